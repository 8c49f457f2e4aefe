//! The builder of page tables from a model's facts and a cut.

use crate::cut::{Coordinates, Cut};
use crate::error::LayoutError;
use crate::facts::ModelFacts;
use crate::spec::RankSpec;
use crate::storage::{Storage, lay_out};
use crate::table::{Dtype, GroupKind, Layer, PageTable};

/// What an instance chooses for itself, whatever the model and the cut. Start from [`TableOptions::new`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TableOptions {
    /// Tokens of a block; 1 for pools whose slots are tokens.
    pub tokens_per_block: u32,
    /// Element type of keys, values and latents. With 4-bit keys and values come rows of their block scales (NVFP4).
    pub dtype: Dtype,
    /// Slots of each pool of a paged group.
    pub slot_count: u32,
    /// Whether the rank of the last stage holds the model's MTP layers too. Of no effect for a model without any.
    pub mtp: bool,
    /// Element type of quantised indexer keys: [`Dtype::Fp8E4m3`] or [`Dtype::Fp4E2m1`].
    pub indexer_dtype: Dtype,
    /// Element type of recurrent state where the model does not say it. `None` is the model's own type, as in vLLM
    /// (`mamba_ssm_cache_dtype` = `auto`); SGLang takes [`Dtype::F32`] (`SGLANG_MAMBA_SSM_DTYPE`).
    pub ssm_dtype: Option<Dtype>,
    /// Slots of each pool of a state group: one a request.
    pub state_slot_count: u32,
    /// How the rows are arranged.
    pub storage: Storage,
}

impl TableOptions {
    /// These, and: as many state slots, no MTP layers, 8-bit indexer keys, state in the model's type, block-major.
    pub fn new(tokens_per_block: u32, dtype: Dtype, slot_count: u32) -> Self {
        Self {
            tokens_per_block,
            dtype,
            slot_count,
            mtp: false,
            indexer_dtype: Dtype::Fp8E4m3,
            ssm_dtype: None,
            state_slot_count: slot_count,
            storage: Storage::default(),
        }
    }
}

/// The table of one rank of an instance, in host memory: see [`lay_out`].
///
/// Context-parallel ranks share the blocks of paged groups out among themselves. State has no blocks, so each of them holds
/// all of it.
///
/// # Errors
///
/// [`LayoutError::Cut`] if the cut does not fit the model or has no such rank, others if the options are not usable.
pub fn build(facts: &ModelFacts, cut: &Cut, rank: u32, options: &TableOptions) -> Result<PageTable, LayoutError> {
    let Coordinates { pp_rank, dp_rank, cp_rank, tp_rank } = cut.coordinates(rank)?;
    let hidden_layers = facts.hidden_layers();
    let mut layers = cut.stage_layers(pp_rank, hidden_layers)?;
    if options.mtp && pp_rank + 1 == cut.pp_size() {
        layers.extend((hidden_layers..hidden_layers + facts.mtp_layers()).map(Layer));
    }
    let mut groups = facts.groups(options)?;
    for group in &mut groups {
        if let GroupKind::Paged { ordinals, .. } = &mut group.kind {
            *ordinals = cut.ordinals(cp_rank);
        }
    }
    let spec = RankSpec { hidden_layers, layers, tp_rank, tp_size: cut.tp_size(), groups };
    Ok(PageTable { dp_rank, ..lay_out(&spec, options.storage)? })
}
