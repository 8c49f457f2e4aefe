"""Two agents in two processes: what a killed peer leaves, and that released memory is quiet."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any, Optional

import numpy as np
import pytest

from kvferry.nixl import _bindings as bindings
from kvferry.nixl import nixl_agent, nixl_agent_config, nixl_xfer_handle

PIECE, PIECES = 4096, 4096
PATIENCE = 20.0


def target(connection: Connection, transports: Optional[str]) -> None:
    """Lends memory, and looks at it when asked to."""
    agent = nixl_agent("target", nixl_agent_config(transports=transports))
    memory = np.zeros(PIECE * PIECES, np.uint8)
    agent.register_memory([(memory.ctypes.data, memory.nbytes, 0, "")], "DRAM")
    connection.send((agent.get_agent_metadata(), memory.ctypes.data))
    while True:
        ask = connection.recv()
        if ask == "heard":
            connection.send(agent.get_new_notifs())
        elif ask == "sum":
            connection.send(int(memory.sum(dtype=np.int64)))
        else:
            memory[:] = ask
            connection.send(None)


class Pair:
    def __init__(self, transports: Optional[str]) -> None:
        spawn = multiprocessing.get_context("spawn")
        self.connection, other = spawn.Pipe()
        self.process = spawn.Process(target=target, args=(other, transports), daemon=True)
        self.process.start()
        self.agent = nixl_agent("initiator", nixl_agent_config(transports=transports, release_timeout=PATIENCE))
        self.memory = np.zeros(PIECE * PIECES, np.uint8)
        self.base = self.memory.ctypes.data
        self.agent.register_memory([(self.base, self.memory.nbytes, 0, "")], "DRAM")
        self.metadata, self.there = self.connection.recv()
        self.agent.add_remote_agent(self.metadata)
        self.local, self.remote = self.listed("", self.base), self.listed("target", self.there)
        self.order = np.random.default_rng(1).permutation(PIECES).astype(np.int32)

    def listed(self, name: str, base: int) -> Any:
        rows = np.zeros((PIECES, 3), np.uint64)
        rows[:, 0] = base + np.arange(PIECES) * PIECE
        rows[:, 1] = PIECE
        return self.agent.prep_xfer_dlist(name, rows, "DRAM")

    def make(self, operation: str) -> nixl_xfer_handle:
        return self.agent.make_prepped_xfer(operation, self.local, self.order, self.remote, self.order[::-1], b"all")

    def ask(self, what: Any) -> Any:
        self.connection.send(what)
        assert self.connection.poll(PATIENCE)
        return self.connection.recv()


@pytest.fixture(params=[None, "tcp"], ids=["default", "tcp"])
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    pair = Pair(request.param)
    yield pair
    pair.process.kill()
    pair.agent.close()


def ended(agent: nixl_agent, handle: nixl_xfer_handle) -> str:
    state, end = agent.transfer(handle), time.monotonic() + PATIENCE
    while state == "PROC" and time.monotonic() < end:
        state = agent.check_xfer_state(handle)
    return state


def test_all_of_it_is_there_when_the_notification_is(pair: Pair) -> None:
    pair.memory[:] = 3
    handle = pair.make("WRITE")
    assert ended(pair.agent, handle) == "DONE"
    end = time.monotonic() + PATIENCE
    while not (heard := pair.ask("heard")) and time.monotonic() < end:
        pass
    assert heard == {"initiator": [b"all"]} and pair.ask("sum") == 3 * PIECE * PIECES
    pair.ask(5)
    read = pair.make("READ")
    assert ended(pair.agent, read) == "DONE"
    assert (pair.memory == 5).all()


def test_released_memory_is_quiet(pair: Pair) -> None:
    """Arrays are used again right after transfers in their middle have been released, for writing and for reading."""
    for value in range(1, 31):
        pair.memory[:] = value
        handle = pair.make("WRITE")
        pair.agent.transfer(handle)
        pair.agent.release_xfer_handle(handle)
        pair.memory[:] = 200  # nothing that is sent now
        pair.ask(0)
        assert pair.ask("sum") == 0
        pair.ask(100)
        read = pair.make("READ")
        pair.agent.transfer(read)
        time.sleep(0.0002 * (value % 7))
        pair.agent.release_xfer_handle(read)
        pair.memory[:] = 7
        time.sleep(0.002)
        assert (pair.memory == 7).all(), value
        pair.ask(0)
    assert ended(pair.agent, pair.make("WRITE")) == "DONE" and pair.ask("sum") == 7 * PIECE * PIECES


@pytest.mark.parametrize("pair", ["tcp"], indirect=True)
def test_a_deregistration_of_which_a_part_is_busy_is_done_by_another_call(pair: Pair) -> None:
    agent, memory, other = pair.agent, np.zeros_like(pair.memory), np.zeros(4096, np.uint8)
    first, second = ((array.ctypes.data, array.nbytes, 0, "") for array in (memory, other))
    both = agent.register_memory([first, second], "DRAM")
    pair.local = pair.listed("", memory.ctypes.data)
    agent.make_connection("target")
    assert pair.process.pid is not None
    os.kill(pair.process.pid, signal.SIGSTOP)
    handle = pair.make("READ")
    agent.transfer(handle)
    agent._config.release_timeout = 0.2
    for _ in range(2):
        with pytest.raises(bindings.nixlRepostActiveError):
            agent.deregister_memory(both)
        assert agent.query_memory([second], "UCX", "DRAM") == [None]
    os.kill(pair.process.pid, signal.SIGCONT)
    agent._config.release_timeout = PATIENCE
    agent.deregister_memory(both)
    end = time.monotonic() + PATIENCE
    while (state := agent.check_xfer_state(handle)) == "PROC":  # the memory is free first
        assert time.monotonic() < end
    assert state == "DONE"
    with pytest.raises(bindings.nixlNotFoundError):
        agent.deregister_memory(agent.get_reg_descs([second], "DRAM"))


@pytest.mark.parametrize("operation", ["WRITE", "READ"])
def test_a_killed_peer_is_an_error_and_what_was_posted_to_it_is_released(pair: Pair, operation: str) -> None:
    handles = [pair.make(operation) for _ in range(20)]
    for handle in handles:
        pair.agent.transfer(handle)
    pair.process.kill()
    start, failed = time.monotonic(), 0
    for handle in handles:
        try:
            while pair.agent.check_xfer_state(handle) == "PROC":
                assert time.monotonic() - start < PATIENCE
        except bindings.nixlRemoteDisconnectError:
            failed += 1
        pair.agent.release_xfer_handle(handle)
    assert failed > 0
    with pytest.raises(bindings.nixlRemoteDisconnectError):
        pair.agent.transfer(pair.make(operation))


def test_an_interrupt_ends_a_wait_and_a_release() -> None:
    """Of a transfer with a peer that is frozen."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    pair = Pair("tcp")
    try:
        read = pair.make("READ")
        os.kill(pair.process.pid or 0, signal.SIGSTOP)
        began = time.monotonic()
        assert pair.agent.transfer(read) == "PROC"
        for wait in (lambda: pair.agent.wait_xfer(read, PATIENCE), lambda: pair.agent.release_xfer_handle(read)):
            threading.Timer(0.3, os.kill, [os.getpid(), signal.SIGINT]).start()
            with pytest.raises(KeyboardInterrupt):
                wait()
        assert time.monotonic() - began < PATIENCE
        os.kill(pair.process.pid or 0, signal.SIGCONT)
        pair.agent.release_xfer_handle(read)
    finally:
        pair.process.kill()
        pair.agent.close()
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("operation", ["WRITE", "READ"])
def test_a_peer_that_is_removed_amid_transfers_and_added_again(pair: Pair, operation: str) -> None:
    """As connectors recover: what was posted ends and is released, the same metadata is added again, lists are made anew."""
    gone = (bindings.nixlRemoteDisconnectError, bindings.nixlCancelledError)
    for turn in range(5):
        handles = [pair.make(operation) for _ in range(4)]
        for handle in handles:
            pair.agent.transfer(handle)
        assert pair.agent.check_remote_metadata("target")
        pair.agent.remove_remote_agent("target")
        assert not pair.agent.check_remote_metadata("target")
        end = time.monotonic() + PATIENCE
        for handle in handles:
            try:
                while pair.agent.check_xfer_state(handle) == "PROC":
                    assert time.monotonic() < end
            except gone:
                pass
            pair.agent.release_xfer_handle(handle)
        pair.agent.add_remote_agent(pair.metadata)
        pair.remote = pair.listed("target", pair.there)
        pair.memory[:] = turn + 1
        pair.ask(0)
        assert ended(pair.agent, pair.make("WRITE")) == "DONE" and pair.ask("sum") == (turn + 1) * PIECE * PIECES
        end = time.monotonic() + PATIENCE
        while not pair.ask("heard") and time.monotonic() < end:
            pass
        assert time.monotonic() < end
