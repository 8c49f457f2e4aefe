//! Cards of instances.
//!
//! # Safety
//!
//! The contract of the crate.
#![allow(unsafe_code, reason = "reads what C's pointers point to")]

use std::mem::MaybeUninit;

use kvferry::InstanceCard;

use crate::bytes::{Bytes, Slice, array, slice};
use crate::status::{Failure, Status, give, guard, handle, out};

/// All ranks of one instance. Freed by kvf_instance_free.
pub struct Instance {
    pub(crate) card: InstanceCard,
}

/// Makes an instance of the cards of its ranks 0 to `count - 1`, in any order.
///
/// # Safety
///
/// The contract of the crate.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_instance_new(
    cards: *const Slice,
    count: usize,
    instance: Option<&mut MaybeUninit<*mut Instance>>,
) -> Status {
    guard(|| {
        // SAFETY: an array by the contract.
        let cards = unsafe { array(cards, count) }?;
        // SAFETY: arrays by the contract.
        let cards = cards.iter().map(|card| unsafe { slice(*card) }).collect::<Result<Vec<_>, _>>()?;
        let ranks = u32::try_from(count).map_err(|_| Failure::argument(format!("{count} ranks")))?;
        give(instance, Instance { card: InstanceCard::new(0..ranks, cards)? })
    })
}

/// Reads what kvf_instance_to_bytes has written.
///
/// # Safety
///
/// The contract of the crate.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_instance_from_bytes(
    bytes: Slice,
    instance: Option<&mut MaybeUninit<*mut Instance>>,
) -> Status {
    guard(|| {
        // SAFETY: an array by the contract.
        let bytes = unsafe { slice(bytes) }?;
        give(instance, Instance { card: InstanceCard::from_bytes(bytes)? })
    })
}

/// The instance as bytes, for the ranks of both instances.
#[unsafe(no_mangle)]
pub extern "C" fn kvf_instance_to_bytes(instance: Option<&Instance>, bytes: Option<&mut MaybeUninit<Bytes>>) -> Status {
    guard(|| {
        let written = handle(instance, "instance")?.card.to_bytes();
        out(bytes)?.write(Bytes::new(written));
        Ok(())
    })
}

/// Frees an instance.
#[unsafe(no_mangle)]
pub extern "C" fn kvf_instance_free(instance: Option<Box<Instance>>) {
    drop(instance);
}
