"""What ``kvferry.nixl`` does with what it cannot take: it says so, and nothing is sent, freed or stuck."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import kvferry
from kvferry.nixl import _bindings as bindings
from kvferry.nixl import nixl_agent, nixl_agent_config

BYTES, PATIENCE = 1 << 16, 20.0


@pytest.fixture
def agents() -> Iterator[tuple[nixl_agent, nixl_agent, Any, Any]]:
    here, there = nixl_agent("here"), nixl_agent("there")
    arrays = [np.zeros(BYTES, np.uint8) for _ in range(2)]
    for agent, array in zip((here, there), arrays):
        agent.register_memory([(array.ctypes.data, array.nbytes, 0, "")], "DRAM")
    here.add_remote_agent(there.get_agent_metadata())
    yield here, there, arrays[0], arrays[1]
    here.close()
    there.close()


def test_descriptors_that_are_none(agents: Any) -> None:
    here, _, array, _ = agents
    base = array.ctypes.data
    for descs, error in (
        ([(-1, 1, 0)], ValueError),
        ([(base, -1, 0)], ValueError),
        ([(base, 1.0, 0)], TypeError),
        ([(base, "1", 0)], TypeError),
        ([(base, None, 0)], TypeError),
        ([(base, 1 << 64, 0)], OverflowError),
        ([(base, 1, 0), (base, 1)], ValueError),
        (np.zeros((2, 3)), ValueError),
        (np.zeros((2, 3), "datetime64[s]"), ValueError),
        (np.zeros((2, 3), object), ValueError),
    ):
        with pytest.raises(error):
            here.get_xfer_descs(descs, "DRAM")
    # 64 bits of address and length, in any mixture of numpy's integers, that add up to more than there are.
    mixed = here.get_xfer_descs([(np.uint64(base), np.int32(1), 0), ((1 << 64) - 1, (1 << 64) - 1, 0)], "DRAM")
    assert list(mixed) == [(base, 1, 0), ((1 << 64) - 1, (1 << 64) - 1, 0)]
    for rows in ([(base, (1 << 64) - 1, 0)], [((1 << 64) - 1, 1, 0)], [(base + BYTES, 1, 0)], [(0, 1, 0)], mixed):
        with pytest.raises(bindings.nixlNotFoundError, match="entry"):
            here.prep_xfer_dlist("", rows, "DRAM")
        with pytest.raises(bindings.nixlNotFoundError, match="entry"):
            here.prep_xfer_dlist("there", rows, "DRAM")
    for counts in ([1 << 63], [1 << 40], [1 << 62, 1 << 62, 1 << 62, 1 << 62]):
        rows = np.array([[base, 8, 0, 8, count] for count in counts], np.uint64)
        with pytest.raises(bindings.nixlInvalidParamError):
            here.prep_xfer_dlist("", rows, "DRAM")
    with pytest.raises(ValueError):
        here.prep_xfer_dlist("", np.zeros((1, 5)), "DRAM")
    with pytest.raises(ValueError):
        here.prep_xfer_dlist("", np.zeros((1, 5), np.uint64))


def test_registrations_that_cannot_be(agents: Any) -> None:
    here, _, array, _ = agents
    for descs in ([(0, 8, 0, "")], [((1 << 64) - 4096, 4096, 0, "")], [(array.ctypes.data, (1 << 64) - 4096, 0, "")]):
        with pytest.raises((bindings.nixlInvalidParamError, bindings.nixlBackendError)):
            here.register_memory(descs, "DRAM")
    with pytest.raises(bindings.nixlNotSupportedError, match="GPU"):
        here.register_memory([(array.ctypes.data, 8, 0, "")], "VRAM")
    with pytest.raises(KeyError):
        here.register_memory([(array.ctypes.data, 8, 0, "")], "RAM")
    with pytest.raises(TypeError):
        here.register_memory([(array.ctypes.data, 8, 0, 7)], "DRAM")
    # One that fails leaves none behind.
    fresh = np.zeros(4096, np.uint8)
    with pytest.raises((bindings.nixlInvalidParamError, bindings.nixlBackendError)):
        here.register_memory([(fresh.ctypes.data, 4096, 0, ""), ((1 << 64) - 4096, 4096, 0, "")], "DRAM")
    assert here.query_memory([(fresh.ctypes.data, 4096, 0, "")], "UCX", "DRAM") == [None]
    # Nothing is nothing: of an empty tensor, say.
    nothing = here.register_memory([(0, 0, 0, ""), (fresh.ctypes.data, 0, 0, "")], "DRAM")
    here.get_partial_agent_metadata(nothing)
    here.deregister_memory(nothing)
    here.deregister_memory(here.register_memory([], "DRAM"))
    for wrong in ([(fresh.ctypes.data, 4096, 0, "")], None, here.get_xfer_descs([(fresh.ctypes.data, 8, 0)], "DRAM")):
        with pytest.raises(TypeError):
            here.deregister_memory(wrong)
        with pytest.raises(TypeError):
            here.get_partial_agent_metadata(wrong)


def test_indices_that_are_none(agents: Any) -> None:
    here, there, array, other = agents
    rows = [(array.ctypes.data + 64 * index, 64, 0) for index in range(8)]
    local = here.prep_xfer_dlist("", rows, "DRAM")
    remote = here.prep_xfer_dlist("there", [(other.ctypes.data + 64 * index, 64, 0) for index in range(8)], "DRAM")
    for indices in (
        [8], [-1], [0.5], [True], ["0"], [None], [1 << 80], [(1 << 64) - 1], [[0]], np.array([0.0]), np.array([[0]]),
        np.array([(1 << 64) - 1], np.uint64), np.array([-1], np.int8), np.array([1 << 40]), np.array(0), 0, None,
    ):  # fmt: skip
        for places in ((indices, [0]), ([0], indices)):
            with pytest.raises((bindings.nixlInvalidParamError, TypeError, ValueError)):
                here.make_prepped_xfer("WRITE", local, places[0], remote, places[1])
    for dtype in (np.int8, np.uint8, np.int16, np.uint16, np.int32, np.uint32, np.int64, np.uint64, ">i4", ">u8"):
        scattered = np.arange(16, dtype=dtype)[::2] % 8
        handle = here.make_prepped_xfer("WRITE", local, np.arange(8, dtype=dtype), remote, np.flip(np.arange(8, dtype=dtype)))
        assert handle.native().nbytes == 512
        handle = here.make_prepped_xfer("READ", local, scattered[:4], remote, scattered[:4])
        assert handle.native().nbytes == 256
    with pytest.raises(bindings.nixlInvalidParamError):
        here.make_prepped_xfer("WRITE", remote, [0], local, [0])
    with pytest.raises(bindings.nixlInvalidParamError):
        there.make_prepped_xfer("WRITE", local, [0], remote, [0])
    assert (other == 0).all()


def test_names_messages_and_metadata_that_are_none(agents: Any) -> None:
    here, there, _, _ = agents
    for message in (5, 1 << 40, None, [1, 2], 2.5):
        with pytest.raises(TypeError):
            here.send_notif("there", message)
        with pytest.raises(TypeError):
            here.add_remote_agent(message)
    for name in (5, None, ["there"]):
        with pytest.raises(TypeError):
            here.send_notif(name, b"x")
        with pytest.raises(TypeError):
            here.remove_remote_agent(name)
        with pytest.raises(TypeError):
            nixl_agent(name)  # type: ignore[arg-type]
    with pytest.raises(ValueError):
        nixl_agent("")
    with pytest.raises(bindings.nixlInvalidParamError):
        nixl_agent("n" * 5000).get_agent_metadata()
    metadata = there.get_agent_metadata()
    for at in range(0, len(metadata), 7):
        damaged = bytearray(metadata)
        damaged[at] ^= 0x55
        for junk in (bytes(damaged), metadata[:at]):
            with pytest.raises(bindings.nixlMismatchError):
                here.add_remote_agent(junk)
    with pytest.raises(bindings.nixlMismatchError):
        here.add_remote_agent(metadata + b"x")
    here.send_notif("there", bytearray(b"one"))
    here.send_notif(b"there", memoryview(b"two"))
    heard: list[bytes] = []
    end = time.monotonic() + PATIENCE
    while len(heard) < 2 and time.monotonic() < end:
        heard.extend(there.get_new_notifs().get("here", []))
    assert heard == [b"one", b"two"]
    with pytest.raises(bindings.nixlInvalidParamError):
        here.send_notif("there", bytes(1 << 29))


def test_times_and_options_that_are_none(agents: Any) -> None:
    for name in ("patience", "transfer_deadline", "linger"):
        for seconds in (-1.0, float("nan"), float("inf"), 1e300):
            with pytest.raises((ValueError, OverflowError, bindings.nixlBackendError)):
                nixl_agent("times", nixl_agent_config(**{name: seconds})).get_agent_metadata()  # type: ignore[arg-type]
    options: list[dict[str, Any]] = [
        {"route": "sideways"}, {"cuda_device": -1}, {"transports": "nosuch"}, {"listen_port": 1 << 17, "enable_listen_thread": True},
    ]  # fmt: skip
    for wrong in options:
        with pytest.raises((ValueError, OverflowError, kvferry.KvferryError)):
            nixl_agent("options", nixl_agent_config(**wrong)).get_agent_metadata()
    here, _, array, other = agents
    handle = here.initialize_xfer(
        "READ", here.get_xfer_descs([(array.ctypes.data, 64, 0)], "DRAM"), here.get_xfer_descs([(other.ctypes.data, 64, 0)], "DRAM"), "there"
    )
    for seconds in (-1.0, float("nan"), 1e300):
        with pytest.raises(ValueError):
            here.wait_xfer(handle, seconds)
        with pytest.raises(ValueError):
            handle.release(seconds)


def test_everything_after_close_says_so(agents: Any) -> None:
    here, there, array, other = agents
    descs = [here.get_xfer_descs([(side.ctypes.data, 64, 0)], "DRAM") for side in (array, other)]
    handle = here.initialize_xfer("WRITE", *descs, "there", b"x")
    local = here.prep_xfer_dlist("", descs[0])
    here.close()
    here.close()
    uses: list[Callable[[], Any]] = [
        lambda: here.register_memory([(array.ctypes.data, 64, 0, "")], "DRAM"),
        lambda: here.prep_xfer_dlist("", descs[0]),
        lambda: here.make_prepped_xfer("WRITE", local, [0], local, [0]),
        lambda: here.get_agent_metadata(),
        lambda: here.get_new_notifs(),
        lambda: here.send_notif("there", b"x"),
        lambda: here.make_connection("there"),
    ]
    for use in uses:
        with pytest.raises(kvferry.ClosedError):
            use()
    with pytest.raises(kvferry.KvferryError):
        here.transfer(handle)
    here.release_xfer_handle(handle)
    here.release_dlist_handle(local)
    assert (other == 0).all()


def test_close_does_not_wait_for_an_exchange_with_nobody() -> None:
    agent = nixl_agent("alone")
    agent.get_agent_metadata()
    agent.fetch_remote_metadata("nobody", "127.0.0.1", 1)
    time.sleep(0.2)
    began = time.monotonic()
    agent.close()
    assert time.monotonic() - began < 4
    exchanges = [thread for thread in threading.enumerate() if thread.name == "kvferry-metadata"]
    for thread in exchanges:
        thread.join(PATIENCE / 2)
        assert not thread.is_alive()


def test_many_threads_may_use_one_agent_and_one_handle(agents: Any) -> None:
    here, _, array, other = agents
    array[:] = 1
    local = here.prep_xfer_dlist("", [(array.ctypes.data + 64 * index, 64, 0) for index in range(64)], "DRAM")
    remote = here.prep_xfer_dlist("there", [(other.ctypes.data + 64 * index, 64, 0) for index in range(64)], "DRAM")
    shared = here.make_prepped_xfer("WRITE", local, np.arange(64), remote, np.arange(64))
    unexpected: list[BaseException] = []

    def work(seed: int) -> None:
        order = np.random.default_rng(seed).permutation(64)
        try:
            for turn in range(60):
                own = here.make_prepped_xfer("READ" if turn % 2 else "WRITE", local, order, remote, order)
                for handle in (own, shared):
                    try:
                        here.transfer(handle)
                    except (bindings.nixlRepostActiveError, bindings.nixlInvalidParamError):
                        assert handle is shared  # somebody else's turn, or the end of it
                        continue
                    try:
                        end = time.monotonic() + PATIENCE
                        while here.check_xfer_state(handle) == "PROC":
                            assert time.monotonic() < end
                    except (bindings.nixlCancelledError, bindings.nixlInvalidParamError):
                        assert handle is shared
                here.release_xfer_handle(own)
                if seed == 0 and turn == 50:
                    here.release_xfer_handle(shared)
        except BaseException as error:  # noqa: BLE001  told by the test
            unexpected.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not unexpected and (other[: 64 * 64] == 1).all() and (other[64 * 64 :] == 0).all()


def test_a_forked_process_is_told(agents: Any) -> None:
    here, there, array, other = agents
    descs = [here.get_xfer_descs([(side.ctypes.data, 64, 0)], "DRAM") for side in (array, other)]
    handle = here.initialize_xfer("WRITE", *descs, "there", b"x")
    lists = here.prep_xfer_dlist("", descs[0])
    unstarted = nixl_agent("later")
    child = os.fork()
    if child == 0:
        status = 1
        try:
            told = 0
            for use in (
                here.get_agent_metadata,
                here.get_new_notifs,
                lambda: here.transfer(handle),
                lambda: here.check_xfer_state(handle),
                lambda: here.release_xfer_handle(handle),
                lambda: here.make_prepped_xfer("WRITE", lists, [0], lists, [0]),
                here.close,
            ):
                try:
                    use()
                except kvferry.ForkedError:
                    told += 1
            del here, there, handle, lists
            gc.collect()
            # UCX was at work, and may hold its locks here for ever.
            for start in (unstarted.get_agent_metadata, kvferry.Engine):
                try:
                    start()
                except kvferry.ForkedError as error:
                    told += error.kind == "Forked"
            status = 0 if told == 9 else 2
        finally:
            os._exit(status)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    here.transfer(handle)
    assert here.wait_xfer(handle, PATIENCE) == "DONE"


END = """
import sys, threading
import numpy as np
from kvferry.nixl import nixl_agent, nixl_agent_config
here, there = (nixl_agent(name, nixl_agent_config(transports=(sys.argv[1] or None))) for name in ("here", "there"))
arrays = [np.zeros(1 << 24, np.uint8) for _ in range(2)]
for agent, array in zip((here, there), arrays):
    agent.register_memory([(array.ctypes.data, array.nbytes, 0, "")], "DRAM")
