"""``kvferry.nixl`` as the connectors of serving frameworks use it: each test is one framework's way through the interface."""

from __future__ import annotations

import ctypes
import gc
import sys
import time
import types
import uuid
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from kvferry.nixl import _bindings as bindings
from kvferry.nixl import nixl_agent, nixl_agent_config, nixl_thread_sync_t, nixl_xfer_handle
from kvferry.nixl import _utils as utils
from kvferry.nixl.logging import get_logger

PATIENCE = 20.0
LAYERS, BLOCKS, BLOCK = 3, 16, 2048

Bytes = npt.NDArray[np.uint8]


def until(what: Callable[[], Any]) -> Any:
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        found = what()
        if found:
            return found
    raise TimeoutError


def layers(value: int) -> list[Bytes]:
    """The cache of a worker: one array a layer."""
    return [np.full((BLOCKS, BLOCK), value, np.uint8) for _ in range(LAYERS)]


def block_rows(cache: list[Bytes], device: int = 0) -> list[tuple[int, int, int]]:
    """All blocks of all layers, layer by layer."""
    return [(layer.ctypes.data + block * BLOCK, BLOCK, device) for layer in cache for block in range(BLOCKS)]


def test_a_decode_worker_pulls_blocks_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    """One agent a worker, lists of all blocks prepared once, reads by index, the request's name as the notification."""
    config = nixl_agent_config(num_threads=4, capture_telemetry=True)
    prefill, decode = nixl_agent(str(uuid.uuid4()), config), nixl_agent(str(uuid.uuid4()), config)
    sent, received = layers(0), layers(0)
    for number, layer in enumerate(sent):
        layer[:] = np.arange(BLOCKS, dtype=np.uint8)[:, None] + 16 * number + 1
    for agent, cache in ((prefill, sent), (decode, received)):
        descs = agent.get_reg_descs([(layer.ctypes.data, layer.nbytes, 0, "") for layer in cache], "DRAM")
        agent.register_memory(descs, backends=["UCX"])
    # The handshake, on a thread of its own in a framework.
    name = decode.add_remote_agent(prefill.get_agent_metadata())
    source_handle = decode.prep_xfer_dlist("NIXL_INIT_AGENT", decode.get_xfer_descs(block_rows(received), "DRAM"))
    remote_handle = decode.prep_xfer_dlist(name, decode.get_xfer_descs(block_rows(sent, 3), "DRAM"))
    names = {name: remote_handle}

    transfers: dict[str, list[nixl_xfer_handle]] = {}
    wanted = {"req-0": ([1, 5, 9], [4, 2, 0]), "req-1": ([0], [15])}
    for request, (theirs, mine) in wanted.items():
        regions = np.arange(LAYERS)[:, None] * BLOCKS
        remote_ids, local_ids = (regions + np.asarray(theirs)[None, :]).flatten(), (regions + np.asarray(mine)[None, :]).flatten()
        handle = decode.make_prepped_xfer(
            "READ", source_handle, local_ids, remote_handle, remote_ids, notif_msg=f"{request}:1".encode()
        )
        decode.transfer(handle)
        transfers.setdefault(request, []).append(handle)
    # A request that is complete at the decoder already only tells the prefill worker to free its blocks.
    decode.send_notif(name, notif_msg=b"req-2:1")

    def pop_done() -> set[str]:
        done = set()
        for request, handles in list(transfers.items()):
            active = []
            for handle in handles:
                state = decode.check_xfer_state(handle)
                if state == "DONE":
                    told = decode.get_xfer_telemetry(handle)
                    assert told.xferDuration / 1e6 < PATIENCE and told.postDuration >= 0
                    assert told.totalBytes == LAYERS * len(wanted[request][0]) * BLOCK and told.descCount > 0
                    decode.release_xfer_handle(handle)
                else:
                    assert state == "PROC"
                    active.append(handle)
            transfers[request] = active
            if not active:
                done.add(request)
                del transfers[request]
        return done

    finished: set[str] = set()

    def ended() -> bool:
        finished.update(pop_done())
        return finished == set(wanted)

    until(ended)
    for request, (theirs, mine) in wanted.items():
        for number in range(LAYERS):
            assert np.array_equal(received[number][mine], sent[number][theirs]), request

    freed: set[str] = set()

    def hear() -> bool:
        for notifs in prefill.get_new_notifs().values():
            freed.update(notif.decode("utf-8").rsplit(":", 1)[0] for notif in notifs)
        return freed == {"req-0", "req-1", "req-2"}

    until(hear)
    # The engine goes: lists first, then its agent, which may have been removed before.
    for known, blocks in names.items():
        decode.release_dlist_handle(blocks)
        decode.remove_remote_agent(known)
        decode.remove_remote_agent(known)
    decode.release_dlist_handle(source_handle)
    with pytest.raises(bindings.nixlNotFoundError):
        decode.prep_xfer_dlist(name, decode.get_xfer_descs(block_rows(sent), "DRAM"))


