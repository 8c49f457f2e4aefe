//! Cards of instances.

use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::failure::Failure;

/// The cards of all ranks of one instance, checked. Does not change.
#[pyclass(frozen, eq)]
#[derive(PartialEq)]
pub(crate) struct InstanceCard {
    pub(crate) card: kvferry::InstanceCard,
}

#[pymethods]
impl InstanceCard {
    #[new]
    fn new(ranks: Vec<u32>, cards: Vec<Vec<u8>>) -> Result<Self, Failure> {
        Ok(Self { card: kvferry::InstanceCard::new(ranks, cards)? })
    }

    #[staticmethod]
    fn from_bytes(bytes: &[u8]) -> Result<Self, Failure> {
        Ok(Self { card: kvferry::InstanceCard::from_bytes(bytes)? })
    }

    fn to_bytes<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, &self.card.to_bytes())
    }

    fn ranks(&self) -> Vec<u32> {
        self.card.ranks().collect()
    }
}
