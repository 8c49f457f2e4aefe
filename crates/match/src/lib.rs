//! Which bytes move between two instances that are cut differently, proved to move exactly once.
//!
//! One mechanism does it: interval overlap, an axis at a time. Layers are matched by their ids, role by role; units (heads)
//! by their ranges; tokens by the ranges of the blocks that hold them, whatever their size and whichever ranks they are dealt
//! out to. There is no rank arithmetic and no pairing by
//! position.
//!
//! - [`assign`] finds for every cell that a destination rank holds the one source rank that sends it, and fails, naming
//!   what is missing or differs, if there is none. Both sides compute it and compare digests.
//! - [`Assignment::template`] is what one source rank copies to one destination rank for a pair of blocks: few strided
//!   pieces. It knows no request.
//!   [`Templates`] keeps one for all pairs of ranks of equal layout.
//! - [`Template::bind`] pairs the slots of one request by the ordinals of their blocks. The [`Plan`] is those pairs with
//!   the template; it is never a list of runs, unless somebody asks for them one by one.
//!
//! Nothing here does I/O, reads a clock or starts a thread. Page tables must have passed
//! [`PageTable::check`](kvferry_layout::PageTable::check); then no function of this crate panics.
//!
//! ```
//! use kvferry_layout::{Cut, Dtype, ModelFacts, PageTable, Slot, TableOptions, build};
//! use kvferry_match::{BlockMap, assign};
//!
//! let facts = ModelFacts::from_config(
//!     r#"{"model_type": "llama", "num_hidden_layers": 4, "num_key_value_heads": 4, "head_dim": 64}"#,
//! )?;
//! let options = TableOptions::new(16, Dtype::Bf16, 100);
//! let tables = |cut: &str| -> Result<Vec<PageTable>, Box<dyn std::error::Error>> {
//!     let cut: Cut = cut.parse()?;
//!     (0..cut.rank_count()).map(|rank| Ok(build(&facts, &cut, rank, &options)?)).collect()
//! };
//! let (prefill, decode) = (tables("pp2tp2")?, tables("tp4")?);
//!
//! // Rank 3 decodes head 3. Prefill ranks 1 and 3 have it, the one for layers 0 and 1, the other for 2 and 3.
//! let assignments = assign((0..).zip(&prefill), (0..).zip(&decode))?;
//! let assignment = &assignments[3];
//! assert!(assignment.sources().eq([1, 3]));
//!
//! // Rank 1 sends, of each block, keys and values of 2 layers: one piece of four runs.
//! let template = assignment.template(1)?;
//!
//! // Of this request two blocks are there already.
//! let source = [BlockMap::dense(0, [4, 8, 15, 16, 23].map(Slot))];
//! let destination = [BlockMap::dense(2, [42, 7, 99].map(Slot))];
//! let plan = template.bind(&source, &destination, 32..80)?;
//! assert_eq!((plan.pieces(), plan.runs(), plan.bytes()), (3, 3 * 4, 3 * 4 * 16 * 64 * 2));
//! assert_eq!(plan.bytes(), template.expected_bytes(&destination, 32..80)?);
//! print!("{}{}", assignment.explain(), plan.explain());
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
#![forbid(unsafe_code)]

mod assign;
mod balance;
mod bind;
mod block_map;
mod chunk;
mod classes;
mod compatible;
mod error;
mod geometry;
mod layers;
mod load;
mod matrix;
mod merge;
mod phase;
mod picture;
mod piece;
mod plan;
mod rivals;
mod rows;
mod shares;
mod slot_set;
mod template;
mod templates;
mod text;
mod transcript;
mod units;
mod whole;

pub use assign::{Assignment, assign};
pub use bind::{Amount, Expectation};
pub use block_map::BlockMap;
pub use chunk::Chunk;
pub use compatible::Mismatch;
pub use error::{BindError, MatchError, Side, TemplateError};
pub use layers::LayerList;
pub use matrix::{Flow, Matrix, MatrixError};
pub use phase::Phase;
pub use piece::{Dim, Piece};
pub use plan::{Plan, Run, SlotPair};
pub use template::{Section, Template};
pub use templates::Templates;
pub use whole::prove_whole;
