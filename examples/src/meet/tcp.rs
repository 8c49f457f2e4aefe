//! Meeting at a TCP address: one process hosts, all others, its own rank included, come as guests.
//!
//! A guest says hello. The host answers with the first rank that it still waits for, again whenever that is another one,
//! and at the end with everyone's cards or the reason why there are none. Until its first answer a guest may be turned
//! away, and comes again; from then on the host keeps it. So whoever runs out of time can say who is missing.

mod guest;
mod host;

use std::time::Duration;

pub use guest::meet;
pub use host::Host;

const POLL_INTERVAL: Duration = Duration::from_millis(10);
