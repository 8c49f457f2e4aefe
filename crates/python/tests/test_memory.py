"""What arrays say of their memory."""

from __future__ import annotations

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
    for nothing in (7, [1, 2], None):
        with pytest.raises(TypeError):
            memory_of(nothing)


def test_the_memory_is_kept() -> None:
    buffer = bytearray(100)
    memory = memory_of(buffer)
    with pytest.raises(BufferError):
        buffer.extend(b"more")
    del memory
    buffer.extend(b"more")
