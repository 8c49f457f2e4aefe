"""Moves paged KV caches between a prefill and a decode instance that are cut differently, over UCX."""

from . import _ucx

_ucx.choose()

from ._doctor import Doctor, doctor  # noqa: E402
from ._errors import ForkedError, KvferryError, Peer, StartError  # noqa: E402
from ._kvferry import __version__  # noqa: E402

__all__ = ["Doctor", "ForkedError", "KvferryError", "Peer", "StartError", "__version__", "doctor"]
