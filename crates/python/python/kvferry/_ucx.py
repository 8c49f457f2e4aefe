"""Finds the UCX of the wheel ``libucx-cu12`` or ``libucx-cu13`` in this very environment."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

VARIABLE = "KVFERRY_UCX_DIR"


def wheel_directory() -> Path | None:
    """The directory of ``libucp.so.0`` of an installed ``libucx`` package, if there is one."""
    found = importlib.util.find_spec("libucx")
    for package in (found.submodule_search_locations or []) if found else []:
        directory = Path(package) / "lib"
        if (directory / "libucp.so.0").exists():
            return directory
    return None


def choose() -> None:
    """Has the library take the wheel's UCX, unless the environment says another.

    Whoever installs a UCX next to this package wants that one. The library looks for wheels too, but by where Python
    environments usually are; this interpreter knows where its own packages are.
    """
    if not os.environ.get(VARIABLE):
        directory = wheel_directory()
        if directory is not None:
            os.environ[VARIABLE] = str(directory)
