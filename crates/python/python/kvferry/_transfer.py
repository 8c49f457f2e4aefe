"""Requests under way."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, Generic, NamedTuple, TypeVar

from . import _kvferry
from ._errors import RequestError
from ._maps import BlockMaps, native_maps, token_bounds
from ._wake import until

R = TypeVar("R", "Sent", "Received")


class Times(NamedTuple):
    """Where the time of a request went, in seconds."""

    posting: float
    """In the call that posted it."""
    queued: float
    """From then on: of a send until the destination had said where to, of a receive until the source began to write."""
    settling: float
    """From the end of the last write until this rank and its peer had agreed."""
    total: float
    """From the post to the end."""


class Carried(NamedTuple):
    """What went one way."""

    route: str
    """The way: ``direct``, ``landing``, ``staged`` or ``runs``."""
    reason: str
    """Why that one."""
    nbytes: int
    """Bytes that took it."""
    runs: int
    """Contiguous copies."""
    elapsed: float
    """Seconds from the start of a write until its bytes were there, over all writes."""


class Sent(NamedTuple):
    """What this rank has written to one destination rank."""

    rank: int
    """The destination rank."""
    rows: int
    """(layer, role) rows, whole or in part."""
    pieces: int
    """Strided pieces, counted once a pair of slots."""
    runs: int
    """Contiguous copies."""
    nbytes: int
    """Bytes, equal to the destination's own count."""
    carried: list[Carried]
    """The ways that they took: one, unless the send was in parts."""
    elapsed: float
    """Seconds on the wire: from the start of a write until its bytes were there, over all writes."""
    times: Times
    """Where the time went."""


class Received(NamedTuple):
    """What one source rank has written to this rank."""

    rank: int
    """The source rank."""
    rows: int
    """(layer, role) rows, whole or in part."""
    nbytes: int
    """Bytes by this rank's own count."""
    carried: list[Carried]
    """The ways that they took, as the source says."""
    elapsed: float
    """Seconds from the post of the receive to the source's report."""
    times: Times
    """Where the time went."""
    note: bytes
    """What the sender's user added to the last part."""


class Transfer(Generic[R]):
    """A request under way. It ends once: which can be awaited, waited for, or asked after.

    How it ended and whether its slots can be used again are two things: a request that failed may leave writes behind that are
    on their way. :meth:`until_quiet` and :meth:`wait_quiet` say when there are none. Dropping the handle stops nothing.
    """

    def __init__(self, native: _kvferry.Transfer) -> None:
        self._native = native

    @property
    def request(self) -> int:
        """Number of the request."""
        return self._native.key()[0]

    @property
    def attempt(self) -> int:
        """Number of the try at it."""
        return self._native.key()[1]

    @property
    def moved_bytes(self) -> int:
        """Bytes known to have moved so far, over all peers."""
        return self._native.moved_bytes()

    def done(self) -> bool:
        """Whether the request has ended, well or badly."""
        try:
            return self._native.wait(0.0) is not None
        except RequestError:
            return True

    def wait(self, timeout: float) -> list[R]:
        """What moved to or from each peer, in the order of ranks. Waits ``timeout`` seconds at most, other threads run meanwhile.

        Raises :class:`kvferry.RequestError` if the request failed, and ``TimeoutError`` if it has not ended: it goes on then.
        """
        return self._outcome(self._native.wait(timeout), timeout)

    def __await__(self) -> Generator[Any, None, list[R]]:
        return self._ended().__await__()

    async def _ended(self) -> list[R]:
        await until(self._native.ring_at_end)
        return self._outcome(self._native.wait(0.0), 0.0)

    def cancel(self) -> None:
        """Gives the request up. It ends with a :class:`kvferry.RequestError` that is ``cancelled``, unless it has ended before.
        The slots are quiet when every peer has stopped."""
        self._native.cancel()

    def wait_quiet(self, timeout: float) -> bool:
        """Whether the slots are quiet: nobody reads or writes them for the request, now or later. Waits ``timeout`` seconds at
        most. How long it takes is up to the peers: one that is frozen keeps them for as long as it is.

        Says so once; raises :class:`kvferry.NotQuietError` afterwards, and if the engine has stopped before.
        """
        return self._native.quiet(timeout)

    async def until_quiet(self) -> None:
        """As :meth:`wait_quiet`, for as long as it takes."""
        await until(self._native.ring_when_quiet)

    def _outcome(self, peers: list[tuple[Any, ...]] | None, timeout: float) -> list[R]:
        if peers is None:
            raise TimeoutError(f"request {self.request} has not ended within {timeout} s")
        return [self._report(peer) for peer in peers]

    def _report(self, peer: tuple[Any, ...]) -> R:
        raise NotImplementedError

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: request {self.request} attempt {self.attempt}>"


class Receive(Transfer[Received]):
    """A request in which this rank is a destination."""

    def _report(self, peer: tuple[Any, ...]) -> Received:
        return _named(Received(*peer))


class Send(Transfer[Sent]):
    """A request in which this rank is a source."""

    def push(
        self,
        tokens: tuple[int, int],
        *,
        layers: tuple[int, int] | None = None,
        block_maps: BlockMaps | None = None,
        note: bytes = b"",
        ready: Signal | None = None,
    ) -> None:
        """Adds a part to a send that was posted by :meth:`kvferry.Engine.send_in_parts`.

        - ``tokens``: of the part, half-open. Parts follow each other, by tokens and of the same tokens by layers; the one that
          ends where the request ends is the last. What does not fill a block leaves with the part that does.
        - ``layers``: of the model that the part has, half-open; ``None``: all.
        - ``block_maps``: if blocks have been added since the send was posted.
        - ``note``: a few bytes for the destination, of the last part only.
        - ``ready``: the part leaves when this is set; ``None``: at once.

        Raises :class:`kvferry.PushError`; the send goes on without the part.
        """
        maps = None if block_maps is None else native_maps(block_maps)
        self._native.push(token_bounds(tokens), layers, maps, note, None if ready is None else ready._native)

    def _report(self, peer: tuple[Any, ...]) -> Sent:
        return _named(Sent(*peer))


def _named(report: R) -> R:
    """With names for what the library hands over as plain tuples."""
    return report._replace(carried=[Carried(*way) for way in report.carried], times=Times(*report.times))


class Signal:
    """Says when one part that was pushed may be read. Dropped without having been set, the part never leaves."""

    def __init__(self) -> None:
        self._native = _kvferry.Signal()

    def set(self) -> None:
        """The bytes are there. From any thread; of no effect the second time."""
        self._native.set()
