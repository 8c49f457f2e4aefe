"""The interface of NIXL's agent, on this library's own transfers.

A program written for NIXL 1.x runs on it with its import changed: ``from kvferry.nixl import nixl_agent, nixl_agent_config``.
What is the same, better and absent is a table in the project's ``docs/nixl.md``.
"""

from ._api import (
    DEFAULT_COMM_PORT,
    nixl_agent,
    nixl_agent_config,
    nixl_backend_handle,
    nixl_prepped_dlist_handle,
    nixl_thread_sync_t,
    nixl_xfer_handle,
)

__all__ = [
    "DEFAULT_COMM_PORT",
    "nixl_agent",
    "nixl_agent_config",
    "nixl_backend_handle",
    "nixl_prepped_dlist_handle",
    "nixl_thread_sync_t",
    "nixl_xfer_handle",
]
