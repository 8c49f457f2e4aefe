//! Names of types and arrangements, as people write them in options.

use std::str::FromStr;

use crate::storage::{CellOrder, Pooling};
use crate::table::Dtype;

/// Nothing is called so. Take one of the names that are known.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{found:?} is none of {}", known.join(", "))]
pub struct NameError {
    /// What was given.
    pub found: String,
    /// The names that there are.
    pub known: Vec<String>,
}

impl FromStr for Dtype {
    type Err = NameError;

    fn from_str(name: &str) -> Result<Self, NameError> {
        const ALL: [Dtype; 7] =
            [Dtype::F32, Dtype::F16, Dtype::Bf16, Dtype::Fp8E4m3, Dtype::Fp8E5m2, Dtype::Fp4E2m1, Dtype::U8];
        find(name, ALL.map(|dtype| (dtype.to_string(), dtype)))
    }
}

/// `block_major`, `layer_together`, `layer_stacked` or `layer_split`.
impl FromStr for Pooling {
    type Err = NameError;

    fn from_str(name: &str) -> Result<Self, NameError> {
        let all = [
            ("block_major", Self::BlockMajor),
            ("layer_together", Self::LayerTogether),
            ("layer_stacked", Self::LayerStacked),
            ("layer_split", Self::LayerSplit),
        ];
        find(name, all.map(|(name, pooling)| (name.to_owned(), pooling)))
    }
}

/// `hnd` or `nhd`.
impl FromStr for CellOrder {
    type Err = NameError;

    fn from_str(name: &str) -> Result<Self, NameError> {
        find(name, [("hnd".to_owned(), Self::Hnd), ("nhd".to_owned(), Self::Nhd)])
    }
}

fn find<T: Copy, const N: usize>(name: &str, all: [(String, T); N]) -> Result<T, NameError> {
    match all.iter().find(|(known, _)| known == name) {
        Some((_, value)) => Ok(*value),
        None => Err(NameError { found: name.to_owned(), known: all.map(|(known, _)| known).to_vec() }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_read_back_and_others_refused() {
        assert_eq!("fp8_e4m3".parse(), Ok(Dtype::Fp8E4m3));
        assert_eq!("layer_stacked".parse(), Ok(Pooling::LayerStacked));
        assert_eq!("nhd".parse(), Ok(CellOrder::Nhd));
        assert_eq!("hdn".parse::<CellOrder>().unwrap_err().to_string(), "\"hdn\" is none of hnd, nhd");
    }
}
