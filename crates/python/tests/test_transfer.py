"""Requests between two engines of one process."""

from __future__ import annotations

import asyncio
import gc
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
import weakref

import numpy
import pytest

import kvferry
from pairs import PATIENCE, Side, connect, pair, started, table

TOKENS = 64
SOURCE_SLOTS, DESTINATION_SLOTS = [9, 2, 5, 11], [3, 0]
LAYERS, ROLES, HEADS, CELL = 4, 2, 2, 64 * 2
BYTES = TOKENS * LAYERS * ROLES * HEADS * CELL
Pair = tuple[Side, Side]


def blocks(side: Side, slots: list[int], tokens: int) -> numpy.ndarray[tuple[int, ...], numpy.dtype[numpy.uint8]]:
    """The bytes of a request, token by token: ``[tokens, layers, roles, heads, cell]``."""
    pool = side.regions[0].array.reshape(-1, LAYERS, ROLES, HEADS, tokens, CELL)
    return numpy.moveaxis(pool[slots], 4, 1).reshape(-1, LAYERS, ROLES, HEADS, CELL)


def fill(source: Side) -> None:
    array = source.regions[0].array
    array[:] = numpy.random.default_rng(7).integers(0, 256, array.size, numpy.uint8)


def check(source: Side, destination: Side) -> None:
    numpy.testing.assert_array_equal(blocks(destination, DESTINATION_SLOTS, 32), blocks(source, SOURCE_SLOTS, 16))


def post(source: Side, destination: Side, request: int = 1) -> tuple[kvferry.Receive, kvferry.Send]:
    receive = destination.engine.receive(destination.link, request, [DESTINATION_SLOTS], TOKENS)
    return receive, source.engine.send(source.link, request, [SOURCE_SLOTS], TOKENS)


def test_bytes_arrive_where_they_belong(connected: Pair) -> None:
    source, destination = connected
    fill(source)
    receive, send = post(source, destination)
    (received,), (sent,) = receive.wait(PATIENCE), send.wait(PATIENCE)
    assert received.nbytes == sent.nbytes == BYTES and received.rank == sent.rank == 0
    assert [way.route for way in sent.carried] == ["direct"] and sent.times.total > 0
    assert received.carried[0].nbytes == BYTES and received.carried[0].reason == sent.carried[0].reason
    assert 0 <= received.times.queued <= received.times.total
    assert receive.done() and (receive.request, receive.attempt) == (1, 0)
    assert receive.wait_quiet(PATIENCE)
    with pytest.raises(kvferry.NotQuietError) as caught:
        receive.wait_quiet(0)
    assert caught.value.kind == "Given"
    check(source, destination)


@pytest.mark.parametrize("transports", ["tcp", "posix,sysv,cma,tcp"])
def test_memory_of_the_users_own(transports: str) -> None:
    ranks = []
    for instance, tokens_per_block in (("prefill", 16), ("decode", 32)):
        engine = kvferry.Engine(instance=instance, patience=PATIENCE, transports=transports)
        own = table(tokens_per_block)
        array = numpy.zeros(own.pool_bytes[0], numpy.uint8)
        regions = [engine.register(array)]
        engine.publish(own, regions)
        kept = weakref.ref(array)
        del array
        assert kept() is not None
        ranks.append((engine, regions))
    source, destination = connect(*ranks)
    fill(source)
    receive, _ = post(source, destination)
    assert receive.wait(PATIENCE)[0].nbytes == BYTES
    check(source, destination)
    source.engine.close()
    destination.engine.close()


def test_a_loop_waits_for_many_without_being_busy(connected: Pair) -> None:
    source, destination = connected
    fill(source)
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            await asyncio.sleep(0.01)
            ticks += 1

    async def main() -> None:
        ticking = asyncio.create_task(tick())
        engine = destination.engine
        receives = [engine.receive(destination.link, request, [[request % 16, 15]], 64) for request in range(8)]
        waiting = asyncio.gather(*receives)
        before, began = time.process_time(), time.monotonic()
        await asyncio.sleep(1.0)
        assert not waiting.done()
        # The engines' threads are in it too: they watch for a while after each message, then sleep.
        assert time.process_time() - before < 0.8 * (time.monotonic() - began)
        sends = [source.engine.send(source.link, request, [SOURCE_SLOTS], 64) for request in range(8)]
        for outcome in await asyncio.wait_for(waiting, PATIENCE):
            assert outcome[0].nbytes == BYTES
        for send in sends:
            await asyncio.wait_for(send, PATIENCE)
        await asyncio.wait_for(asyncio.gather(*(receive.until_quiet() for receive in receives)), PATIENCE)
        # Ended already.
        await receives[0]
        ticking.cancel()

    asyncio.run(main())
    assert ticks > 10


