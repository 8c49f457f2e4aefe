//! What would move between two instances.

use kvferry_layout::PageTable;
use kvferry_match::{Assignment, Chunk, Matrix, assign};
use pyo3::prelude::*;

use crate::failure::Failure;
use crate::table::Table;

/// Who sends what to whom.
#[pyclass(frozen)]
pub(crate) struct Plan {
    assignments: Vec<Assignment>,
}

/// What that is for some tokens of a request.
#[pyclass(frozen)]
pub(crate) struct Explanation {
    matrix: Matrix,
}

/// Source, destination, layers, rows, bytes, pieces, runs.
type Flow = (u32, u32, Vec<u32>, u64, u64, u64, u64);

#[pymethods]
impl Plan {
    #[new]
    fn new(
        py: Python<'_>,
        sources: Vec<PyRef<'_, Table>>,
        destinations: Vec<PyRef<'_, Table>>,
    ) -> Result<Self, Failure> {
        let tables = |tables: Vec<PyRef<'_, Table>>| tables.iter().map(|table| table.table.clone()).collect::<Vec<_>>();
        let (sources, destinations): (Vec<PageTable>, Vec<PageTable>) = (tables(sources), tables(destinations));
        let assignments = py.detach(|| assign((0..).zip(&sources), (0..).zip(&destinations)))?;
        Ok(Self { assignments })
    }

    /// For each destination rank, the ranks that send to it.
    fn sources(&self) -> Vec<Vec<u32>> {
        self.assignments.iter().map(|assignment| assignment.sources().collect()).collect()
    }

    /// For each destination rank, the layers that only the destination instance has.
    fn one_sided(&self) -> Vec<Vec<u32>> {
        let layers = |assignment: &Assignment| assignment.one_sided().iter().map(|layer| layer.0).collect();
        self.assignments.iter().map(layers).collect()
    }

    /// Which source rank sends which layers and units of which role, a table for each destination rank.
    fn roles(&self) -> Vec<String> {
        self.assignments.iter().map(Assignment::explain).collect()
    }

    /// What moves of `tokens`, of a request of `request_tokens`.
    fn explain(&self, py: Python<'_>, tokens: (u64, u64), request_tokens: u64) -> Result<Explanation, Failure> {
        let chunk = Chunk::new(tokens.0..tokens.1, request_tokens);
        Ok(Explanation { matrix: py.detach(|| Matrix::new(&self.assignments, chunk))? })
    }
}

#[pymethods]
impl Explanation {
    fn text(&self) -> String {
        self.matrix.to_string()
    }

    fn svg(&self) -> String {
        self.matrix.to_svg()
    }

    /// What moves between each pair of ranks that talk.
    fn flows(&self) -> Vec<Flow> {
        let flows = self.matrix.flows().iter();
        let flow = |flow: &kvferry_match::Flow| {
            let layers = flow.layers.layers().iter().map(|layer| layer.0).collect();
            let amount = flow.amount;
            (flow.source_rank, flow.destination_rank, layers, flow.rows, amount.bytes, amount.pieces, amount.runs)
        };
        flows.map(flow).collect()
    }
}
