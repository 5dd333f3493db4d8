"""The viewer of a run of several ranks, whose pictures all of them make.

Nerfstudio's viewer renders in threads of its own, in the first rank's process, while it holds the lock that training
takes for every step. But the other ranks must take part, and only the main threads of all ranks may talk to each other.
So a viewer's thread leaves its request with the main thread and waits; the main thread, when it wants the lock, first
serves such requests; and the other ranks' main threads, when they want the lock, do what the first one tells them.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from bytesplat_ns.parallel.ranks import Ranks

Render = Callable[..., Any]

NAP = 0.002
"""Seconds for which the main thread waits for a request before it tries the lock again."""


class ViewerLock:
    """The lock of training and viewer; a context manager as nerfstudio's, for the main threads of all ranks together.

    Args:
        render: what is asked for in ``ask``; all ranks call it together, and the first rank's result counts.
    """

    def __init__(self, ranks: Ranks, render: Render) -> None:
        self._ranks, self._render = ranks, render
        self._mutex = threading.Lock()
        self._requests: queue.SimpleQueue[tuple[Future[Any], tuple[Any, ...]]] = queue.SimpleQueue()

    def ask(self, *arguments: Any) -> Any:
        """The result of ``render(*arguments)``, for a thread that holds the lock."""
        answer: Future[Any] = Future()
        self._requests.put((answer, arguments))
        while not answer.done():  # not ``result()``: the viewer interrupts its thread between lines of Python
            time.sleep(NAP)
        return answer.result()

    def __enter__(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            self._mutex.acquire()
            return
        if self._ranks.rank == 0:
            self.serve(until=lambda: self._mutex.acquire(blocking=False))
        while (arguments := self._ranks.broadcast(None)) is not None:
            self._render(*arguments)

    def __exit__(self, *_: object) -> None:
        if self._mutex.locked():
            self._mutex.release()

    def serve(self, until: Callable[[], bool]) -> None:
        """Serves requests, on the first rank while the others wait for the lock, until a condition holds."""
        while not until():
            try:
                answer, arguments = self._requests.get(timeout=NAP)
            except queue.Empty:
                continue
            self._ranks.broadcast(arguments)
            try:
                answer.set_result(self._render(*arguments))
            except Exception as error:
                answer.set_exception(error)
                raise