def test_a_wait_that_is_given_up_leaves_the_loop_as_it_was(connected: Pair) -> None:
    source, destination = connected

    async def main() -> None:
        receive = destination.engine.receive(destination.link, 1, [DESTINATION_SLOTS], TOKENS)
        for _ in range(3):
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(receive._ended(), 0.05)
        source.engine.send(source.link, 1, [SOURCE_SLOTS], TOKENS)
        await asyncio.wait_for(receive, PATIENCE)

    asyncio.run(main())
    asyncio.run(asyncio.sleep(0))


def test_parts_leave_as_they_are_pushed(connected: Pair) -> None:
    source, destination = connected
    fill(source)
    receive = destination.engine.receive(destination.link, 1, [DESTINATION_SLOTS], TOKENS)
    send = source.engine.send_in_parts(source.link, 1, [SOURCE_SLOTS], TOKENS)
    send.push((0, 32), layers=(0, 2))
    send.push((0, 32), layers=(2, 4))
    with pytest.raises(kvferry.PushError) as caught:
        send.push((48, 64))
    assert (caught.value.kind, caught.value.pushed, caught.value.next, caught.value.end) == ("Tokens", (48, 64), 32, 64)
    computed = kvferry.Signal()
    send.push((32, 64), note=b"first token", ready=computed)
    with pytest.raises(ValueError, match="one part"):
        send.push((64, 64), ready=computed)
    with pytest.raises(TimeoutError):
        receive.wait(0.2)
    computed.set()
    assert receive.wait(PATIENCE)[0].note == b"first token"
    check(source, destination)


def test_a_cancelled_request_says_so(connected: Pair) -> None:
    source, destination = connected
    receive = destination.engine.receive(destination.link, 1, [DESTINATION_SLOTS], TOKENS)
    with pytest.raises(TimeoutError):
        receive.wait(0)
    receive.cancel()
    with pytest.raises(kvferry.RequestError) as caught:
        receive.wait(PATIENCE)
    error = caught.value
    assert error.cancelled and (error.request, error.attempt) == (1, 0)
    assert [part.kind for part in error.errors] == ["Cancelled"] and error.errors[0].phase == "waiting"
    assert receive.wait_quiet(PATIENCE)
    assert pickle.loads(pickle.dumps(error)).fields["request"] == 1
    # The number has been used.
    with pytest.raises(kvferry.PostError) as over:
        destination.engine.receive(destination.link, 1, [DESTINATION_SLOTS], TOKENS)
    assert over.value.kind == "Over"
    destination.engine.receive(destination.link, 1, [DESTINATION_SLOTS], TOKENS, attempt=1).cancel()


def test_wrong_posts_are_refused_by_name(connected: Pair) -> None:
    source, destination = connected
    for maps, kind in (([[3]], "OutOfMap"), ([[3, 16]], "SlotOutOfRange"), ([[3, None]], "Hole"), ([[3, 3]], "SlotTwice")):
        with pytest.raises(kvferry.PostError) as caught:
            destination.engine.receive(destination.link, 1, maps, TOKENS)
        assert caught.value.kind == "BlockMaps" and caught.value.peer == ("source", 0)
        assert isinstance(caught.value.__cause__, kvferry.MatchError) and caught.value.__cause__.kind == kind
    with pytest.raises(kvferry.PostError) as caught:
        source.engine.receive(source.link, 1, [SOURCE_SLOTS], TOKENS)
    assert caught.value.kind == "OtherSide"
    with pytest.raises(kvferry.PostError) as caught:
        source.engine.send(destination.link, 1, [SOURCE_SLOTS], TOKENS)
    assert caught.value.kind == "NoLink"
    with pytest.raises(TypeError, match="each group"):
        source.engine.send(source.link, 1, [3, 0], TOKENS)  # type: ignore[list-item]
    with pytest.raises(ValueError, match="-1 is a hole"):
        source.engine.send(source.link, 1, [[-2]], TOKENS)
    with pytest.raises(ValueError, match="no time to wait"):
        post(source, destination)[0].wait(-1)


def test_slots_can_be_arrays_and_begin_anywhere() -> None:
    slots = kvferry.BlockMap(numpy.array([4, -1, 2], numpy.int32), first=7)
    assert slots.slots.tolist() == [4, -1, 2] and slots.first == 7
    assert kvferry.BlockMap([4, None]).slots.tolist() == [4, -1]
    with pytest.raises(TypeError, match="integers"):
        kvferry.BlockMap(numpy.zeros((2, 2)))


