//! The agent.
//!
//! # Safety
//!
//! The contract of the crate.
#![allow(unsafe_code, reason = "reads what C's pointers point to")]

use std::ffi::{CString, c_char, c_void};
use std::mem::MaybeUninit;
use std::net::{SocketAddr, ToSocketAddrs};
use std::time::Duration;

use kvferry_agent::{AgentOptions as Options, Notification};
use kvferry_wire::{ContextOptions, CudaOptions, RegionId};

use crate::bytes::{Bytes, Slice, given, slice, text};
use crate::own::Own;
use crate::region::{Released, register};
use crate::status::{Failure, Status, give, guard, handle, out};

/// A named agent. Freed by kvf_agent_free.
pub struct Agent {
    agent: Own<kvferry_agent::Agent>,
}

impl Agent {
    /// The agent, in its own process.
    pub(crate) fn of(agent: Option<&Self>) -> Result<&kvferry_agent::Agent, Failure> {
        handle(agent, "agent")?.agent.get()
    }
}

/// Memory that is registered with an agent. Freed by kvf_memory_free, which does not deregister it.
pub struct Memory {
    id: RegionId,
    base: u64,
}

/// What peers have said. Freed by kvf_notifications_free.
pub struct Notifications {
    all: Vec<(CString, Vec<u8>)>,
}

/// How an agent is set up. Zeroed, everything but the name is at its default.
#[repr(C)]
pub struct AgentOptions {
    /// Its name.
    pub name: *const c_char,
    /// Where to listen for peers that exchange metadata: "0.0.0.0:5555", port 0 for any; NULL: not at all.
    pub listen: *const c_char,
    /// Transports that UCX may use, as in UCX_TLS; NULL leaves the choice to UCX.
    pub transports: *const c_char,
    /// Whether there is memory of a GPU.
    pub on_gpu: bool,
    /// Which GPU, as this process counts them.
    pub device: u32,
    /// How long a peer that is asked for something may show no sign of life; 0: the default.
    pub patience_ms: u64,
    /// How long a transfer may take in all; 0: as long as it moves.
    pub transfer_deadline_ms: u64,
}

/// Starts an agent.
///
/// # Safety
///
/// The contract of the crate.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_agent_start(
    options: Option<&AgentOptions>,
    agent: Option<&mut MaybeUninit<*mut Agent>>,
) -> Status {
    guard(|| {
        let given_options = handle(options, "options")?;
        // SAFETY: text by the contract.
        let name = unsafe { given(given_options.name, "name") }?;
        // SAFETY: text by the contract.
        let listen = unsafe { text(given_options.listen) }?;
        // SAFETY: text by the contract.
        let transports = unsafe { text(given_options.transports) }?;
        let defaults = Options::default();
        let deadline = given_options.transfer_deadline_ms;
        let options = Options {
            listen: listen.map(address).transpose()?,
            patience: match given_options.patience_ms {
                0 => defaults.patience,
                patience => Duration::from_millis(patience),
            },
            transfer_deadline: (deadline > 0).then(|| Duration::from_millis(deadline)),
            context: ContextOptions {
                transports: transports.map(str::to_owned),
                cuda: given_options.on_gpu.then(|| CudaOptions::new(given_options.device)),
                ..defaults.context
            },
        };
        let place = out(agent)?;
        give(Some(place), Agent { agent: Own::new(kvferry_agent::Agent::new(name, options)?) })
    })
}

/// The port that the agent listens at. 0 if it does not.
#[unsafe(no_mangle)]
pub extern "C" fn kvf_agent_port(agent: Option<&Agent>) -> u16 {
    agent.and_then(|agent| agent.agent.get().ok()?.listens_at()).map_or(0, |address| address.port())
}

