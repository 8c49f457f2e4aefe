"""What arrays say of their memory."""

from __future__ import annotations

import ctypes
import mmap
from typing import Any

import numpy
import pytest

from kvferry._memory import memory_of


class OnlyDlpack:
    """An array of a library that has nothing but DLPack."""

    def __init__(self, array: Any) -> None:
        self.array = array

    def __dlpack__(self, **options: Any) -> Any:
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self.array.__dlpack_device__()


class OnGpu:
    """As torch and cupy describe memory of a GPU."""

    def __init__(self, **interface: Any) -> None:
        self.__cuda_array_interface__ = {"shape": (4, 8), "typestr": "<f4", "data": (4096, False), "version": 3, **interface}


@pytest.mark.parametrize("wrap", [lambda array: array, OnlyDlpack])
def test_arrays_of_the_host(wrap: Any) -> None:
    array = numpy.zeros((3, 5, 7), numpy.float32)
    whole = memory_of(wrap(array))
    assert whole[:3] == (array.ctypes.data, array.nbytes, None)
    # In any order of axes, and a part that has no gaps.
    assert memory_of(wrap(array.transpose(2, 0, 1)))[:3] == whole[:3]
    assert memory_of(wrap(array[1]))[:3] == (array[1].ctypes.data, array[1].nbytes, None)
    for gaps in (array[:, 1], array[::2], array[..., :3], array[::-1]):
        with pytest.raises(ValueError, match="gaps"):
            memory_of(wrap(gaps))


def test_buffers_and_addresses() -> None:
    assert memory_of(bytearray(100)).nbytes == 100
    assert memory_of(mmap.mmap(-1, 8192)).nbytes == 8192
    assert memory_of((4096, 100, None))[:3] == (4096, 100, None)
    assert memory_of((4096, 100, 1))[:3] == (4096, 100, 1)


def test_arrays_of_a_gpu() -> None:
    assert memory_of(OnGpu(), 2)[:3] == (4096, 4 * 8 * 4, 2)
    assert memory_of(OnGpu(strides=(32, 4)))[:3] == (4096, 4 * 8 * 4, 0)
    with pytest.raises(ValueError, match="gaps"):
        memory_of(OnGpu(strides=(64, 4)))


class DLTensor(ctypes.Structure):
    """As ``dlpack.h`` has it."""

    _fields_ = [
        ("data", ctypes.c_void_p), ("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32), ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16), ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p), ("byte_offset", ctypes.c_uint64), ("manager", ctypes.c_void_p), ("deleter", ctypes.c_void_p),
    ]  # fmt: skip


class Dlpack:
    """An array of a library that has nothing but DLPack, on a device of its own."""

    def __init__(self, device_type: int, shape: list[int], strides: list[int] | None, bits: int = 16, offset: int = 0) -> None:
        axes = ctypes.c_int64 * len(shape)
        self.kept = axes(*shape), None if strides is None else axes(*strides)
        where = [0 if kept is None else ctypes.addressof(kept) for kept in self.kept]
        self.tensor = DLTensor(1 << 20, device_type, 3, len(shape), 2, bits, 1, *where, offset, 0, 0)
        self.asked: dict[str, Any] = {}

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.tensor.device_type, 3

    def __dlpack__(self, **options: Any) -> Any:
        self.asked = options
        new = ctypes.pythonapi.PyCapsule_New
        new.restype, new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
        return new(ctypes.addressof(self.tensor), b"dltensor", None)


def test_dlpack_of_any_device() -> None:
    on_gpu = Dlpack(2, [4, 8], None, offset=64)
    assert memory_of(on_gpu)[:3] == ((1 << 20) + 64, 64, 3) and on_gpu.asked == {"stream": -1}
    assert memory_of(Dlpack(13, [4, 8], [8, 1]))[:3] == (1 << 20, 64, 3)
    # Memory of the host, locked for a device, and elements that fill no byte by themselves.
    locked = Dlpack(3, [4, 8], [1, 4], bits=8)
    assert memory_of(locked)[:3] == (1 << 20, 32, None) and locked.asked == {}
    with pytest.raises(ValueError, match="gaps"):
        memory_of(Dlpack(2, [4, 8], [16, 1]))
    with pytest.raises(TypeError, match="device type 10"):
        memory_of(Dlpack(10, [4], None))
    frozen = numpy.zeros(4)
    frozen.flags.writeable = False
    with pytest.raises(ValueError):
        memory_of(OnlyDlpack(frozen))


class Tensor:
    """As much of torch's as is asked for."""

    class device:
        type, index = "cuda", 1

    shape = (4, 8)

    def __init__(self, *stride: int) -> None:
        self.stride = lambda: stride

    def data_ptr(self) -> int:
        return 4096

    def element_size(self) -> int:
        return 2


def test_tensors() -> None:
    assert memory_of(Tensor(8, 1))[:3] == memory_of(Tensor(1, 4))[:3] == (4096, 4 * 8 * 2, 1)
    with pytest.raises(ValueError, match="gaps"):
        memory_of(Tensor(16, 1))


def test_what_cannot_be_registered_is_refused() -> None:
    frozen = numpy.zeros(4)
    frozen.flags.writeable = False
    for read_only in (frozen, b"bytes", memoryview(b"bytes")):
        with pytest.raises(ValueError, match="read-only"):
            memory_of(read_only)
    for nothing in (7, [1, 2], None, "text", (1, 2), (4096, 1.5, None), ("4096", 1, None), (4096, 1, 0.5)):
        with pytest.raises(TypeError):
            memory_of(nothing)
    for nowhere in ((0, 8, None), (-4096, 8, None), (4096, -8, None), (1 << 64, 8, None), (4096, 1 << 64, 0)):
        with pytest.raises(ValueError):
            memory_of(nowhere)
    with pytest.raises(TypeError):
        memory_of(OnGpu(data=None))


def test_the_memory_is_kept() -> None:
    buffer = bytearray(100)
    memory = memory_of(buffer)
    with pytest.raises(BufferError):
        buffer.extend(b"more")
    del memory
    buffer.extend(b"more")
