//! Descriptors of GPU allocations, handed from process to process over a socket. A descriptor of the driver's cannot be opened
//! through `/proc` as a memory file can: what is opened there is the device, without the allocation.
//!
//! Each process has one socket, made at its first allocation, in the namespace of names without files: nothing is left of it.
//! Its name cannot be guessed, it answers processes of the same user only, and gives a descriptor to whoever knows the
//! allocation's cookie.

use std::collections::BTreeMap;
use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::sync::{Arc, OnceLock};
use std::thread;
use std::time::Duration;

use parking_lot::Mutex;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, SocketAddrUnix, SocketFlags, SocketType,
};

use crate::cuda::card::ExportCard;
use crate::cuda::imported::CONTROL_BYTES;
use crate::options::Pages;
use crate::share::Share;

/// How long either side waits for the other.
const DEADLINE: Duration = Duration::from_secs(2);

/// Allocations of one region, at most: as many descriptors as one message takes.
pub(crate) const ALLOCATIONS_MAX: usize = 253;

/// Descriptors of this process's allocations, by cookie.
type Files = Arc<Mutex<BTreeMap<u128, Arc<[OwnedFd]>>>>;

/// The socket of this process, with the thread that answers.
#[derive(Debug)]
struct Server {
    socket: u128,
    files: Files,
}

/// Allocations that peers can have while this lives. What they have by then is theirs.
#[derive(Debug)]
pub(crate) struct Export {
    server: &'static Server,
    control: Share,
    mapped_bytes: Vec<u64>,
    offset: u64,
}

/// Offers allocations, each with its length, in which a region starts at `offset`. `None` if the system has no sockets or files
/// for it: then they stay private.
pub(crate) fn offer(allocations: Vec<(OwnedFd, u64)>, offset: u64) -> Option<Export> {
    if allocations.len() > ALLOCATIONS_MAX {
        return None;
    }
    static SERVER: OnceLock<Option<Server>> = OnceLock::new();
    let server = SERVER
        .get_or_init(|| Server::start().inspect_err(|error| tracing::warn!(%error, "GPU memory is not shared")).ok())
        .as_ref()?;
    let control = Share::create(usize::try_from(CONTROL_BYTES).ok()?, Pages::default())?;
    let (files, mapped_bytes): (Vec<OwnedFd>, Vec<u64>) = allocations.into_iter().unzip();
    server.files.lock().insert(control.card()?.cookie(), files.into());
    Some(Export { server, control, mapped_bytes, offset })
}

impl Export {
    pub(crate) fn card(&self) -> Option<ExportCard> {
        let control = self.control.card()?;
        let (socket, mapped_bytes) = (self.server.socket, self.mapped_bytes.clone());
        Some(ExportCard { socket, mapped_bytes, offset: self.offset, control })
    }

    /// Tells peers that the memory is no longer registered.
    pub(crate) fn withdraw(&self) {
        self.control.withdraw();
    }
}

impl Drop for Export {
    fn drop(&mut self) {
        if let Some(card) = self.control.card() {
            self.server.files.lock().remove(&card.cookie());
        }
    }
}

impl Server {
    fn start() -> io::Result<Self> {
        let mut random = [0; 16];
        rustix::rand::getrandom(&mut random, rustix::rand::GetRandomFlags::empty())?;
        let socket = u128::from_ne_bytes(random);
        let listener = UnixListener::bind_addr(&SocketAddr::from_abstract_name(name_of(socket))?)?;
        let files = Files::default();
        let served = files.clone();
        thread::Builder::new().name("kvferry-share".to_owned()).spawn(move || {
            for stream in listener.incoming() {
                let answered = stream.and_then(|stream| answer(stream, &served));
                if let Err(error) = answered {
                    tracing::debug!(%error, "a request for GPU memory was not answered");
                }
            }
        })?;
        Ok(Self { socket, files })
    }
}

fn name_of(socket: u128) -> String {
    format!("kvferry-{socket:032x}")
}

