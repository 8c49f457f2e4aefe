//! Errors as exceptions: the classes are in `python/kvferry/_errors.py`.

use std::error::Error;
use std::fmt::Debug;

use pyo3::prelude::*;
use pyo3::types::PyDict;

/// An exception to be: of one class for each kind of operation, with the name and the fields of the variant.
#[derive(Debug)]
pub(crate) struct Failure(Box<Kind>);

#[derive(Debug)]
enum Kind {
    Described(Described),
    /// An exception of Python's own.
    Raised(PyErr),
}

/// What the exception says.
#[derive(Debug)]
pub(crate) struct Described {
    /// Name of the class.
    pub(crate) class: &'static str,
    /// The variant of the Rust enum.
    pub(crate) kind: String,
    /// With the sources behind it.
    pub(crate) message: String,
    /// The fields of the variant, in units of Python's.
    pub(crate) fields: Vec<(&'static str, Value)>,
    /// What it is the consequence of.
    pub(crate) cause: Option<Box<Described>>,
}

/// A field of an error.
#[derive(Clone, Debug, IntoPyObject)]
pub(crate) enum Value {
    Flag(bool),
    Count(u64),
    Seconds(f64),
    Text(String),
    Range((u64, u64)),
    /// Side and rank.
    Peer((String, u32)),
    /// Request and attempt.
    Key((u64, u32)),
    Nothing(Option<u64>),
}

impl Failure {
    /// The object belongs to the process that this one was forked off.
    pub(crate) fn forked() -> Self {
        let message = "made before fork, of no use after it: a forked process has none of the engine's threads. Start \
                       processes with multiprocessing's 'spawn' method, or make the engine after the fork";
        Self::new("ForkedError", "Forked", message)
    }

    /// A failure without fields.
    pub(crate) fn new(class: &'static str, kind: &str, message: &str) -> Self {
        let (kind, message) = (kind.to_owned(), message.to_owned());
        Described { class, kind, message, fields: Vec::new(), cause: None }.into()
    }
}

impl Described {
    /// An error as an exception of `class`.
    pub(crate) fn of(class: &'static str, error: &impl Error) -> Self {
        Self { class, kind: variant(error), message: chain(error), fields: Vec::new(), cause: None }
    }

    pub(crate) fn with(self, fields: Vec<(&'static str, Value)>) -> Self {
        Self { fields, ..self }
    }

    pub(crate) fn because(self, cause: Option<Described>) -> Self {
        Self { cause: cause.map(Box::new), ..self }
    }

    /// The exception, made but not raised.
    pub(crate) fn exception<'py>(self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let fields = PyDict::new(py);
        for (name, value) in self.fields {
            fields.set_item(name, value)?;
        }
        let class = py.import("kvferry._errors")?.getattr(self.class)?;
        let exception = class.call1((self.message, self.kind, fields))?;
        if let Some(cause) = self.cause {
            exception.setattr("__cause__", cause.exception(py)?)?;
        }
        Ok(exception)
    }
}

impl From<Described> for Failure {
    fn from(described: Described) -> Self {
        Self(Box::new(Kind::Described(described)))
    }
}

impl From<PyErr> for Failure {
    fn from(error: PyErr) -> Self {
        Self(Box::new(Kind::Raised(error)))
    }
}

impl From<std::io::Error> for Failure {
    fn from(error: std::io::Error) -> Self {
        PyErr::from(error).into()
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

/// An error with its sources.
fn chain(error: &dyn Error) -> String {
    let (mut text, mut source) = (error.to_string(), error.source());
    while let Some(error) = source {
        text = format!("{text}: {error}");
        source = error.source();
    }
    text
}
