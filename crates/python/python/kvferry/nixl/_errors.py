"""NIXL's exceptions, by their names. They carry what those of :mod:`kvferry` carry: ``kind`` and ``fields``."""

from __future__ import annotations

from .._errors import KvferryError


class nixlNotPostedError(KvferryError):
    """The transfer has not been posted."""


class nixlInvalidParamError(KvferryError):
    """An index past the end, lists of different length, or something else that the call cannot take. Nothing was sent."""


class nixlBackendError(KvferryError):
    """The wire or the operating system failed."""


class nixlNotFoundError(KvferryError):
    """Memory that is not registered, or no such agent. Nothing was sent."""


class nixlMismatchError(KvferryError):
    """The bytes are no metadata, are damaged, or are of a release or a UCX that this one cannot talk to."""


class nixlNotAllowedError(KvferryError):
    """The call is not allowed now."""


class nixlRepostActiveError(KvferryError):
    """The transfer is active, or not quiet yet."""


class nixlUnknownError(KvferryError):
    """Something else."""


class nixlNotSupportedError(KvferryError):
    """There is no such thing here."""


class nixlRemoteDisconnectError(KvferryError):
    """The remote agent is gone or silent, or has started again. Add its new metadata."""


class nixlCancelledError(KvferryError):
    """The transfer was given up."""


class nixlNoTelemetryError(KvferryError):
    """The transfer has not ended."""
