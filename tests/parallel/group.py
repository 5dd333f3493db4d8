"""Processes that form groups of ranks and call functions of the tests together: real ones, over gloo or NCCL."""

from __future__ import annotations

import multiprocessing
import pickle
import sys
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

SECONDS = 240
"""Longest that a call may take."""


class Group:
    """So many processes, those on a CPU forked from one that has imported torch. They live until ``close``.

    Args:
        device_type: where tensors live that they exchange, "cpu" or "cuda".
    """

    def __init__(self, size: int, device_type: str = "cpu") -> None:
        # CUDA cannot be used in a fork of a process that has as much as asked for it.
        context = multiprocessing.get_context("forkserver" if device_type == "cpu" else "spawn")
        context.set_forkserver_preload(["torch", "torch.distributed", "bytesplat_ns.config", "group"])
        self._folder = tempfile.TemporaryDirectory()
        self._pipes, self._processes = [], []
        for rank in range(size):
            here, there = context.Pipe()
            arguments = (rank, size, device_type, self._folder.name, there, sys.path)
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            there.close()
            self._pipes.append(here)
            self._processes.append(process)

    def __call__(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Calls ``function(ranks, *arguments)`` on all ranks at once; what it returned on each.

        ``function`` is one of a module, or a method of a pickled object.
        """
        work = pickle.dumps((function, arguments))
        for pipe in self._pipes:
            pipe.send_bytes(work)
        results = []
        for rank, pipe in enumerate(self._pipes):
            assert pipe.poll(SECONDS), f"rank {rank} does not answer"
            results.append(pipe.recv())
        failures = [result for done, result in results if not done]
        assert not failures, "\n".join(failures)
        return [result for _, result in results]

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(10)
            process.kill()
        self._folder.cleanup()


def _serve(rank: int, size: int, device_type: str, folder: str, pipe: Connection, path: list[str]) -> None:
    sys.path[:] = path
    import torch
    import torch.distributed as dist

    from bytesplat_ns.parallel.ranks import Ranks

    torch.set_num_threads(1)
    device, backend = torch.device("cpu"), "gloo"
    if device_type == "cuda":
        device, backend = torch.device("cuda", rank), "nccl"
        torch.cuda.set_device(device)
    dist.init_process_group(
        backend, f"file://{Path(folder) / 'store'}", timeout=timedelta(seconds=SECONDS), rank=rank, world_size=size
    )
    ranks = Ranks(rank, size, device)
    while True:
        try:
            function, arguments = pickle.loads(pipe.recv_bytes())
        except EOFError:
            break
        try:
            pipe.send((True, function(ranks, *arguments)))
        except BaseException:
            pipe.send((False, f"rank {rank}: {traceback.format_exc()}"))
    dist.destroy_process_group()