/// Gives the descriptors that are asked for. Who asks for others gets none.
fn answer(mut stream: UnixStream, files: &Files) -> io::Result<()> {
    stream.set_read_timeout(Some(DEADLINE))?;
    stream.set_write_timeout(Some(DEADLINE))?;
    if rustix::net::sockopt::socket_peercred(&stream)?.uid != rustix::process::geteuid() {
        return Err(io::ErrorKind::PermissionDenied.into());
    }
    let mut cookie = [0; 16];
    stream.read_exact(&mut cookie)?;
    let found = files.lock().get(&u128::from_le_bytes(cookie)).cloned();
    let files = found.ok_or(io::Error::from(io::ErrorKind::NotFound))?;
    let descriptors: Vec<BorrowedFd<'_>> = files.iter().map(AsFd::as_fd).collect();
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(ALLOCATIONS_MAX))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    if !ancillary.push(SendAncillaryMessage::ScmRights(&descriptors)) {
        return Err(io::ErrorKind::OutOfMemory.into());
    }
    rustix::net::sendmsg(&stream, &[IoSlice::new(&[1])], &mut ancillary, SendFlags::NOSIGNAL)?;
    Ok(())
}

/// Asks the owner for the descriptors, one for each length of the card. `None` if it does not give them: it is on another host,
/// in another container, another user's, gone, or has freed the memory.
pub(crate) fn fetch(card: &ExportCard) -> Option<Vec<OwnedFd>> {
    ask(card).inspect_err(|error| tracing::debug!(%error, "GPU memory of a peer is out of reach")).ok()
}

fn ask(card: &ExportCard) -> io::Result<Vec<OwnedFd>> {
    // Not to wait in `connect` for an owner that has stopped accepting.
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    rustix::net::connect(&socket, &SocketAddrUnix::new_abstract_name(name_of(card.socket).as_bytes())?)?;
    let mut stream = UnixStream::from(socket);
    stream.set_nonblocking(false)?;
    stream.set_read_timeout(Some(DEADLINE))?;
    stream.set_write_timeout(Some(DEADLINE))?;
    stream.write_all(&card.control.cookie().to_le_bytes())?;
    let mut byte = [0];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(ALLOCATIONS_MAX))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    rustix::net::recvmsg(&stream, &mut [IoSliceMut::new(&mut byte)], &mut ancillary, RecvFlags::CMSG_CLOEXEC)?;
    let files = ancillary.drain().filter_map(|message| match message {
        RecvAncillaryMessage::ScmRights(files) => Some(files),
        _ => None,
    });
    let files: Vec<OwnedFd> = files.flatten().collect();
    if files.len() == card.mapped_bytes.len() { Ok(files) } else { Err(io::ErrorKind::NotFound.into()) }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt;

    use super::*;

    /// Stands in for a descriptor of the driver's.
    fn file() -> (OwnedFd, u64) {
        let file = tempfile::tempfile().unwrap();
        let inode = file.metadata().unwrap().ino();
        (file.into(), inode)
    }

    #[test]
    fn a_descriptor_is_given_to_who_knows_its_cookie_while_it_is_offered() {
        let (mut allocations, mut inodes) = (Vec::new(), Vec::new());
        for bytes in [4096, 8192, 4096] {
            let (file, inode) = file();
            allocations.push((file, bytes));
            inodes.push(inode);
        }
        let export = offer(allocations, 100).unwrap();
        let card = export.card().unwrap();
        assert_eq!((&card.mapped_bytes[..], card.offset), (&[4096, 8192, 4096][..], 100));
        let fetched: Vec<std::fs::File> = fetch(&card).unwrap().into_iter().map(Into::into).collect();
        let of_fetched = || fetched.iter().map(|file| file.metadata().unwrap().ino()).collect::<Vec<_>>();
        assert_eq!(of_fetched(), inodes);
        let other = offer(vec![(file().0, 4096)], 0).unwrap().card().unwrap(); // and no longer offered
        assert!(fetch(&other).is_none());
        assert!(fetch(&ExportCard { control: other.control, ..card.clone() }).is_none());
        assert!(fetch(&ExportCard { socket: card.socket ^ 1, ..card.clone() }).is_none());
        assert!(fetch(&ExportCard { mapped_bytes: vec![4096], ..card.clone() }).is_none());
        drop(export);
        assert!(fetch(&card).is_none());
        assert_eq!(of_fetched(), inodes, "what was given is the receiver's");
    }

    #[test]
    fn as_many_descriptors_as_are_offered_are_given() {
        let many = |count| (0..count).map(|_| (file().0, 4096)).collect();
        let export = offer(many(ALLOCATIONS_MAX), 0).unwrap();
        assert_eq!(fetch(&export.card().unwrap()).unwrap().len(), ALLOCATIONS_MAX);
        assert!(offer(many(ALLOCATIONS_MAX + 1), 0).is_none());
    }
}
