//! Page tables.
//!
//! # Safety
//!
//! The contract of the crate.
#![allow(unsafe_code, reason = "reads what C's pointers point to")]

use std::ffi::c_char;
use std::mem::MaybeUninit;

use kvferry_layout::{Cut, Dtype, MemoryKind, ModelFacts, PageTable, Storage, build};
use parking_lot::Mutex;

use crate::bytes::{Bytes, given, text};
use crate::status::{Failure, Status, give, guard, handle, out};

/// One rank's description of its pools. Freed by kvf_table_free.
pub struct Table {
    pub(crate) table: Mutex<PageTable>,
}

/// What an instance chooses for itself. Zeroed, everything but the first three is at its default.
#[repr(C)]
pub struct TableOptions {
    /// Tokens of a block.
    pub tokens_per_block: u32,
    /// Slots of each pool of blocks.
    pub slot_count: u32,
    /// Element type: f32, f16, bf16, fp8_e4m3, fp8_e5m2, fp4_e2m1 or u8.
    pub dtype: *const c_char,
    /// Slots of each pool of state; 0: as many as of blocks.
    pub state_slot_count: u32,
    /// Whether the last stage holds the model's MTP layers too.
    pub mtp: bool,
    /// Whether the pools are in memory of a GPU.
    pub on_gpu: bool,
    /// Which GPU, as this process counts them.
    pub device: u32,
    /// Element type of indexer keys; NULL: fp8_e4m3.
    pub indexer_dtype: *const c_char,
    /// Element type of recurrent state where the model does not say it; NULL: the model's own.
    pub ssm_dtype: *const c_char,
    /// block_major (NULL), layer_together, layer_stacked or layer_split.
    pub pooling: *const c_char,
    /// hnd (NULL) or nhd.
    pub cells: *const c_char,
    /// hnd (NULL) or nhd.
    pub state_cells: *const c_char,
}

impl TableOptions {
    /// # Safety
    ///
    /// The texts are those of the contract.
    unsafe fn read(&self) -> Result<kvferry_layout::TableOptions, Failure> {
        // SAFETY: the caller's promise, passed on.
        let dtype: Dtype = unsafe { given(self.dtype, "dtype") }?.parse()?;
        // SAFETY: as above.
        let indexer_dtype = unsafe { text(self.indexer_dtype) }?.map(str::parse).transpose()?;
        // SAFETY: as above.
        let ssm_dtype = unsafe { text(self.ssm_dtype) }?.map(str::parse).transpose()?;
        // SAFETY: as above.
        let pooling = unsafe { text(self.pooling) }?.map(str::parse).transpose()?;
        // SAFETY: as above.
        let cells = unsafe { text(self.cells) }?.map(str::parse).transpose()?;
        // SAFETY: as above.
        let state_cells = unsafe { text(self.state_cells) }?.map(str::parse).transpose()?;
        let mut options = kvferry_layout::TableOptions::new(self.tokens_per_block, dtype, self.slot_count);
        options.mtp = self.mtp;
        options.ssm_dtype = ssm_dtype;
        options.indexer_dtype = indexer_dtype.unwrap_or(options.indexer_dtype);
        options.storage = Storage {
            pooling: pooling.unwrap_or_default(),
            cells: cells.unwrap_or_default(),
            state_cells: state_cells.unwrap_or_default(),
        };
        if self.state_slot_count > 0 {
            options.state_slot_count = self.state_slot_count;
        }
        Ok(options)
    }
}

fn new(table: PageTable) -> Table {
    Table { table: Mutex::new(table) }
}

/// The table of one rank of a model.
///
/// - `config`: the model's config.json, as text.
/// - `cut`: how the instance is cut: "tp8", "pp4tp2", "dp2", "cp2tp2".
///
/// # Safety
///
/// The contract of the crate.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_table_from_config(
    config: *const c_char,
    cut: *const c_char,
    rank: u32,
    options: Option<&TableOptions>,
    table: Option<&mut MaybeUninit<*mut Table>>,
) -> Status {
    guard(|| {
        // SAFETY: text by the contract.
        let config = unsafe { given(config, "config") }?;
        // SAFETY: text by the contract.
        let cut: Cut = unsafe { given(cut, "cut") }?.parse()?;
        let options = handle(options, "options")?;
        // SAFETY: texts by the contract.
        let read = unsafe { options.read() }?;
        let mut built = build(&ModelFacts::from_config(config)?, &cut, rank, &read)?;
        if options.on_gpu {
            built.pools.iter_mut().for_each(|pool| pool.memory = MemoryKind::Cuda { device: options.device });
        }
        give(table, new(built))
    })
}

/// Reads a table that somebody else laid out: the form that kvf_table_to_json writes.
///
/// # Safety
///
/// The contract of the crate.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_table_from_json(
    json: *const c_char,
    table: Option<&mut MaybeUninit<*mut Table>>,
) -> Status {
    guard(|| {
        // SAFETY: text by the contract.
        let json = unsafe { given(json, "json") }?;
        give(table, new(PageTable::from_json(json)?))
    })
}

/// The table as JSON.
#[unsafe(no_mangle)]
pub extern "C" fn kvf_table_to_json(table: Option<&Table>, json: Option<&mut MaybeUninit<Bytes>>) -> Status {
    guard(|| {
        let text = handle(table, "table")?.table.lock().to_json();
        out(json)?.write(Bytes::text(text));
        Ok(())
    })
}

/// Pools of the table. 0 for NULL.
#[unsafe(no_mangle)]
pub extern "C" fn kvf_table_pools(table: Option<&Table>) -> usize {
    table.map_or(0, |table| table.table.lock().pools.len())
}

/// Bytes that a pool takes, from its first slot to behind its last. 0 for a pool that there is not.
#[unsafe(no_mangle)]
pub extern "C" fn kvf_table_pool_bytes(table: Option<&Table>, pool: usize) -> u64 {
    let extent = |table: &Table| table.table.lock().pools.get(pool)?.extent_bytes();
    table.and_then(extent).unwrap_or(0)
}

/// Says where a pool's slot 0 is. kvf_engine_allocate does so itself; a pool that is nowhere yet is published where its region
/// begins.
#[unsafe(no_mangle)]
pub extern "C" fn kvf_table_place(table: Option<&Table>, pool: usize, base: u64) -> Status {
    guard(|| {
        let mut table = handle(table, "table")?.table.lock();
        let found = table.pools.get_mut(pool).ok_or_else(|| Failure::argument(format!("no pool {pool}")))?;
        found.base = base;
        Ok(())
    })
}

/// Frees a table.
#[unsafe(no_mangle)]
pub extern "C" fn kvf_table_free(table: Option<Box<Table>>) {
    drop(table);
}
