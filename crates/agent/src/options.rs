//! How an agent is set up.

use std::net::SocketAddr;
use std::time::Duration;

use kvferry_wire::ContextOptions;

/// Settings of an agent. Start from the default and change what you need.
#[derive(Clone, Debug)]
pub struct AgentOptions {
    /// UCX, the routes, and the GPU if there is to be one.
    pub context: ContextOptions,
    /// How long a peer that is asked for something may show no sign of life.
    pub patience: Duration,
    /// How long a transfer may take in all. One that takes longer is cancelled, and has failed with
    /// [`Failure::Deadline`](crate::Failure::Deadline) once it is quiet. `None`: as long as it moves, see
    /// [`ContextOptions::stall_deadline`].
    pub transfer_deadline: Option<Duration>,
    /// Where to listen for peers that exchange metadata. `None`: not at all.
    pub listen: Option<SocketAddr>,
}

impl Default for AgentOptions {
    fn default() -> Self {
        let context = ContextOptions::default();
        Self { patience: context.stall_deadline, context, transfer_deadline: None, listen: None }
    }
}
