"""Processes that work at the same time, but for what one of them has to do alone."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

PERIOD = 0.25
"""Seconds after which a process lets others have a turn alone."""


class Turns:
    """A process's view of two locked files: ``PATH``, which all share while they work, and ``PATH.next``.

    Who wants to be alone takes ``next`` first. The others pass through it whenever they offer their turn, so they wait
    there, and the first file falls free.

    Args:
        path: None for a process that has no others beside it.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._shared = self._next = -1  # file descriptors
        self._since = 0.0

    @contextmanager
    def working(self) -> Iterator[None]:
        """Within its block nobody is alone, but while this process offers its turn, or is alone itself."""
        if self._path is None:
            yield
            return
        self._shared, self._next = (os.open(p, os.O_RDWR | os.O_CREAT) for p in (self._path, f"{self._path}.next"))
        try:
            self._begin()
            yield
        finally:  # closing a file gives up what it locks
            os.close(self._shared)
            os.close(self._next)

    def offer(self) -> None:
        """Lets others who want to be alone go first, now and then."""
        if self._path is not None and time.monotonic() - self._since > PERIOD:
            self._end()
            self._begin()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Within its block, which lies within ``working``, nobody else works."""
        if self._path is None:
            yield
            return
        self._end()
        fcntl.flock(self._next, fcntl.LOCK_EX)
        fcntl.flock(self._shared, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self._shared, fcntl.LOCK_UN)
            fcntl.flock(self._next, fcntl.LOCK_UN)
            self._begin()

    def _begin(self) -> None:
        fcntl.flock(self._next, fcntl.LOCK_SH)
        fcntl.flock(self._shared, fcntl.LOCK_SH)
        fcntl.flock(self._next, fcntl.LOCK_UN)
        self._since = time.monotonic()

    def _end(self) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # what this process has launched is work, too
        fcntl.flock(self._shared, fcntl.LOCK_UN)
