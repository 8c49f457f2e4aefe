"""Page tables: where every (layer, role, unit, token) of one rank's paged cache lives."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from . import _kvferry

Dtype = Literal["f32", "f16", "bf16", "fp8_e4m3", "fp8_e5m2", "fp4_e2m1", "u8"]
"""Element types. A label: two rows match only if it is equal."""

_DTYPES = {
    "f32": "F32", "f16": "F16", "bf16": "Bf16", "fp8_e4m3": "Fp8E4m3", "fp8_e5m2": "Fp8E5m2", "fp4_e2m1": "Fp4E2m1", "u8": "U8",
}  # fmt: skip
_ROLES = {
    "key": "Key", "value": "Value", "latent": "Latent", "indexer key": "IndexerKey", "key scale": "KeyScale",
    "value scale": "ValueScale", "conv state": "ConvState", "ssm state": "SsmState",
}  # fmt: skip


@dataclass(frozen=True)
class Pool:
    """One allocation of equal slots: byte ``b`` of slot ``s`` is at ``base + s * slot_stride + b``."""

    slot_count: int
    """Number of slots."""
    slot_bytes: int
    """Bytes of a slot that rows may use."""
    slot_stride: int | None = None
    """Bytes from one slot to the next; ``None``: ``slot_bytes``."""
    base: int = 0
    """Address of slot 0. 0: where the region begins that the pool is published with."""
    device: int | None = None
    """CUDA device; ``None`` for memory of the host."""


@dataclass(frozen=True)
class Plane:
    """A strided array inside a row, over units (heads) and tokens.

    The cell of unit ``u`` (of the whole model) and token ``t`` of the block is the ``cell_bytes`` bytes at
    ``row.offset + offset + (u - units[0]) * unit_stride + t * token_stride`` of a slot.
    """

    cell_bytes: int
    """Bytes of one (unit, token) cell."""
    unit_stride: int
    """Bytes from one unit to the next."""
    token_stride: int
    """Bytes from one token to the next."""
    units: tuple[int, int]
    """Units held here, half-open, out of ``units_total``."""
    units_total: int
    """Units of the whole model."""
    tokens: int
    """Places on the token axis: tokens of a block, or a divisor of that where several tokens share a cell."""
    offset: int = 0
    """First byte, from the start of the row."""


@dataclass(frozen=True)
class Row:
    """The bytes of one (layer, role) in a slot."""

    layer: int
    """The model's layer, whatever the rank."""
    role: str
    """``key``, ``value``, ``latent``, ``indexer key``, ``key scale``, ``value scale``, ``conv state``, ``ssm state``, or any
    other name of ASCII."""
    dtype: Dtype
    """Element type."""
    pool: int
    """Index of the pool that holds the row."""
    nbytes: int
    """Bytes of the row."""
    planes: Sequence[Plane]
    """Arrays inside the row."""
    offset: int = 0
    """First byte, from the start of a slot."""


@dataclass(frozen=True)
class Group:
    """One life cycle: one list of slots a request, valid in each pool that its rows name."""

    rows: Sequence[Row]
    """Only those that exist: a layer that owns none of a role has no row for it."""
    tokens_per_block: int | None
    """Tokens of a block; ``None`` for state, of which a request has one slot."""
    window_tokens: int | None = None
    """Sliding window; ``None`` keeps every token."""
    ordinals: tuple[int, int] = (1, 0)
    """``(step, first)``: this rank holds the blocks whose ordinal leaves ``first`` when divided by ``step``."""


