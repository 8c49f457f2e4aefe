//! How calls end.

use std::cell::RefCell;
use std::error::Error;
use std::ffi::{CString, c_char};
use std::fmt::Debug;
use std::mem::MaybeUninit;
use std::panic::{AssertUnwindSafe, catch_unwind};

use kvferry_wire::{OpenError, chain};

/// How a call has ended. Others may be added.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(i32)]
pub enum Status {
    /// Well.
    KvfOk = 0,
    /// Nothing is wrong: what was asked after has not happened yet.
    KvfPending = 1,
    /// An argument is NULL, no UTF-8, or not what it should be.
    KvfArgument = 2,
    /// No UCX, or one that refuses its settings: see kvf_doctor.
    KvfStart = 3,
    /// A page table cannot be built, read or used.
    KvfTable = 4,
    /// Memory could not be allocated or registered, or an access is outside of it.
    KvfRegion = 5,
    /// A page table was not published.
    KvfPublish = 6,
    /// The bytes are no card, or the cards no instance.
    KvfCard = 7,
    /// The instances were not connected.
    KvfConnect = 8,
    /// A request or a transfer was not taken up. Nothing was sent.
    KvfPost = 9,
    /// A part was not taken up; the send goes on.
    KvfPush = 10,
    /// A request or a transfer failed: what was to be written is to be taken for unwritten.
    KvfFailed = 11,
    /// It was cancelled on this side.
    KvfCancelled = 12,
    /// There will be no word that slots can be used again: it was given before, or the engine has stopped first.
    KvfNotQuiet = 13,
    /// A remote agent is not known, or cannot be reached.
    KvfRemote = 14,
    /// A list or a transfer cannot be prepared: an entry is in no registered memory, or does not pair.
    KvfPrepare = 15,
    /// Metadata was not exchanged.
    KvfExchange = 16,
    /// A bug of the library's.
    KvfPanic = 17,
    /// Two instances cannot serve each other, or there are no such tokens.
    KvfMatch = 18,
    /// The handle was made in the process that this one was forked off, or there had been an engine or an agent: fork before there
    /// is any.
    KvfForked = 19,
}

/// Why a call ends otherwise than well.
#[derive(Debug)]
pub(crate) struct Failure {
    status: Status,
    kind: String,
    message: String,
}

struct Last {
    kind: CString,
    message: CString,
}

thread_local! {
    static LAST: RefCell<Last> = RefCell::new(Last { kind: CString::default(), message: CString::default() });
}

impl Failure {
    pub(crate) fn new(status: Status, kind: &str, message: impl Into<String>) -> Self {
        Self { status, kind: kind.to_owned(), message: message.into() }
    }

    /// An error of the library's, with its variant's name and its sources.
    pub(crate) fn of(status: Status, error: &impl Error) -> Self {
        let text = format!("{error:?}");
        let kind = text.split(|letter: char| !letter.is_alphanumeric()).next().unwrap_or_default();
        Self { status, kind: kind.to_owned(), message: chain(error) }
    }

    pub(crate) fn argument(message: impl Into<String>) -> Self {
        Self::new(Status::KvfArgument, "Argument", message)
    }

    pub(crate) fn pending() -> Self {
        Self::new(Status::KvfPending, "Pending", "not yet")
    }
}

/// Errors, each with the status that it is.
macro_rules! failures {
    ($($error:ty => $status:ident),* $(,)?) => {
        $(impl From<$error> for Failure {
            fn from(error: $error) -> Self {
                Self::of(Status::$status, &error)
            }
        })*
    };
}
failures! {
    kvferry::OptionsError => KvfArgument,
    kvferry::PublishError => KvfPublish,
    kvferry::InstanceCardError => KvfCard,
    kvferry::ConnectError => KvfConnect,
    kvferry::PostError => KvfPost,
    kvferry::PushError => KvfPush,
    kvferry_match::MatchError => KvfMatch,
    kvferry_match::MatrixError => KvfMatch,
    kvferry_layout::LayoutError => KvfTable,
    kvferry_layout::ConfigError => KvfTable,
    kvferry_layout::CutError => KvfTable,
    kvferry_layout::DecodeError => KvfTable,
    kvferry_layout::NameError => KvfArgument,
    kvferry_wire::RegionError => KvfRegion,
    kvferry_agent::MemoryError => KvfRegion,
    kvferry_agent::RemoteError => KvfRemote,
    kvferry_agent::MakeError => KvfPrepare,
    kvferry_agent::PostError => KvfPost,
    kvferry_agent::ExchangeError => KvfExchange,
    serde_json::Error => KvfArgument,
}

