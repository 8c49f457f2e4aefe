//! Registered memory.

use kvferry_wire::MemoryKind;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::failure::Failure;
use crate::own::Own;

/// Memory that peers can reach. What it was made of is kept alive by it, and by transfers that use it.
#[pyclass(frozen)]
pub(crate) struct Region {
    region: Own<kvferry_wire::Region>,
    base: u64,
    bytes: u64,
    on_gpu: bool,
}

impl Region {
    pub(crate) fn new(region: kvferry_wire::Region) -> Self {
        let on_gpu = region.kind() != MemoryKind::Host;
        Self { base: region.base(), bytes: region.bytes(), on_gpu, region: Own::new(region) }
    }

    pub(crate) fn get(&self) -> Result<&kvferry_wire::Region, Failure> {
        self.region.get()
    }
}

#[pymethods]
impl Region {
    #[getter]
    fn base(&self) -> u64 {
        self.base
    }

    #[getter]
    fn nbytes(&self) -> u64 {
        self.bytes
    }

    #[getter]
    fn on_gpu(&self) -> bool {
        self.on_gpu
    }

    fn write(&self, py: Python<'_>, offset: u64, from: &[u8]) -> Result<(), Failure> {
        let region = self.get()?;
        Ok(py.detach(|| region.write(offset, from))?)
    }

    fn read<'py>(&self, py: Python<'py>, offset: u64, bytes: usize) -> Result<Bound<'py, PyBytes>, Failure> {
        let region = self.get()?;
        let mut read = Vec::new();
        let (read, result) = py.detach(|| {
            // More than the region has is refused below, whatever it is.
            read.resize(bytes.min(usize::try_from(self.bytes).unwrap_or(usize::MAX).saturating_add(1)), 0);
            let result = region.read(offset, &mut read);
            (read, result)
        });
        result?;
        Ok(PyBytes::new(py, &read))
    }
}
