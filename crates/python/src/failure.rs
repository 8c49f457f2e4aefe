//! Errors as exceptions: the classes are in `python/kvferry/_errors.py`, the fields of each error in `fields.rs`.

use std::error::Error;
use std::fmt::Debug;
use std::sync::Arc;

use kvferry_layout::NameError;
use kvferry_wire::chain;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyDict;

/// An exception to be, of the library's own kinds or of Python's.
#[derive(Debug)]
pub(crate) struct Failure(Box<Kind>);

#[derive(Debug)]
enum Kind {
    Described(Described),
    Raised(PyErr),
}

/// What an exception says.
#[derive(Debug)]
pub(crate) struct Described {
    /// Name of its class, one for each kind of operation: with its module, if that is another than `kvferry._errors`.
    class: &'static str,
    /// The variant of the Rust enum.
    kind: String,
    /// With the sources behind it.
    message: String,
    /// The fields of the variant, in the units of Python's.
    fields: Vec<(&'static str, Value)>,
    /// What it is the consequence of.
    cause: Option<Box<Described>>,
    /// Several errors at once: those of the peers of a request.
    errors: Vec<Described>,
}

/// An error that has a class, a name and fields in Python.
pub(crate) trait Describe {
    fn describe(&self) -> Described;
}

/// A field of an error.
#[derive(Clone, Debug, IntoPyObject)]
pub(crate) enum Value {
    Flag(bool),
    Count(u64),
    Seconds(f64),
    Text(String),
    Texts(Vec<String>),
    Layers(Vec<u32>),
    Range((u64, u64)),
    /// Side and rank.
    Peer((String, u32)),
    /// Pool, layer and role.
    Row((u64, u32, String)),
    Nothing(Option<u64>),
}

impl Failure {
    /// The object belongs to the process that this one was forked off.
    pub(crate) fn forked() -> Self {
        let message = "made before fork, and of no use after it: a forked process has none of the engine's threads. Fork before \
                       there is an engine, or start processes by multiprocessing's \"spawn\"";
        Self::new("ForkedError", "Forked", message)
    }

    /// The engine was closed.
    pub(crate) fn closed() -> Self {
        Self::new("ClosedError", "Closed", "the engine has been closed")
    }

    pub(crate) fn new(class: &'static str, kind: &str, message: &str) -> Self {
        Self(Box::new(Kind::Described(Described::new(class, kind.to_owned(), message.to_owned()))))
    }
}

impl Described {
    fn new(class: &'static str, kind: String, message: String) -> Self {
        Self { class, kind, message, fields: Vec::new(), cause: None, errors: Vec::new() }
    }

    /// An error as an exception of `class`.
    pub(crate) fn of(class: &'static str, error: &impl Error) -> Self {
        Self::new(class, variant(error), chain(error))
    }

    pub(crate) fn with(self, fields: Vec<(&'static str, Value)>) -> Self {
        Self { fields, ..self }
    }

    /// With these fields too.
    pub(crate) fn and(mut self, fields: Vec<(&'static str, Value)>) -> Self {
        self.fields.extend(fields);
        self
    }

    pub(crate) fn because(self, cause: Described) -> Self {
        Self { cause: Some(Box::new(cause)), ..self }
    }

    /// One error of several, called by the name of the first.
    pub(crate) fn made_of(self, errors: Vec<Described>) -> Self {
        let kind = errors.first().map(|first| first.kind.clone()).unwrap_or_default();
        Self { errors, kind, ..self }
    }

    /// The exception, made but not raised.
    fn exception<'py>(self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let fields = PyDict::new(py);
        for (name, value) in self.fields {
            fields.set_item(name, value)?;
        }
        if !self.errors.is_empty() {
            let errors = self.errors.into_iter().map(|error| error.exception(py)).collect::<PyResult<Vec<_>>>()?;
            fields.set_item("errors", errors)?;
        }
        let (module, class) = self.class.rsplit_once('.').unwrap_or(("kvferry._errors", self.class));
        let class = py.import(module)?.getattr(class)?;
        let exception = class.call1((self.message, self.kind, fields))?;
        if let Some(cause) = self.cause {
            exception.setattr("__cause__", cause.exception(py)?)?;
        }
        Ok(exception)
    }
}

impl<E: Describe> Describe for Arc<E> {
    fn describe(&self) -> Described {
        self.as_ref().describe()
    }
}

impl<E: Describe> From<E> for Failure {
    fn from(error: E) -> Self {
        Self(Box::new(Kind::Described(error.describe())))
    }
}

impl From<PyErr> for Failure {
    fn from(error: PyErr) -> Self {
        Self(Box::new(Kind::Raised(error)))
    }
}

impl From<NameError> for Failure {
    fn from(error: NameError) -> Self {
        PyValueError::new_err(error.to_string()).into()
    }
}

impl From<Failure> for PyErr {
    fn from(failure: Failure) -> Self {
        match *failure.0 {
            Kind::Raised(error) => error,
            Kind::Described(described) => {
                Python::attach(|py| described.exception(py).map_or_else(|error| error, PyErr::from_value))
            }
        }
    }
}

/// The name of the variant of an enum, by its derived `Debug`.
fn variant(error: &impl Debug) -> String {
    let text = format!("{error:?}");
    text.split(|letter: char| !letter.is_alphanumeric()).next().unwrap_or_default().to_owned()
}
