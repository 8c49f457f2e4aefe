//! What a peer sends, read as it is on its way in: for the fuzz target `read_message`, and only in its build.

use ucx_sys::Version;

use crate::address::{WorkerCard, seal};
use crate::cuda::description::{self, DeviceDescription};
use crate::frame::{self, Audience, Place};
use crate::inbox::message::{Body, Description, Message, PartDescription};
use crate::pieces::Size;

/// Largest region that a description is checked against.
const REGION_BYTES_MAX: u64 = 1 << 40;

/// Reads any bytes as a frame, as what is in one, and as an address.
///
/// # Panics
///
/// If something that has passed its check does not hold.
pub fn read(bytes: &[u8]) {
    let _ = frame::parse(0, bytes.to_vec());
    let framed = frame::encode(Audience::Worker, 1, 0, Place::NONE, 0, bytes);
    let (_, _, frame) = frame::parse(0, framed).expect("the header is right");
    assert_eq!(frame.payload, bytes);
    if let Some(message) = Message::parse(bytes) {
        assert_eq!(Message::parse(&message.encode()), Some(message.clone()));
        match &message.body {
            Body::Describe { bytes, .. } => check(bytes),
            Body::DescribeDevice { bytes, .. } => check_device(&bytes.0),
            _ => {}
        }
    }
    check(bytes);
    check_device(bytes);
    let _ = WorkerCard::parse(&seal(bytes), Version::new(1, 22, 0));
}

fn check(bytes: &[u8]) {
    let Some(description) = Description::parse(bytes) else { return };
    description.parts.iter().enumerate().for_each(|(part, claim)| check_part(part, claim));
}

fn check_device(bytes: &[u8]) {
    let Some(description) = DeviceDescription::parse(bytes) else { return };
    let parts = description::parse_parts(description.parts).unwrap_or_default();
    parts.iter().enumerate().for_each(|(part, (claim, _))| check_part(part, claim));
}

/// What is inside of its region by the check is so piece by piece.
fn check_part(part: usize, claim: &PartDescription) {
    for region_bytes in [0, 4096, REGION_BYTES_MAX] {
        let shape = claim.shape(region_bytes);
        let Ok(Size { bytes, .. }) = shape.check(part) else { continue };
        if bytes == 0 {
            continue;
        }
        for pair in &*shape.pairs {
            for piece in &*shape.pieces {
                let moves = piece.run_bytes > 0 && piece.dims.iter().all(|dim| dim.count > 0);
                let reach: u128 = piece
                    .dims
                    .iter()
                    .map(|dim| u128::from(dim.count.saturating_sub(1)) * u128::from(dim.remote_stride))
                    .sum();
                let slot = u128::from(pair.remote) * u128::from(shape.remote.slot_stride);
                let start = u128::from(shape.remote.base) + slot + u128::from(piece.remote_offset);
                assert!(!moves || start + reach + u128::from(piece.run_bytes) <= u128::from(region_bytes));
            }
        }
    }
}
