"""A step's counts on their way to the host, while the GPU works on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

from bytesplat_ns.ops.nvrtc import record_in_graph

UNKNOWN = -1


class Counts:
    """Pinned memory for a step's state (``step.h``), and an event that says when it is there.

    Attributes:
        recorded: whether the transfer is a part of a recording, to be made at every replay.
    """

    def __init__(self, device: torch.device, recorded: bool = False) -> None:
        self.recorded = recorded
        self._state = torch.full((3,), UNKNOWN, dtype=torch.int64, pin_memory=device.type == "cuda")
        self._words = self._state.numpy()  # the same memory
        self._arrived = torch.cuda.Event() if device.type == "cuda" else None
        if recorded and self._arrived is not None:
            self._arrived.record()  # creates it: impossible in a recording

    @classmethod
    def of_step(cls, device: torch.device) -> Counts:
        """Those of the recording that this thread is making, else new ones."""
        return _of_recording.get() or cls(device)

    def fetch(self, state: Tensor) -> None:
        """Starts the transfer behind what has been launched so far; in a recording, adds it there."""
        self._state.copy_(state, non_blocking=True)
        if self._arrived is None:
            return
        if self.recorded:
            record_in_graph(self._arrived, torch.cuda.current_stream(state.device))
        else:
            self._arrived.record()

    def expect(self) -> None:
        """Forgets what came with the last replay; called before the next one."""
        self._words[:] = UNKNOWN

    def read(self) -> list[int]:
        """The state, once it is there. Waits for no more than the transfer."""
        while True:
            if self._arrived is not None:
                self._arrived.synchronize()  # lets other threads run; raises what went wrong on the GPU
            state = self._words.tolist()
            if UNKNOWN not in state:
                return state


_of_recording: ContextVar[Counts | None] = ContextVar("counts of the recording that is being made", default=None)


@contextmanager
def recording(counts: Counts) -> Iterator[None]:
    """The stages that are launched in this context fetch these counts, and do not wait for them."""
    token = _of_recording.set(counts)
    try:
        yield
    finally:
        _of_recording.reset(token)
