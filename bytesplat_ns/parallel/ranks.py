"""The processes that train one model together, and the collectives with which they talk.

Everything that ranks tell each other goes through here, so that what is sent is counted in one place. With one rank
every collective is the identity, and no process group is needed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class Ranks:
    """A group of ranks, numbered from 0. All of them must call the same collectives in the same order.

    Attributes:
        rank, size: which one this is, and how many there are.
        sent: bytes that this rank has sent to other ranks, by kind.
    """

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        if size > 1 and not dist.is_initialized():
            raise RuntimeError(f"Rank {rank} of {size} has no process group: start ranks with ns-train or torchrun.")
        self.rank = rank
        self.size = size
        self.sent: Counter[str] = Counter()

    def gather(self, rows: Tensor, kind: str = "control") -> Tensor:
        """Concatenates the rows [n, ...] of all ranks, which may differ in number, in the order of ranks."""
        if self.size == 1:
            return rows
        return torch.cat(self.gather_parts(rows, kind))

    def gather_parts(self, rows: Tensor, kind: str = "control") -> list[Tensor]:
        """The rows [n, ...] of each rank."""
        if self.size == 1:
            return [rows]
        counts = self._all_gather(torch.tensor([len(rows)], device=rows.device), kind)
        longest = max(int(count) for count in counts)
        padded = rows.new_zeros(longest, *rows.shape[1:])
        padded[: len(rows)] = rows
        parts = self._all_gather(padded, kind)
        return [part[: int(count)] for part, count in zip(parts, counts, strict=True)]

    def sum(self, tensor: Tensor, kind: str = "control") -> Tensor:
        """The sum of the ranks' tensors of one shape, added in the order of ranks: the same bits everywhere."""
        if self.size == 1:
            return tensor
        parts = self._all_gather(tensor.contiguous(), kind)
        total = parts[0].clone()
        for part in parts[1:]:
            total += part
        return total

    def exchange(self, parts: Sequence[Tensor], kind: str) -> list[Tensor]:
        """Sends ``parts[r]`` [n_r, ...] to rank r, and returns what each rank has sent to this one.

        Parts of one call have one type and the same columns; their numbers of rows may differ.
        """
        assert len(parts) == self.size, "one part for each rank"
        if self.size == 1:
            return list(parts)
        device = parts[0].device
        counts = torch.tensor([len(part) for part in parts], device=device)
        incoming = torch.empty_like(counts)
        dist.all_to_all_single(incoming, counts)
        sizes = incoming.tolist()
        received = parts[0].new_empty(sum(sizes), *parts[0].shape[1:])
        dist.all_to_all_single(received, torch.cat(list(parts)), sizes, [len(part) for part in parts])
        here = parts[self.rank]
        self.sent[kind] += sum(part.nbytes for part in parts) - here.nbytes + 8 * (self.size - 1)
        return list(received.split(sizes))

    def broadcast(self, value: Any, source: int = 0) -> Any:
        """What rank ``source`` has as ``value``: any object that pickle can carry."""
        if self.size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=source)
        return box[0]

    def wait(self) -> None:
        """Returns once all ranks are here."""
        if self.size > 1:
            dist.barrier()

    def _all_gather(self, tensor: Tensor, kind: str) -> list[Tensor]:
        parts = [torch.empty_like(tensor) for _ in range(self.size)]
        dist.all_gather(parts, tensor)
        self.sent[kind] += tensor.nbytes * (self.size - 1)
        return parts


ALONE = Ranks()
"""One rank."""


@cache
def of_process() -> Ranks:
    """The group that this process was started in; ``ALONE`` without one (so in every tool that does not train)."""
    if not (dist.is_available() and dist.is_initialized()):
        return ALONE
    return Ranks(dist.get_rank(), dist.get_world_size())
