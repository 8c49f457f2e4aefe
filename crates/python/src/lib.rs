//! What the Python package `kvferry` is made of below: its modules in `python/kvferry/` give the names, types and
//! conversions that people see, this one the engine.
//!
//! - Whatever waits or copies does so with the interpreter released.
//! - No thread of the engine's ever takes the interpreter: an event loop is woken through a file descriptor ([`bell`]).
//! - Nothing is used, or released, in a process that was forked off the one that made it ([`own`]).
//! - A panic becomes an exception: PyO3 catches it.
#![deny(unsafe_code)]
#![allow(dead_code, reason = "what the engine is bound with comes next")]

mod bell;
mod doctor;
mod failure;
mod own;

use pyo3::prelude::*;

#[pymodule]
mod _kvferry {
    #[pymodule_export]
    use super::bell::Bell;
    #[pymodule_export]
    use super::doctor::doctor;

    use super::{Bound, PyModule, PyModuleMethods, PyResult};

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        module.add("__version__", env!("CARGO_PKG_VERSION"))
    }
}
