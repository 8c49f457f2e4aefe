//! What an engine offers to its peers: memory, and the card that says where it is.

use std::sync::Arc;

use kvferry_layout::{Extent, MemoryKind, PageTable};
use kvferry_wire::Region;

use super::Engine;
use crate::card::Card;
use crate::core::Introduction;
use crate::error::PublishError;
use crate::shared::Published;

impl Engine {
    /// Allocates zeroed memory for each pool of `table`, of the host or of the engine's GPU as the pool says, and writes its
    /// address into the table.
    ///
    /// # Errors
    ///
    /// [`PublishError::Table`] or [`PublishError::Memory`].
    pub fn allocate(&self, table: &mut PageTable) -> Result<Vec<Region>, PublishError> {
        table.check()?;
        let mut regions = Vec::with_capacity(table.pools.len());
        for (index, pool) in table.pools.iter_mut().enumerate() {
            // `check` has made sure that the extent is a number; an absurd one is the allocation's error.
            let bytes = pool.extent_bytes().unwrap_or(u64::MAX);
            let region = match pool.memory {
                MemoryKind::Host => self.shared.context.allocate(bytes),
                MemoryKind::Cuda { .. } => self.shared.context.allocate_device(bytes),
            };
            let region = region.map_err(|source| PublishError::Memory { pool: index, source })?;
            pool.base = region.base();
            regions.push(region);
        }
        Ok(regions)
    }

    /// Offers this rank's pools to its peers: pool `i` of `table` lies in `regions[i]`.
    ///
    /// # Errors
    ///
    /// [`PublishError`]: the table does not hold, a pool leaves its region, a region belongs to another engine, or a table has
    /// been published before.
    pub fn publish(&self, table: PageTable, regions: Vec<Region>) -> Result<(), PublishError> {
        if table.pools.len() != regions.len() {
            return Err(PublishError::Regions { pools: table.pools.len(), regions: regions.len() });
        }
        let extents: Vec<Extent> = regions.iter().map(|r| Extent { base: r.base(), bytes: r.bytes() }).collect();
        table.check_regions(&extents)?;
        if let Some(pool) = regions.iter().position(|region| !self.shared.context.owns(region)) {
            return Err(PublishError::OtherContext { pool });
        }
        let mut state = self.shared.lock();
        if state.published.is_some() {
            return Err(PublishError::Twice);
        }
        let layers = || table.rows().map(|(_, row)| row.layer.0);
        let own_layers = layers().min().unwrap_or(0)..layers().max().map_or(0, |last| last.saturating_add(1));
        let published = Published { table, regions };
        let card = self.card_of(&published);
        state.core.introduce(Introduction {
            instance: self.shared.options.instance.clone(),
            born: self.shared.born,
            card,
            own_layers,
        });
        state.published = Some(Arc::new(published));
        Ok(())
    }

    /// This rank's card: opaque bytes, which become an [`InstanceCard`](crate::InstanceCard) with those of the instance's other ranks. `None` before
    /// [`publish`](Self::publish).
    #[must_use]
    pub fn card(&self) -> Option<Vec<u8>> {
        let published = self.shared.lock().published.clone()?;
        Some(self.card_of(&published))
    }

    fn card_of(&self, published: &Published) -> Vec<u8> {
        let card = Card {
            instance: self.shared.options.instance.clone(),
            rank: self.shared.options.rank,
            verify: self.shared.options.verify,
            epoch: self.shared.epoch,
            born: self.shared.born,
            ucx: self.shared.context.ucx_version(),
            addresses: self.shared.workers().addresses(),
            table: published.table.clone(),
            regions: published.regions.iter().map(Region::card).collect(),
            probe: self.shared.probe.card(),
        };
        card.encode()
    }
}
