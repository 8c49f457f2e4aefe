"""Exceptions: one class for each kind of operation, as the Rust library has one enum for each."""

from __future__ import annotations

from typing import Any, NamedTuple


class Peer(NamedTuple):
    """A rank of the other instance, as errors name it."""

    side: str
    """``"source"`` or ``"destination"``."""
    rank: int

    def __str__(self) -> str:
        return f"{self.side} rank {self.rank}"


class KvferryError(Exception):
    """Base of all exceptions of this package.

    The fields of the error are attributes of the exception: which there are is up to ``kind``, and ``fields`` has them all.
    Times are in seconds, sizes in bytes, ranges are half-open pairs.
    """

    kind: str
    """Name of the case, as in the Rust library's enum: ``"Stalled"``, say."""
    fields: dict[str, Any]
    """What is known of it."""

    def __init__(self, message: str, kind: str = "", fields: dict[str, Any] | None = None) -> None:
        super().__init__(message)
        self.kind = kind
        self.fields = dict(fields or {})
        if "peer" in self.fields:
            self.fields["peer"] = Peer(*self.fields["peer"])

    def __getattr__(self, name: str) -> Any:
        # Only asked for what is not there otherwise; unpickling asks before there are fields.
        try:
            return self.__dict__["fields"][name]
        except KeyError:
            raise AttributeError(f"{type(self).__name__} {self.__dict__.get('kind', '')} has no {name!r}") from None

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self), self.kind, self.fields)


class ForkedError(KvferryError):
    """The object was made before this process was forked off. Make another here, or spawn processes instead."""


class StartError(KvferryError):
    """The engine did not start: no UCX, or one that refuses its settings. Fix the setup; :func:`kvferry.doctor` helps."""
