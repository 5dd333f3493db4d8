"""Notices that a rank has failed or is gone, and ends the others.

Collectives do not: those of NCCL wait on the device for ever, those of gloo say that a connection was closed but not
why. So every rank has a thread that shows signs of life in the store through which the ranks found each other, and
looks there for the first failure that any of them has reported.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from datetime import timedelta
from types import TracebackType

import torch.distributed as dist

INTERVAL = 1.0
"""Seconds between signs of life."""

SILENCE = 45.0
"""A rank of which there has been no sign for so many seconds is gone: killed, stopped, or its machine is down."""

GRACE = 5.0
"""Seconds that a rank has to end by itself once another has failed, and to learn why it has lost the others."""

_FAILURE = "bytesplat/failure"


class Watch:
    """Watches over the ranks of a run within its ``with`` block. All ranks enter it together.

    Args:
        store: that of the process group.
        machine: number of the machine that this rank runs on.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, machine: int) -> None:
        self._store, self._rank, self._size, self._machine = store.clone(), rank, size, machine
        self._watched = range(1, size) if rank == 0 else range(1)
        self._parent = os.getppid()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)

    def __enter__(self) -> Watch:
        self._store.set(_alive(self._rank), "0")
        self._store.wait([_alive(rank) for rank in range(self._size)])
        self._store.set_timeout(timedelta(seconds=SILENCE))
        self._thread.start()
        return self

    def __exit__(self, _: type | None, error: BaseException | None, __: TracebackType | None) -> None:
        """Ends watching. The store is in the first rank's process, which therefore waits for the others."""
        self._ended.set()
        self._thread.join()
        try:
            self._store.add("bytesplat/ended", 1)
            deadline = time.monotonic() + (SILENCE if error is None else 2 * INTERVAL)
            while self._rank == 0 and self._store.add("bytesplat/ended", 0) < self._size:
                if time.monotonic() > deadline:
                    break
                time.sleep(0.01)
        except RuntimeError:  # the first rank is gone; who had to know of it does
            pass

    def report(self, message: str) -> None:
        """Tells why this rank has failed, unless another has failed before it: its failure follows from that one."""
        mine = json.dumps({"rank": self._rank, "machine": self._machine, "message": message})
        try:
            first = self._store.compare_set(_FAILURE, "", mine).decode() == mine
        except RuntimeError:
            first = self._machine > 0  # the first rank is gone; on its machine that has been told
        if first:
            _tell(f"Rank {self._rank} of {self._size}: {message}")

    def report_loss(self, message: str) -> None:
        """Like ``report``, when this rank has lost the others: one of them may be about to tell why."""
        deadline = time.monotonic() + GRACE
        try:
            while time.monotonic() < deadline and not self._store.check([_FAILURE]):
                time.sleep(0.1)
        except RuntimeError:
            pass
        self.report(message)

    def _run(self) -> None:
        # Silence is counted in one's own beats, so that who was stopped does not take the others for dead.
        signs = dict.fromkeys(self._watched, ("", 0))
        beat = 0
        while not self._ended.wait(INTERVAL):
            beat += 1
            if os.getppid() != self._parent:  # what started the ranks is gone: nobody would stop them
                self._parent = os.getppid()
                os.kill(os.getpid(), signal.SIGTERM)
            try:
                self._store.set(_alive(self._rank), str(beat))
                if self._store.check([_FAILURE]):
                    return self._end(self._store.get(_FAILURE).decode())
                for rank, (sign, heard) in signs.items():
                    if (new := self._store.get(_alive(rank)).decode()) != sign:
                        signs[rank] = new, beat
                    elif (beat - heard) * INTERVAL > SILENCE and self._store.add("bytesplat/ended", 0) == 0:
                        self.report(f"rank {rank} has not been heard of for {SILENCE:.0f} s. It is gone, or stopped.")
            except RuntimeError:
                failure = {"rank": 0, "machine": 0, "message": "its process is gone, or the way to its machine."}
                return self._end(json.dumps(failure))

    def _end(self, failure: str) -> None:
        """A rank has failed: ends this process, whatever it waits for."""
        found = json.loads(failure)
        if self._ended.wait(GRACE):
            return
        if found["machine"] != self._machine:
            _tell(f"Rank {found['rank']} of {self._size}: {found['message']}")
        sys.stdout.flush()
        os._exit(1)


def _alive(rank: int) -> str:
    return f"bytesplat/alive/{rank}"


def _tell(message: str) -> None:
    print(f"\n{message}", file=sys.stderr, flush=True)
