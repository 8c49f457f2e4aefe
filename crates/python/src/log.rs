//! What the library says of itself, on its way to Python's `logging`.
//!
//! Threads of the engine's leave records in a bounded queue; a thread of Python's takes them out and hands them to loggers. So no
//! transfer waits for the interpreter, or for whatever a program does with its log.

use std::collections::VecDeque;
use std::fmt::{self, Write};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError, TryLockError};
use std::thread;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Level, Metadata, Subscriber};
use tracing_subscriber::filter::LevelFilter;
use tracing_subscriber::layer::{Context, Layer, SubscriberExt};
use tracing_subscriber::registry::{LookupSpan, Registry};
use tracing_subscriber::reload;

/// Records that may wait to be taken. What comes when so many do is counted, and lost.
const RECORDS_MAX: usize = 4096;

/// How long a record may wait for the queue's lock, which is held for moments: but for ever in a process that was forked off while
/// another thread had it.
const LOCK_WAIT: Duration = Duration::from_millis(20);

/// How often it is tried meanwhile.
const LOCK_LOOK: Duration = Duration::from_micros(50);

/// Seconds of Unix time, level as `logging` has it, target, and the message with its fields and spans.
type Said = (f64, u8, &'static str, String);

/// The standard library's locks leave nothing of who waits for them in memory: a process that is forked off wakes no thread of its
/// parent's in place of its own.
static QUEUE: Queue = Queue { state: Mutex::new(State::new()), come: Condvar::new() };

/// The level below which nothing is recorded. `None` until there is a subscriber.
static FILTER: Mutex<Option<reload::Handle<LevelFilter, Registry>>> = Mutex::new(None);

struct Queue {
    state: Mutex<State>,
    come: Condvar,
}

struct State {
    records: VecDeque<Said>,
    dropped: u64,
    /// Nobody takes any more.
    stopped: bool,
}

impl State {
    const fn new() -> Self {
        Self { records: VecDeque::new(), dropped: 0, stopped: true }
    }
}

impl Queue {
    fn lock(&self) -> Option<MutexGuard<'_, State>> {
        let began = Instant::now();
        loop {
            match self.state.try_lock() {
                Ok(state) => return Some(state),
                Err(TryLockError::Poisoned(state)) => return Some(state.into_inner()),
                Err(TryLockError::WouldBlock) if began.elapsed() > LOCK_WAIT => return None,
                Err(TryLockError::WouldBlock) => thread::sleep(LOCK_LOOK),
            }
        }
    }

    fn push(&self, said: Said) {
        let Some(mut state) = self.lock() else { return };
        if state.stopped {
            return;
        }
        if state.records.len() < RECORDS_MAX {
            state.records.push_back(said);
            self.come.notify_one();
        } else {
            state.dropped += 1;
        }
    }

    /// Waits for records, or for the end.
    fn take(&self, wait: Duration) -> (Vec<Said>, u64, bool) {
        let Some(state) = self.lock() else { return (Vec::new(), 0, false) };
        let nothing = |state: &mut State| state.records.is_empty() && !state.stopped;
        let (mut state, _) = self.come.wait_timeout_while(state, wait, nothing).unwrap_or_else(PoisonError::into_inner);
        (state.records.drain(..).collect(), std::mem::take(&mut state.dropped), state.stopped)
    }
}

/// Makes records of events, with the fields of the spans that they are in.
struct ToPython;

/// Fields of a span, as text.
struct Fields(String);

impl<S: Subscriber + for<'a> LookupSpan<'a>> Layer<S> for ToPython {
    fn on_new_span(&self, attributes: &Attributes<'_>, id: &Id, context: Context<'_, S>) {
        let Some(span) = context.span(id) else { return };
        let mut fields = Text::default();
        attributes.record(&mut fields);
        span.extensions_mut().insert(Fields(fields.0));
    }

    fn on_record(&self, id: &Id, values: &Record<'_>, context: Context<'_, S>) {
        let Some(span) = context.span(id) else { return };
        let mut more = Text::default();
        values.record(&mut more);
        if let Some(fields) = span.extensions_mut().get_mut::<Fields>() {
            fields.0.push_str(&more.0);
        }
    }

    fn on_event(&self, event: &Event<'_>, context: Context<'_, S>) {
        let mut text = Text::default();
        event.record(&mut text);
        let mut message = text.0.trim_start().to_owned();
        for span in context.event_scope(event).into_iter().flatten() {
            let extensions = span.extensions();
            let fields = extensions.get::<Fields>().map(|fields| fields.0.as_str()).unwrap_or_default();
            let _ = write!(message, " in {}{fields}", span.name()); // to memory
        }
        let metadata: &'static Metadata<'static> = event.metadata();
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        QUEUE.push((now.as_secs_f64(), number(*metadata.level()), metadata.target(), message));
    }
}

/// The message, and fields by their names, each behind a space.
#[derive(Default)]
struct Text(String);

impl Visit for Text {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        // To memory, which does not fail.
        let _ = match field.name() {
            "message" => write!(self.0, " {value:?}"),
            name => write!(self.0, " {name}={value:?}"),
        };
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        let _ = match field.name() {
            "message" => write!(self.0, " {value}"),
            name => write!(self.0, " {name}={value}"),
        };
    }
}

/// A level as `logging` has it. It has none below `DEBUG` of its own.
fn number(level: Level) -> u8 {
    match level {
        Level::ERROR => 40,
        Level::WARN => 30,
        Level::INFO => 20,
        Level::DEBUG => 10,
        Level::TRACE => 5,
    }
}

/// Has the library say what is at or above `level`, by the numbers of `logging`. It can be called again, with another.
#[pyfunction]
pub(crate) fn log_start(level: i64) -> PyResult<()> {
    let filter = match level {
        ..0 => return Err(PyValueError::new_err(format!("there is no level {level}"))),
        0..10 => LevelFilter::TRACE,
        10..20 => LevelFilter::DEBUG,
        20..30 => LevelFilter::INFO,
        30..40 => LevelFilter::WARN,
        40..=50 => LevelFilter::ERROR,
        _ => LevelFilter::OFF,
    };
    let error = |error: &dyn std::error::Error| PyRuntimeError::new_err(format!("the log cannot be had: {error}"));
    let mut handle = FILTER.lock().unwrap_or_else(PoisonError::into_inner);
    match handle.as_ref() {
        Some(handle) => handle.reload(filter).map_err(|failed| error(&failed))?,
        None => {
            let (filter, made) = reload::Layer::new(filter);
            let subscriber = Registry::default().with(ToPython.with_filter(filter));
            tracing::subscriber::set_global_default(subscriber).map_err(|failed| error(&failed))?;
            *handle = Some(made);
        }
    }
    if let Some(mut state) = QUEUE.lock() {
        state.stopped = false;
    }
    Ok(())
}

/// Has whoever waits in [`log_take`] return, and nothing more be recorded. `forget`: not what has been said so far either.
#[pyfunction]
pub(crate) fn log_stop(forget: bool) {
    if let Some(mut state) = QUEUE.lock() {
        state.stopped = true;
        if forget {
            state.records.clear();
        }
        QUEUE.come.notify_all();
    }
}

/// What has been said since the last call, how much more was said and is lost, and whether there is an end to it. Waits for the
/// first, `seconds` at most.
#[pyfunction]
pub(crate) fn log_take(py: Python<'_>, seconds: f64) -> (Vec<Said>, u64, bool) {
    let wait = Duration::try_from_secs_f64(seconds).unwrap_or_default();
    py.detach(|| QUEUE.take(wait))
}
