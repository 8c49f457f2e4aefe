//! Page tables.

use kvferry_layout::{Cut, MemoryKind, ModelFacts, PageTable, Storage, TableOptions, build};
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
        let storage = Storage { pooling: pooling.parse()?, cells: cells.parse()?, state_cells: state_cells.parse()? };
        let options = TableOptions {
            mtp,
            indexer_dtype: indexer_dtype.parse()?,
            ssm_dtype: ssm_dtype.map(str::parse).transpose()?,
            state_slot_count: state_slot_count.unwrap_or(slot_count),
            storage,
            ..TableOptions::new(tokens_per_block, dtype.parse()?, slot_count)
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
