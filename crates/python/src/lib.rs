//! What the Python package `kvferry` is made of below: its modules in `python/kvferry/` give the names, types and
//! conversions that people see, this one the engine.
//!
//! - Whatever waits or copies does so with the interpreter released.
//! - No thread of the engine's ever takes the interpreter: an event loop is woken through a file descriptor, and what there is
//!   to log waits in a queue.
//! - Nothing is used, or released, in a process that was forked off the one that made it.
//! - A panic becomes an exception: PyO3 catches it.
#![deny(unsafe_code)]

mod bell;
mod card;
mod doctor;
mod engine;
mod failure;
mod fields;
mod log;
mod maps;
mod metrics;
mod nixl;
mod own;
mod plan;
mod region;
mod table;
mod transfer;

use pyo3::prelude::*;

#[pymodule]
mod _kvferry {
    #[pymodule_export]
    use super::bell::Bell;
    #[pymodule_export]
    use super::card::InstanceCard;
    #[pymodule_export]
    use super::doctor::doctor;
    #[pymodule_export]
    use super::engine::{Engine, Link};
    #[pymodule_export]
    use super::log::{log_start, log_stop, log_take};
    #[pymodule_export]
    use super::metrics::{metrics_record, metrics_text};
    #[pymodule_export]
    use super::nixl::{NixlAgent, NixlList, NixlRegistration, NixlTransfer};
    #[pymodule_export]
    use super::plan::{Explanation, Plan};
    #[pymodule_export]
    use super::region::Region;
    #[pymodule_export]
    use super::table::Table;
    #[pymodule_export]
    use super::transfer::{Signal, Transfer};

    use super::{Bound, PyModule, PyModuleMethods, PyResult};

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        module.add("__version__", env!("CARGO_PKG_VERSION"))
    }
}
