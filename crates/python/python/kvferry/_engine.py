"""The engine."""

from __future__ import annotations

import atexit
import json
import os
import weakref
from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy
from numpy.typing import NDArray

from . import _kvferry
from ._errors import ForkedError, Peer, PublishError
from ._maps import BlockMaps, native_maps, token_bounds
from ._memory import memory_of
from ._table import PageTable
from ._transfer import Receive, Send

if TYPE_CHECKING:
    from typing_extensions import Self

Route = Literal["direct", "landing", "staged", "runs"]
"""A way to move bytes."""


class Region:
    """Memory that peers can reach: registered by :meth:`Engine.register` or allocated by the engine.

    It keeps what it was made of alive, and the engine keeps it while transfers use it. Memory of the host is an array interface
    of its own (``numpy.asarray(region)``, or :attr:`array`), memory of a GPU a CUDA array interface
    (``torch.as_tensor(region, device="cuda")``, ``cupy.asarray(region)``).
    """

    def __init__(self, native: _kvferry.Region) -> None:
        self._native = native

    @property
    def base(self) -> int:
        """First address."""
        return self._native.base

    @property
    def nbytes(self) -> int:
        """Length."""
        return self._native.nbytes

    @property
    def on_gpu(self) -> bool:
        """Whether it is memory of the engine's GPU."""
        return self._native.on_gpu

    @property
    def array(self) -> NDArray[numpy.uint8]:
        """The memory as an array of bytes, shape ``[nbytes]``: no copy. What a peer writes is there when its request has ended."""
        return numpy.asarray(self)

    @property
    def __array_interface__(self) -> dict[str, Any]:
        if self.on_gpu:
            raise AttributeError("memory of a GPU has no __array_interface__")
        return self._interface()

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        if not self.on_gpu:
            raise AttributeError("memory of the host has no __cuda_array_interface__")
        return self._interface()

    def _interface(self) -> dict[str, Any]:
        return {"shape": (self.nbytes,), "typestr": "|u1", "data": (self.base, False), "version": 3}

    def read(self, offset: int, length: int) -> bytes:
        """Copies ``length`` bytes out, of the host or of the GPU. Does not wait for transfers."""
        return self._native.read(offset, length)

    def write(self, offset: int, data: bytes) -> None:
        """Copies ``data`` in, at ``offset``. Does not wait for transfers."""
        self._native.write(offset, data)

    def __len__(self) -> int:
        return self.nbytes

    def __repr__(self) -> str:
        return f"<Region: {self.nbytes} B of {'GPU' if self.on_gpu else 'host'} memory at {self.base:#x}>"


class InstanceCard:
    """All ranks of one instance, or of one data-parallel part of it: what ranks need to connect.

    - ``cards``: those of the ranks, in any order: see :attr:`Engine.card`.
    - ``ranks``: which there must be; ``None``: as many as there are cards, from 0 on.

    Raises :class:`kvferry.CardError`, which names the rank that is missing, twice there, or of another instance.
    """

    def __init__(self, cards: Iterable[bytes], ranks: Iterable[int] | None = None) -> None:
        cards = list(cards)
        expected = range(len(cards)) if ranks is None else ranks
        self._native = _kvferry.InstanceCard(list(expected), cards)

    @classmethod
    def from_bytes(cls, data: bytes) -> InstanceCard:
        """Reads what :meth:`to_bytes` has made, and checks it."""
        card = cls.__new__(cls)
        card._native = _kvferry.InstanceCard.from_bytes(data)
        return card

    def to_bytes(self) -> bytes:
        """The card as bytes, for the ranks of both instances."""
        return self._native.to_bytes()

    def __reduce__(self) -> tuple[Any, ...]:
        return InstanceCard.from_bytes, (self.to_bytes(),)

    @property
    def ranks(self) -> list[int]:
        """The ranks, ascending."""
        return self._native.ranks()

    def __eq__(self, other: object) -> bool:
        return self._native == other._native if isinstance(other, InstanceCard) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.to_bytes())

    def __repr__(self) -> str:
        return f"<InstanceCard: ranks {self.ranks}>"


class Link:
    """One pair of connected instances, of which the engine that made it is a rank."""

    def __init__(self, native: _kvferry.Link) -> None:
        self._native = native

    def __eq__(self, other: object) -> bool:
        return self._native == other._native if isinstance(other, Link) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._native)


class Quarantine(NamedTuple):
    """Slots of one receive to which one peer may still write, although the receive has ended."""

    request: int
    """The request."""
    attempt: int
    """The try at it."""
    peer: Peer
    """Who may still write."""
    epoch: int
    """The life of it that was told of the slots."""
    slots: int
    """Slots of the request, over all groups."""
    pools: int
    """Pools that they are in at most."""
    nbytes: int
    """Bytes that the peer was to write."""
    elapsed: float
    """Seconds since the request ended."""
    why: str
    """``NoAnswer``, ``Unreachable`` or ``Unsettled``: what keeps the slots from being given back."""
    text: str
    """All of it, for people."""


