//! What tests of several modules begin with.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use kvferry_wire::{MemoryKind, Run};

use crate::{Agent, AgentOptions, Operation, Transfer};

/// Agents `a` and `b` with some memory each, and a transfer that is to read `b`'s into `a`'s, not posted.
pub(crate) fn reading() -> ([Agent; 2], Transfer) {
    let agents = ["a", "b"].map(|name| Agent::new(name, AgentOptions::default()).unwrap());
    let [here, there] = agents.each_ref().map(|agent| {
        let memory = agent.context().allocate(64).unwrap();
        let run = Run { address: memory.base(), bytes: 64 };
        agent.register(memory).unwrap();
        [run]
    });
    let [a, b] = &agents;
    a.add_remote(&b.metadata()).unwrap();
    let (here, there) = ((MemoryKind::Host, &here[..]), ("b", MemoryKind::Host, &there[..]));
    let read = a.make_once(Operation::Read, here, there, None).unwrap();
    (agents, read)
}