def test_a_prefill_worker_pushes_chunks_with_notifications() -> None:
    """A backend that is created by hand, lists that are used once, pages in arrays of addresses, polling of many handles."""
    prefill = nixl_agent("prefill", nixl_agent_config(backends=[], num_threads=2, sync_mode=nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT))
    decode = nixl_agent("decode", nixl_agent_config(backends=[]))
    for agent in (prefill, decode):
        agent.create_backend("UCX", {"num_threads": "2"})
        assert "UCX" in agent.get_plugin_list() and agent.get_plugin_params("UCX")
    sent, received = layers(7), layers(0)
    auxiliary, there = np.arange(64, dtype=np.uint8), np.zeros(64, np.uint8)
    for agent, cache, aux in ((prefill, sent, auxiliary), (decode, received, there)):
        descs = agent.register_memory([(layer.ctypes.data, layer.nbytes, 0, "") for layer in cache], "DRAM")
        assert descs, "a list of descriptors is true"
        assert agent.register_memory([(aux.ctypes.data, aux.nbytes, 0, "")], "DRAM")
    prefill.add_remote_agent(decode.get_agent_metadata())

    def pages(cache: list[Bytes], indices: npt.NDArray[np.int32]) -> npt.NDArray[np.uint64]:
        base = np.array([layer.ctypes.data for layer in cache], np.uint64)
        addresses = (base[:, None] + indices.astype(np.uint64)[None, :] * np.uint64(BLOCK)).flatten()
        return np.column_stack((addresses, np.full_like(addresses, BLOCK), np.zeros_like(addresses)))

    mine, theirs = np.array([3, 1, 2, 9], np.int32), np.array([0, 4, 5, 6], np.int32)
    handles = []
    for chunk in range(2):
        part = slice(2 * chunk, 2 * chunk + 2)
        source = prefill.get_xfer_descs(pages(sent, mine[part]), "DRAM")
        target = prefill.get_xfer_descs(pages(received, theirs[part]), "DRAM")
        handle = prefill.initialize_xfer("WRITE", source, target, "decode", f"12_kv_{chunk}_{int(chunk == 1)}".encode("ascii"))
        assert handle, "a handle is true"
        assert prefill.transfer(handle) != "ERR"
        handles.append(handle)
    source = prefill.get_xfer_descs([(auxiliary.ctypes.data, 64, 0)], "DRAM")
    target = prefill.get_xfer_descs([(there.ctypes.data, 64, 0)], "DRAM")
    handles.append(prefill.initialize_xfer("WRITE", source, target, "decode", b"12_aux"))
    assert prefill.transfer(handles[-1]) != "ERR"
    until(lambda: all(prefill.check_xfer_state(handle) == "DONE" for handle in handles))
    told: list[str] = []

    def hear() -> bool:
        for peer, messages in decode.get_new_notifs().items():
            assert peer == "prefill"
            told.extend(message.decode("ascii") for message in messages)
        return len(told) == 3

    until(hear)
    assert sorted(told) == ["12_aux", "12_kv_0_0", "12_kv_1_1"]
    assert all((layer[theirs] == 7).all() for layer in received) and np.array_equal(auxiliary, there)
    with pytest.raises(KeyError):
        prefill.register_memory([(there.ctypes.data, 64, 0, "")], "DRAM", backends=["LIBFABRIC"])
    # A peer that is gone is one of the errors that frameworks take for that, here or when it is posted to.
    decode.close()
    gone = (bindings.nixlRemoteDisconnectError, bindings.nixlBackendError, bindings.nixlCancelledError)

    def fails() -> bool:
        try:
            prefill.transfer(handles[0])
            until(lambda: prefill.check_xfer_state(handles[0]) == "DONE")
        except gone:
            return True
        return False

    assert until(fails)
    for handle in handles:
        prefill.release_xfer_handle(handle)


