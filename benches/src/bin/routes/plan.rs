//! Cells that another engine's benchmark has measured, measured here: it writes them into a file and reads JSON lines.

use std::path::Path;

use serde::Deserialize;
use serde_json::json;

use crate::Arguments;
use crate::ask::{Blocks, Error, Pool};
use crate::cell;
use crate::order::Order;
use crate::show;
use crate::ways::{By, Source, Way};

#[derive(Debug, Deserialize)]
struct Plan {
    tls: String,
    cells: Vec<Cell>,
}

#[derive(Debug, Deserialize)]
struct Cell {
    op: String,
    size: u64,
    count: u64,
    pool_blocks: u64,
    order: Order,
    seed: u64,
    warmup: usize,
    iters: usize,
}

/// The transports come in the environment, as they were set for the other engine. Cells that
/// read are left out: this library writes.
pub(crate) fn run(arguments: &Arguments, file: &Path) -> Result<(), Error> {
    let plan: Plan = serde_json::from_str(&std::fs::read_to_string(file)?)?;
    let pool = plan.cells.iter().map(|cell| cell.size * cell.pool_blocks).max().ok_or("a plan of no cells")?;
    let arguments = Arguments { pool, plan: None, ways: Vec::new(), sizes: Vec::new(), ..*arguments };
    let way = Way { name: "auto", transports: None, pool: Pool::Allocated, by: By::AUTO };
    let mut source = Source::open(&arguments)?;
    for cell in plan.cells.iter().filter(|cell| cell.op == "WRITE") {
        let Cell { size, count, pool_blocks, order, seed, warmup, iters, .. } = *cell;
        let blocks = Blocks { order, size, pool_blocks, count, seed };
        let measured = cell::measure(&arguments, &mut source, &[way], &blocks, warmup, iters)?;
        for measured in &measured {
            let mut line = show::line(&way, &blocks, measured);
            line["tls"] = json!(plan.tls);
            println!("{line}");
        }
    }
    show::show_latency(&arguments, &mut source, None, &plan.tls)
}
