"""Moves paged KV caches between a prefill and a decode instance that are cut differently, over UCX.

Each rank has an :class:`Engine`. It publishes its pools with a :class:`PageTable`, and connects with the cards of both instances.
For each request the destination says by :meth:`Engine.receive` where its blocks go, the sources write them there by
:meth:`Engine.send`, and both handles end when the two sides agree on every byte.
"""

from . import _ucx

_ucx.choose()

from ._log import forward_log  # noqa: E402  first: its exit hook runs after those of what is imported below
from ._doctor import Doctor, doctor  # noqa: E402
from ._engine import Engine, InstanceCard, Link, Quarantine, Region, Route  # noqa: E402
from ._errors import (  # noqa: E402
    CardError,
    ClosedError,
    ConnectError,
    ForkedError,
    KvferryError,
    MatchError,
    NotQuietError,
    OptionsError,
    PartError,
    Peer,
    PostError,
    PublishError,
    PushError,
    RegionError,
    RequestError,
    RowName,
    StartError,
    TableError,
    WireError,
)
from ._kvferry import __version__  # noqa: E402
from ._maps import BlockMap, BlockMaps, Slots  # noqa: E402
from ._metrics import metrics, record_metrics  # noqa: E402
from ._plan import Explanation, Flow, Plan, plan  # noqa: E402
from ._table import Dtype, Group, PageTable, Plane, Pool, Row  # noqa: E402
from ._transfer import Carried, Receive, Received, Send, Sent, Signal, Times, Transfer  # noqa: E402

__all__ = [
    "BlockMap",
    "BlockMaps",
    "CardError",
    "Carried",
    "ClosedError",
    "ConnectError",
    "Doctor",
    "Dtype",
    "Engine",
    "Explanation",
    "Flow",
    "ForkedError",
    "Group",
    "InstanceCard",
    "KvferryError",
    "Link",
    "MatchError",
    "NotQuietError",
    "OptionsError",
    "PageTable",
    "PartError",
    "Peer",
    "Plan",
    "Plane",
    "Pool",
    "PostError",
    "PublishError",
    "PushError",
    "Quarantine",
    "Receive",
    "Received",
    "Region",
    "RegionError",
    "RequestError",
    "Route",
    "Row",
    "RowName",
    "Send",
    "Sent",
    "Signal",
    "Slots",
    "StartError",
    "TableError",
    "Times",
    "Transfer",
    "WireError",
    "__version__",
    "doctor",
    "forward_log",
    "metrics",
    "plan",
    "record_metrics",
]
