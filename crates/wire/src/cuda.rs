//! GPU memory: one kernel expands a whole transfer and copies it.
//!
//! The driver is opened when a context asks for a GPU, and not before. A [`gpu::Gpu`] is a device with its primary context;
//! [`memory::DeviceMemory`] is memory on it, [`imported::Imported`] a peer's that is mapped here. A [`queue::Queue`] launches
//! the kernel on a stream of the progress thread.

pub(crate) mod card;
pub(crate) mod copy;
pub(crate) mod description;
pub(crate) mod desk;
pub(crate) mod done;
pub(crate) mod driver;
pub(crate) mod event;
pub(crate) mod expand;
pub(crate) mod export;
pub(crate) mod gpu;
pub(crate) mod imported;
pub(crate) mod incoming;
pub(crate) mod kernel;
pub(crate) mod landing;
pub(crate) mod lane;
pub(crate) mod memory;
pub(crate) mod options;
pub(crate) mod pairs;
pub(crate) mod pinned;
pub(crate) mod queue;
pub(crate) mod route;
pub(crate) mod scatter;
pub(crate) mod sheet;
pub(crate) mod slab;
pub(crate) mod stream;
pub(crate) mod target;
pub(crate) mod template;
