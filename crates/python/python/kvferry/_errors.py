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


class RowName(NamedTuple):
    """A row of a page table, as errors name it."""

    pool: int
    layer: int
    role: str

    def __str__(self) -> str:
        return f"pool {self.pool}, layer {self.layer}, {self.role}"


class KvferryError(Exception):
    """Base of all exceptions of this package.

    The fields of an error are attributes of its exception; which there are is up to ``kind``, and ``fields`` has them all. Times
    are in seconds, sizes in bytes, ranges half-open pairs. ``__cause__`` is the error that it is the consequence of.
    """

    kind: str
    """Name of the case, as the Rust library's enum has it: ``"Stalled"``, say."""
    fields: dict[str, Any]
    """What is known of it."""

    def __init__(self, message: str, kind: str = "", fields: dict[str, Any] | None = None) -> None:
        super().__init__(message)
        self.kind = kind
        self.fields = dict(fields or {})
        if "peer" in self.fields:
            self.fields["peer"] = Peer(*self.fields["peer"])
        for name in ("row", "other"):
            if isinstance(self.fields.get(name), tuple):
                self.fields[name] = RowName(*self.fields[name])

    def __getattr__(self, name: str) -> Any:
        # Called for what is not there otherwise; while an exception is unpickled there are no fields either.
        try:
            return self.__dict__["fields"][name]
        except KeyError:
            raise AttributeError(f"{type(self).__name__} {self.__dict__.get('kind', '')} has no {name!r}") from None

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self), self.kind, self.fields)


class ForkedError(KvferryError):
    """The object was made before this process was forked off; or it would be made now, but UCX had been opened when that happened, and
    may be in the middle of something here for ever. Fork before there is any engine, or spawn processes instead."""


class ClosedError(KvferryError):
    """The engine has been closed."""


class StartError(KvferryError):
    """The engine did not start: no UCX, or one that refuses its settings. Fix the setup; :func:`kvferry.doctor` helps."""


class OptionsError(KvferryError):
    """Options could not be read. Mend the file or the variable."""


class RegionError(KvferryError):
    """Memory could not be allocated or registered, or an access falls outside of it."""


class TableError(KvferryError):
    """A page table cannot be built, read or used. Mend the config, the cut or the table."""


class PublishError(KvferryError):
    """A page table was not published. Nothing has changed."""


class CardError(KvferryError):
    """The bytes are no card, or the cards are no instance. Collect those that are named again."""


class MatchError(KvferryError):
    """Two instances cannot serve each other, or block maps do not fit the tables."""


class ConnectError(KvferryError):
    """The instances were not connected. Nothing is left behind."""


class PostError(KvferryError):
    """A request was not taken up. Nothing was sent and no slot is exposed."""


class PushError(KvferryError):
    """A part was not taken up; the send goes on without it."""


class PartError(KvferryError):
    """What went wrong with one peer of a request: one of :attr:`RequestError.errors`."""


class WireError(KvferryError):
    """What the wire says of a write: the cause of another error."""


class RequestError(KvferryError):
    """A request failed. Treat every byte of its slots at the destination as unwritten, and use the slots for nothing else until
    :meth:`kvferry.Transfer.wait_quiet` says so.
    """

    @property
    def cancelled(self) -> bool:
        """Whether it was cancelled on this side."""
        return self.kind == "Cancelled"

    @property
    def errors(self) -> list[PartError]:
        """What had gone wrong when the request ended, in the order of ranks. At least one."""
        errors: list[PartError] = self.fields["errors"]
        return errors


class NotQuietError(KvferryError):
    """There will be no word that the slots can be used again: it was given before, or the engine has stopped first."""


for _class in [KvferryError, *KvferryError.__subclasses__(), Peer, RowName]:
    _class.__module__ = "kvferry"  # where they are imported from
