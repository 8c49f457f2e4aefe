//! What a model caches, whatever the instance: read from its `config.json`.

use crate::build::TableOptions;
use crate::error::LayoutError;
use crate::mask::LayerMask;
use crate::spec::{GroupSpec, PlaneSpec, RowSpec, cell_bytes};
use crate::table::{Dtype, GroupKind, Role};

/// Elements that share one scale in a row of indexer keys: `quant_block_size` of vLLM's and SGLang's sparse-attention
/// indexers.
pub(crate) const INDEXER_QUANT_BLOCK: u32 = 128;

/// Elements that share one 8-bit scale in NVFP4 keys and values.
const NVFP4_QUANT_BLOCK: u32 = 16;

/// How long what a layer caches of a token is kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Lifetime {
    /// As long as the request lives.
    Full,
    /// Until it leaves a window of so many tokens.
    Window(u32),
    /// It is no cache of tokens but state, of which a request has one.
    State,
}

/// What an owner caches.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Shape {
    /// Keys and values of `kv_heads` heads of `head_dim` elements.
    Heads { kv_heads: u32, head_dim: u32 },
    /// One vector: the compressed latent with the rotary part of the key behind it.
    Latent { elements: u32 },
    /// Keys of a sparse-attention indexer, quantised, with scales.
    Indexer { head_dim: u32, tokens_per_cell: u32 },
    /// Keys of a sparse-attention indexer in the model's own type.
    PlainIndexer { head_dim: u32 },
    /// One vector whose rotary part stays 16 bits wide where the rest is quantised. Each stands for several tokens where
    /// `tokens_per_cell` is above 1.
    MixedLatent { role: Role, plain: u32, rotary: u32, tokens_per_cell: u32 },
    /// What a compressor has taken in of the tokens that it has not put out yet: 32-bit floats.
    CompressorState { role: Role, elements: u32 },
    /// State of a recurrent layer: the last columns of a convolution over `sections`, and a matrix a head.
    Recurrent { sections: Vec<Section>, columns: u32, heads: u32, head_elements: u32, dtype: Option<Dtype> },
}

/// Channels of a convolution that are split over ranks by themselves.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Section {
    /// Heads or groups.
    pub(crate) heads: u32,
    /// Channels of each.
    pub(crate) head_channels: u32,
}

/// One thing that some layers cache.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Cache {
    pub(crate) lifetime: Lifetime,
    /// MTP layers included.
    pub(crate) owners: LayerMask,
    pub(crate) shape: Shape,
}

/// Those facts of a model that decide the shape of its cache. Made by [`ModelFacts::from_config`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModelFacts {
    pub(crate) model_type: String,
    pub(crate) hidden_layers: u32,
    pub(crate) mtp_layers: u32,
    pub(crate) dtype: Dtype,
    pub(crate) caches: Vec<Cache>,
}

impl ModelFacts {
    /// The `model_type` of the config.
    pub fn model_type(&self) -> &str {
        &self.model_type
    }

    /// Hidden layers: ids `0..hidden_layers`, those that cache nothing included.
    pub fn hidden_layers(&self) -> u32 {
        self.hidden_layers
    }

    /// MTP layers: ids from `hidden_layers` on, those that cache nothing included.
    pub fn mtp_layers(&self) -> u32 {
        self.mtp_layers
    }

    /// Element type of the model's own numbers: `dtype` or `torch_dtype` of the config, bfloat16 where it has neither.
    pub fn dtype(&self) -> Dtype {
        self.dtype
    }

    /// Layers that own a cache of indexer keys, MTP layers included; `None` for a model without indexers.
    pub fn indexer_owners(&self) -> Option<&LayerMask> {
        let indexer = |cache: &&Cache| matches!(cache.shape, Shape::Indexer { .. } | Shape::PlainIndexer { .. });
        self.caches.iter().find(indexer).map(|cache| &cache.owners)
    }

    /// What the model stores: a group for each life cycle, first what is kept whole, then windows, then state. In a group,
    /// what is stored apart in every engine seen (indexer keys, block scales) has a pool of its own.
    ///
    /// # Errors
    ///
    /// [`LayoutError::CacheDtype`] for a type that no engine stores the model's rows as.
    pub fn groups(&self, options: &TableOptions) -> Result<Vec<GroupSpec>, LayoutError> {
        let mut lifetimes: Vec<Lifetime> = Vec::new();
        for cache in &self.caches {
            if !lifetimes.contains(&cache.lifetime) {
                lifetimes.push(cache.lifetime);
            }
        }
        let group = |lifetime: Lifetime| {
            let mut pools = Vec::new();
            for cache in self.caches.iter().filter(|cache| cache.lifetime == lifetime) {
                pools.extend(self.pools_of(cache, options)?);
            }
            let tokens_per_block = options.tokens_per_block;
            let (kind, slot_count) = match lifetime {
                Lifetime::Full => (GroupKind::paged(tokens_per_block), options.slot_count),
                Lifetime::Window(tokens) => (GroupKind::windowed(tokens_per_block, tokens), options.slot_count),
                Lifetime::State => (GroupKind::State, options.state_slot_count),
            };
            Ok(GroupSpec { kind, slot_count, pools })
        };
        lifetimes.into_iter().map(group).collect()
    }

