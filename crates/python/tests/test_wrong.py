"""What the package does with what it cannot take: an exception that says so, and nothing else."""

from __future__ import annotations

from typing import Any

import numpy
import pytest

import kvferry
from pairs import CONFIG, PATIENCE, Side, started, table

REFUSED = (TypeError, ValueError, OverflowError, kvferry.KvferryError)


def test_posts_of_what_is_no_request(connected: tuple[Side, Side]) -> None:
    source, destination = connected
    receive, link = destination.engine.receive, destination.link
    calls: list[tuple[Any, ...]] = [
        (link, -1, [[3, 0]], 64),
        (link, 1 << 64, [[3, 0]], 64),
        (link, 1.5, [[3, 0]], 64),
        (link, None, [[3, 0]], 64),
        (link, 1, [[3, 0]], -1),
        (link, 1, [[3, 0]], 1 << 64),
        (link, 1, [[3, 0]], (64, 0)),
        (link, 1, [[3, 0]], (0, 1 << 63)),
        (link, 1, [[3, 0]], (0, 64, 128)),
        (link, 1, [[3, 0]], 64.0),
        (link, 1, [[3, 0]], None),
        (link, 1, [[3.5, 0]], 64),
        (link, 1, [["3", 0]], 64),
        (link, 1, [numpy.array([3.0, 0.0])], 64),
        (link, 1, [numpy.array([[3, 0]])], 64),
        (link, 1, [numpy.array([(1 << 64) - 1, 0], numpy.uint64)], 64),
        (link, 1, [[1 << 32, 0]], 64),
        (link, 1, [[1 << 80, 0]], 64),
        (link, 1, [None], 64),
        (link, 1, None, 64),
        (link, 1, [], 64),
        (link, 1, [[3, 0], [3, 0]], 64),
        (link, 1, [kvferry.BlockMap([3, 0], first=-1)], 64),
        (link, 1, [kvferry.BlockMap([3, 0], first=1 << 64)], 64),
        (link, 1, [kvferry.BlockMap([3, 0], first=(1 << 64) - 1)], 64),
        ([], 1, [[3, 0]], 64),
        ([link, None], 1, [[3, 0]], 64),
        (None, 1, [[3, 0]], 64),
    ]
    for call in calls:
        with pytest.raises((*REFUSED, AttributeError)):
            receive(*call)
    for attempt in (-1, 1 << 32, 0.5):
        with pytest.raises(REFUSED):
            receive(link, 1, [[3, 0]], 64, attempt=attempt)  # type: ignore[arg-type]
    # None of them has left anything behind.
    good = receive(link, 1, [[3, 0]], 64)
    for timeout in (-1.0, float("nan"), float("inf"), None, "1"):
        with pytest.raises(REFUSED):
            good.wait(timeout)  # type: ignore[arg-type]
    send = source.engine.send_in_parts(source.link, 1, [[9, 2, 5, 11]], 64)
    for part in ((-1, 16), (0, 1 << 64), (16, 0), (0, 65), (16, 32), (0,), None):
        with pytest.raises(REFUSED):
            send.push(part)  # type: ignore[arg-type]
    for layers in ((-1, 2), (2, 1), (0, 0), (0, 1 << 32), (1, 2), (3, 9), (7, 9)):
        with pytest.raises(REFUSED):
            send.push((0, 16), layers=layers)
    with pytest.raises(kvferry.PushError) as caught:
        send.push((0, 64), note=bytes(1 << 20))
    assert caught.value.kind == "Note" and caught.value.bytes == 1 << 20
    send.push((0, 64))
    assert good.wait(1e15)[0].nbytes > 0 and good.wait_quiet(PATIENCE)


def test_memory_that_cannot_be_had_and_accesses_outside() -> None:
    engine, (region,) = started("prefill", 16)
    for length in (-1, 0, 1 << 62, 1 << 64, 1.5, None):
        with pytest.raises(REFUSED):
            engine.allocate_bytes(length)  # type: ignore[arg-type]
    with pytest.raises(kvferry.RegionError):
        engine.allocate_bytes(4096, on_gpu=True)
    for array in (numpy.zeros(0), (4096, 0, None), ((1 << 64) - 4096, 4096, None), (4096, 1 << 63, None), numpy.zeros(4)[::2], "text"):
        with pytest.raises(REFUSED):
            engine.register(array)
    end = region.nbytes
    for offset, length in ((end, 1), (-1, 1), (0, end + 1), (1, end), (1 << 63, 1), (0, 1 << 62), (0, -1)):
        with pytest.raises(REFUSED):
            region.read(offset, length)
    for offset, data in ((end, b"x"), (-1, b"x"), (0, bytes(end + 1)), ((1 << 64) - 1, b"xy"), (0, "text"), (0, 5)):
        with pytest.raises(REFUSED):
            region.write(offset, data)  # type: ignore[arg-type]
    region.write(end - 1, b"x")
    assert region.read(end - 1, 1) == b"x" and region.read(end, 0) == b""
    engine.close()


@pytest.mark.parametrize(
    "options",
    [
        {"rank": -1}, {"rank": 1 << 32}, {"rank": "0"}, {"instance": 5}, {"transports": "nosuch"}, {"transports": 5},
        {"route": "sideways"}, {"patience": float("nan")}, {"patience": float("inf")}, {"patience": -1.0}, {"patience": 0.0},
        {"resend": -1.0}, {"resend": 1e9}, {"workers": 0}, {"workers": -1}, {"workers": 1 << 40}, {"requests_max": -1},
        {"inbox_bytes": -1}, {"ring_bytes": -1}, {"inbox_bytes": 1 << 62}, {"copy_threads": -1}, {"cpus": [1 << 20]}, {"cpus": [-1]}, {"gpu": -1},
        {"gpu_options": {"urgent": True}}, {"gpu": 0, "gpu_options": {"nosuch": 1}}, {"file": "/nowhere.toml"},
    ],
)  # fmt: skip
def test_options_that_there_are_not(options: dict[str, Any]) -> None:
    with pytest.raises(REFUSED):
        kvferry.Engine(**options).close()


