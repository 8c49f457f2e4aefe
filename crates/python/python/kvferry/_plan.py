"""What would move between two instances, without moving anything."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from . import _kvferry
from ._maps import token_bounds
from ._table import PageTable


class Flow(NamedTuple):
    """What one source rank sends to one destination rank."""

    source: int
    """Rank that sends."""
    destination: int
    """Rank that receives."""
    layers: list[int]
    """Layers of which it sends at least a part of a row."""
    rows: int
    """(layer, role) rows of which it sends at least a part."""
    nbytes: int
    """Bytes of the request."""
    pieces: int
    """Strided pieces."""
    runs: int
    """Contiguous copies."""


class Explanation:
    """What moves for some tokens of a request. ``str`` gives a table; a notebook shows a picture."""

    def __init__(self, native: _kvferry.Explanation) -> None:
        self._native = native

    @property
    def flows(self) -> list[Flow]:
        """What moves between each pair of ranks that talk, by source, then destination."""
        return [Flow(*flow) for flow in self._native.flows()]

    @property
    def nbytes(self) -> int:
        """Bytes in all."""
        return sum(flow.nbytes for flow in self.flows)

    def to_svg(self) -> str:
        """A picture as an SVG document: source ranks down, destination ranks across."""
        return self._native.svg()

    def _repr_svg_(self) -> str:
        return self.to_svg()

    def __str__(self) -> str:
        return self._native.text()


class Plan:
    """Who sends what to whom. See :func:`plan`."""

    def __init__(self, native: _kvferry.Plan) -> None:
        self._native = native

    @property
    def sources(self) -> list[list[int]]:
        """For each destination rank, the source ranks that send to it."""
        return self._native.sources()

    @property
    def one_sided(self) -> list[list[int]]:
        """For each destination rank, the layers that only the destination instance has: nobody sends them."""
        return self._native.one_sided()

    @property
    def roles(self) -> list[str]:
        """For each destination rank a table: which source rank sends which layers and units of which role."""
        return self._native.roles()

    def explain(self, tokens: int | tuple[int, int] = 1024, request_tokens: int | None = None) -> Explanation:
        """What moves of a request.

        - ``tokens``: of how many tokens, or of which (half-open): those before the first are at the destination already.
        - ``request_tokens``: where the request ends, if that is later.
        """
        start, end = token_bounds(tokens)
        return Explanation(self._native.explain((start, end), end if request_tokens is None else request_tokens))

    def _repr_svg_(self) -> str:
        return self.explain().to_svg()

    def __str__(self) -> str:
        return str(self.explain())


def plan(sources: Sequence[PageTable], destinations: Sequence[PageTable]) -> Plan:
    """Matches two instances, given by the tables of their ranks, in the order of ranks.

    Raises :class:`kvferry.MatchError` if the sources cannot serve the destinations.
    """
    tables = [[table._native for table in side] for side in (sources, destinations)]
    return Plan(_kvferry.Plan(*tables))