impl From<kvferry::StartError> for Failure {
    fn from(error: kvferry::StartError) -> Self {
        let forked = matches!(error, kvferry::StartError::Open(OpenError::Forked));
        Self::of(if forked { Status::KvfForked } else { Status::KvfStart }, &error)
    }
}

impl From<kvferry_agent::StartError> for Failure {
    fn from(error: kvferry_agent::StartError) -> Self {
        let forked = matches!(error, kvferry_agent::StartError::Open(OpenError::Forked));
        Self::of(if forked { Status::KvfForked } else { Status::KvfStart }, &error)
    }
}

impl From<kvferry::NotQuiet> for Failure {
    fn from(error: kvferry::NotQuiet) -> Self {
        match error {
            kvferry::NotQuiet::Waiting => Self::pending(),
            error => Self::of(Status::KvfNotQuiet, &error),
        }
    }
}

impl From<&kvferry::RequestError> for Failure {
    fn from(error: &kvferry::RequestError) -> Self {
        let cancelled = |part: &kvferry::PartError| matches!(part.error, kvferry::TransferError::Cancelled);
        let status = if error.errors.iter().any(cancelled) { Status::KvfCancelled } else { Status::KvfFailed };
        let kind = error.errors.first().map(|part| Self::of(status, &part.error).kind).unwrap_or_default();
        Self { kind, ..Self::of(status, error) }
    }
}

impl From<kvferry_agent::Failure> for Failure {
    fn from(error: kvferry_agent::Failure) -> Self {
        let cancelled = error == kvferry_agent::Failure::Cancelled;
        Self::of(if cancelled { Status::KvfCancelled } else { Status::KvfFailed }, &error)
    }
}

/// Runs the body of a call: what goes wrong in it, a panic included, is its status and the thread's last error.
pub(crate) fn guard(body: impl FnOnce() -> Result<(), Failure>) -> Status {
    // Whatever a panic leaves behind is behind the library's own locks, which do not poison.
    let failure = match catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(())) => return Status::KvfOk,
        Ok(Err(failure)) => failure,
        Err(payload) => {
            let said = payload.downcast_ref::<&str>().map(|said| (*said).to_owned());
            let said = said.or_else(|| payload.downcast_ref::<String>().cloned());
            Failure::new(Status::KvfPanic, "Panic", said.unwrap_or_default())
        }
    };
    let Failure { status, kind, message } = failure;
    if status != Status::KvfPending {
        let text = |text: String| CString::new(text.replace('\0', " ")).unwrap_or_default();
        // A thread that is ending has nobody to ask for it.
        let _ = LAST.try_with(|last| *last.borrow_mut() = Last { kind: text(kind), message: text(message) });
    }
    status
}

/// Where to write to.
pub(crate) fn out<T>(place: Option<&mut MaybeUninit<T>>) -> Result<&mut MaybeUninit<T>, Failure> {
    place.ok_or_else(|| Failure::argument("no place to write to: NULL"))
}

/// A handle.
pub(crate) fn handle<'a, T>(handle: Option<&'a T>, what: &str) -> Result<&'a T, Failure> {
    handle.ok_or_else(|| Failure::argument(format!("no {what}: NULL")))
}

/// Writes a new handle.
pub(crate) fn give<T>(place: Option<&mut MaybeUninit<*mut T>>, value: T) -> Result<(), Failure> {
    out(place)?.write(Box::into_raw(Box::new(value)));
    Ok(())
}

/// What went wrong in the last call of this thread that failed, for people. Lasts until the next one that does.
#[unsafe(no_mangle)]
#[allow(unsafe_code, reason = "the name is this library's: nothing else begins with kvf_")]
pub extern "C" fn kvf_last_error() -> *const c_char {
    LAST.try_with(|last| last.borrow().message.as_ptr()).unwrap_or(c"".as_ptr())
}

/// The name of the case, as the library's documentation has it: "Stalled", say. Lasts as kvf_last_error does.
#[unsafe(no_mangle)]
#[allow(unsafe_code, reason = "the name is this library's: nothing else begins with kvf_")]
pub extern "C" fn kvf_last_error_kind() -> *const c_char {
    LAST.try_with(|last| last.borrow().kind.as_ptr()).unwrap_or(c"".as_ptr())
}
