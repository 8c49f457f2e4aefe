"""Memory by address, for programs that try an agent out: NIXL's examples take theirs from here."""

from __future__ import annotations

import ctypes

_libc = ctypes.CDLL(None)
_libc.malloc.argtypes, _libc.malloc.restype = [ctypes.c_size_t], ctypes.c_void_p
_libc.free.argtypes, _libc.free.restype = [ctypes.c_void_p], None

FILLER = 0xBA
"""What :func:`ba_buf` fills memory with."""


def malloc_passthru(size: int) -> int:
    """Address of ``size`` bytes of the host, to be given to :func:`free_passthru`."""
    if not 0 < size < 1 << 63:
        raise ValueError(f"{size} B cannot be allocated")
    address: int | None = _libc.malloc(size)
    if address is None:
        raise MemoryError(f"{size} B cannot be allocated")
    return address


def free_passthru(address: int) -> None:
    """Frees what :func:`malloc_passthru` has allocated."""
    _libc.free(address)


def ba_buf(address: int, size: int) -> None:
    """Fills ``size`` bytes at ``address``."""
    ctypes.memset(address, FILLER, size)


def verify_transfer(address: int, other: int, size: int) -> None:
    """Compares ``size`` bytes. Raises ``ValueError`` if they differ."""
    if ctypes.string_at(address, size) != ctypes.string_at(other, size):
        raise ValueError(f"{size} B at {address:#x} and at {other:#x} differ")