    fn pools_of(&self, cache: &Cache, options: &TableOptions) -> Result<Vec<Vec<RowSpec>>, LayoutError> {
        let owners = || cache.owners.clone();
        let dtype = options.dtype;
        let one = |row: RowSpec| vec![vec![row]];
        let whole_bytes = |role: Role| {
            if dtype.bits() < 8 { Err(LayoutError::CacheDtype { role, dtype }) } else { Ok(()) }
        };
        Ok(match &cache.shape {
            &Shape::Heads { kv_heads, head_dim } => {
                let rows = |key, value, dtype, elements| -> Result<_, LayoutError> {
                    let row = |role| RowSpec::single(role, dtype, owners(), kv_heads, elements);
                    Ok(vec![row(key)?, row(value)?])
                };
                let mut pools = vec![rows(Role::Key, Role::Value, dtype, head_dim)?];
                if dtype == Dtype::Fp4E2m1 {
                    let scales = head_dim.div_ceil(NVFP4_QUANT_BLOCK);
                    pools.push(rows(Role::KeyScale, Role::ValueScale, Dtype::Fp8E4m3, scales)?);
                }
                pools
            }
            &Shape::Latent { elements } => {
                whole_bytes(Role::Latent)?;
                one(RowSpec::single(Role::Latent, dtype, owners(), 1, elements)?)
            }
            &Shape::Indexer { head_dim, tokens_per_cell } => {
                let dtype = options.indexer_dtype;
                if dtype.bits() > 8 {
                    return Err(LayoutError::CacheDtype { role: Role::IndexerKey, dtype });
                }
                let row = RowSpec::indexer(dtype, owners(), head_dim, INDEXER_QUANT_BLOCK)?;
                one(row.compressed(tokens_per_cell))
            }
            &Shape::PlainIndexer { head_dim } => {
                one(RowSpec::single(Role::IndexerKey, self.dtype, owners(), 1, head_dim)?)
            }
            Shape::MixedLatent { role, plain, rotary, tokens_per_cell } => {
                whole_bytes(role.clone())?;
                let row = mixed_latent(role.clone(), dtype, owners(), *plain, *rotary)?;
                one(row.compressed(*tokens_per_cell))
            }
            Shape::CompressorState { role, elements } => {
                one(RowSpec::single(role.clone(), Dtype::F32, owners(), 1, *elements)?)
            }
            Shape::Recurrent { sections, columns, heads, head_elements, dtype } => {
                let channel_bytes = cell_bytes(&Role::ConvState, self.dtype, 1)?;
                let section = |section: &Section| PlaneSpec {
                    // The config's reader bounds the product.
                    units_total: section.heads * section.head_channels,
                    units_together: section.head_channels,
                    columns: *columns,
                    ..PlaneSpec::of(1, channel_bytes)
                };
                let planes = sections.iter().map(section).collect();
                let ssm_dtype = dtype.or(options.ssm_dtype).unwrap_or(self.dtype);
                vec![vec![
                    RowSpec { role: Role::ConvState, dtype: self.dtype, owners: owners(), planes },
                    RowSpec::single(Role::SsmState, ssm_dtype, owners(), *heads, *head_elements)?,
                ]]
            }
        })
    }
}

/// A latent vector as DeepSeek-V4's engines store it. 16 bits wide or wider, it is one vector. 8 bits wide, the rotary part
/// stays 16 bits wide, and behind all vectors of a block there is for each a scale of 1 B for 64 elements and a byte of
/// padding: 448 + 2 * 64 + 8 B (`python/sglang/srt/mem_cache/deepseek_v4_memory_pool.py`, `get_bytes_per_token`,
/// sgl-project/sglang at commit 007bddd4a95b).
fn mixed_latent(role: Role, dtype: Dtype, owners: LayerMask, plain: u32, rotary: u32) -> Result<RowSpec, LayoutError> {
    // The config's reader bounds both.
    if dtype.bits() >= 16 {
        return RowSpec::single(role, dtype, owners, 1, plain + rotary);
    }
    let vector = cell_bytes(&role, dtype, plain)? + cell_bytes(&role, Dtype::Bf16, rotary)?;
    let scales = u64::from(plain.div_ceil(64) + 1);
    Ok(RowSpec { role, dtype, owners, planes: vec![PlaneSpec::of(1, vector), PlaneSpec::of(1, scales)] })
}
