//! What would move between two instances.
//!
//! # Safety
//!
//! The contract of the crate.
#![allow(unsafe_code, reason = "reads what C's pointers point to")]

use std::mem::MaybeUninit;

use kvferry_layout::PageTable;
use kvferry_match::{Assignment, Chunk, Matrix, assign};

use crate::bytes::{Bytes, handles};
use crate::engine::tokens;
use crate::status::{Status, give, guard, handle, out};
use crate::table::Table;

/// Who sends what to whom. Freed by kvf_plan_free.
pub struct Plan {
    assignments: Vec<Assignment>,
}

/// Works out who sends what to whom, of the tables of all ranks of a source instance and of a destination instance, in the order
/// of ranks. It needs no engine. What does not fit together is named, as kvf_engine_connect does.
///
/// # Safety
///
/// The contract of the crate.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_plan_make(
    sources: *const Option<&Table>,
    source_count: usize,
    destinations: *const Option<&Table>,
    destination_count: usize,
    plan: Option<&mut MaybeUninit<*mut Plan>>,
) -> Status {
    guard(|| {
        // SAFETY: an array of handles by the contract.
        let sources = tables(unsafe { handles(sources, source_count, "source table") }?);
        // SAFETY: an array of handles by the contract.
        let destinations = tables(unsafe { handles(destinations, destination_count, "destination table") }?);
        give(plan, Plan { assignments: assign((0..).zip(&sources), (0..).zip(&destinations))? })
    })
}

fn tables(tables: Vec<&Table>) -> Vec<PageTable> {
    tables.into_iter().map(|table| table.table.lock().clone()).collect()
}

/// What moves of the tokens `first_token` to `end_token - 1` of a request of `request_tokens` (0: that ends with them): as a table
/// in `text`, and drawn in `svg`; either may be NULL.
#[unsafe(no_mangle)]
pub extern "C" fn kvf_plan_explain(
    plan: Option<&Plan>,
    first_token: u64,
    end_token: u64,
    request_tokens: u64,
    text: Option<&mut MaybeUninit<Bytes>>,
    svg: Option<&mut MaybeUninit<Bytes>>,
) -> Status {
    guard(|| {
        let end = if request_tokens == 0 { end_token } else { request_tokens };
        let matrix = Matrix::new(&handle(plan, "plan")?.assignments, Chunk::new(tokens(first_token, end_token)?, end))?;
        if text.is_none() && svg.is_none() {
            out(text)?;
        } else {
            text.map(|place| place.write(Bytes::text(matrix.to_string())));
            svg.map(|place| place.write(Bytes::text(matrix.to_svg())));
        }
        Ok(())
    })
}

/// Frees a plan.
#[unsafe(no_mangle)]
pub extern "C" fn kvf_plan_free(plan: Option<Box<Plan>>) {
    drop(plan);
}