_engines: weakref.WeakSet[Engine] = weakref.WeakSet()


class Engine:
    """Moves one rank's page cache.

    What is not given is as the environment says (``KVFERRY_ENGINE_PATIENCE_MS``, say; not if ``environment`` is false), as
    ``file`` says, which is called ``*.json`` or ``*.toml``, or at the library's default.

    - ``rank``: in its instance, 0 by default. ``instance``: the name of that; those that one engine is connected with need
      different ones.
    - ``transports``: that UCX may use, as in ``UCX_TLS``. ``route``: the only way that bytes may take.
    - ``patience``: seconds that a peer may make no progress before what waits for it fails.
    - ``resend``: seconds after which a message that is not answered is sent again, at most the patience or 0.2.
    - ``requests_max``: receives, and as many sends, that may be under way.
    - ``verify``: whether checksums are made and compared, on both sides alike.
    - ``workers``: progress threads, among which peers are divided.
    - ``inbox_bytes``, ``chunk_bytes``, ``ring_bytes``, ``copy_threads``, ``cpus``: see the library's ``EngineOptions``.
    - ``gpu``: the CUDA device of pools in GPU memory, as this process counts them; ``gpu_options``: further keys of the
      library's ``CudaOptions`` (``sm_blocks``, ``urgent``, ``slab_bytes``, ``slab_chunk_bytes``).

    Raises :class:`kvferry.StartError`: there is no UCX, or it does not start; or :class:`kvferry.OptionsError`.

    An engine is closed by :meth:`close` or as a context manager: what it has said to its peers leaves then. One that is
    dropped is closed by a thread, which nobody waits for. Of use only in the process that made it, not in those forked off it.
    """

    def __init__(
        self,
        rank: int | None = None,
        instance: str | None = None,
        *,
        transports: str | None = None,
        route: Route | None = None,
        patience: float | None = None,
        resend: float | None = None,
        requests_max: int | None = None,
        verify: bool | None = None,
        inbox_bytes: int | None = None,
        chunk_bytes: int | None = None,
        ring_bytes: int | None = None,
        workers: int | None = None,
        copy_threads: int | None = None,
        cpus: Sequence[int] | None = None,
        file: str | os.PathLike[str] | None = None,
        environment: bool = True,
        gpu: int | None = None,
        gpu_options: Mapping[str, Any] | None = None,
    ) -> None:
        given = {
            "rank": rank, "instance": instance, "transports": transports, "route": route,
            "patience_ms": None if patience is None else round(patience * 1000),
            "resend_ms": None if resend is None else round(resend * 1000),
            "requests_max": requests_max, "verify": verify, "inbox_bytes": inbox_bytes, "chunk_bytes": chunk_bytes,
            "ring_bytes": ring_bytes, "workers": workers, "copy_threads": copy_threads, "cpus": None if cpus is None else list(cpus),
        }  # fmt: skip
        cuda = None
        if gpu is not None:
            cuda = json.dumps({**(gpu_options or {}), "device": gpu})
        elif gpu_options:
            raise ValueError("gpu_options without a gpu")
        self._gpu = gpu
        said = json.dumps({name: value for name, value in given.items() if value is not None})
        self._native = _kvferry.Engine(None if file is None else os.fspath(file), environment, said, cuda)
        _engines.add(self)

    @property
    def options(self) -> dict[str, Any]:
        """The options in force, by the library's names: times in ms."""
        options: dict[str, Any] = json.loads(self._native.options())
        return options

    @property
    def epoch(self) -> int:
        """This life of the engine, as errors of peers name it."""
        return self._native.epoch()

    @property
    def ucx_version(self) -> str:
        """Version of the UCX in use."""
        return self._native.ucx_version()

    @property
    def resent_messages(self) -> int:
        """Messages that were sent again because they had not been answered in time."""
        return self._native.resent_messages()

    def allocate(self, table: PageTable) -> tuple[PageTable, list[Region]]:
        """Allocates zeroed memory for each pool of ``table``, of the host or of the GPU as the pool says.

        Returns the table with the addresses, and a region a pool. Memory that an engine allocates can be mapped by peers of the
        same host, which makes it the fastest to write to. Raises :class:`kvferry.PublishError`.
        """
        native, regions = self._native.allocate(table._native)
        return PageTable._of(native), [Region(region) for region in regions]

    def allocate_bytes(self, length: int, *, on_gpu: bool = False) -> Region:
        """Allocates and registers ``length`` zeroed bytes of the host, or of the engine's GPU. Raises
        :class:`kvferry.RegionError`."""
        return Region(self._native.allocate_bytes(length, on_gpu))

    def register(self, array: object) -> Region:
        """Registers the memory of ``array``, which the region keeps alive: an array of numpy, torch, cupy or any other library
        with ``__array_interface__``, ``__cuda_array_interface__`` or ``__dlpack__``; a writable buffer; or a triple
        ``(address, bytes, device)``, with ``None`` for memory of the host, which the caller keeps until the region and all
        transfers that use it are gone.

        The whole of it must be writable and without gaps; memory of a GPU must be of the engine's. Raises ``TypeError``,
        ``ValueError``, or :class:`kvferry.RegionError`.
        """
        memory = memory_of(array, self._gpu)
        if memory.device is not None and memory.device != self._gpu:
            engine_has = "none" if self._gpu is None else f"CUDA device {self._gpu}"
            raise ValueError(f"memory of CUDA device {memory.device}: the engine has {engine_has} (Engine(gpu=..))")
        return Region(self._native.register(memory.base, memory.nbytes, memory.device is not None, memory.owner))

    def publish(self, table: PageTable, regions: Sequence[Region]) -> None:
        """Offers this rank's pools to its peers: pool ``i`` of ``table`` lies in ``regions[i]``, at its ``base``, or where the
        region begins if that is 0. Once in the engine's life. Raises :class:`kvferry.PublishError`.
        """
        placed = table._native.placed([region.base for region in regions])
        self._native.publish(placed, [region._native for region in regions])

    @property
    def card(self) -> bytes:
        """This rank's card: with those of the instance's other ranks it makes an :class:`InstanceCard`."""
        card = self._native.card()
        if card is None:
            raise PublishError("there is a card once a page table has been published", "Unpublished")
        return card

    def connect(self, sources: InstanceCard, destinations: InstanceCard) -> Link:
        """Connects two instances, of one of which this engine is a rank. Every rank of both makes this call with the same cards,
        at the same time: it waits for the others, up to the engine's patience, until it is interrupted or the engine is closed. In
        an event loop: ``await asyncio.to_thread(engine.connect, sources, destinations)``.

        Raises :class:`kvferry.ConnectError`; nothing is left behind.
        """
        return Link(self._native.connect(sources._native, destinations._native))

    def disconnect(self, link: Link) -> None:
        """Forgets a link and tells its peers. Raises :class:`kvferry.PostError` while a request of it is under way."""
        self._native.disconnect(link._native)

    def receive(
        self,
        links: Link | Sequence[Link],
        request: int,
        block_maps: BlockMaps,
        tokens: int | tuple[int, int],
        *,
        attempt: int = 0,
    ) -> Receive:
        """Asks the sources of a link for a request.

        - ``links``: several, before it is known which of their instances will send it. Each rank of this rank's instance chooses by
          itself: where there are several, only one group of sources may send an attempt.
        - ``request``, ``attempt``: a number that both instances agree on, and a count of the tries at it.
        - ``block_maps``: one a group of this rank's table: lists or integer arrays of slots, or :class:`BlockMap`.
        - ``tokens``: how many, or which (half-open): tokens that this side has already are left out at the start.

        The slots are exposed until the handle says that they are quiet. Raises :class:`kvferry.PostError`; no slot is exposed
        then.
        """
        asked = [links] if isinstance(links, Link) else links
        natives = [link._native for link in asked]
        maps, bounds = native_maps(block_maps), token_bounds(tokens)
        return Receive(self._native.receive(natives, (request, attempt), maps, bounds))

    def send(
        self, link: Link, request: int, block_maps: BlockMaps, tokens: int | tuple[int, int], *, attempt: int = 0
    ) -> Send:
        """Writes a request to each destination of a link that this rank serves, as soon as it has said where to. The arguments
        are those of :meth:`receive`, by this rank's own table. The slots must hold the bytes now and must not change until they
        are quiet, which of a send that ended well they are. Raises :class:`kvferry.PostError`; nothing was written then.
        """
        return self._send(link, request, attempt, block_maps, tokens, False)

    def send_in_parts(
        self, link: Link, request: int, block_maps: BlockMaps, tokens: int | tuple[int, int], *, attempt: int = 0
    ) -> Send:
        """As :meth:`send`, of bytes that are yet to come: they leave as they are pushed, by :meth:`Send.push`."""
        return self._send(link, request, attempt, block_maps, tokens, True)

    def _send(
        self, link: Link, request: int, attempt: int, block_maps: BlockMaps, tokens: int | tuple[int, int], in_parts: bool
    ) -> Send:
        maps, bounds = native_maps(block_maps), token_bounds(tokens)
        return Send(self._native.send(link._native, (request, attempt), maps, bounds, in_parts))

    def quarantine(self) -> list[Quarantine]:
        """Slots of receives that have ended and to which a peer may still write, one entry a request and peer."""
        held = self._native.quarantine()
        return [Quarantine(request, attempt, Peer(*peer), *rest) for request, attempt, peer, *rest in held]

    def close(self) -> None:
        """Ends every request, says goodbye to the peers and stops the threads. Waits for that; of no effect the second time."""
        self._native.close()
        _engines.discard(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@atexit.register
def _close_all() -> None:
    """An interpreter that ends takes UCX down under threads that still run."""
    for engine in list(_engines):
        try:
            engine.close()
        except ForkedError:
            pass  # not this process's to close
