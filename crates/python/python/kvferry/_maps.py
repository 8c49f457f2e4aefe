"""Block maps: where the blocks of one request are."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import numpy
from numpy.typing import NDArray


class BlockMap:
    """The slots of a request's blocks in one group of a page table.

    It is positional: ``slots[i]`` is the slot of block ``first + i`` of the sequence. ``None`` or -1 is a hole: a block that is
    not there. Where blocks are dealt out to context-parallel ranks, those of the other ranks are entries too. A group of state
    has one entry.
    """

    def __init__(self, slots: Slots, first: int = 0) -> None:
        self.first = first
        self.slots = _array(slots)

    def __repr__(self) -> str:
        return f"BlockMap({self.slots.tolist()}, first={self.first})"


Slots: TypeAlias = "Iterable[int | None] | NDArray[numpy.integer[Any]]"
"""Slots in the order of blocks: a list, with ``None`` for holes, or an array of integers, with -1."""
BlockMaps: TypeAlias = "Sequence[BlockMap | Slots]"
"""One a group of the page table, in its order."""


def _array(slots: Slots) -> NDArray[numpy.int64]:
    if isinstance(slots, numpy.ndarray):
        if slots.ndim != 1 or slots.dtype.kind not in "iu":
            raise TypeError(f"slots are a list of integers, not an array of {slots.ndim} dimensions and {slots.dtype}")
        if slots.dtype == numpy.uint64 and slots.size and slots.max() > numpy.iinfo(numpy.int64).max:
            raise ValueError(f"slot {slots.max()}: slots count from 0 to 2^32 - 1")
        return slots.astype(numpy.int64)
    # `index` refuses what numpy would round.
    return numpy.fromiter((-1 if slot is None else operator.index(slot) for slot in slots), numpy.int64)


def native_maps(block_maps: BlockMaps) -> list[tuple[int, bytes]]:
    """Block maps as the library takes them."""
    maps = (entry if isinstance(entry, BlockMap) else BlockMap(_entries(entry)) for entry in block_maps)
    return [(entry.first, entry.slots.astype("<i8").tobytes()) for entry in maps]


def _entries(entry: object) -> Any:
    if isinstance(entry, (int, numpy.integer)):
        raise TypeError("block_maps has one list of slots for each group of the page table: [[3, 0]], not [3, 0]")
    return entry


def token_bounds(tokens: int | tuple[int, int]) -> tuple[int, int]:
    """Tokens as they are given: how many, or which."""
    if not isinstance(tokens, tuple):
        return 0, operator.index(tokens)
    if len(tokens) != 2:
        raise TypeError(f"tokens are a number, or a pair (first, end), not a tuple of {len(tokens)}")
    first, end = operator.index(tokens[0]), operator.index(tokens[1])
    if first > end:
        raise ValueError(f"tokens {first} to {end}: the end is before the first")
    return first, end
