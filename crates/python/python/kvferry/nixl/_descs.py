"""Descriptor lists from what connectors hand over."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from typing import Any, Optional, TypeVar, Union

import numpy as np
import numpy.typing as npt

from . import _bindings as nixlBind

logger = logging.getLogger("kvferry.nixl")

Descs = Any
"""A descriptor list, tuples, an array ``[N, 3]`` of integers, or tensors."""

L = TypeVar("L", nixlBind.nixlXferDList, nixlBind.nixlRegDList)


class Refused(ValueError):
    """Something that is no list of descriptors. Callers of NIXL's interface get ``None``, and find this in the log."""


def xfer_descs(descs: Descs, mem_type: Optional[nixlBind.nixl_mem_t]) -> Optional[nixlBind.nixlXferDList]:
    try:
        return _list(nixlBind.nixlXferDList, descs, mem_type)
    except Refused as refused:
        logger.error("%s", refused)
        return None


def reg_descs(descs: Descs, mem_type: Optional[nixlBind.nixl_mem_t]) -> Optional[nixlBind.nixlRegDList]:
    try:
        listed = _list(nixlBind.nixlRegDList, descs, mem_type)
    except Refused as refused:
        logger.error("%s", refused)
        return None
    if listed is not descs and (_is_tensor(descs) or (len(descs) and _is_tensor(descs[0]))):
        listed.owner = descs if _is_tensor(descs) else tuple(descs)  # the list is the caller's, who may empty it
    return listed


def _list(kind: type[L], descs: Descs, mem_type: Optional[nixlBind.nixl_mem_t]) -> L:
    width = 4 if kind is nixlBind.nixlRegDList else 3
    if isinstance(descs, kind):
        return descs
    if isinstance(descs, (nixlBind.nixlXferDList, nixlBind.nixlRegDList)):
        raise Refused(f"{type(descs).__name__} in place of a {kind.__name__}")
    if _is_tensor(descs):
        return _of_tensors(kind, [descs])
    if isinstance(descs, np.ndarray):
        if mem_type is None:
            raise Refused("descriptors in an array say nothing of their memory: mem_type does")
        if descs.ndim != 2 or descs.shape[1] != 3:
            raise Refused(f"an array of descriptors is [N, 3], not {list(descs.shape)}")
        return kind(mem_type, descs)
    if not isinstance(descs, Sequence):
        raise Refused(f"{type(descs).__name__} is no list of descriptors")
    if len(descs) == 0:
        if mem_type is None:
            raise Refused("no descriptors")
        return kind(mem_type)
    if _is_tensor(descs[0]):
        return _of_tensors(kind, descs)
    if isinstance(descs[0], tuple):
        if mem_type is None:
            raise Refused("descriptors in tuples say nothing of their memory: mem_type does")
        if len(descs[0]) != width:
            raise Refused(f"a {kind.__name__} is made of tuples of {width}, not {len(descs[0])}")
        return kind(mem_type, descs)
    raise Refused(f"{type(descs[0]).__name__} is no descriptor")


def _of_tensors(kind: type[L], tensors: Sequence[Any]) -> L:
    device = tensors[0].device
    rows: npt.NDArray[np.uint64] = np.empty((len(tensors), 3), np.uint64)
    for row, tensor in zip(rows, tensors):
        if tensor.device != device:
            raise Refused(f"tensors of {device} and of {tensor.device} in one list")
        if not tensor.is_contiguous():
            raise Refused(f"a tensor of shape {list(tensor.shape)} has gaps: use contiguous ones")
        row[:] = (tensor.data_ptr(), tensor.numel() * tensor.element_size(), max(tensor.get_device(), 0))
    on_gpu = tensors[0].get_device() != -1
    return kind(nixlBind.VRAM_SEG if on_gpu else nixlBind.DRAM_SEG, rows)


def _is_tensor(value: Union[object, Any]) -> bool:
    """Whether it is a tensor of torch, which nobody has if torch was not imported."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)
