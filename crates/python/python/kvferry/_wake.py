"""Waking event loops."""

from __future__ import annotations

import asyncio
import itertools
import os
import weakref
from collections.abc import Callable

from . import _kvferry
from ._errors import ForkedError


class _Wakeup:
    """What one event loop waits with: a file descriptor that the engine's threads make readable.

    They never take the interpreter, so that a Python thread that is busy does not hold up anybody's transfers. The loop looks at
    the descriptor only while something waits, so that nothing is left behind in a loop that is closed.
    """

    def __init__(self) -> None:
        self._process = os.getpid()
        self._bell = _kvferry.Bell()
        self._tokens = itertools.count()
        self._waiting: dict[int, asyncio.Future[None]] = {}

    async def until(self, done: Callable[[_kvferry.Bell, int], bool]) -> None:
        """Calls ``done``, and again whenever the bell has rung with its token, until it is true."""
        if self._process != os.getpid():
            raise ForkedError("this event loop was running before the process was forked off", "Forked")
        loop = asyncio.get_running_loop()
        token = next(self._tokens)
        while True:
            future = loop.create_future()
            if not self._waiting:
                loop.add_reader(self._bell.fileno(), self._heard)
            self._waiting[token] = future
            try:
                if done(self._bell, token):
                    return
                await future
            finally:
                del self._waiting[token]
                if not self._waiting:
                    loop.remove_reader(self._bell.fileno())

    def _heard(self) -> None:
        for token in self._bell.take():
            future = self._waiting.get(token)
            if future is not None and not future.done():
                future.set_result(None)


_wakeups: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Wakeup] = weakref.WeakKeyDictionary()


async def until(done: Callable[[_kvferry.Bell, int], bool]) -> None:
    """Waits in the running event loop, without keeping it busy."""
    loop = asyncio.get_running_loop()
    wakeup = _wakeups.get(loop)
    if wakeup is None:
        wakeup = _wakeups[loop] = _Wakeup()
    await wakeup.until(done)
