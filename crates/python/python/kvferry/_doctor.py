"""What this machine offers."""

from __future__ import annotations

from dataclasses import dataclass

from . import _kvferry


@dataclass(frozen=True)
class Doctor:
    """What :func:`doctor` found. ``print`` it, or look at the fields."""

    text: str
    """All of it, for people."""
    ucx_version: str | None
    """Of the UCX in use; ``None`` if there is none."""
    ucx_path: str | None
    """File of that UCX."""
    ucx_origin: str | None
    """Where it was looked for."""
    routes: dict[str, float | str]
    """By route, the seconds that 1 MiB in pieces of 4 KiB took from this process to itself, or why it did not arrive."""
    memory_lock_bytes: int | None
    """Bytes that may be locked; ``None`` is no limit."""
    shared_memory_bytes: int | None
    """Size of ``/dev/shm``."""
    findings: list[tuple[str, str]]
    """What could be better, and what to do about it."""

    def __str__(self) -> str:
        return self.text


def doctor() -> Doctor:
    """Looks at this machine: loads UCX, tries each route from this process to itself, reads the limits."""
    return Doctor(**_kvferry.doctor())
