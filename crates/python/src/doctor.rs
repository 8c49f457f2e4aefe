//! What this machine offers.

use kvferry_wire::{Finding, Report, report};
use pyo3::prelude::*;
use pyo3::types::PyDict;

/// Looks at this machine. Returns the fields of `kvferry.Doctor`.
#[pyfunction]
pub(crate) fn doctor(py: Python<'_>) -> PyResult<Bound<'_, PyDict>> {
    let report = py.detach(report);
    let fields = PyDict::new(py);
    fields.set_item("text", report.to_string())?;
    let ucx = report.ucx.as_ref().ok();
    fields.set_item("ucx_version", ucx.map(|ucx| ucx.version.to_string()))?;
    fields.set_item("ucx_path", ucx.map(|ucx| ucx.path.display().to_string()))?;
    fields.set_item("ucx_origin", ucx.map(|ucx| ucx.origin.to_string()))?;
    fields.set_item("routes", routes(py, &report)?)?;
    fields.set_item("memory_lock_bytes", report.memory_lock_bytes)?;
    fields.set_item("shared_memory_bytes", report.shared_memory_bytes)?;
    let finding = |finding: &Finding| (finding.to_string(), finding.fix());
    fields.set_item("findings", report.findings.iter().map(finding).collect::<Vec<_>>())?;
    Ok(fields)
}

/// Seconds that a little took by each route, or why it did not move.
fn routes<'py>(py: Python<'py>, report: &Report) -> PyResult<Bound<'py, PyDict>> {
    let routes = PyDict::new(py);
    for (route, tried) in &report.routes {
        match tried {
            Ok(trial) => routes.set_item(route.to_string(), trial.elapsed.as_secs_f64())?,
            Err(error) => routes.set_item(route.to_string(), error.to_string())?,
        }
    }
    Ok(routes)
}
