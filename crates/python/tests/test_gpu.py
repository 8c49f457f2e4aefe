"""Memory of a GPU, over a driver that is none: its GPU memory is the host's. See ``crates/fake-cuda`` and ``ci/python``."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

DRIVER = os.environ.get("KVFERRY_FAKE_CUDA_DIR")
"""A folder with its ``libcuda.so.1``."""

SCRIPT = """
import ctypes, sys, time
import numpy
sys.path.insert(0, sys.argv[1])
import kvferry
from kvferry.nixl import nixl_agent, nixl_agent_config, _bindings as bindings
from pairs import PATIENCE, connect, table

driver = ctypes.CDLL("libcuda.so.1")
context = ctypes.c_size_t()
assert driver.cuInit(0) == 0 and driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0
driver.cuCtxSetCurrent.argtypes = [ctypes.c_size_t]
assert driver.cuCtxSetCurrent(context) == 0


class OnGpu:
    "An array of a library that describes memory of a GPU as torch and cupy do."

    def __init__(self, shape, dtype, **more):
        address, dtype = ctypes.c_uint64(), numpy.dtype(dtype)
        self.nbytes = int(numpy.prod(shape)) * dtype.itemsize
        assert driver.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(self.nbytes)) == 0
        self.address = address.value
        self.__cuda_array_interface__ = {
            "shape": shape, "typestr": dtype.str, "data": (address.value, False), "version": 3, "strides": None, **more
        }

    def host(self):
        return numpy.frombuffer((ctypes.c_uint8 * self.nbytes).from_address(self.address), numpy.uint8)


# Engines: pools in arrays of the GPU, and in memory that the engine allocates there.
ranks, arrays = [], []
for instance, tokens_per_block in (("prefill", 16), ("decode", 32)):
    engine = kvferry.Engine(instance=instance, patience=PATIENCE, gpu=0)
    own = table(tokens_per_block, device=0)
    if instance == "prefill":
        array = OnGpu((own.pool_bytes[0] // 2,), "f2")
        regions = [engine.register(array)]
        assert (regions[0].base, regions[0].nbytes, regions[0].on_gpu) == (array.address, array.nbytes, True)
    else:
        own, regions = engine.allocate(own)
        array = regions[0]
        described = array.__cuda_array_interface__
        assert described["data"] == (array.base, False) and described["shape"] == (array.nbytes,)
        assert not hasattr(array, "__array_interface__")
    engine.publish(own, regions)
    ranks.append((engine, regions))
    arrays.append(array)
source, destination = connect(*ranks)
source.regions[0].write(0, numpy.random.default_rng(1).integers(0, 256, arrays[0].nbytes, numpy.uint8).tobytes())
receive = destination.engine.receive(destination.link, 1, [[3, 0]], 64)
send = source.engine.send(source.link, 1, [[9, 2, 5, 11]], 64)
assert receive.wait(PATIENCE)[0].nbytes == send.wait(PATIENCE)[0].nbytes > 0
shape = (-1, 4, 2, 2)
sent = numpy.frombuffer(source.regions[0].read(0, arrays[0].nbytes), numpy.uint8).reshape(*shape, 16, 128)[[9, 2, 5, 11]]
got = numpy.frombuffer(destination.regions[0].read(0, arrays[1].nbytes), numpy.uint8).reshape(*shape, 32, 128)[[3, 0]]
numpy.testing.assert_array_equal(*(numpy.moveaxis(blocks, 4, 1).reshape(64, 4, 2, 2, 128) for blocks in (got, sent)))

for wrong, error in (
    (OnGpu((4, 4), "f4", strides=(32, 4)), "gaps"),
    ((arrays[0].address, 64, 1), "CUDA device 1"),
    (OnGpu((4,), "f4", data=(arrays[0].address, True)), "read-only"),
):
    try:
        source.engine.register(wrong)
    except ValueError as caught:
        assert error in str(caught), caught
    else:
        raise AssertionError(error)
try:
    source.engine.register((numpy.zeros(64, numpy.uint8).ctypes.data, 64, 0))
except kvferry.RegionError as caught:
    assert caught.kind in ("Cuda", "NotOfDevice"), caught
else:
    raise AssertionError("memory of the host as the GPU's")
plain = kvferry.Engine()
try:
    plain.register(arrays[0])
except ValueError as caught:
    assert "the engine has none" in str(caught)
else:
    raise AssertionError("a GPU that the engine has not")
for engine in (source.engine, destination.engine, plain):
    engine.close()

# Agents: addresses on a GPU, and on the host.
here, there = nixl_agent("here"), nixl_agent("there")
mine, theirs, on_host = OnGpu((1 << 16,), "u1"), OnGpu((1 << 16,), "u1"), numpy.zeros(1 << 16, numpy.uint8)
here.register_memory([(mine.address, mine.nbytes, 0, "")], "VRAM")
descs = there.register_memory([(theirs.address, theirs.nbytes, 0, "")], "cuda")
there.register_memory([(on_host.ctypes.data, on_host.nbytes, 0, "")], "DRAM")
try:
    here.register_memory([(mine.address, 64, 1, "")], "VRAM")
except bindings.nixlNotSupportedError as caught:
    assert "GPU 1" in str(caught)
else:
    raise AssertionError("memory of another GPU")
here.add_remote_agent(there.get_agent_metadata())
mine.host()[:] = numpy.arange(1 << 16).astype(numpy.uint8)
order = numpy.random.default_rng(2).permutation(64)
def rows(base):
    return numpy.column_stack([base + numpy.arange(64) * 1024, numpy.full(64, 1024), numpy.zeros(64, int)]).astype(numpy.uint64)
local = here.prep_xfer_dlist("", rows(mine.address), "VRAM")
for base, kind, memory in ((theirs.address, "VRAM", theirs.host()), (on_host.ctypes.data, "DRAM", on_host)):
    remote = here.prep_xfer_dlist("there", rows(base), kind)
    handle = here.make_prepped_xfer("WRITE", local, order, remote, order[::-1])
    here.transfer(handle)
    assert here.wait_xfer(handle, PATIENCE) == "DONE"
    moved = memory.reshape(64, 1024)[order[::-1]]
    numpy.testing.assert_array_equal(moved, mine.host().reshape(64, 1024)[order])
there.deregister_memory(descs)
print("moved")
"""


@pytest.mark.skipif(DRIVER is None, reason="KVFERRY_FAKE_CUDA_DIR names no driver")
def test_arrays_and_addresses_of_a_gpu() -> None:
    command = [sys.executable, "-c", SCRIPT, os.path.dirname(__file__)]
    environment = {**os.environ, "LD_LIBRARY_PATH": f"{DRIVER}:{os.environ.get('LD_LIBRARY_PATH', '')}"}
    said = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert (said.returncode, said.stdout) == (0, "moved\n"), said.stderr