@dataclass(frozen=True, eq=False, repr=False)
class PageTable:
    """One rank's description of its pools. Made by :meth:`from_config`, or of pools and groups that somebody else laid out.

    Every table is checked when it is made: :class:`kvferry.TableError` says what does not hold.
    """

    hidden_layers: int
    """Hidden layers of the model. A layer from here on is an MTP or draft layer, which one side may lack."""
    pools: Sequence[Pool]
    """Allocations."""
    groups: Sequence[Group]
    """Life cycles. A request has a block map for each, in this order."""
    dp_rank: int = 0
    """Data-parallel part that the rank is of."""
    _native: _kvferry.Table = field(init=False)

    def __post_init__(self) -> None:
        table = {
            "hidden_layers": self.hidden_layers,
            "dp_rank": self.dp_rank,
            "pools": [_pool(pool) for pool in self.pools],
            "groups": [_group(group) for group in self.groups],
        }
        object.__setattr__(self, "_native", _kvferry.Table.from_json(json.dumps(table)))

    @classmethod
    def from_config(
        cls,
        config: Mapping[str, Any] | str,
        cut: str,
        rank: int,
        *,
        tokens_per_block: int,
        dtype: Dtype,
        slot_count: int,
        state_slot_count: int | None = None,
        mtp: bool = False,
        indexer_dtype: Dtype = "fp8_e4m3",
        ssm_dtype: Dtype | None = None,
        pooling: Literal["block_major", "layer_together", "layer_stacked", "layer_split"] = "block_major",
        cells: Literal["hnd", "nhd"] = "hnd",
        state_cells: Literal["hnd", "nhd"] = "hnd",
        device: int | None = None,
    ) -> PageTable:
        """The table of one rank of a model.

        - ``config``: the model's ``config.json``, as text or as the dictionary that it is.
        - ``cut``: how the instance is cut: ``"tp8"``, ``"pp4tp2"``, ``"dp2"``, ``"cp2tp2"``, ``"pp40+38tp2"``.
        - ``rank``: of the instance, from 0 on.
        - ``slot_count``: slots of each pool of blocks; ``state_slot_count``, as many by default, of each pool of state.
        - ``mtp``: whether the last stage holds the model's MTP layers too.
        - ``pooling``: which rows share a pool; ``cells``: heads outside of tokens (``"hnd"``) or inside.
        - ``device``: CUDA device of the pools; ``None`` for memory of the host.

        Raises :class:`kvferry.TableError`: the config is of a model that is not known, or the cut does not fit it.
        """
        text = config if isinstance(config, str) else json.dumps(config)
        native = _kvferry.Table.from_config(
            text, cut, rank, tokens_per_block=tokens_per_block, dtype=dtype, slot_count=slot_count,
            state_slot_count=state_slot_count, mtp=mtp, indexer_dtype=indexer_dtype, ssm_dtype=ssm_dtype, pooling=pooling,
            cells=cells, state_cells=state_cells, device=device,
        )  # fmt: skip
        return cls._of(native)

    @classmethod
    def from_bytes(cls, data: bytes) -> PageTable:
        """Reads what :meth:`to_bytes` has made, and checks it."""
        return cls._of(_kvferry.Table.from_bytes(data))

    def to_bytes(self) -> bytes:
        """A compact form for other processes. The same table always gives the same bytes."""
        return self._native.to_bytes()

    def __reduce__(self) -> tuple[Any, ...]:
        return PageTable.from_bytes, (self.to_bytes(),)

    def to_dict(self) -> dict[str, Any]:
        """The table as the library writes it as JSON."""
        table: dict[str, Any] = json.loads(self._native.to_json())
        return table

    @property
    def pool_bytes(self) -> list[int]:
        """Bytes that each pool takes, from its first slot to behind its last."""
        return self._native.pool_bytes()

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one token takes on this rank, over all groups of blocks."""
        return self._native.bytes_per_token()

    def placed(self, bases: Sequence[int]) -> PageTable:
        """This table with the addresses of its pools, but for those that have one."""
        return self._of(self._native.placed(list(bases)))

    @classmethod
    def _of(cls, native: _kvferry.Table) -> PageTable:
        read = json.loads(native.to_json())
        table = cls.__new__(cls)
        values = {
            "hidden_layers": read["hidden_layers"],
            "dp_rank": read["dp_rank"],
            "pools": [_read_pool(pool) for pool in read["pools"]],
            "groups": [_read_group(group) for group in read["groups"]],
            "_native": native,
        }
        for name, value in values.items():
            object.__setattr__(table, name, value)
        return table

    def __eq__(self, other: object) -> bool:
        return self._native == other._native if isinstance(other, PageTable) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.to_bytes())

    def __repr__(self) -> str:
        rows = sum(len(group.rows) for group in self.groups)
        return f"<PageTable: {rows} rows in {len(self.groups)} groups and {len(self.pools)} pools>"


def _pool(pool: Pool) -> dict[str, Any]:
    memory: object = "Host" if pool.device is None else {"Cuda": {"device": pool.device}}
    stride = pool.slot_bytes if pool.slot_stride is None else pool.slot_stride
    return {
        "memory": memory, "base": pool.base, "slot_count": pool.slot_count, "slot_stride": stride, "slot_bytes": pool.slot_bytes,
    }  # fmt: skip


def _read_pool(read: dict[str, Any]) -> Pool:
    memory = read["memory"]
    device = None if memory == "Host" else memory["Cuda"]["device"]
    return Pool(read["slot_count"], read["slot_bytes"], read["slot_stride"], read["base"], device)


def _group(group: Group) -> dict[str, Any]:
    kind: object = "State"
    if group.tokens_per_block is not None:
        step, first = group.ordinals
        paged = {"tokens_per_block": group.tokens_per_block, "window_tokens": group.window_tokens}
        kind = {"Paged": {**paged, "ordinals": {"step": step, "first": first}}}
    return {"kind": kind, "rows": [_row(row) for row in group.rows]}


def _read_group(read: dict[str, Any]) -> Group:
    rows = [_read_row(row) for row in read["rows"]]
    if read["kind"] == "State":
        return Group(rows, None)
    paged = read["kind"]["Paged"]
    ordinals = (paged["ordinals"]["step"], paged["ordinals"]["first"])
    return Group(rows, paged["tokens_per_block"], paged["window_tokens"], ordinals)


def _row(row: Row) -> dict[str, Any]:
    if row.dtype not in _DTYPES:
        raise ValueError(f"{row.dtype!r} is none of {', '.join(_DTYPES)}")
    return {
        "layer": row.layer,
        "role": _ROLES.get(row.role, {"Named": row.role}),
        "dtype": _DTYPES[row.dtype],
        "pool": row.pool,
        "offset": row.offset,
        "bytes": row.nbytes,
        "planes": [{**vars(plane), "units": {"start": plane.units[0], "end": plane.units[1]}} for plane in row.planes],
    }


def _read_row(read: dict[str, Any]) -> Row:
    roles = {written: role for role, written in _ROLES.items()}
    dtypes: dict[str, Any] = {written: dtype for dtype, written in _DTYPES.items()}
    role = read["role"]["Named"] if isinstance(read["role"], dict) else roles[read["role"]]
    units = [(plane["units"]["start"], plane["units"]["end"]) for plane in read["planes"]]
    planes = [Plane(**{**plane, "units": held}) for plane, held in zip(read["planes"], units)]
    return Row(read["layer"], role, dtypes[read["dtype"]], read["pool"], read["bytes"], planes, read["offset"])
