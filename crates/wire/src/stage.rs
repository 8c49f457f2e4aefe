//! Points that a transfer passes, for whoever measures where its time goes: trace events of one target, named by the point. They
//! cost a look at a flag when nobody listens.

/// The target of the events.
macro_rules! stage {
    ($name:literal) => {
        tracing::trace!(name: $name, target: "kvferry_wire::stage", "")
    };
}

pub(crate) use stage;
