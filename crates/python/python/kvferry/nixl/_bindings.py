"""Descriptor lists, telemetry, numbers and exceptions by the names that they have in NIXL's extension module."""

from __future__ import annotations

import enum
import operator
from collections.abc import Iterator, Sequence
from typing import Any, Union

import numpy as np
import numpy.typing as npt

from .._kvferry import NixlRegistration
from ._errors import nixlBackendError as nixlBackendError
from ._errors import nixlCancelledError as nixlCancelledError
from ._errors import nixlInvalidParamError as nixlInvalidParamError
from ._errors import nixlMismatchError as nixlMismatchError
from ._errors import nixlNotAllowedError as nixlNotAllowedError
from ._errors import nixlNotFoundError as nixlNotFoundError
from ._errors import nixlNotPostedError as nixlNotPostedError
from ._errors import nixlNotSupportedError as nixlNotSupportedError
from ._errors import nixlNoTelemetryError as nixlNoTelemetryError
from ._errors import nixlRemoteDisconnectError as nixlRemoteDisconnectError
from ._errors import nixlRepostActiveError as nixlRepostActiveError
from ._errors import nixlUnknownError as nixlUnknownError

Rows = npt.NDArray[np.uint64]

DEFAULT_COMM_PORT = 8888
NIXL_INIT_AGENT = ""
HAVE_UCX_GPU_DEVICE_API = False


class nixl_mem_t(enum.IntEnum):
    """Where memory is."""

    DRAM_SEG = 0
    VRAM_SEG = 1
    BLK_SEG = 2
    OBJ_SEG = 3
    FILE_SEG = 4


class nixl_xfer_op_t(enum.IntEnum):
    """Which way bytes go."""

    NIXL_READ = 0
    NIXL_WRITE = 1


class nixl_status_t(enum.IntEnum):
    """What a call came to."""

    NIXL_IN_PROG = 1
    NIXL_SUCCESS = 0
    NIXL_ERR_NOT_POSTED = -1
    NIXL_ERR_INVALID_PARAM = -2
    NIXL_ERR_BACKEND = -3
    NIXL_ERR_NOT_FOUND = -4
    NIXL_ERR_MISMATCH = -5
    NIXL_ERR_NOT_ALLOWED = -6
    NIXL_ERR_REPOST_ACTIVE = -7
    NIXL_ERR_UNKNOWN = -8
    NIXL_ERR_NOT_SUPPORTED = -9


class nixl_cost_t(enum.IntEnum):
    """How a cost was estimated."""

    NIXL_COST_ANALYTICAL_BACKEND = 0


class nixl_thread_sync_t(enum.IntEnum):
    """How an agent is shared by threads. Here every agent may be."""

    NIXL_THREAD_SYNC_NONE = 0
    NIXL_THREAD_SYNC_STRICT = 1
    NIXL_THREAD_SYNC_RW = 2
    NIXL_THREAD_SYNC_DEFAULT = 0


DRAM_SEG, VRAM_SEG, BLK_SEG, OBJ_SEG, FILE_SEG = nixl_mem_t
NIXL_READ, NIXL_WRITE = nixl_xfer_op_t
NIXL_IN_PROG, NIXL_SUCCESS = nixl_status_t.NIXL_IN_PROG, nixl_status_t.NIXL_SUCCESS
NIXL_ERR_NOT_POSTED = nixl_status_t.NIXL_ERR_NOT_POSTED
NIXL_ERR_INVALID_PARAM = nixl_status_t.NIXL_ERR_INVALID_PARAM
NIXL_ERR_BACKEND = nixl_status_t.NIXL_ERR_BACKEND
NIXL_ERR_NOT_FOUND = nixl_status_t.NIXL_ERR_NOT_FOUND
NIXL_ERR_MISMATCH = nixl_status_t.NIXL_ERR_MISMATCH
NIXL_ERR_NOT_ALLOWED = nixl_status_t.NIXL_ERR_NOT_ALLOWED
NIXL_ERR_REPOST_ACTIVE = nixl_status_t.NIXL_ERR_REPOST_ACTIVE
NIXL_ERR_UNKNOWN = nixl_status_t.NIXL_ERR_UNKNOWN
NIXL_ERR_NOT_SUPPORTED = nixl_status_t.NIXL_ERR_NOT_SUPPORTED
NIXL_COST_ANALYTICAL_BACKEND = nixl_cost_t.NIXL_COST_ANALYTICAL_BACKEND
NIXL_THREAD_SYNC_NONE = nixl_thread_sync_t.NIXL_THREAD_SYNC_NONE
NIXL_THREAD_SYNC_STRICT = nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
NIXL_THREAD_SYNC_RW = nixl_thread_sync_t.NIXL_THREAD_SYNC_RW
NIXL_THREAD_SYNC_DEFAULT = nixl_thread_sync_t.NIXL_THREAD_SYNC_DEFAULT


