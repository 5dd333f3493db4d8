"""SIGINT and SIGTERM while training: the step is finished, a checkpoint written, and the exit code says what happened.

Exit codes of ``ns-train bytesplat``:

- 0: training is complete. This holds too when the signal came afterwards, to close the viewer. Or the program that runs
  the trainer has shut it down.
- 130 (SIGINT), 143 (SIGTERM): stopped early at the user's or the scheduler's wish, and saved. 128 + n is what shells
  report of commands that signal n ended, so ``ns-train ... && ns-eval ...`` does not go on with half a model, and a
  scheduler that preempts a job does not count it as done but may queue it again.
- 1: an error.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

from bytesplat_ns.parallel.ranks import ALONE, Ranks

SIGNALS = (signal.SIGINT, signal.SIGTERM)

SHUT_DOWN = 1
"""What a rank announces that was told to end without a signal: less than the number of any."""

ECHO_SECONDS = 0.5
"""A signal that comes again this soon is an echo: ``timeout``, ``srun`` and others send it to the process and to its
group."""


class Interrupted(BaseException):
    """A signal ended what may be abandoned. Not an ``Exception``, so that no library takes it for its own."""


class Interrupt:
    """Within its ``with`` block the first signal is remembered and the second ends the process at once.

    With several ranks the others are told of it with the next collective: ``Ranks.heard`` says when all know, and
    nothing is abandoned, as the others would wait.

    Outside the main thread, where Python allows no handlers, and for signals that the process was started to ignore,
    nothing changes.

    Attributes:
        signal: the first that came, or None.
        asked: whether a signal came or somebody called ``stop``.
    """

    def __init__(self, ranks: Ranks = ALONE) -> None:
        self.signal: signal.Signals | None = None
        self.asked = False
        self._ranks = ranks
        self._when = 0.0
        self._abandon = False
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Interrupt:
        self._ranks.announce(0)
        if threading.current_thread() is threading.main_thread():
            handlers = {number: signal.getsignal(number) for number in SIGNALS}
            self._previous = {n: old for n, old in handlers.items() if old not in (None, signal.SIG_IGN)}
            for number in self._previous:
                signal.signal(number, self._receive)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    @property
    def exit_code(self) -> int:
        """What a run that stopped early exits with, the same on all ranks."""
        return 128 + self._ranks.heard if self._ranks.heard > SHUT_DOWN else 0

    def stop(self) -> None:
        """Does what a signal would, from any thread; but the run has succeeded."""
        if not self.asked:
            self.asked = True
            self._ranks.announce(SHUT_DOWN)

    @contextmanager
    def abandonable(self) -> Iterator[None]:
        """For work that changes nothing that is kept, evaluation say: a signal ends it with ``Interrupted``."""
        self._abandon = self._ranks.size == 1
        try:
            if self._ranks.heard:
                raise Interrupted
            yield
        finally:
            self._abandon = False

    def _receive(self, number: int, _: FrameType | None) -> None:
        now = time.monotonic()
        if self.signal is None:
            self.signal, self._when, self.asked = signal.Signals(number), now, True
            self._ranks.announce(number)
            if self._ranks.size == 1:  # several have been started by a process that says so
                # Not through Python's buffered streams: the handler may have interrupted a write to them.
                message = f"\n{self.signal.name}: ending with a checkpoint; once more to end at once.\n"
                with suppress(OSError):
                    os.write(2, message.encode())
            if self._abandon:
                raise Interrupted
        elif now - self._when > ECHO_SECONDS:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
