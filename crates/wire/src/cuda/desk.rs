//! What a step of a transfer may use and say.

use crate::context::Context;
use crate::endpoint::EndpointId;
use crate::inbox::message::Body;
use crate::inbox::outbox::Outbox;
use crate::raw::RawEndpoint;

/// As the host's, without an inbox of its own: the transfer has it.
pub(crate) struct Desk<'a> {
    pub(crate) context: &'a Context,
    pub(crate) id: EndpointId,
    pub(crate) endpoint: &'a RawEndpoint,
    pub(crate) outbox: &'a mut Outbox,
    pub(crate) say: &'a mut dyn FnMut(Body),
}