def rows_of(descs: Union[Sequence[Sequence[Any]], npt.NDArray[Any]]) -> Rows:
    """Descriptors as an array ``[N, 3]`` of 64-bit words: address, length in bytes, device."""
    if isinstance(descs, np.ndarray):
        if descs.ndim != 2 or descs.shape[1] != 3 or descs.dtype.kind not in "iu":
            raise ValueError(f"descriptors are an array [N, 3] of integers, not {list(descs.shape)} of {descs.dtype}")
        return np.ascontiguousarray(descs, dtype=np.uint64)
    if len(descs) == 0:
        return np.empty((0, 3), np.uint64)
    rows = np.array(descs)
    if rows.dtype.kind not in "iu":
        # numpy makes floats of integers of several types, and objects of large ones. Real floats are refused here.
        rows = np.array([[operator.index(word) for word in desc] for desc in descs], dtype=np.uint64)
    if rows.ndim != 2 or rows.shape[1] != 3:
        raise ValueError("descriptors in tuples are of three integers each")
    if rows.dtype.kind == "i" and rows.min() < 0:
        raise ValueError("a descriptor of a negative address, length or device")
    return rows.astype(np.uint64)


class _DList:
    """Descriptors of one kind of memory, which grow."""

    __slots__ = ("_type", "_rows", "_count")

    def __init__(self, type: nixl_mem_t, descs: Any = 0, *, init_size: int = 0) -> None:
        self._type = nixl_mem_t(type)
        if isinstance(descs, (int, np.integer)):
            # Room for so many, in NIXL. It grows by itself here.
            self._rows, self._count = np.empty((0, 3), np.uint64), 0
        else:
            self._rows = rows_of(descs)
            self._count = len(self._rows)

    def rows(self) -> Rows:
        """Address, length and device of each."""
        return self._rows[: self._count]

    def getType(self) -> nixl_mem_t:
        return self._type

    def descCount(self) -> int:
        return self._count

    def isEmpty(self) -> bool:
        return self._count == 0

    def append(self, desc: Sequence[Any]) -> None:
        if self._count == len(self._rows):
            more = np.empty((max(16, 2 * self._count), 3), np.uint64)
            more[: self._count] = self.rows()
            self._rows = more
        self._rows[self._count] = rows_of([desc])[0]
        self._count += 1

    def addDesc(self, desc: Sequence[Any]) -> None:
        self.append(desc)

    def remDesc(self, index: int) -> None:
        self._rows = np.delete(self.rows(), range(self._count)[index], axis=0)
        self._count = len(self._rows)

    def clear(self) -> None:
        self._rows, self._count = np.empty((0, 3), np.uint64), 0

    def index(self, desc: Sequence[Any]) -> int:
        """The first that is ``desc``; -1 if none is."""
        found = np.flatnonzero((self.rows() == np.array(desc[:3], np.uint64)).all(axis=1))
        return int(found[0]) if len(found) else -1

    def print(self) -> None:
        print(self)

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        return tuple(int(word) for word in self.rows()[index])

    def __setitem__(self, index: int, desc: Sequence[Any]) -> None:
        self.rows()[index] = rows_of([desc])[0]

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        return (self[index] for index in range(self._count))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _DList) or type(other) is not type(self):
            return NotImplemented
        return self._type == other._type and np.array_equal(self.rows(), other.rows())

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._type.name}, {[self[index] for index in range(min(self._count, 8))]}" + (
            f", and {self._count - 8} more)" if self._count > 8 else ")"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._type, self.rows())