def test_engines_that_cannot_work_together() -> None:
    first, _ = started("prefill", 16)
    second, _ = started("decode", 32, verify=True)
    with pytest.raises(kvferry.CardError) as caught:
        kvferry.InstanceCard([first.card], ranks=range(2))
    assert (caught.value.kind, caught.value.rank) == ("Missing", 1)
    with pytest.raises(kvferry.CardError):
        kvferry.InstanceCard.from_bytes(b"junk")
    cards = [kvferry.InstanceCard([engine.card]) for engine in (first, second)]
    assert kvferry.InstanceCard.from_bytes(cards[0].to_bytes()) == cards[0] != cards[1]
    assert pickle.loads(pickle.dumps(cards[0])) == cards[0]
    with pytest.raises(kvferry.ConnectError) as refused:
        first.connect(*cards)
    assert refused.value.kind == "Verify" and refused.value.theirs is True and refused.value.peer == ("destination", 0)
    first.close()
    second.close()


def test_an_engine_that_is_closed_says_so() -> None:
    source, destination = pair()
    receive, _ = post(source, destination)
    receive.wait(PATIENCE)
    late = destination.engine.receive(destination.link, 2, [DESTINATION_SLOTS], TOKENS)
    with destination.engine:
        pass
    with pytest.raises(kvferry.RequestError) as stopped:
        late.wait(PATIENCE)
    assert stopped.value.kind == "Stopped"
    with pytest.raises(kvferry.ClosedError):
        destination.engine.receive(destination.link, 3, [DESTINATION_SLOTS], TOKENS)
    destination.engine.close()
    source.engine.close()


def test_dropping_an_engine_waits_for_nobody() -> None:
    def drop() -> float:
        source, destination = pair()
        post(source, destination)
        # In the middle of a request, to a peer that goes at the same time.
        view = destination.regions[0].array
        began = time.monotonic()
        del source, destination
        gc.collect()
        took = time.monotonic() - began
        # Memory is there while somebody looks at it.
        view[:] = 1
        return took

    # A busy machine may be late now and then.
    assert any(drop() < 1.0 for _ in range(3))


def test_other_threads_run_while_one_waits(connected: Pair) -> None:
    _, destination = connected
    receive = destination.engine.receive(destination.link, 1, [DESTINATION_SLOTS], TOKENS)
    counted, stop = 0, threading.Event()

    def count() -> None:
        nonlocal counted
        while not stop.is_set():
            counted += 1

    counting = threading.Thread(target=count)
    counting.start()
    before = counted
    with pytest.raises(TimeoutError):
        receive.wait(0.5)
    during = counted - before
    stop.set()
    counting.join()
    assert during > 1000
    receive.cancel()


def test_an_interrupt_ends_a_wait(connected: Pair) -> None:
    # What a shell starts in the background ignores interrupts, and so would this process.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        interrupt_waits(connected)
    finally:
        signal.signal(signal.SIGINT, before)


def interrupt_waits(connected: Pair) -> None:
    _, destination = connected
    receive = destination.engine.receive(destination.link, 1, [DESTINATION_SLOTS], TOKENS)
    began = time.monotonic()
    for wait in (receive.wait, receive.wait_quiet):
        threading.Timer(0.3, os.kill, [os.getpid(), signal.SIGINT]).start()
        with pytest.raises(KeyboardInterrupt):
            wait(PATIENCE)
    assert time.monotonic() - began < PATIENCE
    receive.cancel()


def test_connecting_ends_with_an_interrupt_and_with_the_engine() -> None:
    """To a rank that is there and does not make the call."""
    first, _ = started("prefill", 16)
    second, regions = started("decode", 32)
    cards = [kvferry.InstanceCard([engine.card]) for engine in (first, second)]
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        began = time.monotonic()
        threading.Timer(0.3, os.kill, [os.getpid(), signal.SIGINT]).start()
        with pytest.raises(KeyboardInterrupt):
            first.connect(*cards)
    finally:
        signal.signal(signal.SIGINT, before)
    ended: list[str] = []

    def connect() -> None:
        try:
            second.connect(*cards)
        except kvferry.KvferryError as error:
            ended.append(error.kind)

    third, _ = started("prefill", 16)
    cards[0] = kvferry.InstanceCard([third.card])
    waiting = threading.Thread(target=connect)
    waiting.start()
    time.sleep(0.3)
    second.close()
    waiting.join()
    assert time.monotonic() - began < PATIENCE and ended in (["Stopped"], ["Closed"])
    # The call that was interrupted ends with its engine too.
    first.close()
    third.close()
    assert time.monotonic() - began < PATIENCE