/// Registers memory of the caller's: `bytes` from `base` on, of the host or of the agent's GPU. It has to stay until `released`
/// is called, which may be NULL if the memory stays for ever. It is called only if this returns KVF_OK.
///
/// # Safety
///
/// The contract of the crate.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_agent_register(
    agent: Option<&Agent>,
    base: u64,
    bytes: u64,
    on_gpu: bool,
    released: Released,
    context: *mut c_void,
    memory: Option<&mut MaybeUninit<*mut Memory>>,
) -> Status {
    guard(|| {
        let agent = Agent::of(agent)?;
        let place = out(memory)?;
        // SAFETY: it stays, by the contract.
        let region = unsafe { register(agent.context(), (base, bytes, on_gpu), (released, context)) }?;
        give(Some(place), Memory { id: agent.register(region)?, base })
    })
}

/// Allocates and registers zeroed memory, of the host or of the agent's GPU. Peers on this host can map it, which makes it the
/// fastest to write to. It is freed when it has been deregistered.
#[unsafe(no_mangle)]
pub extern "C" fn kvf_agent_allocate(
    agent: Option<&Agent>,
    bytes: u64,
    on_gpu: bool,
    memory: Option<&mut MaybeUninit<*mut Memory>>,
) -> Status {
    guard(|| {
        let agent = Agent::of(agent)?;
        let place = out(memory)?;
        let region = if on_gpu { agent.context().allocate_device(bytes) } else { agent.context().allocate(bytes) }?;
        let base = region.base();
        give(Some(place), Memory { id: agent.register(region)?, base })
    })
}

/// First address, of the host or of the GPU. 0 for NULL.
#[unsafe(no_mangle)]
pub extern "C" fn kvf_memory_base(memory: Option<&Memory>) -> u64 {
    memory.map_or(0, |memory| memory.base)
}

/// Undoes a registration, and waits for what uses the memory, `timeout_ms` at most. After KVF_OK nothing reads or writes it any
/// more. After anything else it takes part in nothing new, and this can be called again to wait on.
#[unsafe(no_mangle)]
pub extern "C" fn kvf_agent_deregister(agent: Option<&Agent>, memory: Option<&Memory>, timeout_ms: u64) -> Status {
    guard(|| {
        let agent = Agent::of(agent)?;
        Ok(agent.deregister(handle(memory, "memory")?.id, Duration::from_millis(timeout_ms))?)
    })
}

/// Frees the handle of a registration, which stays.
#[unsafe(no_mangle)]
pub extern "C" fn kvf_memory_free(memory: Option<Box<Memory>>) {
    drop(memory);
}

/// All that a peer needs: where the agent is, and all of its memory.
#[unsafe(no_mangle)]
pub extern "C" fn kvf_agent_metadata(agent: Option<&Agent>, metadata: Option<&mut MaybeUninit<Bytes>>) -> Status {
    guard(|| {
        let made = Agent::of(agent)?.metadata();
        out(metadata)?.write(Bytes::new(made));
        Ok(())
    })
}

/// Takes in a remote agent's metadata. Its name is written to `name` if that is not NULL. A new life of an agent that is known
/// replaces it.
///
/// # Safety
///
/// The contract of the crate.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_agent_add_remote(
    agent: Option<&Agent>,
    metadata: Slice,
    name: Option<&mut MaybeUninit<Bytes>>,
) -> Status {
    guard(|| {
        // SAFETY: an array by the contract.
        let metadata = unsafe { slice(metadata) }?;
        tell(name, Agent::of(agent)?.add_remote(metadata)?);
        Ok(())
    })
}

/// Asks the agent that listens at `at` ("host:port") for its metadata and takes it in, as kvf_agent_add_remote does.
///
/// # Safety
///
/// The contract of the crate.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_agent_fetch_remote(
    agent: Option<&Agent>,
    at: *const c_char,
    timeout_ms: u64,
    name: Option<&mut MaybeUninit<Bytes>>,
) -> Status {
    guard(|| {
        let agent = Agent::of(agent)?;
        // SAFETY: text by the contract.
        let at = address(unsafe { given(at, "address") }?)?;
        tell(name, agent.fetch_metadata(at, None, Duration::from_millis(timeout_ms))?);
        Ok(())
    })
}

