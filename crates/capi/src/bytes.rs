//! Text, bytes and arrays from C and to it.
//!
//! # Safety
//!
//! Lengths and terminators are as the contract of the crate has them.
#![allow(unsafe_code, reason = "reads what C's pointers point to")]

use std::ffi::{CStr, c_char};
use std::ptr;

use crate::status::Failure;

/// Bytes of the library's. Freed by kvf_bytes_free.
#[repr(C)]
pub struct Bytes {
    /// The bytes, with a NUL behind the last.
    pub data: *mut u8,
    /// How many, the NUL left out.
    pub length: usize,
}

/// Bytes of the caller's.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct Slice {
    /// The first.
    pub data: *const u8,
    /// How many.
    pub length: usize,
}

impl Bytes {
    pub(crate) fn new(mut bytes: Vec<u8>) -> Self {
        let length = bytes.len();
        bytes.push(0);
        Self { data: Box::into_raw(bytes.into_boxed_slice()).cast(), length }
    }

    pub(crate) fn text(text: impl Into<String>) -> Self {
        Self::new(text.into().into_bytes())
    }
}

/// Frees what a function has written to a kvf_bytes.
#[unsafe(no_mangle)]
pub extern "C" fn kvf_bytes_free(bytes: Bytes) {
    if !bytes.data.is_null() {
        let whole = ptr::slice_from_raw_parts_mut(bytes.data, bytes.length.saturating_add(1));
        // SAFETY: `Bytes::new` made it of a boxed slice with one byte more than the length, and by the contract it is freed once.
        drop(unsafe { Box::from_raw(whole) });
    }
}

/// Text; `None` for NULL.
///
/// # Safety
///
/// NULL, or a string that ends in a NUL and lasts for `'a`.
pub(crate) unsafe fn text<'a>(text: *const c_char) -> Result<Option<&'a str>, Failure> {
    if text.is_null() {
        return Ok(None);
    }
    // SAFETY: the caller's promise.
    let text = unsafe { CStr::from_ptr(text) };
    text.to_str().map(Some).map_err(|_| Failure::argument(format!("{text:?} is no UTF-8")))
}

/// Text that there has to be.
///
/// # Safety
///
/// As [`text`].
pub(crate) unsafe fn given<'a>(pointer: *const c_char, what: &str) -> Result<&'a str, Failure> {
    // SAFETY: the caller's promise, passed on.
    let text = unsafe { text(pointer) }?;
    text.ok_or_else(|| Failure::argument(format!("no {what}: NULL")))
}

/// An array.
///
/// # Safety
///
/// `length` of `T` at `data` that last for `'a` and are not written meanwhile; `data` may be anything if `length` is 0.
pub(crate) unsafe fn array<'a, T>(data: *const T, length: usize) -> Result<&'a [T], Failure> {
    if length == 0 {
        return Ok(&[]);
    }
    if data.is_null() {
        return Err(Failure::argument(format!("an array of {length} that is NULL")));
    }
    if isize::try_from(length).ok().and_then(|length| length.checked_mul(size_of::<T>().cast_signed())).is_none() {
        // A negative number, as a rule, and no length of anything.
        return Err(Failure::argument(format!("an array of {length}: that is more than there is memory")));
    }
    // SAFETY: the caller's promise.
    Ok(unsafe { std::slice::from_raw_parts(data, length) })
}

/// Bytes of the caller's.
///
/// # Safety
///
/// As [`array`].
pub(crate) unsafe fn slice<'a>(bytes: Slice) -> Result<&'a [u8], Failure> {
    // SAFETY: the caller's promise, passed on.
    unsafe { array(bytes.data, bytes.length) }
}

/// An array of handles, none of them NULL.
///
/// # Safety
///
/// As [`array`], with handles by the contract in it.
pub(crate) unsafe fn handles<'a, T>(
    data: *const Option<&'a T>,
    length: usize,
    what: &str,
) -> Result<Vec<&'a T>, Failure> {
    // SAFETY: the caller's promise, passed on; a reference is C's pointer, and `None` is NULL.
    let handles = unsafe { array(data, length) }?;
    handles.iter().map(|handle| crate::status::handle(*handle, what)).collect()
}
