"""A round's stages, recorded once as a CUDA graph and replayed round after round.

A step of a small scene is some twenty kernels of a few microseconds each; launching them one by one takes Python longer
than the GPU takes to run them. A recording is the very launches that the stages' own code makes, so a replayed round
cannot differ from one that is not. What a recording holds for good is what ``Replay`` compares before each replay:

- where the tables lie (parameters, moments, statistics). They are replaced when Gaussians come or go: then all
  recordings go;
- the ``key`` of the caller and the shapes of a round's inputs, which are copied to where the recorded kernels look;
- how much room there is for records and pairs. If a round needs more, nothing of it takes place (``step.h``): the
  counts, which the host reads while the GPU is still at work, say so, and the round is run with larger buffers.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from . import ahead
from .counts import Counts, recording

T = TypeVar("T")


class Replay:
    """Runs a round's stages: as they are the first time, from a recording later."""

    KEPT = 16
    """Most recordings at a time. Nothing is evicted: what comes around again is likely to be among the first."""

    LARGEST = 2_000_000
    """Most Gaussians of a recording: with more the GPU is busy enough, and a recording keeps buffers of its own."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._recorder = Recorder(device)
        self._places: tuple[tuple[int, int], ...] = ()  # and lengths of the tables that the recordings were made for
        self._recordings: dict[Hashable, Recording | None] = {}  # None: met once

    def __call__(self, stages: Callable[..., T], inputs: Sequence[Any], tables: Sequence[Tensor], key: Hashable) -> T:
        """``stages(*inputs)``, for a step that took place. Its results are overwritten by the next call.

        Args:
            stages: launches a round and waits for nothing but ``ahead.differentiate``. Of what it uses besides
                ``inputs`` only the values in ``tables`` may differ from one round to the next with the same key.
            inputs: tensors, dataclasses of tensors, and whatever else, which then is a part of the key.
            tables: all tensors that stay from round to round and may be replaced.
            key: None for a round that is not to be recorded.
        """
        if key is None or len(tables[0]) > self.LARGEST:
            return stages(*inputs)
        places = tuple((table.data_ptr(), len(table)) for table in tables)
        if places != self._places:
            self._places = places
            self._recordings.clear()
        parts = _parts(inputs)
        shapes = tuple((part.shape, part.dtype) if isinstance(part, Tensor) else part for part in parts)
        while True:
            key_now = key, shapes, ahead.capacities(self.device)
            if key_now not in self._recordings:
                # Not recorded at once: kernels are compiled and loaded when first needed, and a recording cannot wait.
                if len(self._recordings) < self.KEPT:
                    self._recordings[key_now] = None
                return stages(*inputs)
            made = self._recordings[key_now]
            if made is None:
                made = self._recordings[key_now] = Recording(self._recorder, stages, inputs)
            if ahead.fitted(made.run(parts), self.device):
                return made.result


class Recording:
    """Stages recorded with memory of their own for a round's inputs.

    Attributes:
        result: what the stages returned; its tensors hold the results of the last ``run``.
    """

    def __init__(self, recorder: Recorder, stages: Callable[..., T], inputs: Sequence[Any]) -> None:
        copies = [torch.empty_like(p) if isinstance(p, Tensor) else p for p in _parts(inputs)]
        self._memory = [copy for copy in copies if isinstance(copy, Tensor)]
        self._held: list[tuple[Tensor | None, int]] = [(None, 0)] * len(self._memory)  # whose values it has, and which
        self._counts = Counts(recorder.device, recorded=True)
        inside = _rebuilt(inputs, iter(copies))
        with recording(self._counts):
            self._replay, self.result = recorder.record(lambda: stages(*inside))

    def run(self, parts: Sequence[Any]) -> list[int]:
        """One round. Returns its counts as soon as they are known; the GPU goes on."""
        tensors = [part for part in parts if isinstance(part, Tensor)]
        for i, (memory, part, (held, version)) in enumerate(zip(self._memory, tensors, self._held, strict=True)):
            if part is not held or part._version != version:  # views of one camera have the same intrinsics
                memory.copy_(part, non_blocking=True)
                self._held[i] = part, part._version
        self._counts.expect()
        self._replay()
        return self._counts.read()


class Recorder:
    """Makes CUDA graphs that share their memory: only one of them runs at a time."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)
        self._last: torch.cuda.CUDAGraph | None = None  # keeps the shared memory alive when all recordings go

    def record(self, run: Callable[[], T]) -> tuple[Callable[[], None], T]:
        """What replays the launches of ``run`` on the current stream, and the tensors it then writes.

        Unlike ``torch.cuda.graph`` this neither waits for the GPU nor gives cached memory back: it happens every
        hundred rounds. Other threads may use the GPU meanwhile.
        """
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                result = run()
            except BaseException:
                with suppress(RuntimeError):  # a capture that went wrong says so again
                    graph.capture_end()
                raise
            graph.capture_end()
        self._last = graph
        return graph.replay, result


def _parts(inputs: Iterable[Any]) -> list[Any]:
    """The inputs, dataclasses taken apart."""
    parts: list[Any] = []
    for value in inputs:
        if isinstance(value, Tensor) or not is_dataclass(value):
            parts.append(value)
        else:
            parts += [getattr(value, field.name) for field in fields(value)]
    return parts


def _rebuilt(inputs: Iterable[Any], parts: Iterator[Any]) -> list[Any]:
    """The inputs put together again from other parts."""
    return [
        replace(value, **{field.name: next(parts) for field in fields(value)}) if is_dataclass(value) else next(parts)
        for value in inputs
    ]
