//! What a GPU scatters with. Requests between the same regions come again and again with other slots: what a peer has described
//! of them once is kept, checked and on the device, and found by its bytes.

use std::cell::RefCell;
use std::collections::HashMap;
use std::rc::Rc;
use std::sync::Arc;

use xxhash_rust::xxh3::Xxh3Builder;

use crate::context::Context;
use crate::cuda::description;
use crate::cuda::driver::DeviceAddress;
use crate::cuda::expand::{Mode, Placed};
use crate::cuda::gpu::Gpu;
use crate::cuda::queue::Queue;
use crate::cuda::template::Template;
use crate::inbox::message::Refusal;
use crate::pieces::{Shape, SlotPair};
use crate::region::{Region, RegionId};

/// Descriptions that are kept. Beyond, all of them are given up, to be read again when they come again.
const KNOWN_MAX: usize = 64;

/// Longer ones are not: they are lists of many lengths, which do not come again.
const KNOWN_BYTES_MAX: usize = 64 << 10;

/// The copies of transfers that land here.
pub(crate) struct Incoming {
    pub(crate) queue: Rc<RefCell<Queue>>,
    known: RefCell<HashMap<Vec<u8>, Rc<Known>, Xxh3Builder>>,
}

/// The parts of a peer's transfers, with all that does not depend on their slots.
pub(crate) struct Known {
    /// The highest slot of each part that is inside of its region, if there is one, and the number of its set.
    pub(crate) limits: Vec<(Option<u64>, usize)>,
    /// The regions, in the order in which the parts name them, each with where the GPU has it.
    regions: Vec<(RegionId, DeviceAddress)>,
    pub(crate) template: Rc<Template>,
}

impl Incoming {
    pub(crate) fn new(queue: Queue) -> Self {
        Self { queue: Rc::new(RefCell::new(queue)), known: RefCell::default() }
    }

    /// What these bytes describe, and the regions, to be held: as they are registered now.
    pub(crate) fn look_up(&self, context: &Context, parts: &[u8]) -> Result<(Rc<Known>, Vec<Region>), Refusal> {
        let known = self.known.borrow().get(parts).cloned();
        if let Some(known) = known
            && let Some(regions) = known.regions(context, self.queue.borrow().gpu())
        {
            return Ok((known, regions));
        }
        let (known, regions) = self.read(context, parts)?;
        let known = Rc::new(known);
        if parts.len() > KNOWN_BYTES_MAX {
            return Ok((known, regions));
        }
        let mut all = self.known.borrow_mut();
        if all.len() >= KNOWN_MAX {
            all.clear();
        }
        all.insert(parts.to_vec(), known.clone());
        Ok((known, regions))
    }

    fn read(&self, context: &Context, parts: &[u8]) -> Result<(Known, Vec<Region>), Refusal> {
        let parts = description::parse_parts(parts).ok_or(Refusal::Unreadable)?;
        let mut queue = self.queue.borrow_mut();
        let none: Arc<[SlotPair]> = Arc::new([]);
        let (mut shapes, mut places) = (Vec::with_capacity(parts.len()), Vec::with_capacity(parts.len()));
        let mut limits = Vec::with_capacity(parts.len());
        let (mut regions, mut held) = (Vec::new(), Vec::<Region>::new());
        for (part, (claim, set)) in parts.iter().enumerate() {
            // Parts of one region follow each other.
            if regions.last().is_none_or(|(id, _)| *id != claim.region) {
                let region = context.region(claim.region).ok_or(Refusal::Unregistered { part })?;
                // Host memory is locked when it is first named.
                let place = region.device_address(queue.gpu()).map_err(|_| Refusal::Gpu)?;
                regions.push((claim.region, place));
                held.push(region);
            }
            let (Some((_, place)), Some(region)) = (regions.last(), held.last()) else {
                return Err(Refusal::Unreadable);
            };
            let shape = Shape { pairs: none.clone(), ..claim.shape(region.bytes()) };
            let set = usize::try_from(*set).map_err(|_| Refusal::Unreadable)?;
            let (_, highest) = shape.check_pieces(part).map_err(|_| Refusal::Unreadable)?;
            limits.push((highest.map(|(_, remote)| remote), set));
            places.push(*place);
            shapes.push((shape, set));
        }
        let placed: Vec<Placed<'_>> = shapes
            .iter()
            .zip(&places)
            .map(|((shape, set), place)| Placed { shape, from: 0, to: *place, set: *set })
            .collect();
        let template = queue.template(Mode::Scatter, &placed).map_err(|_| Refusal::Busy)?.ok_or(Refusal::Unreadable)?;
        Ok((Known { limits, regions, template }, held))
    }
}

impl Known {
    /// The regions, if all of them are registered and where they were.
    fn regions(&self, context: &Context, gpu: &Arc<Gpu>) -> Option<Vec<Region>> {
        let region = |(id, at): &(RegionId, DeviceAddress)| {
            context.region(*id).filter(|region| region.device_address(gpu).is_ok_and(|place| place == *at))
        };
        self.regions.iter().map(region).collect()
    }
}
