//! What `kvferry.nixl` is made of below: an agent, its lists and its transfers. Names, argument shapes and classes of
//! exceptions are in `python/kvferry/nixl/`.
//!
//! Descriptors come as the bytes of an N x 3 array of 64 bits (address, length, device), indices as those of an array: one copy
//! each, and no loop in Python.

mod agent;
mod fields;
mod transfer;

pub(crate) use agent::{NixlAgent, NixlRegistration};
pub(crate) use transfer::{NixlList, NixlTransfer};
