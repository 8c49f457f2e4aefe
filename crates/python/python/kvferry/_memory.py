"""What an array says of its memory, whatever library it is of."""

from __future__ import annotations

import ctypes
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy

KDL_CPU, KDL_CUDA, KDL_CUDA_HOST, KDL_CUDA_MANAGED = 1, 2, 3, 13
"""Device types of DLPack (``DLDeviceType`` of its ``dlpack.h``)."""


class Memory(NamedTuple):
    """A range of memory, and what keeps it."""

    base: int
    """First address."""
    nbytes: int
    """Length."""
    device: int | None
    """CUDA device; ``None`` for memory of the host."""
    owner: object
    """Keeps the memory alive."""


def memory_of(array: object, device: int | None = None) -> Memory:
    """The memory of ``array``, which may be

    - a triple ``(address, bytes, device)``, with ``None`` for the host; whoever hands it over keeps the memory,
    - a tensor of torch's, of any type,
    - anything with ``__array_interface__`` (numpy), ``__cuda_array_interface__`` (cupy) or ``__dlpack__`` (jax),
    - anything with a writable buffer (``bytearray``, ``mmap``).

    ``device`` is the CUDA device of an array that does not say it: ``__cuda_array_interface__`` does not.

    Raises ``TypeError`` for something else, and ``ValueError`` for an array that cannot be written or has gaps.
    """
    if isinstance(array, tuple):
        if len(array) != 3:
            raise TypeError(f"memory by its address is a triple (address, bytes, device), not a tuple of {len(array)}")
        address, length = operator.index(array[0]), operator.index(array[1])
        if not 0 < address < 1 << 64 or not 0 <= length < 1 << 64:
            raise ValueError(f"{length} B at {address:#x} are no memory")
        return Memory(address, length, None if array[2] is None else operator.index(array[2]), array)
    if hasattr(array, "data_ptr") and hasattr(array, "element_size"):
        return _of_torch(array)
    interface = getattr(array, "__array_interface__", None)
    if interface is not None:
        return _of_interface(interface, None, array)
    interface = getattr(array, "__cuda_array_interface__", None)
    if interface is not None:
        return _of_interface(interface, _device_of(array, device), array)
    if hasattr(array, "__dlpack__"):
        return _of_dlpack(array)
    try:
        view = numpy.frombuffer(array, numpy.uint8)  # type: ignore[call-overload]
    except (TypeError, ValueError, BufferError) as error:
        raise TypeError(f"{type(array).__name__} has no array interface and no contiguous buffer") from error
    return _of_interface(view.__array_interface__, None, view)


def _of_torch(tensor: Any) -> Memory:
    """By its own methods: its interfaces refuse some types (8-bit floats) and tensors that want gradients."""
    if tensor.device.type not in ("cpu", "cuda"):
        raise TypeError(f"a tensor on {tensor.device} is neither in memory of the host nor of a CUDA device")
    item = tensor.element_size()
    strides = [stride * item for stride in tensor.stride()]
    return Memory(tensor.data_ptr(), _dense_bytes(tensor.shape, strides, item), tensor.device.index, tensor)


def _of_interface(interface: dict[str, Any], device: int | None, owner: object) -> Memory:
    if not isinstance(interface.get("data"), tuple):
        raise TypeError(f"{type(owner).__name__} does not say where its memory is")
    base, read_only = interface["data"]
    if read_only:
        raise ValueError("the array is read-only: memory is registered for reading and writing")
    item = numpy.dtype(interface["typestr"]).itemsize
    return Memory(int(base), _dense_bytes(interface["shape"], interface.get("strides"), item), device, owner)


def _dense_bytes(shape: Sequence[int], strides: Sequence[int] | None, item: int) -> int:
    """Bytes of an array whose elements lie side by side, in whatever order of axes. ``strides`` in bytes."""
    total = item
    for length in shape:
        total *= int(length)
    if strides is not None and total > 0:
        expected = item
        for stride, length in sorted((int(stride), int(length)) for stride, length in zip(strides, shape) if length > 1):
            if stride != expected:
                raise ValueError(f"the array has gaps (shape {tuple(shape)}, strides {tuple(strides)}): register what it is of")
            expected *= length
    return total


def _device_of(array: object, device: int | None) -> int:
    number = getattr(getattr(array, "device", None), "id", None)  # cupy's way to say it
    if isinstance(number, int):
        return number
    return 0 if device is None else device


class _DLTensor(ctypes.Structure):
    """``DLTensor`` of ``dlpack.h``, the same in its versions 0.2 to 1.x."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


def _of_dlpack(array: Any) -> Memory:
    device_type, _ = array.__dlpack_device__()
    # -1: without waiting for work on any stream. When the bytes are there is for whoever sends them to know.
    try:
        capsule = array.__dlpack__(stream=-1) if device_type in (KDL_CUDA, KDL_CUDA_MANAGED) else array.__dlpack__()
    except BufferError as error:
        # Read-only memory, as a rule: DLPack as old as everybody speaks it has no word for it.
        raise ValueError(f"the memory of the {type(array).__name__} cannot be had: {error}") from error
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    # A capsule that nobody takes over frees the tensor's handle when it goes itself.
    tensor = _DLTensor.from_address(pointer(capsule, b"dltensor"))
    if tensor.device_type in (KDL_CPU, KDL_CUDA_HOST):
        device = None
    elif tensor.device_type in (KDL_CUDA, KDL_CUDA_MANAGED):
        device = int(tensor.device_id)
    else:
        raise TypeError(f"memory of DLPack's device type {tensor.device_type} is neither the host's nor a CUDA device's")
    item = (tensor.bits * tensor.lanes + 7) // 8
    shape = tensor.shape[: tensor.ndim]
    strides = [stride * item for stride in tensor.strides[: tensor.ndim]] if tensor.strides else None
    base = (tensor.data or 0) + tensor.byte_offset
    return Memory(base, _dense_bytes(shape, strides, item), device, (array, capsule))
