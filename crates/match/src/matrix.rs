//! What moves between two whole instances, for people.

use std::collections::BTreeMap;
use std::fmt;

use crate::assign::Assignment;
use crate::bind::Amount;
use crate::chunk::Chunk;
use crate::error::{BindError, TemplateError};
use crate::layers::LayerList;
use crate::templates::Templates;
use crate::text;

/// What each source rank sends to each destination rank for a request. Printed as a table; drawn by [`Self::to_svg`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Matrix {
    pub(crate) flows: Vec<Flow>,
    pub(crate) chunk: Chunk,
    /// Ascending; of the source those that send something.
    pub(crate) sources: Vec<u32>,
    pub(crate) destinations: Vec<u32>,
}

/// What one source rank sends to one destination rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Flow {
    /// Rank that sends.
    pub source_rank: u32,
    /// Rank that receives.
    pub destination_rank: u32,
    /// Layers of which it sends at least a part of a row.
    pub layers: LayerList,
    /// Rows (layer, role) of which it sends at least a part.
    pub rows: u64,
    /// How much it sends.
    pub amount: Amount,
}

/// Why there is no matrix of some assignments.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum MatrixError {
    /// There is no template for a pair of ranks. Change the block sizes.
    #[error("no template for source rank {source_rank} and destination rank {destination_rank}")]
    Template {
        /// Rank that would send.
        source_rank: u32,
        /// Rank that would receive.
        destination_rank: u32,
        /// Why.
        source: TemplateError,
    },
    /// The chunk is none. Correct it.
    #[error("no such chunk of a request")]
    Chunk(#[source] BindError),
}

impl Matrix {
    /// What moves with `chunk` according to `assignments`, which are of different destination ranks.
    ///
    /// # Errors
    ///
    /// [`MatrixError`], if some pair has no template or the chunk is none.
    pub fn new(assignments: &[Assignment], chunk: impl Into<Chunk>) -> Result<Self, MatrixError> {
        let chunk = chunk.into();
        let mut templates = Templates::default();
        let mut flows = Vec::new();
        for assignment in assignments {
            let destination_rank = assignment.destination_rank();
            for source_rank in assignment.sources() {
                let template = templates.template(assignment, source_rank);
                let template =
                    template.map_err(|source| MatrixError::Template { source_rank, destination_rank, source })?;
                let amount = template.amount(chunk.clone()).map_err(MatrixError::Chunk)?;
                let (layers, rows) = (assignment.layers(source_rank), assignment.rows(source_rank));
                flows.push(Flow { source_rank, destination_rank, layers, rows, amount });
            }
        }
        flows.sort_by_key(|flow| (flow.source_rank, flow.destination_rank));
        let mut sources: Vec<u32> = flows.iter().map(|flow| flow.source_rank).collect();
        sources.dedup();
        let mut destinations: Vec<u32> = assignments.iter().map(Assignment::destination_rank).collect();
        destinations.sort_unstable();
        Ok(Self { flows, chunk, sources, destinations })
    }

    /// The pairs of ranks that talk to each other, ascending by source, then destination.
    pub fn flows(&self) -> &[Flow] {
        &self.flows
    }

    /// How much moves in all. Saturates.
    pub fn total(&self) -> Amount {
        sum(&self.flows)
    }

    /// How much each source rank sends.
    pub fn sent(&self) -> BTreeMap<u32, Amount> {
        self.by(|flow| flow.source_rank)
    }

    /// How much each destination rank gets that gets anything.
    pub fn received(&self) -> BTreeMap<u32, Amount> {
        self.by(|flow| flow.destination_rank)
    }

    fn by(&self, rank: impl Fn(&Flow) -> u32) -> BTreeMap<u32, Amount> {
        let mut amounts = BTreeMap::<u32, Amount>::new();
        for flow in &self.flows {
            let amount = amounts.entry(rank(flow)).or_default();
            *amount = add(*amount, flow.amount);
        }
        amounts
    }
}

fn sum<'a>(flows: impl IntoIterator<Item = &'a Flow>) -> Amount {
    flows.into_iter().fold(Amount::default(), |sum, flow| add(sum, flow.amount))
}

fn add(a: Amount, b: Amount) -> Amount {
    Amount {
        bytes: a.bytes.saturating_add(b.bytes),
        pieces: a.pieces.saturating_add(b.pieces),
        runs: a.runs.saturating_add(b.runs),
    }
}

impl fmt::Display for Matrix {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let line = |ranks: String, layers: String, rows: String, amount: Amount| {
            [ranks, layers, rows, amount.pieces.to_string(), amount.runs.to_string(), amount.bytes.to_string()]
        };
        let flow = |flow: &Flow| {
            let ranks = format!("{} -> {}", flow.source_rank, flow.destination_rank);
            line(ranks, flow.layers.to_string(), flow.rows.to_string(), flow.amount)
        };
        let total = line("all".to_owned(), String::new(), String::new(), self.total());
        let lines = self.flows.iter().map(flow).chain([total]);
        f.write_str(&text::table(["ranks", "layers", "rows", "pieces", "runs", "bytes"], lines))
    }
}
