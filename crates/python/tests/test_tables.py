"""Page tables and plans."""

from __future__ import annotations

import copy
import json
import pickle
import xml.etree.ElementTree
from pathlib import Path

import pytest

import kvferry
from kvferry import Group, PageTable, Plane, Pool, Row
from pairs import CONFIG, table

MODELS = Path(__file__).parents[3] / "examples" / "models"


def glm(cut: str, rank: int) -> PageTable:
    config = json.loads((MODELS / "glm-5.2.json").read_text())
    return PageTable.from_config(config, cut, rank, tokens_per_block=64, dtype="fp8_e4m3", slot_count=1)


def test_a_table_of_a_config_is_the_table_of_its_own_pools_and_rows() -> None:
    built = table()
    assert (len(built.pools), len(built.groups), built.hidden_layers) == (1, 1, 4)
    # Tokens, layers, keys and values, heads, head size, two bytes.
    assert built.pool_bytes == [16 * 16 * 4 * 2 * 2 * 64 * 2]
    written = PageTable(built.hidden_layers, built.pools, built.groups)
    assert written == built and hash(written) == hash(built)
    assert PageTable.from_bytes(built.to_bytes()) == built
    assert table(tokens_per_block=32) != built
    assert pickle.loads(pickle.dumps(built)) == copy.deepcopy(built) == built


def test_a_table_of_ones_own() -> None:
    cells = Plane(cell_bytes=256, unit_stride=256, token_stride=512, units=(2, 4), units_total=8, tokens=16)
    rows = [Row(0, "key", "bf16", 0, 8192, [cells]), Row(0, "my scales", "u8", 1, 8192, [cells])]
    pools = [Pool(slot_count=10, slot_bytes=8192), Pool(10, 8192, slot_stride=10000, base=4096, device=3)]
    own = PageTable(1, pools, [Group(rows, tokens_per_block=16, window_tokens=128, ordinals=(2, 1))], dp_rank=1)
    assert own.groups[0].rows[1].role == "my scales" and own.groups[0].ordinals == (2, 1)
    assert PageTable.from_bytes(own.to_bytes()).pools[1] == pools[1]
    assert [pool.base for pool in own.placed([64, 128]).pools] == [64, 4096]


def test_what_is_wrong_is_named() -> None:
    with pytest.raises(kvferry.TableError, match="tpp3") as caught:
        PageTable.from_config(CONFIG, "tpp3", 0, tokens_per_block=16, dtype="bf16", slot_count=1)
    assert caught.value.kind == "Syntax"
    with pytest.raises(kvferry.TableError, match="rank 2 is not one of the 2") as caught:
        PageTable.from_config(CONFIG, "tp2", 2, tokens_per_block=16, dtype="bf16", slot_count=1)
    with pytest.raises(ValueError, match="none of f32, f16, bf16"):
        PageTable.from_config(CONFIG, "tp2", 0, tokens_per_block=16, dtype="int8", slot_count=1)  # type: ignore[arg-type]
    with pytest.raises(kvferry.TableError, match="empty") as caught:
        PageTable(1, [Pool(0, 8)], [])
    with pytest.raises(kvferry.TableError, match="unknown"):
        PageTable.from_config({"model_type": "abacus"}, "tp1", 0, tokens_per_block=1, dtype="bf16", slot_count=1)


def test_a_plan_says_who_sends_what_to_whom() -> None:
    plan = kvferry.plan([glm("pp2", 0), glm("pp2", 1)], [glm("tp2", 0), glm("tp2", 1)])
    assert plan.sources == [[0, 1], [0, 1]]
    explained = plan.explain(8192)
    assert [(flow.source, flow.destination) for flow in explained.flows] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    # As `loopback --model glm-5.2 --from pp2 --to tp2 --tokens 8192` moves.
    assert explained.nbytes == 781_516_800
    assert "0 -> 1" in str(explained)
    drawn = xml.etree.ElementTree.fromstring(plan.explain(8192)._repr_svg_())
    assert drawn.tag.endswith("svg")
    held = plan.explain((4096, 8192))
    assert held.nbytes == explained.nbytes // 2


def test_instances_that_do_not_match_are_refused() -> None:
    other = PageTable.from_config({**CONFIG, "head_dim": 128}, "tp1", 0, tokens_per_block=16, dtype="bf16", slot_count=1)
    with pytest.raises(kvferry.MatchError) as caught:
        kvferry.plan([table()], [other])
    assert caught.value.kind == "Incompatible"
