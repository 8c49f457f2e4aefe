"""Two instances of one rank each, for tests."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import kvferry

CONFIG = {"model_type": "llama", "num_hidden_layers": 4, "num_key_value_heads": 2, "head_dim": 64}
SLOTS = 16
PATIENCE = 20.0
"""Seconds that a test waits for anything: for a busy machine."""


def table(tokens_per_block: int = 16, slot_count: int = SLOTS, **options: Any) -> kvferry.PageTable:
    return kvferry.PageTable.from_config(
        CONFIG, "tp1", 0, tokens_per_block=tokens_per_block, dtype="bf16", slot_count=slot_count, **options
    )


@dataclass
class Side:
    """One rank with its memory."""

    engine: kvferry.Engine
    regions: list[kvferry.Region]
    link: kvferry.Link


def started(instance: str, tokens_per_block: int, **options: Any) -> tuple[kvferry.Engine, list[kvferry.Region]]:
    engine = kvferry.Engine(instance=instance, patience=PATIENCE, **options)
    placed, regions = engine.allocate(table(tokens_per_block))
    engine.publish(placed, regions)
    return engine, regions


def connect(*ranks: tuple[kvferry.Engine, list[kvferry.Region]]) -> tuple[Side, Side]:
    """A source and a destination. Their calls have to overlap."""
    cards = [kvferry.InstanceCard([engine.card]) for engine, _ in ranks]
    with ThreadPoolExecutor(2) as pool:
        links = list(pool.map(lambda rank: rank[0].connect(*cards), ranks))
    source, destination = (Side(engine, regions, link) for (engine, regions), link in zip(ranks, links))
    return source, destination


def pair(**options: Any) -> tuple[Side, Side]:
    """A source of blocks of 16 tokens and a destination of blocks of 32, both in this process, connected."""
    return connect(started("prefill", 16, **options), started("decode", 32, **options))
