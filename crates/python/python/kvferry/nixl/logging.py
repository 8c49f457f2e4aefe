"""Loggers, where programs written for NIXL look for them."""

from __future__ import annotations

import logging

__all__ = ["get_logger"]


def get_logger(name: str) -> logging.Logger:
    """The logger of that name, below ``kvferry.nixl``. What it writes, and from which level on, is the program's to set up."""
    return logging.getLogger(name if name.startswith("kvferry.nixl") else f"kvferry.nixl.{name}")