class Buffer:
    """Registers memory while it lives, whoever else has registered it."""

    def __init__(self, agent: nixl_agent, array: Bytes) -> None:
        self.agent, self.array = agent, array
        self.handle = agent.register_memory([(array.ctypes.data, array.nbytes, 0, "cpu")], "cpu")

    def __del__(self) -> None:
        self.agent.deregister_memory(self.handle)

    def rows(self) -> list[tuple[int, int, int]]:
        return [(self.array.ctypes.data, self.array.nbytes, 0)]


def test_operations_that_register_add_and_remove_as_they_come_and_go() -> None:
    """Every operation registers its memory, adds the remote agent, and takes both back at its end."""
    active, passive = nixl_agent(uuid.uuid4().hex), nixl_agent(uuid.uuid4().hex)
    array, there = np.zeros(4096, np.uint8), np.zeros(4096, np.uint8)
    for turn in range(8):
        array[:] = turn + 1
        offered = Buffer(passive, there)
        key = str(uuid.uuid4())
        metadata = passive.get_agent_metadata()

        mine = Buffer(active, array)
        name = active.add_remote_agent(metadata).decode("utf-8")
        handle = active.initialize_xfer(
            operation="WRITE",
            local_descs=active.get_xfer_descs(descs=mine.rows(), mem_type="cpu"),
            remote_descs=active.get_xfer_descs(descs=offered.rows(), mem_type="cpu"),
            remote_agent=name,
            notif_msg=key.encode("utf-8"),
        )
        state = active.transfer(handle, key.encode("utf-8"))
        while state not in ("DONE", "ERR"):
            state = active.check_xfer_state(handle)
        assert state == "DONE"

        def told() -> bool:
            notifications = passive.update_notifs()
            assert isinstance(notifications, dict)
            return any(value.decode("utf-8") == key for values in notifications.values() for value in values)

        until(told)
        assert (there == turn + 1).all()
        active.release_xfer_handle(handle)
        active.remove_remote_agent(name)
        active.remove_remote_agent(name)
        del mine, offered
        gc.collect()
    active.close()
    passive.close()


def test_memory_that_is_registered_several_times_stays_until_each_was_undone() -> None:
    active, passive = nixl_agent("active"), nixl_agent("passive")
    array, there = np.ones(4096, np.uint8), np.zeros(4096, np.uint8)
    kept = Buffer(passive, there)
    active.add_remote_agent(passive.get_agent_metadata())
    first = Buffer(active, array)
    descs = active.get_xfer_descs(first.rows(), "DRAM"), active.get_xfer_descs(kept.rows(), "DRAM")
    second = Buffer(active, array)
    handle = active.initialize_xfer("WRITE", *descs, "passive")
    # It was made of the second registration. The first goes by its own list.
    del first
    gc.collect()
    active.transfer(handle)
    until(lambda: active.check_xfer_state(handle) == "DONE")
    # By another list of the same memory the latest goes, once; and then there is none.
    again = active.register_memory([(array.ctypes.data, array.nbytes, 0, "")], "DRAM")
    assert again is not second.handle
    same = active.get_reg_descs([(array.ctypes.data, array.nbytes, 0, "")], "DRAM")
    active.deregister_memory(same)
    active.initialize_xfer("WRITE", *descs, "passive")
    del second
    gc.collect()
    with pytest.raises(bindings.nixlNotFoundError):
        active.initialize_xfer("WRITE", *descs, "passive")
    for nothing in (again, same):
        with pytest.raises(bindings.nixlNotFoundError):
            active.deregister_memory(nothing)


