#!/usr/bin/env python3
"""Prints the JSON form of the seed table with mask T F T F, from the numbers in seed.json alone."""

import json
import pathlib

seed = json.loads((pathlib.Path(__file__).parent / "seed.json").read_text())
tokens, index = seed["tokens_per_block"], seed["index_head_dim"]
key_row = tokens * seed["head_dim"] * 2
index_row = tokens * (index + index // seed["quant_block"] * 4)
owners = [layer for layer, owns in enumerate("TFTF") if owns == "T"]


def plane(offset, cell):
    return {
        "offset": offset,
        "cell_bytes": cell,
        "unit_stride": tokens * cell,
        "token_stride": cell,
        "units": {"start": 0, "end": 1},
        "units_total": 1,
        "tokens": tokens,
    }


def row(layer, role, dtype, pool, offset, size, planes):
    return {
        "layer": layer,
        "role": role,
        "dtype": dtype,
        "pool": pool,
        "offset": offset,
        "bytes": size,
        "planes": planes,
    }


def pool(slot_bytes):
    return {"memory": "Host", "base": 0, "slot_count": 8, "slot_stride": slot_bytes, "slot_bytes": slot_bytes}


keys = [plane(0, seed["head_dim"] * 2)]
index_keys = [plane(0, index), plane(tokens * index, 4)]
rows = [row(n, "Key", "F16", 0, n * key_row, key_row, keys) for n in range(4)]
rows += [row(n, "IndexerKey", "Fp8E4m3", 1, at * index_row, index_row, index_keys) for at, n in enumerate(owners)]
group = {"kind": {"Paged": {"tokens_per_block": tokens, "window_tokens": None, "ordinals": {"step": 1, "first": 0}}}, "rows": rows}
pools = [pool(4 * key_row), pool(len(owners) * index_row)]
print(json.dumps({"hidden_layers": 4, "dp_rank": 0, "pools": pools, "groups": [group]}, indent=2))
