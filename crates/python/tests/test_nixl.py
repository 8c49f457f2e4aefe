"""``kvferry.nixl`` as connectors use NIXL: argument shapes, states, notifications, exceptions."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from kvferry import nixl
from kvferry.nixl import _bindings as bindings
from kvferry.nixl import nixl_agent, nixl_agent_config, nixl_xfer_handle

BLOCK, BLOCKS = 1024, 32
PATIENCE = 20.0

Bytes = npt.NDArray[np.uint8]


class Side:
    """An agent with one array of blocks."""

    def __init__(self, name: str, **config: Any) -> None:
        self.agent = nixl_agent(name, nixl_agent_config(**config))
        self.blocks: Bytes = np.zeros((BLOCKS, BLOCK), np.uint8)
        self.base = self.blocks.ctypes.data
        self.registered = self.agent.register_memory([(self.base, self.blocks.nbytes, 0, "")], "DRAM")

    def rows(self) -> npt.NDArray[np.uint64]:
        rows = np.zeros((BLOCKS, 3), np.uint64)
        rows[:, 0] = self.base + np.arange(BLOCKS) * BLOCK
        rows[:, 1] = BLOCK
        return rows

    def heard(self) -> dict[str, list[bytes]]:
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            heard = self.agent.get_new_notifs()
            if heard:
                return heard
        raise TimeoutError("no notification")


def done(agent: nixl_agent, handle: nixl_xfer_handle, notif: bytes = b"") -> None:
    state = agent.transfer(handle, notif)
    end = time.monotonic() + PATIENCE
    while state == "PROC" and time.monotonic() < end:
        state = agent.check_xfer_state(handle)
    assert state == "DONE"


@pytest.fixture(params=[{}, {"transports": "tcp"}], ids=["default", "tcp"])
def sides(request: pytest.FixtureRequest) -> Iterator[tuple[Side, Side]]:
    here, there = Side("here", **request.param), Side("there", **request.param)
    yield here, there
    here.agent.close()
    there.agent.close()


def test_blocks_are_written_and_read_by_index(sides: tuple[Side, Side]) -> None:
    here, there = sides
    name = here.agent.add_remote_agent(there.agent.get_agent_metadata())
    assert name == b"there" and here.agent.check_remote_metadata("there") and not here.agent.check_remote_metadata("nobody")
    here.agent.make_connection(name)
    local = here.agent.prep_xfer_dlist("NIXL_INIT_AGENT", here.rows(), "DRAM")
    remote = here.agent.prep_xfer_dlist(name, there.rows(), "DRAM")
    here.blocks[:] = np.arange(BLOCKS, dtype=np.uint8)[:, None] + 1
    order = np.random.default_rng(0).permutation(BLOCKS).astype(np.int32)
    half = BLOCKS // 2
    handle = here.agent.make_prepped_xfer("WRITE", local, order[:half], remote, [int(i) for i in order[half:]], "written")
    with pytest.raises(bindings.nixlNotPostedError):
        here.agent.check_xfer_state(handle)
    done(here.agent, handle)
    assert there.heard() == {"here": [b"written"]}
    expected = np.zeros_like(there.blocks)
    expected[order[half:]] = here.blocks[order[:half]]
    assert np.array_equal(there.blocks, expected)
    told = here.agent.get_xfer_telemetry(handle)
    assert (told.totalBytes, told.descCount) == (half * BLOCK, half) and told.xferDuration > 0
    done(here.agent, handle, b"again")
    assert there.heard() == {"here": [b"again"]}
    here.agent.release_xfer_handle(handle)
    with pytest.raises(bindings.nixlInvalidParamError):
        here.agent.check_xfer_state(handle)

    here.blocks[:] = 0
    read = here.agent.make_prepped_xfer("READ", local, range(BLOCKS), remote, np.arange(BLOCKS), b"read")
    done(here.agent, read)
    assert np.array_equal(here.blocks, there.blocks) and there.heard() == {"here": [b"read"]}
    here.agent.release_dlist_handle(local)
    with pytest.raises(bindings.nixlInvalidParamError):
        here.agent.make_prepped_xfer("READ", local, [0], remote, [0])


def test_lists_that_are_used_once_and_an_agent_that_is_its_own_peer(sides: tuple[Side, Side]) -> None:
    here, there = sides
    here.agent.add_remote_agent(there.agent.get_agent_metadata())
    here.blocks[3] = 7
    for peer, side in (("there", there), ("here", here)):
        once = here.agent.initialize_xfer(
            "WRITE",
            here.agent.get_xfer_descs([(here.base + 3 * BLOCK, 100, 0)], "DRAM"),
            here.agent.get_xfer_descs([(side.base + 5 * BLOCK, 100, 0)], "DRAM"),
            peer,
            b"once",
        )
        assert here.agent.query_xfer_backend(once) == "UCX"
        done(here.agent, once)
        assert side.heard() == {"here": [b"once"]}
        assert (side.blocks[5, :100] == 7).all() and (side.blocks[5, 100:] == 0).all()
    # `count` blocks a row, `stride` apart.
    rows = np.array([[here.base, 10, 0, BLOCK, 3], [here.base + 8 * BLOCK, 20, 0, 20, 2]], np.uint64)
    unrolled = here.agent.prep_xfer_dlist("", rows, "DRAM")
    assert len(unrolled.native()) == 5


def test_notifications_are_looked_up_and_kept(sides: tuple[Side, Side]) -> None:
    here, there = sides
    here.agent.add_remote_agent(there.agent.get_agent_metadata())
    for message in (b"first:1", "second:2", b"third:1"):
        here.agent.send_notif("there", message)
    end = time.monotonic() + PATIENCE
    while not there.agent.check_remote_xfer_done("here", b"third") and time.monotonic() < end:
        pass
    assert not there.agent.check_remote_xfer_done("here", b"third")
    assert not there.agent.check_remote_xfer_done("here", b":2")
    assert there.agent.check_remote_xfer_done("here", b":2", tag_is_prefix=False)
    assert there.agent.update_notifs() == {"here": [b"first:1"]} and there.agent.get_new_notifs() == {}


def test_what_is_wrong_raises_what_it_raises_in_nixl(sides: tuple[Side, Side], caplog: pytest.LogCaptureFixture) -> None:
    here, there = sides
    here.agent.add_remote_agent(there.agent.get_agent_metadata())
    end = here.base + here.blocks.nbytes
    with pytest.raises(bindings.nixlNotFoundError, match="entry 1"):
        here.agent.prep_xfer_dlist("", [(here.base, 1, 0), (end - 1, 2, 0)], "DRAM")
    with pytest.raises(bindings.nixlNotFoundError):
        here.agent.prep_xfer_dlist("there", [(there.base + there.blocks.nbytes, 1, 0)], "DRAM")
    with pytest.raises(bindings.nixlNotFoundError):
        here.agent.prep_xfer_dlist("nobody", [(there.base, 1, 0)], "DRAM")
    with pytest.raises(bindings.nixlNotFoundError):
        here.agent.prep_xfer_dlist("", here.rows(), "VRAM")
    local = here.agent.prep_xfer_dlist("", here.rows(), "DRAM")
    remote = here.agent.prep_xfer_dlist("there", there.rows(), "DRAM")
    for mine, theirs in (([BLOCKS], [0]), ([0], [-1]), ([0, 1], [0]), ([0.5], [0])):
        with pytest.raises((bindings.nixlInvalidParamError, TypeError)):
            here.agent.make_prepped_xfer("WRITE", local, np.asarray(mine), remote, theirs)
    with pytest.raises(KeyError):
        here.agent.make_prepped_xfer("COPY", local, [0], remote, [0])
    with pytest.raises(bindings.nixlMismatchError):
        here.agent.add_remote_agent(b"no metadata")
    with pytest.raises(bindings.nixlNotSupportedError):
        here.agent.register_memory([(there.base, 100, 0, "")], "FILE")
    with pytest.raises(bindings.nixlNotSupportedError):
        here.agent.send_local_metadata()
    with caplog.at_level(logging.ERROR):
        assert here.agent.get_xfer_descs([(1, 2, 3, "")], "DRAM") is None
        assert here.agent.get_xfer_descs(here.rows()) is None
        assert here.agent.get_reg_descs(here.agent.get_xfer_descs(here.rows(), "DRAM")) is None
    assert len(caplog.records) == 3
    here.agent.deregister_memory(here.registered)
    with pytest.raises(bindings.nixlNotFoundError):
        here.agent.make_prepped_xfer("WRITE", local, [0], remote, [0])
    with pytest.raises(bindings.nixlNotFoundError):
        here.agent.deregister_memory(here.registered)
    assert (there.blocks == 0).all()


def test_metadata_in_parts_through_a_listener_and_withdrawn(sides: tuple[Side, Side]) -> None:
    here, there = sides
    more = np.zeros(64, np.uint8)
    later = there.agent.register_memory([(more.ctypes.data, 64, 0, b"meta")], "DRAM")
    assert there.agent.query_memory([(more.ctypes.data, 64, 0, ""), (1, 1, 0, "")], "UCX", "DRAM")[1] is None
    wanted = here.agent.get_xfer_descs([(more.ctypes.data, 8, 0)], "DRAM")
    here.agent.add_remote_agent(there.agent.get_partial_agent_metadata(there.registered, inc_conn_info=True))
    assert here.agent.check_remote_metadata("there") and not here.agent.check_remote_metadata("there", wanted)
    here.agent.add_remote_agent(there.agent.get_partial_agent_metadata(later))
    assert here.agent.check_remote_metadata(b"there", wanted)
    here.agent.remove_remote_agent("there")
    assert not here.agent.check_remote_metadata("there")

    listening = nixl_agent("listening", nixl_agent_config(enable_listen_thread=True, listen_port=0, listen_host="127.0.0.1"))
    address, port = listening._agent().listens_at or ("", 0)
    here.agent.fetch_remote_metadata("listening", address, port)
    here.agent.send_local_metadata(address, port)

    def until(what: Any) -> None:
        end = time.monotonic() + PATIENCE
        while not what() and time.monotonic() < end:
            time.sleep(0.01)
        assert what()

    until(lambda: here.agent.check_remote_metadata("listening") and listening.check_remote_metadata("here"))
    here.agent.invalidate_local_metadata(address, port)
    until(lambda: not listening.check_remote_metadata("here"))
    listening.close()


def test_an_agent_that_starts_again_is_taken_in_place_of_its_last_life(sides: tuple[Side, Side]) -> None:
    here, there = sides
    here.agent.add_remote_agent(there.agent.get_agent_metadata())
    local = here.agent.prep_xfer_dlist("", here.rows(), "DRAM")
    remote = here.agent.prep_xfer_dlist("there", there.rows(), "DRAM")
    handle = here.agent.make_prepped_xfer("WRITE", local, [0], remote, [0], b"x")
    done(here.agent, handle)
    there.agent.close()
    again = Side("there", transports=here.agent._config.transports)
    here.agent.add_remote_agent(again.agent.get_agent_metadata())
    with pytest.raises(bindings.nixlRemoteDisconnectError):
        here.agent.transfer(handle)
    with pytest.raises(bindings.nixlRemoteDisconnectError):
        here.agent.make_prepped_xfer("WRITE", local, [0], remote, [0])
    remote = here.agent.prep_xfer_dlist("there", again.rows(), "DRAM")
    done(here.agent, here.agent.make_prepped_xfer("WRITE", local, [1], remote, [2], b"y"))
    assert again.heard() == {"here": [b"y"]}
    again.agent.close()


def test_descriptor_lists_are_lists() -> None:
    descs = bindings.nixlRegDList(bindings.DRAM_SEG, [(1, 2, 3, "a"), (4, 5, 6, b"b")])
    assert descs.descCount() == 2 and descs[1] == (4, 5, 6, b"b") and descs.getType() == bindings.DRAM_SEG
    descs.append((7, 8, 9, "c"))
    descs.remDesc(0)
    assert list(descs) == [(4, 5, 6, b"b"), (7, 8, 9, b"c")]
    plain = descs.trim()
    assert isinstance(plain, bindings.nixlXferDList) and plain[1] == (7, 8, 9)
    assert plain.index((7, 8, 9)) == 1 and plain.index((7, 8, 8)) == -1
    agent = nixl_agent("lists", nixl_agent_config(backends=[]))
    for one in (descs, plain):
        assert agent.deserialize_descs(agent.get_serialized_descs(one)) == one
    assert agent.get_plugin_list() == ["UCX"] and agent.get_backend_params("UCX") == {}
    agent.create_backend("UCX", {"ucx_error_handling_mode": "peer", "num_threads": "2"})
    assert agent.get_backend_params("UCX")["num_threads"] == "2"
    with pytest.raises(bindings.nixlNotFoundError):
        agent.create_backend("GDS", {})
    plain.clear()
    assert plain.isEmpty() and nixl.DEFAULT_COMM_PORT == 8888