def test_a_forked_process_is_told(connected: Pair) -> None:
    source, destination = connected
    receive, send = post(source, destination)
    receive.wait(PATIENCE)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            uses = [
                lambda: destination.engine.epoch,
                lambda: destination.regions[0].read(0, 1),
                lambda: receive.wait(1.0),
                lambda: send.cancel(),
                destination.engine.close,
            ]
            told = 0
            for use in uses:
                try:
                    use()
                except kvferry.ForkedError:
                    told += 1
            del source, destination, receive, send, uses
            gc.collect()
            status = 0 if told == 5 else 2
        finally:
            os._exit(status)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    # And the parent goes on.
    assert post(source, destination, 2)[0].wait(PATIENCE)[0].nbytes == BYTES


def test_nothing_starts_in_a_fork_of_a_process_that_had_an_engine() -> None:
    """Though it is closed: UCX's locks may be held by any thread that allocates memory."""
    script = """
import os
import kvferry
kvferry.Engine().close()
child = os.fork()
if child == 0:
    try:
        kvferry.Engine()
    except kvferry.ForkedError as error:
        os._exit(0 if error.kind == "Forked" else 2)
    os._exit(1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
kvferry.Engine().close()
print("refused")
"""
    said = subprocess.run([sys.executable, "-c", script], timeout=120, capture_output=True, text=True)
    assert (said.returncode, said.stdout) == (0, "refused\n"), said.stderr


def test_an_interpreter_that_ends_closes_what_is_left() -> None:
    """Engines in the middle of requests, with a thread that waits for one: UCX must not be torn down under their threads."""
    script = """
import sys, threading
sys.path.insert(0, sys.argv[1])
from pairs import pair
source, destination = pair()
receive = destination.engine.receive(destination.link, 1, [[3, 0]], 64)
threading.Thread(target=receive.wait, args=(60,), daemon=True).start()
kept = [source, destination, receive]
import kvferry
from pairs import started
alone = [started("prefill", 16)[0], started("decode", 32)[0]]
cards = [kvferry.InstanceCard([engine.card]) for engine in alone]
threading.Thread(target=alone[0].connect, args=cards, daemon=True).start()
print("ends")
"""
    command = [sys.executable, "-c", script, os.path.dirname(__file__)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout) == (0, "ends\n"), ended.stderr


CANCELS = int(os.environ.get("KVFERRY_CANCEL_TRIALS", "100"))


def test_slots_of_a_cancelled_receive_are_ones_own_once_quiet(connected: Pair) -> None:
    source, destination = connected
    source.regions[0].array[:] = 1
    array, taken = destination.regions[0].array, 0
    for trial in range(10 * CANCELS):
        # More, if all of them were over before they were cancelled.
        if trial >= CANCELS and taken > 0:
            break
        # What has been sent for moves while it is posted, if nothing else is going on; a source that waits takes a moment.
        early = source.engine.send(source.link, trial, [SOURCE_SLOTS], TOKENS) if trial % 2 else None
        receive = destination.engine.receive(destination.link, trial, [DESTINATION_SLOTS], TOKENS)
        send = early or source.engine.send(source.link, trial, [SOURCE_SLOTS], TOKENS)
        # At every point of its life, from before it has been asked for to after its end.
        if trial % 20 > 1:
            time.sleep(trial % 20 * 20e-6)
        receive.cancel()
        assert receive.wait_quiet(PATIENCE)
        array[:] = 2
        try:
            send.wait(PATIENCE)
        except kvferry.RequestError:
            taken += 1
        assert send.wait_quiet(PATIENCE)
        assert (array == 2).all(), trial
    assert taken > 0


def test_options_have_the_librarys_names(tmp_path: os.PathLike[str], monkeypatch: pytest.MonkeyPatch) -> None:
    path = os.path.join(tmp_path, "engine.toml")
    with open(path, "w") as file:
        file.write("rank = 3\npatience_ms = 1500")
    monkeypatch.setenv("KVFERRY_ENGINE_ROUTE", "staged")
    with kvferry.Engine(file=path) as engine:
        options = engine.options
    assert (options["rank"], options["patience_ms"], options["route"]) == (3, 1500, "staged")
    # What is given goes first.
    with kvferry.Engine(0, file=path, route="runs") as engine:
        options = engine.options
    assert (options["rank"], options["patience_ms"], options["route"]) == (0, 1500, "runs")
    with kvferry.Engine(5, "x", resend=0.5, workers=2, environment=False) as engine:
        options = engine.options
    assert (options["rank"], options["resend_ms"], options["workers"], options["route"]) == (5, 500, 2, None)
    with pytest.raises(kvferry.OptionsError) as caught:
        kvferry.Engine(file="/no/options.yaml")
    assert caught.value.kind == "Format" and caught.value.path == "/no/options.yaml"
    with pytest.raises(kvferry.StartError) as start:
        kvferry.Engine(patience=0.0)
    assert start.value.kind == "Patience"
