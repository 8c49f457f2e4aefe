"""The library's log, in Python's ``logging``."""

from __future__ import annotations

import atexit
import logging
import os
import threading

from . import _kvferry

TAKE_SECONDS = 60.0
"""How long the thread waits before it looks again whether it is still needed."""

STOP_SECONDS = 1.0
"""How long an interpreter that ends waits for what was said last."""

_logger = logging.getLogger("kvferry")
_starting = threading.Lock()
_thread: threading.Thread | None = None


def forward_log(level: int | str = logging.INFO) -> None:
    """Has what the library says of itself, at ``level`` and above, appear in Python's ``logging``: below the logger ``kvferry``, by
    the names of the library's modules (``kvferry.wire.worker``). Whether it is then written, and where to, is up to those.

    Messages of requests are followed by the request's fields. ``level`` is one of ``logging``'s, by number or name; below ``DEBUG``
    there is ``TRACE`` (5), which is for the library's authors. It can be called again to change the level.

    The engines' threads leave messages in a queue, from which a thread of Python's takes them: no transfer waits for the
    interpreter. A program that leaves thousands of them there loses the rest, and is told how many. A process that is forked off
    has to ask again.
    """
    number = logging.getLevelName(level.upper()) if isinstance(level, str) else level
    if not isinstance(number, int) or isinstance(number, bool):
        raise ValueError(f"there is no level {level!r}")
    global _thread
    with _starting:
        _kvferry.log_start(number)
        if _thread is None or not _thread.is_alive():
            _thread = threading.Thread(target=_forward, name="kvferry-log", daemon=True)
            _thread.start()


def _forward() -> None:
    stopped = False
    while not stopped:
        records, dropped, stopped = _kvferry.log_take(TAKE_SECONDS)
        for created, level, target, message in records:
            _hand_over(created, level, target, message)
        if dropped:
            _logger.warning("%d messages are lost: more came than were written", dropped)


def _hand_over(created: float, level: int, target: str, message: str) -> None:
    logger = logging.getLogger(_name_of(target))
    if not logger.isEnabledFor(level):
        return
    record = logger.makeRecord(logger.name, level, "", 0, message, (), None)
    record.created, record.msecs = created, (created % 1) * 1000
    record.threadName, record.thread = None, None  # one of the library's
    try:
        logger.handle(record)
    except Exception:
        # As logging does with what a handler raises, and that of a filter.
        if logging.raiseExceptions and logging.lastResort is not None:
            logging.lastResort.handleError(record)


def _name_of(target: str) -> str:
    """``kvferry_wire::worker`` is ``kvferry.wire.worker``, and ``kvferry::engine`` ``kvferry.engine``."""
    crate, _, rest = target.partition("::")
    parts = [crate.replace("kvferry_", "kvferry.", 1), *rest.split("::")]
    return ".".join(part for part in parts if part)


@atexit.register
def _stop() -> None:
    """Writes what was said last. It is registered before whatever closes engines, and so runs after that."""
    thread = _thread
    if thread is not None and thread.is_alive():
        _kvferry.log_stop(False)
        thread.join(STOP_SECONDS)


def _forget() -> None:
    """In a process that was forked off there is no thread, and what is in the queue is its parent's."""
    global _thread, _starting
    _kvferry.log_stop(True)
    _thread, _starting = None, threading.Lock()


os.register_at_fork(after_in_child=_forget)