/// Gives this agent's metadata to the one that listens at `at`.
///
/// # Safety
///
/// The contract of the crate.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_agent_send_metadata(agent: Option<&Agent>, at: *const c_char, timeout_ms: u64) -> Status {
    guard(|| {
        let agent = Agent::of(agent)?;
        // SAFETY: text by the contract.
        let at = address(unsafe { given(at, "address") }?)?;
        Ok(agent.send_metadata(at, None, Duration::from_millis(timeout_ms))?)
    })
}

/// Gives up what is under way with a remote agent and closes the connection to it.
///
/// # Safety
///
/// The contract of the crate.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_agent_remove_remote(agent: Option<&Agent>, name: *const c_char) -> Status {
    guard(|| {
        // SAFETY: text by the contract.
        let name = unsafe { given(name, "name") }?;
        Ok(Agent::of(agent)?.remove_remote(name)?)
    })
}

/// Says something to a remote agent. It is not ordered against transfers.
///
/// # Safety
///
/// The contract of the crate.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_agent_notify(agent: Option<&Agent>, name: *const c_char, message: Slice) -> Status {
    guard(|| {
        // SAFETY: text by the contract.
        let name = unsafe { given(name, "name") }?;
        // SAFETY: an array by the contract.
        let message = unsafe { slice(message) }?;
        Ok(Agent::of(agent)?.send_notification(name, message)?)
    })
}

/// What peers have said since the last call. Waits for the first, `timeout_ms` at most; there may be none.
#[unsafe(no_mangle)]
pub extern "C" fn kvf_agent_notifications(
    agent: Option<&Agent>,
    timeout_ms: u64,
    notifications: Option<&mut MaybeUninit<*mut Notifications>>,
) -> Status {
    guard(|| {
        let agent = Agent::of(agent)?;
        let place = out(notifications)?;
        let heard = match timeout_ms {
            0 => agent.notifications(),
            _ => agent.wait_notifications(Duration::from_millis(timeout_ms)),
        };
        // A name with a NUL in it would end there in C.
        let text =
            |Notification { from, message, .. }| (CString::new(from.replace('\0', " ")).unwrap_or_default(), message);
        give(Some(place), Notifications { all: heard.into_iter().map(text).collect() })
    })
}

/// How many there are. 0 for NULL.
#[unsafe(no_mangle)]
pub extern "C" fn kvf_notifications_count(notifications: Option<&Notifications>) -> usize {
    notifications.map_or(0, |notifications| notifications.all.len())
}

/// Who said the one with this index, and what. Both last as long as `notifications`.
#[unsafe(no_mangle)]
pub extern "C" fn kvf_notifications_at(
    notifications: Option<&Notifications>,
    index: usize,
    from: Option<&mut MaybeUninit<*const c_char>>,
    message: Option<&mut MaybeUninit<Slice>>,
) -> Status {
    guard(|| {
        let all = &handle(notifications, "notifications")?.all;
        let (name, said) = all.get(index).ok_or_else(|| Failure::argument(format!("no notification {index}")))?;
        out(from)?.write(name.as_ptr());
        out(message)?.write(Slice { data: said.as_ptr(), length: said.len() });
        Ok(())
    })
}

/// Frees notifications.
#[unsafe(no_mangle)]
pub extern "C" fn kvf_notifications_free(notifications: Option<Box<Notifications>>) {
    drop(notifications);
}

/// Gives up what is under way, takes leave of the peers, stops the threads, and frees an agent. Waits for that. Memory that a peer
/// was asked to write and may still write then stays registered until the process ends: it is not said to be released.
#[unsafe(no_mangle)]
pub extern "C" fn kvf_agent_free(agent: Option<Box<Agent>>) {
    // A panic here has nobody to be told to.
    let _ = guard(|| {
        drop(agent);
        Ok(())
    });
}

fn tell(place: Option<&mut MaybeUninit<Bytes>>, name: String) {
    if let Some(place) = place {
        place.write(Bytes::text(name));
    }
}

fn address(text: &str) -> Result<SocketAddr, Failure> {
    let found = text.to_socket_addrs().ok().and_then(|mut found| found.next());
    found.ok_or_else(|| Failure::argument(format!("{text:?} is no address")))
}