def test_tables_cards_and_plans_of_what_is_none() -> None:
    good: dict[str, Any] = {"tokens_per_block": 16, "dtype": "bf16", "slot_count": 4}
    for wrong in (
        {"tokens_per_block": 0}, {"tokens_per_block": -1}, {"tokens_per_block": 1 << 32}, {"slot_count": 0}, {"slot_count": 1 << 32},
        {"dtype": "int3"}, {"dtype": None}, {"device": -1}, {"pooling": "all"}, {"cells": "nhdx"}, {"tokens_per_block": 1.5},
    ):  # fmt: skip
        with pytest.raises(REFUSED):
            kvferry.PageTable.from_config(CONFIG, "tp1", 0, **{**good, **wrong})
    configs: tuple[Any, ...] = ({}, [], None, {"model_type": 5}, {**CONFIG, "num_hidden_layers": 1 << 40}, {**CONFIG, "head_dim": -1}, {"a": object()})
    for config in configs:
        with pytest.raises(REFUSED):
            kvferry.PageTable.from_config(config, "tp1", 0, **good)
    for cut, rank in (("tp0", 0), ("tp1", 1), ("tp1", -1), ("tp99999999999", 0), ("pp5", 0), ("", 0), (None, 0)):
        with pytest.raises(REFUSED):
            kvferry.PageTable.from_config(CONFIG, cut, rank, **good)  # type: ignore[arg-type]
    own = table()
    encoded = own.to_bytes()
    for at in range(0, len(encoded), 3):
        with pytest.raises(kvferry.TableError):
            kvferry.PageTable.from_bytes(encoded[:at])
    for junk in (b"", encoded + b"x", "text", None):
        with pytest.raises(REFUSED):
            kvferry.PageTable.from_bytes(junk)  # type: ignore[arg-type]
    for cards, ranks in (([b"junk"], None), ([5], None), (None, None), ([b""], [0]), ([b""], [-1]), ([b""], [1 << 32])):
        with pytest.raises(REFUSED):
            kvferry.InstanceCard(cards, ranks)  # type: ignore[arg-type]
    with pytest.raises(kvferry.ConnectError) as alone:
        engine, _ = started("prefill", 16)
        engine.connect(kvferry.InstanceCard([]), kvferry.InstanceCard([engine.card]))
    assert alone.value.kind == "NotAmong" or alone.value.__cause__ is not None
    engine.close()
    for sources, destinations in (([], [own]), ([own], [None]), (None, [own])):
        with pytest.raises((*REFUSED, AttributeError)):
            kvferry.plan(sources, destinations)  # type: ignore[arg-type]
    plan = kvferry.plan([own], [own])
    for tokens in (-1, 1 << 64, (64, 16), (0, 1 << 63), 1.5, None):
        with pytest.raises(REFUSED):
            plan.explain(tokens)  # type: ignore[arg-type]


def test_errors_have_the_fields_of_the_librarys() -> None:
    def caught(*arguments: Any, **options: Any) -> kvferry.KvferryError:
        with pytest.raises(kvferry.TableError) as error:
            kvferry.PageTable.from_config(*arguments, **{"tokens_per_block": 16, "dtype": "bf16", "slot_count": 4, **options})
        return error.value

    rank = caught(CONFIG, "tp2", 2)
    assert rank.kind == "Rank" and rank.fields == {"rank": 2, "rank_count": 2, "cut": "tp2"}
    syntax = caught(CONFIG, "tpp3", 0)
    assert (syntax.kind, syntax.text) == ("Syntax", "tpp3")
    unknown = caught({"model_type": "abacus"}, "tp1", 0)
    assert (unknown.kind, unknown.found) == ("UnknownModelType", "abacus") and "llama" in unknown.known
    missing = caught({"model_type": "llama"}, "tp1", 0)
    assert missing.kind == "MissingKey" and isinstance(missing.key, str)
    with pytest.raises(kvferry.TableError) as empty:
        kvferry.PageTable(1, [kvferry.Pool(0, 8)], [])
    assert (empty.value.kind, empty.value.pool, empty.value.slot_count, empty.value.slot_bytes) == ("EmptyPool", 0, 0, 8)
    plane = kvferry.Plane(cell_bytes=256, unit_stride=256, token_stride=256, units=(0, 1), units_total=1, tokens=16)
    rows = [kvferry.Row(7, "key", "bf16", 0, 4096, [plane]), kvferry.Row(7, "value", "bf16", 0, 4096, [plane], offset=2048)]
    with pytest.raises(kvferry.TableError) as overlap:
        kvferry.PageTable(8, [kvferry.Pool(4, 8192)], [kvferry.Group(rows, tokens_per_block=16)])
    error = overlap.value
    assert error.kind == "RowsOverlap" and {error.row, error.other} == {(0, 7, "key"), (0, 7, "value")}
    assert error.row.layer == 7 and str(error.row).startswith("pool 0, layer 7")
    halves = [kvferry.PageTable.from_config(CONFIG, "tp2", rank, tokens_per_block=16, dtype="bf16", slot_count=4) for rank in range(2)]
    with pytest.raises(kvferry.MatchError) as uncovered:
        kvferry.plan(halves[:1], [table()])
    told = uncovered.value
    assert (told.kind, told.destination_rank, told.layers, told.units) == ("Uncovered", 0, [0, 1, 2, 3], (1, 2))
    assert told.role in ("key", "value") and told.plane == 0
