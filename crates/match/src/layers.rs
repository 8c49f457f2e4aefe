//! Lists of layers that people read.

use std::fmt;

use kvferry_layout::Layer;

/// Layers in ascending order, each once. Printed as half-open ranges: `0..3, 7, 40..78`.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct LayerList(Vec<Layer>);

impl LayerList {
    /// The layers, ascending.
    pub fn layers(&self) -> &[Layer] {
        &self.0
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

impl FromIterator<Layer> for LayerList {
    fn from_iter<I: IntoIterator<Item = Layer>>(layers: I) -> Self {
        let mut layers: Vec<Layer> = layers.into_iter().collect();
        layers.sort_unstable();
        layers.dedup();
        Self(layers)
    }
}

impl fmt::Display for LayerList {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // In u64 the layer after the last possible one exists too.
        let runs = self.0.chunk_by(|a, b| u64::from(a.0) + 1 == u64::from(b.0));
        for (index, run) in runs.enumerate() {
            f.write_str(if index == 0 { "" } else { ", " })?;
            match run {
                [] => {}
                [layer] => write!(f, "{layer}")?,
                [first, .., last] => write!(f, "{first}..{}", u64::from(last.0) + 1)?,
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prints_half_open_ranges() {
        let check = |layers: &[u32], expected: &str| {
            assert_eq!(layers.iter().copied().map(Layer).collect::<LayerList>().to_string(), expected);
        };
        check(&[], "");
        check(&[7], "7");
        check(&[2, 0, 1, 1, 7, 40, 41], "0..3, 7, 40..42");
        check(&[u32::MAX - 1, u32::MAX], "4294967294..4294967296");
    }
}
