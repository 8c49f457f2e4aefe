#!/usr/bin/env python3
"""Prints models.json: what each model under examples/models caches, worked out here from the keys of its config.

A role is [layers as half-open ranges, planes as (units, cells of a 128-token block, bytes of a cell)], with 8-bit keys,
values and latents, 8-bit indexers, and MTP layers.
"""

import json
import pathlib

MODELS = pathlib.Path(__file__).parents[4] / "examples" / "models"
BLOCK = 128


def ranges(layers):
    text = []
    for layer in sorted(layers):
        if text and text[-1][1] == layer:
            text[-1][1] += 1
        else:
            text.append([layer, layer + 1])
    return ",".join(f"{start}..{end}" for start, end in text)


def role(layers, *planes):
    return [ranges(layers), [list(plane) for plane in planes]]


def heads(layers, units, size):
    return {"key": role(layers, (units, BLOCK, size)), "value": role(layers, (units, BLOCK, size))}


def conv(layers, columns, *sections):
    return role(layers, *((channels, columns, 2) for channels in sections))


def indexer(layers, cells=BLOCK):
    return role(layers, (1, cells, 128), (1, cells, 4))


def describe(name):
    outer = json.loads((MODELS / f"{name}.json").read_text())
    config = {**outer, **outer.get("text_config", {})}
    get = config.get
    kind = outer["architectures"][0]
    n = get("num_hidden_layers") or len(config["layers_block_type"])
    hidden = range(n)
    mtp = get("num_nextn_predict_layers", 0)
    full, window, state = {}, {}, {}
    windows = None
    more = []
    if "num_mtp_modules" in config:
        mtp = config["num_mtp_modules"] * get("mtp_transformer_layers", 1)
    if kind.startswith("Qwen3Next") or kind.startswith("Qwen3_5"):
        mtp = get("mtp_num_hidden_layers", 1)
    if kind.startswith("Nemotron"):
        mtp = mtp * len(get("mtp_layers_block_type") or get("mtp_hybrid_override_pattern") or [])
    every = range(n + mtp)

    if kind.startswith("DeepseekV4"):
        ratio = dict(enumerate(config["compress_ratios"]))
        fours, many = ([i for i in every if ratio[i] == r] for r in (4, 128))
        # 448 + 64 elements: 8-bit, but for the last 64, and 7 + 1 B of scales.
        latent = lambda cells: ((1, cells, 448 + 2 * 64), (1, cells, 8))
        windows = config["sliding_window"]
        # The two ratios in one role: layer by layer either 32 cells or 1.
        full = {
            "compressed latent": role(fours, *latent(32)),
            "compressed latent/128": role(many, *latent(1)),
            "indexer key": indexer(fours, 32),
        }
        window = {"latent": role(every, *latent(BLOCK)), "compressor state": role(many, (1, BLOCK, 4 * 2 * 512))}
        eight = {
            "compressor state": role(fours, (1, BLOCK, 4 * 2 * 2 * 512)),
            "indexer compressor state": role(fours, (1, BLOCK, 4 * 2 * 2 * 128)),
        }
        more = [{"window": 8, "roles": eight}]
    elif kind.startswith("KimiK3"):
        linear = config["linear_attn_config"]
        full = {"latent": role([i - 1 for i in linear["full_attn_layers"]], (1, BLOCK, 576))}
        kda = [i - 1 for i in linear["kda_layers"]]
        state = {"conv state": conv(kda, 3, 12288, 12288, 12288), "ssm state": role(kda, (96, 1, 128 * 128 * 4))}
    elif "kv_lora_rank" in config:
        full = {"latent": role(every, (1, BLOCK, config["kv_lora_rank"] + config["qk_rope_head_dim"]))}
        if "index_topk" in config:
            types = get("indexer_types", ["full"] * n)
            full["indexer key"] = indexer([i for i in every if i >= n or types[i] == "full"])
    elif kind.startswith("Nemotron"):
        letters = {"mamba": "M", "attention": "*", "moe": "E"}
        layers = get("hybrid_override_pattern") or [letters[word] for word in config["layers_block_type"]]
        own = list(layers) + ["*", "E"][:mtp]
        full = heads([i for i in every if own[i] == "*"], config["num_key_value_heads"], 128)
        mamba = [i for i in every if own[i] == "M"]
        count, size = config["mamba_num_heads"], config["ssm_state_size"]
        width = 4 if "mamba_ssm_cache_dtype" in config else 2
        groups = config["n_groups"] * size
        state = {
            "conv state": conv(mamba, 3, count * 64, groups, groups),
            "ssm state": role(mamba, (count, 1, 64 * size * width)),
        }
    elif kind.startswith("Qwen3Next") or kind.startswith("Qwen3_5"):
        attends = [i for i in every if i >= n or i % 4 == 3]
        full = heads(attends, config["num_key_value_heads"], config["head_dim"])
        linear = [i for i in every if i not in attends]
        keys, values = config["linear_num_key_heads"] * 128, config["linear_num_value_heads"] * 128
        width = 4 if "mamba_ssm_dtype" in config else 2
        state = {
            "conv state": conv(linear, 3, keys, keys, values),
            "ssm state": role(linear, (config["linear_num_value_heads"], 1, 128 * 128 * width)),
        }
    else:
        units = config["num_key_value_heads"]
        size = get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        types = get("layer_types")
        if "sliding_window_pattern" in config:
            types = ["full_attention" if i % 6 == 5 else "sliding_attention" for i in hidden]
        if types:
            windows = config["sliding_window"]
            slides = [i for i in hidden if types[i] == "sliding_attention"]
            window = heads(slides, units, size)
            units = get("num_global_key_value_heads", units)
            size = get("global_head_dim", size)
            full = heads([i for i in hidden if i not in slides], units, size)
        else:
            full = heads(every, units, size)
        if "sparse_attention_config" in config:
            sparse = config["sparse_attention_config"]
            owners = [i for i in hidden if sparse["sparse_attention_freq"][i]]
            full["indexer key"] = role(owners, (1, BLOCK, 2 * sparse["sparse_index_dim"]))

    groups = [{"window": None, "roles": full}]
    if window:
        groups.append({"window": windows, "roles": window})
    groups += more
    if state:
        groups.append({"window": "state", "roles": state})
    return {"model": name, "architecture": kind, "hidden_layers": n, "mtp_layers": mtp, "groups": groups}


def lines(model):
    head = {key: value for key, value in model.items() if key != "groups"}
    groups = ",\n".join(
        f'      {{ "window": {json.dumps(group["window"])}, "roles": {{\n'
        + ",\n".join(f"        {json.dumps(name)}: {json.dumps(value)}" for name, value in group["roles"].items())
        + " } }"
        for group in model["groups"]
    )
    return "    " + json.dumps(head)[:-1] + ', "groups": [\n' + groups + " ] }"


source = "models.py, from the configs under examples/models alone"
models = ",\n".join(lines(describe(path.stem)) for path in sorted(MODELS.glob("*.json")))
print(f'{{\n  "source": {json.dumps(source)},\n  "models": [\n{models}\n  ]\n}}')