here.add_remote_agent(there.get_agent_metadata())
sides = []
for name, array in zip(("", "there"), arrays):
    rows = np.zeros((1 << 12, 3), np.uint64)
    rows[:, 0], rows[:, 1] = array.ctypes.data + np.arange(1 << 12) * 4096, 4096
    sides.append(here.prep_xfer_dlist(name, rows, "DRAM"))
order = np.random.default_rng(0).permutation(1 << 12)
handles = [here.make_prepped_xfer(("READ", "WRITE")[turn % 2], sides[0], order, sides[1], order[::-1], b"n") for turn in range(8)]
for handle in handles:
    here.transfer(handle)
threading.Thread(target=here.wait_xfer, args=(handles[0], 60), daemon=True).start()
threading.Thread(target=lambda: [there.get_new_notifs() for _ in range(10**9)], daemon=True).start()
kept = {KEPT}
print("ends", flush=True)
{HOW}
"""


@pytest.mark.parametrize("transports", ["", "tcp"])
@pytest.mark.parametrize("how", ["", "sys.exit(3)", "raise RuntimeError", "del here, there, handles, sides"])
def test_an_interpreter_that_ends_with_transfers_under_way(how: str, transports: str) -> None:
    script = END.replace("{KEPT}", "[handles, sides, here, there]").replace("{HOW}", how)
    ended = subprocess.run([sys.executable, "-c", script, transports], capture_output=True, text=True, timeout=60)
    expected = {"sys.exit(3)": 3, "raise RuntimeError": 1}.get(how, 0)
    assert (ended.returncode, ended.stdout) == (expected, "ends\n"), ended.stderr
