//! Page tables: where every (layer, role, unit, token) of a paged KV cache lives.
//!
//! A [`PageTable`] is one rank's description of its memory: pools of equal slots, and for each `(layer, role)` that the
//! rank holds the row of bytes in a slot. It is plain data: print it, compare it, send it. Every table is checked by the
//! same [`PageTable::check`], whether [`build`] made it, a framework wrote it down, or a peer sent it.
//!
//! ```
//! use kvferry_layout::{Cut, Dtype, Layer, ModelFacts, PageTable, Role, TableOptions, build};
//!
//! // Keys of the model's own config.json. Layers 0, 1 and 3 own an indexer, layer 2 uses the choice of layer 1.
//! let config = r#"{
//!     "model_type": "glm_moe_dsa", "num_hidden_layers": 4, "kv_lora_rank": 512, "qk_rope_head_dim": 64,
//!     "index_head_dim": 128, "indexer_types": ["full", "full", "shared", "full"]
//! }"#;
//! let facts = ModelFacts::from_config(config)?;
//! let options = TableOptions::new(64, Dtype::Fp8E4m3, 1000);
//!
//! // The second of two pipeline stages has layers 2 and 3, and one indexer row.
//! let cut: Cut = "pp2".parse()?;
//! let table = build(&facts, &cut, 1, &options)?;
//! let (_, row) = table.row(Layer(3), &Role::IndexerKey)?;
//! assert_eq!((row.offset, row.bytes), (0, 64 * (128 + 4)));
//! assert_eq!(table.row(Layer(2), &Role::IndexerKey).unwrap_err().to_string(), "no indexer key row for layer 2");
//!
//! // The other side gets the same table from a hundred bytes or so, checked.
//! let bytes = table.to_bytes();
//! assert_eq!(PageTable::from_bytes(&bytes)?, table);
//! # assert!(bytes.len() < 120);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! The crate does no I/O, reads no clock and starts no thread.
#![forbid(unsafe_code)]

mod architectures;
mod build;
mod check;
mod codec;
mod config;
mod cut;
mod digest;
mod error;
mod facts;
mod families;
mod indexer_mask;
mod json;
mod layer_kinds;
mod mask;
mod names;
mod spec;
mod stages;
mod storage;
mod strides;
mod table;
mod wire;

pub use build::{TableOptions, build};
pub use check::{
    Extent, GROUPS_MAX, INTERLEAVED_PLANES_MAX, LAYERS_MAX, PLANES_MAX, POOLS_MAX, ROLE_NAME_BYTES_MAX, ROWS_MAX,
};
pub use codec::{DecodeError, TABLE_BYTES_MAX};
pub use config::ConfigError;
pub use cut::{Coordinates, Cut, CutError, RANKS_MAX};
pub use digest::Digest;
pub use error::{Counted, LayoutError, RowName};
pub use facts::ModelFacts;
pub use mask::LayerMask;
pub use names::NameError;
pub use spec::{GroupSpec, PlaneSpec, RankSpec, RowSpec, unit_share};
pub use storage::{CellOrder, Pooling, Storage, block_major, lay_out};
pub use table::{
    Dtype, GroupId, GroupKind, Layer, LayerGroup, MemoryKind, Ordinals, PageTable, Plane, Pool, PoolId, Role, Row, Slot,
};
