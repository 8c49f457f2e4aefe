//! What engines count, as Prometheus text.

use std::sync::OnceLock;
use std::thread;
use std::time::Duration;

use metrics_exporter_prometheus::{Matcher, PrometheusBuilder, PrometheusHandle};
use parking_lot::Mutex;
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;

use crate::own::Process;

/// Bounds of the buckets of everything that is measured in seconds: 10 us to 10 s.
const BUCKETS_S: [f64; 19] =
    [1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0];

/// How often what was measured is put into buckets, so that it does not pile up when nobody asks.
const UPKEEP_INTERVAL: Duration = Duration::from_secs(1);

static RECORDER: OnceLock<PrometheusHandle> = OnceLock::new();

/// The process that has the thread which keeps the recorder in order: a process that is forked off has not.
static UPKEEP: Mutex<Option<Process>> = Mutex::new(None);

/// Has engines that start from now on count. Of no effect the second time.
#[pyfunction]
pub(crate) fn metrics_record() -> PyResult<()> {
    let error = |error: &dyn std::error::Error| PyRuntimeError::new_err(format!("metrics cannot be recorded: {error}"));
    let mut upkeep = UPKEEP.lock();
    if RECORDER.get().is_none() {
        let builder = PrometheusBuilder::new().set_buckets_for_metric(Matcher::Suffix("_seconds".into()), &BUCKETS_S);
        let recorder = builder.and_then(PrometheusBuilder::install_recorder).map_err(|failed| error(&failed))?;
        let _ = RECORDER.set(recorder); // the lock is held
    }
    if *upkeep != Some(Process::this()) {
        let run = || {
            loop {
                thread::sleep(UPKEEP_INTERVAL);
                if let Some(recorder) = RECORDER.get() {
                    recorder.run_upkeep();
                }
            }
        };
        thread::Builder::new().name("kvferry-metrics".to_owned()).spawn(run).map_err(|failed| error(&failed))?;
        *upkeep = Some(Process::this());
    }
    Ok(())
}

/// What was counted, as Prometheus text; `None` if nothing is recorded.
#[pyfunction]
pub(crate) fn metrics_text(py: Python<'_>) -> Option<String> {
    RECORDER.get().map(|recorder| py.detach(|| recorder.render()))
}
