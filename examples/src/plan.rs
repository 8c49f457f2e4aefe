//! Who would send what to whom, without moving anything.

use std::ffi::OsString;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use kvferry_layout::{CellOrder, Cut, LayoutError, ModelFacts, PageTable, Pooling, Storage, TableOptions, build};
use kvferry_match::{Assignment, Chunk, MatchError, Matrix, MatrixError, assign};

use crate::failure::Failure;
use crate::models::{self, ModelError};
use crate::options::{Cells, Mtp, PlanOptions, Pools, parse};
use crate::voice::print;

/// Slots of every pool. How many there are decides nothing here.
const SLOT_COUNT: u32 = 1;

/// Why there is no plan.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PlanError {
    /// The model is not known or not usable.
    #[error("--model")]
    Model(#[from] ModelError),
    /// The cut does not fit the model.
    #[error("rank {rank} of {option} {cut}")]
    Table {
        /// The option that gives the cut.
        option: &'static str,
        /// The cut.
        cut: Cut,
        /// The rank.
        rank: u32,
        /// What is wrong.
        source: Box<LayoutError>,
    },
    /// The cut has no such data-parallel part.
    #[error("{option} {part}: {cut} has {parts} data-parallel parts")]
    Part {
        /// The option that gives the part.
        option: &'static str,
        /// The part.
        part: u32,
        /// The cut.
        cut: Cut,
        /// How many it has.
        parts: u32,
    },
    /// The instances cannot serve each other.
    #[error("{from} cannot be moved to {to}")]
    Match {
        /// Cut of the sending instance.
        from: Cut,
        /// Cut of the receiving instance.
        to: Cut,
        /// Why.
        source: Box<MatchError>,
    },
    /// What moves cannot be described.
    #[error("no plan")]
    Matrix(#[from] MatrixError),
    /// The picture cannot be written.
    #[error("--svg {}", path.display())]
    Svg {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
}

/// Runs the program.
///
/// # Errors
///
/// [`Failure`] with the line and exit code to end with.
pub fn main(args: impl IntoIterator<Item = OsString>) -> Result<(), Failure> {
    let Some(options) = parse::<PlanOptions>(args)? else {
        return Ok(());
    };
    run(&options).map_err(|error| match error {
        PlanError::Svg { .. } => Failure::failed(error),
        error => Failure::usage(error),
    })
}

fn run(options: &PlanOptions) -> Result<(), PlanError> {
    let assignments = assignments(options)?;
    let chunk = Chunk::from(options.held_tokens.min(options.tokens)..options.tokens);
    let matrix = Matrix::new(&assignments, chunk)?;
    if options.roles {
        for assignment in &assignments {
            print(&assignment.explain());
        }
    }
    print(matrix.to_string().trim_end());
    for assignment in assignments.iter().filter(|assignment| !assignment.one_sided().is_empty()) {
        let layers: Vec<String> = assignment.one_sided().iter().map(ToString::to_string).collect();
        let (rank, layers) = (assignment.destination_rank(), layers.join(", "));
        print(&format!("receiver rank {rank}: nobody sends layers {layers}, which only the receiving instance has"));
    }
    match &options.svg {
        Some(path) => draw(&matrix, path),
        None => Ok(()),
    }
}

/// Who sends what for a request of the sending instance's part `--part-from`, to the ranks of part `--part-to`.
///
/// # Errors
///
/// [`PlanError`] names the option, or what keeps the instances from being matched.
pub fn assignments(options: &PlanOptions) -> Result<Vec<Assignment>, PlanError> {
    let facts = models::load(&options.model)?;
    let table_options = |tokens_per_block, pools: Pools, cells: Cells, mtp| TableOptions {
        mtp,
        storage: storage(pools, cells),
        ..TableOptions::new(tokens_per_block, options.dtype, SLOT_COUNT)
    };
    let (from, to) = (
        table_options(
            options.block_tokens_from,
            options.pools_from,
            options.cells_from,
            matches!(options.mtp, Mtp::From | Mtp::Both),
        ),
        table_options(
            options.block_tokens_to,
            options.pools_to,
            options.cells_to,
            matches!(options.mtp, Mtp::To | Mtp::Both),
        ),
    );
    let sources = part("--from", "--part-from", &facts, &options.from, options.part_from, &from)?;
    let destinations = part("--to", "--part-to", &facts, &options.to, options.part_to, &to)?;
    assign(members(&sources), members(&destinations)).map_err(|source| PlanError::Match {
        from: options.from.clone(),
        to: options.to.clone(),
        source: Box::new(source),
    })
}

/// The ranks of one data-parallel part, and their tables.
fn part(
    option: &'static str,
    part_option: &'static str,
    facts: &ModelFacts,
    cut: &Cut,
    part: u32,
    options: &TableOptions,
) -> Result<Vec<(u32, PageTable)>, PlanError> {
    if part >= cut.dp_size() {
        return Err(PlanError::Part { option: part_option, part, cut: cut.clone(), parts: cut.dp_size() });
    }
    let table = |rank| match build(facts, cut, rank, options) {
        Ok(table) => Ok((rank, table)),
        Err(source) => Err(PlanError::Table { option, cut: cut.clone(), rank, source: Box::new(source) }),
    };
    cut.ranks_of(part).map(table).collect()
}

fn members(tables: &[(u32, PageTable)]) -> impl Iterator<Item = (u32, &PageTable)> {
    tables.iter().map(|(rank, table)| (*rank, table))
}

fn storage(pools: Pools, cells: Cells) -> Storage {
    Storage {
        pooling: match pools {
            Pools::BlockMajor => Pooling::BlockMajor,
            Pools::LayerTogether => Pooling::LayerTogether,
            Pools::LayerStacked => Pooling::LayerStacked,
            Pools::LayerSplit => Pooling::LayerSplit,
        },
        cells: match cells {
            Cells::Hnd => CellOrder::Hnd,
            Cells::Nhd => CellOrder::Nhd,
        },
        ..Storage::default()
    }
}

fn draw(matrix: &Matrix, path: &Path) -> Result<(), PlanError> {
    fs::write(path, matrix.to_svg()).map_err(|source| PlanError::Svg { path: path.to_owned(), source })
}
