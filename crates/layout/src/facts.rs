//! What a model caches, whatever the instance: read from its `config.json`.

use crate::build::TableOptions;
use crate::error::LayoutError;
use crate::mask::LayerMask;
use crate::spec::{GroupSpec, RowSpec};
use crate::table::{GroupKind, Role};

/// Elements that share one scale in a row of indexer keys: `quant_block_size` of vLLM's and SGLang's sparse-attention
/// indexers.
pub(crate) const INDEXER_QUANT_BLOCK: u32 = 128;

/// What the attention of a model's layers caches for a token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Attention {
    /// Keys and values of some heads.
    Heads {
        /// Key-value heads of the model.
        kv_heads: u32,
        /// Elements of a key, and of a value.
        head_dim: u32,
    },
    /// One vector: the compressed latent with the rotary part of the key behind it.
    Latent {
        /// Elements of the vector.
        elements: u32,
    },
}

/// The sparse-attention indexer of a model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Indexer {
    /// Elements of a key.
    pub(crate) head_dim: u32,
    /// Layers that own a cache of keys, MTP layers included.
    pub(crate) owners: LayerMask,
}

/// Those facts of a model that decide the shape of its cache. Made by [`ModelFacts::from_config`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModelFacts {
    pub(crate) model_type: String,
    pub(crate) hidden_layers: u32,
    pub(crate) mtp_layers: u32,
    pub(crate) attention: Attention,
    pub(crate) indexer: Option<Indexer>,
}

impl ModelFacts {
    /// The `model_type` of the config.
    pub fn model_type(&self) -> &str {
        &self.model_type
    }

    /// Hidden layers: ids `0..hidden_layers`.
    pub fn hidden_layers(&self) -> u32 {
        self.hidden_layers
    }

    /// MTP layers: ids from `hidden_layers` on.
    pub fn mtp_layers(&self) -> u32 {
        self.mtp_layers
    }

    /// Layers that own a cache of indexer keys, MTP layers included; `None` for a model without indexers.
    pub fn indexer_owners(&self) -> Option<&LayerMask> {
        self.indexer.as_ref().map(|indexer| &indexer.owners)
    }

    /// What the model stores, block by block: one paged group, keys and values or latents in one pool, indexer keys in a
    /// second one.
    ///
    /// # Errors
    ///
    /// [`LayoutError::CacheDtype`] for 4-bit caches, which need rows of block scales that nothing here lists.
    pub fn groups(&self, options: &TableOptions) -> Result<Vec<GroupSpec>, LayoutError> {
        let dtype = options.dtype;
        if dtype.bits() < 8 {
            return Err(LayoutError::CacheDtype { role: Role::Key, dtype });
        }
        // The config's reader bounds the sum.
        let every_layer = LayerMask::all(self.hidden_layers + self.mtp_layers);
        let main = match self.attention {
            Attention::Heads { kv_heads, head_dim } => vec![
                RowSpec::single(Role::Key, dtype, every_layer.clone(), kv_heads, head_dim)?,
                RowSpec::single(Role::Value, dtype, every_layer, kv_heads, head_dim)?,
            ],
            Attention::Latent { elements } => vec![RowSpec::single(Role::Latent, dtype, every_layer, 1, elements)?],
        };
        let mut pools = vec![main];
        if let Some(Indexer { head_dim, owners }) = &self.indexer {
            pools.push(vec![RowSpec::indexer(options.indexer_dtype, owners.clone(), *head_dim, INDEXER_QUANT_BLOCK)?]);
        }
        let kind = GroupKind::paged(options.tokens_per_block);
        Ok(vec![GroupSpec { kind, slot_count: options.slot_count, pools }])
    }
}
