"""Moves requests from a prefill to a decode process that lay their caches out differently, and checks every byte.

    pip install kvferry libucx-cu13    # or a libucx0 of Debian's or Ubuntu's in place of the latter
    python two_processes.py [--transports tcp] [--requests 20]
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
from multiprocessing.connection import Connection

import numpy
from numpy.typing import NDArray

import kvferry

LAYERS, HEADS, HEAD_DIM, SLOTS = 8, 4, 64, 64
CONFIG = {"model_type": "llama", "num_hidden_layers": LAYERS, "num_key_value_heads": HEADS, "head_dim": HEAD_DIM}
TOKENS = 256
# Prefill has blocks of 16 tokens, with the heads outside of the tokens; decode has blocks of 32, with the heads inside.
PREFILL_TABLE = kvferry.PageTable.from_config(CONFIG, "tp1", 0, tokens_per_block=16, dtype="bf16", slot_count=SLOTS)
DECODE_TABLE = kvferry.PageTable.from_config(
    CONFIG, "tp1", 0, tokens_per_block=32, dtype="bf16", slot_count=SLOTS, cells="nhd"
)
TIMEOUT = 30.0  # seconds


def cache_of(request: int) -> NDArray[numpy.uint16]:
    """What prefill computes for a request: ``[tokens, layers, keys and values, heads, head_dim]`` of 16 bits each."""
    shape = (TOKENS, LAYERS, 2, HEADS, HEAD_DIM)
    return numpy.random.default_rng(request).integers(0, 1 << 16, shape, numpy.uint16)


def slots_of(request: int, blocks: int) -> NDArray[numpy.int64]:
    """The slots that a framework would take from its free list: any."""
    return numpy.random.default_rng(1000 + request).permutation(SLOTS)[:blocks]


def prefill(peer: Connection, transports: str | None, requests: int) -> None:
    pool = numpy.zeros(PREFILL_TABLE.pool_bytes[0] // 2, numpy.uint16)
    by_block = pool.reshape(SLOTS, LAYERS, 2, HEADS, 16, HEAD_DIM)
    with kvferry.Engine(instance="prefill", transports=transports) as engine:
        engine.publish(PREFILL_TABLE, [engine.register(pool)])
        card = kvferry.InstanceCard([engine.card])
        peer.send(card.to_bytes())
        link = engine.connect(card, kvferry.InstanceCard.from_bytes(peer.recv()))
        for request in range(requests):
            slots = slots_of(request, TOKENS // 16)
            blocks = cache_of(request).reshape(-1, 16, LAYERS, 2, HEADS, HEAD_DIM)
            by_block[slots] = blocks.transpose(0, 2, 3, 4, 1, 5)
            (sent,) = engine.send(link, request, [slots], TOKENS).wait(TIMEOUT)
            if request in (0, requests - 1):
                rate, route = sent.nbytes / sent.elapsed / 1e9, sent.carried[0].route
                print(f"request {request}: {sent.nbytes} B in {sent.runs} runs by {route}, {rate:.2f} GB/s", flush=True)
        peer.recv()  # decode has checked everything


async def receive_all(engine: kvferry.Engine, link: kvferry.Link, pool: NDArray[numpy.uint16], requests: int) -> None:
    by_block = pool.reshape(SLOTS, LAYERS, 2, 32, HEADS, HEAD_DIM)
    for request in range(requests):
        slots = slots_of(-request, TOKENS // 32)
        receive = engine.receive(link, request, [slots], TOKENS)
        await asyncio.wait_for(receive, TIMEOUT)
        # Nobody writes to the slots any more. After a request that has failed this is what has to be waited for.
        await asyncio.wait_for(receive.until_quiet(), TIMEOUT)
        arrived = by_block[slots].transpose(0, 3, 1, 2, 4, 5).reshape(TOKENS, LAYERS, 2, HEADS, HEAD_DIM)
        numpy.testing.assert_array_equal(arrived, cache_of(request))


def decode(peer: Connection, transports: str | None, requests: int) -> None:
    with kvferry.Engine(instance="decode", transports=transports) as engine:
        # Memory of the engine's own: prefill maps it and copies straight into it.
        table, regions = engine.allocate(DECODE_TABLE)
        engine.publish(table, regions)
        card = kvferry.InstanceCard([engine.card])
        peer.send(card.to_bytes())
        link = engine.connect(kvferry.InstanceCard.from_bytes(peer.recv()), card)
        asyncio.run(receive_all(engine, link, regions[0].array.view(numpy.uint16), requests))
        print(f"{requests} requests arrived, every byte is right", flush=True)
        peer.send(None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--transports", help="those that UCX may use, as in UCX_TLS")
    parser.add_argument("--requests", type=int, default=20)
    options = parser.parse_args()
    here, there = multiprocessing.Pipe()
    # Spawned, not forked: an engine is of no use after a fork.
    spawn = multiprocessing.get_context("spawn")
    other = spawn.Process(target=decode, args=(there, options.transports, options.requests))
    other.start()
    there.close()
    prefill(here, options.transports, options.requests)
    other.join(TIMEOUT)
    if other.exitcode != 0:
        raise SystemExit(f"decode ended with {other.exitcode}")


if __name__ == "__main__":
    main()