class nixlXferDList(_DList):
    """Descriptors ``(address, length, device)`` of one side of transfers."""

    __slots__ = ()


class nixlRegDList(_DList):
    """Descriptors ``(address, length, device, meta)`` of memory to register. ``meta`` is kept and has no meaning here."""

    __slots__ = ("_meta", "owner", "registrations")

    def __init__(self, type: nixl_mem_t, descs: Any = 0, *, init_size: int = 0, owner: object = None) -> None:
        self._meta: list[bytes] = []
        self.registrations: list[NixlRegistration] = []
        """What this list was registered as, each time."""
        self.owner = owner
        """What keeps the memory, if that is known: it is held until the memory is deregistered."""
        if isinstance(descs, (list, tuple)) and descs and len(descs[0]) == 4:
            self._meta = [_bytes_of(desc[3]) for desc in descs]
            descs = [desc[:3] for desc in descs]
        super().__init__(type, descs, init_size=init_size)
        self._meta.extend([b""] * (self._count - len(self._meta)))

    def append(self, desc: Sequence[Any]) -> None:
        super().append(desc[:3])
        self._meta.append(_bytes_of(desc[3]) if len(desc) > 3 else b"")

    def remDesc(self, index: int) -> None:
        super().remDesc(index)
        del self._meta[index]

    def clear(self) -> None:
        super().clear()
        self._meta.clear()

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        return (*super().__getitem__(index), self._meta[index])

    def __setitem__(self, index: int, desc: Sequence[Any]) -> None:
        super().__setitem__(index, desc[:3])
        self._meta[index] = _bytes_of(desc[3]) if len(desc) > 3 else b""

    def trim(self) -> nixlXferDList:
        """The same without what is said of each."""
        return nixlXferDList(self._type, self.rows().copy())

    def __eq__(self, other: object) -> bool:
        equal = super().__eq__(other)
        return equal and self._meta == other._meta if isinstance(other, nixlRegDList) else equal

    __hash__ = None

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._type, list(self))


def _bytes_of(meta: Union[str, bytes]) -> bytes:
    if isinstance(meta, str):
        return meta.encode()
    if not isinstance(meta, (bytes, bytearray, memoryview)):
        raise TypeError(f"what is said of a descriptor is bytes or text, not a {type(meta).__name__}")
    return bytes(meta)


class nixlXferTelemetry:
    """How the last post of a transfer went. Times are in microseconds."""

    __slots__ = ("startTime", "postDuration", "xferDuration", "totalBytes", "descCount", "route", "reason")

    def __init__(
        self,
        startTime: int = 0,
        postDuration: int = 0,
        xferDuration: int = 0,
        totalBytes: int = 0,
        descCount: int = 0,
        route: Union[str, None] = None,
        reason: Union[str, None] = None,
    ) -> None:
        self.startTime = startTime
        """When it was posted: microseconds of Unix time."""
        self.postDuration = postDuration
        """How long the call that posted it took."""
        self.xferDuration = xferDuration
        """From the post until it was known to have ended."""
        self.totalBytes = totalBytes
        self.descCount = descCount
        self.route = route
        """The way that the bytes took, which NIXL has no name for; ``None`` if the peer was asked to push them, or they
        went in a message."""
        self.reason = reason
        """Why that way."""

    def __repr__(self) -> str:
        return f"nixlXferTelemetry({', '.join(f'{name}={getattr(self, name)!r}' for name in self.__slots__)})"

