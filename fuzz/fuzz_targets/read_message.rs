//! What a peer sends to a worker: read, or refused; and what passes its check stays inside of its region.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| kvferry_wire::fuzzing::read(bytes));
