//! Page tables.

use kvferry_layout::{CellOrder, Cut, Dtype, MemoryKind, ModelFacts, PageTable, Pooling, Storage, TableOptions, build};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::failure::Failure;

/// One rank's description of its pools. Does not change.
#[pyclass(frozen, eq)]
#[derive(Clone, PartialEq)]
pub(crate) struct Table {
    pub(crate) table: PageTable,
}

#[pymethods]
impl Table {
    /// The table of one rank of a model, by the keys of its `config.json`.
    #[staticmethod]
    #[pyo3(signature = (config, cut, rank, *, tokens_per_block, dtype, slot_count, state_slot_count, mtp, indexer_dtype,
        ssm_dtype, pooling, cells, state_cells, device))]
    #[expect(clippy::too_many_arguments, reason = "Python passes them by name")]
    fn from_config(
        config: &str,
        cut: &str,
        rank: u32,
        tokens_per_block: u32,
        dtype: &str,
        slot_count: u32,
        state_slot_count: Option<u32>,
        mtp: bool,
        indexer_dtype: &str,
        ssm_dtype: Option<&str>,
        pooling: &str,
        cells: &str,
        state_cells: &str,
        device: Option<u32>,
    ) -> Result<Self, Failure> {
        let facts = ModelFacts::from_config(config)?;
        let cut: Cut = cut.parse()?;
        let storage = Storage {
            pooling: parse_pooling(pooling)?,
            cells: parse_cells(cells)?,
            state_cells: parse_cells(state_cells)?,
        };
        let options = TableOptions {
            mtp,
            indexer_dtype: parse_dtype(indexer_dtype)?,
            ssm_dtype: ssm_dtype.map(parse_dtype).transpose()?,
            state_slot_count: state_slot_count.unwrap_or(slot_count),
            storage,
            ..TableOptions::new(tokens_per_block, parse_dtype(dtype)?, slot_count)
        };
        let mut table = build(&facts, &cut, rank, &options)?;
        if let Some(device) = device {
            table.pools.iter_mut().for_each(|pool| pool.memory = MemoryKind::Cuda { device });
        }
        Ok(Self { table })
    }

    #[staticmethod]
    fn from_json(text: &str) -> Result<Self, Failure> {
        Ok(Self { table: PageTable::from_json(text)? })
    }

    fn to_json(&self) -> String {
        self.table.to_json()
    }

    #[staticmethod]
    fn from_bytes(bytes: &[u8]) -> Result<Self, Failure> {
        Ok(Self { table: PageTable::from_bytes(bytes)? })
    }

    fn to_bytes<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, &self.table.to_bytes())
    }

    /// Bytes from the first of each pool to behind its last.
    fn pool_bytes(&self) -> Vec<u64> {
        // Checked with the table: they are numbers.
        self.table.pools.iter().map(|pool| pool.extent_bytes().unwrap_or(u64::MAX)).collect()
    }

    fn bytes_per_token(&self) -> u64 {
        self.table.bytes_per_token()
    }

    /// As this one, with each pool that lies nowhere yet at its address in `bases`.
    fn placed(&self, bases: Vec<u64>) -> Self {
        let mut table = self.table.clone();
        for (pool, base) in table.pools.iter_mut().zip(bases) {
            if pool.base == 0 {
                pool.base = base;
            }
        }
        Self { table }
    }
}

fn parse_dtype(name: &str) -> PyResult<Dtype> {
    const TYPES: [Dtype; 7] =
        [Dtype::F32, Dtype::F16, Dtype::Bf16, Dtype::Fp8E4m3, Dtype::Fp8E5m2, Dtype::Fp4E2m1, Dtype::U8];
    find(TYPES.map(|dtype| (dtype.to_string(), dtype)), name)
}

fn parse_pooling(name: &str) -> PyResult<Pooling> {
    let poolings = [
        ("block_major", Pooling::BlockMajor),
        ("layer_together", Pooling::LayerTogether),
        ("layer_stacked", Pooling::LayerStacked),
        ("layer_split", Pooling::LayerSplit),
    ];
    find(poolings.map(|(name, pooling)| (name.to_owned(), pooling)), name)
}

fn parse_cells(name: &str) -> PyResult<CellOrder> {
    find([("hnd".to_owned(), CellOrder::Hnd), ("nhd".to_owned(), CellOrder::Nhd)], name)
}

fn find<T: Copy, const N: usize>(known: [(String, T); N], name: &str) -> PyResult<T> {
    match known.iter().find(|(known, _)| known == name) {
        Some((_, value)) => Ok(*value),
        None => {
            let known = known.map(|(name, _)| name).join(", ");
            Err(PyValueError::new_err(format!("{name:?} is none of {known}")))
        }
    }
}