class Tensor:
    """As much of torch's on the host as is asked for."""

    device = "cpu"

    def __init__(self, array: Bytes) -> None:
        self.array = array

    def is_contiguous(self) -> bool:
        return True

    def data_ptr(self) -> int:
        return self.array.ctypes.data

    def numel(self) -> int:
        return self.array.size

    def element_size(self) -> int:
        return 1

    def get_device(self) -> int:
        return -1


def test_tensors_are_kept_though_their_list_is_emptied(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = types.ModuleType("torch")
    monkeypatch.setattr(torch, "Tensor", Tensor, raising=False)
    cuda = types.SimpleNamespace(is_initialized=lambda: False)
    monkeypatch.setattr(torch, "cuda", cuda, raising=False)
    monkeypatch.setitem(sys.modules, "torch", torch)
    agent = nixl_agent(str(uuid.uuid4()))
    tensors = [Tensor(layer) for layer in layers(0)]
    kept = [weakref.ref(tensor) for tensor in tensors]
    descs = agent.register_memory(tensors)
    tensors.clear()
    gc.collect()
    assert all(tensor() is not None for tensor in kept)
    agent.deregister_memory(descs)
    del descs
    gc.collect()
    assert all(tensor() is None for tensor in kept)
    agent.close()


def test_a_list_that_names_the_same_memory_twice() -> None:
    agent = nixl_agent("twice")
    array = np.zeros(4096, np.uint8)
    twice = agent.register_memory([(array.ctypes.data, 4096, 0, "")] * 2, "DRAM")
    same = agent.get_reg_descs([(array.ctypes.data, 4096, 0, "")] * 2, "DRAM")
    agent.deregister_memory(same)
    with pytest.raises(bindings.nixlNotFoundError):
        agent.deregister_memory(twice)


def test_an_agent_behind_a_wrapper_of_its_own() -> None:
    """Descriptors are made anew for each call, also to deregister; the message to the peer is text, or none."""
    ends = [nixl_agent(name, nixl_agent_config(enable_prog_thread=True, backends=["UCX"], num_threads=1)) for name in "ab"]
    memory = [np.full(1024, 5 * index, np.uint8) for index in range(2)]

    def reg(index: int) -> Any:
        return ends[index].get_reg_descs([(memory[index].ctypes.data, 1024, 0, "")], "DRAM")

    for index in range(2):
        ends[index].register_memory(reg(index))
    ends[0].add_remote_agent(ends[1].get_agent_metadata())
    for message, heard in (("", {}), ("sync", {"a": [b"sync"]})):
        source = ends[0].get_xfer_descs([(memory[0].ctypes.data, 512, 0)], "DRAM")
        target = ends[0].get_xfer_descs([(memory[1].ctypes.data + 512, 512, 0)], "DRAM")
        handle: nixl_xfer_handle = ends[0].initialize_xfer("READ", source, target, "b", message)
        assert ends[0].transfer(handle) != "ERROR"
        until(lambda: ends[0].check_xfer_state(handle) == "DONE")
        assert (memory[0][:512] == 5).all()
        found: dict[str, list[bytes]] = {}

        def hear() -> bool:
            found.update(ends[1].get_new_notifs())
            return found == heard

        until(hear)
    for index in range(2):
        ends[index].deregister_memory(reg(index))


def test_what_examples_for_nixl_take_from_elsewhere() -> None:
    assert get_logger("program").name == "kvferry.nixl.program"
    first, second = utils.malloc_passthru(256), utils.malloc_passthru(256)
    utils.ba_buf(first, 256)
    utils.ba_buf(second, 256)
    utils.verify_transfer(first, second, 256)
    agent = nixl_agent("agent")
    descs = agent.register_memory([(first, 256, 0, ""), (second, 256, 0, "")], "DRAM")
    handle = agent.initialize_xfer("WRITE", descs.trim(), descs.trim(), "agent", "UUID")
    agent.transfer(handle)
    until(lambda: agent.check_xfer_state(handle) == "DONE")
    agent.deregister_memory(descs)
    ctypes.memset(second, 0, 256)
    with pytest.raises(ValueError, match="differ"):
        utils.verify_transfer(first, second, 256)
    utils.free_passthru(first)
    utils.free_passthru(second)
    with pytest.raises(ValueError):
        utils.malloc_passthru(-1)

