"""Moves a request from one GPU to another, from a tensor of torch's into one, and checks every byte.

    pip install kvferry libucx-cu13 torch
    python two_gpus.py [--tokens 16384] [--devices 0 1]
"""

from __future__ import annotations

import argparse
import multiprocessing
from multiprocessing.connection import Connection

import torch

import kvferry

LAYERS, HEADS, HEAD_DIM, TOKENS_PER_BLOCK = 16, 8, 128, 16
CONFIG = {"model_type": "llama", "num_hidden_layers": LAYERS, "num_key_value_heads": HEADS, "head_dim": HEAD_DIM}
ROUNDS = 5
TIMEOUT = 60.0  # seconds


def table(device: int, tokens: int) -> kvferry.PageTable:
    slot_count = 2 * tokens // TOKENS_PER_BLOCK
    return kvferry.PageTable.from_config(
        CONFIG, "tp1", 0, tokens_per_block=TOKENS_PER_BLOCK, dtype="bf16", slot_count=slot_count, device=device
    )


def cache(device: int, tokens: int) -> torch.Tensor:
    """What prefill computes: ``[blocks, bytes of a block]``. Both processes know it, to compare."""
    made = torch.Generator().manual_seed(7)
    block_bytes = LAYERS * 2 * HEADS * TOKENS_PER_BLOCK * HEAD_DIM * 2
    return torch.randint(0, 256, (tokens // TOKENS_PER_BLOCK, block_bytes), dtype=torch.uint8, generator=made).to(device)


def slots(seed: int, tokens: int) -> torch.Tensor:
    blocks = tokens // TOKENS_PER_BLOCK
    return torch.randperm(2 * blocks, generator=torch.Generator().manual_seed(seed))[:blocks]


def rank(role: str, device: int, tokens: int, peer: Connection) -> None:
    torch.cuda.set_device(device)
    with kvferry.Engine(instance=role, gpu=device) as engine:
        # Memory of the engine's own can be mapped by the other process. `engine.register(tensor)` takes memory of torch's,
        # which others write through a buffer.
        placed, regions = engine.allocate(table(device, tokens))
        engine.publish(placed, regions)
        pool = torch.as_tensor(regions[0], device=f"cuda:{device}").view(2 * tokens // TOKENS_PER_BLOCK, -1)
        card = kvferry.InstanceCard([engine.card])
        peer.send(card.to_bytes())
        other = kvferry.InstanceCard.from_bytes(peer.recv())
        link = engine.connect(card, other) if role == "prefill" else engine.connect(other, card)
        for request in range(ROUNDS):
            own = slots(request if role == "prefill" else -1 - request, tokens)
            if role == "prefill":
                pool[own] = cache(device, tokens)
                torch.cuda.synchronize()  # the bytes are there: only then are they sent
                (sent,) = engine.send(link, request, [own.numpy()], tokens).wait(TIMEOUT)
                ms, rate, route = sent.elapsed * 1e3, sent.nbytes / sent.elapsed / 1e9, sent.carried[0].route
                print(f"request {request}: {sent.nbytes} B in {ms:.2f} ms by {route}, {rate:.0f} GB/s", flush=True)
            else:
                engine.receive(link, request, [own.numpy()], tokens).wait(TIMEOUT)
                assert torch.equal(pool[own], cache(device, tokens))
            # Neither goes on before the other has compared.
            peer.send(None)
            peer.recv()
        if role == "decode":
            print("every byte is right", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--devices", type=int, nargs=2, default=[0, 1], metavar=("PREFILL", "DECODE"))
    options = parser.parse_args()
    here, there = multiprocessing.Pipe()
    spawn = multiprocessing.get_context("spawn")
    other = spawn.Process(target=rank, args=("decode", options.devices[1], options.tokens, there))
    other.start()
    there.close()
    rank("prefill", options.devices[0], options.tokens, here)
    other.join(TIMEOUT)
    if other.exitcode != 0:
        raise SystemExit(f"decode ended with {other.exitcode}")


if __name__ == "__main__":
    main()
