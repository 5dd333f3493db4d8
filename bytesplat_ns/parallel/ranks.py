"""The processes that train one model together, and the collectives with which they talk.

Everything that ranks tell each other goes through here, so that what is sent is counted in one place. With one rank
every collective is the identity, and no process group is needed.

Every collective begins with a header: how many rows come, and a word of their sender. Receivers need the former anyway.
The word costs nothing, and keeps the ranks in step when something is amiss: a rank that cannot go on takes part in the
header of whatever the others do next, and all of them leave that collective together; a signal that one rank received
is known to all after the same collective.
"""

from __future__ import annotations

import pickle
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from bytesplat_ns.run.memory import exhausted

T = TypeVar("T")

HEADER_BYTES = 16
"""What a rank sends each other one ahead of every collective."""

DEVICE_ERRORS: tuple[type[Exception], ...] = (torch.AcceleratorError,) if hasattr(torch, "AcceleratorError") else ()
"""A kernel of this rank went wrong, which shows when the host next waits: mostly in a collective."""

_LEAVES = -1


class RankLeft(RuntimeError):
    """Another rank cannot go on, and said so. All ranks have left the same collective."""

    def __init__(self, rank: int) -> None:
        super().__init__(f"Rank {rank} could not go on.")
        self.rank = rank


class RankLost(RuntimeError):
    """A collective failed: another rank, or the way to it, is gone."""


class Ranks:
    """A group of ranks, numbered from 0. All of them must call the same collectives in the same order.

    Attributes:
        rank, size: which one this is, and how many there are.
        device: where small tensors live that ranks exchange.
        sent: bytes that this rank has sent to other ranks, by kind.
        rows, zero_rows: gradient rows that were due to other ranks, and those of them that were zero and not sent.
        heard: the largest number that any rank has announced by now, 0 if none has; the same on all ranks.
        waited, transferred: seconds spent in headers and in what follows them, of what ``timed`` covered. A header is
            small, so what it takes is waiting for other ranks.
    """

    def __init__(self, rank: int = 0, size: int = 1, device: torch.device | str = "cpu") -> None:
        if size > 1 and not dist.is_initialized():
            raise RuntimeError(f"Rank {rank} of {size} has no process group: start ranks with ns-train or torchrun.")
        self.rank = rank
        self.size = size
        self.device = torch.device(device)
        self.sent: Counter[str] = Counter()
        self.rows = self.zero_rows = 0
        self.heard = 0
        self.waited = self.transferred = 0.0
        self._word = 0
        self._within = False  # a collective whose header the others have had
        self._timed = False

    # Collectives -------------------------------------------------------------------------------------------------

    def gather(self, rows: Tensor, kind: str = "control") -> Tensor:
        """Concatenates the rows [n, ...] of all ranks, which may differ in number, in the order of ranks."""
        if self.size == 1:
            return rows
        return torch.cat(self.gather_parts(rows, kind))

    def gather_parts(self, rows: Tensor, kind: str = "control") -> list[Tensor]:
        """The rows [n, ...] of each rank."""
        if self.size == 1:
            return [rows]
        _, counts = self._header([len(rows)] * self.size, kind)
        padded = rows.new_zeros(max(counts), *rows.shape[1:])
        padded[: len(rows)] = rows
        return [part[:count] for part, count in zip(self._all_gather(padded, kind), counts, strict=True)]

    def sum(self, tensor: Tensor, kind: str = "control") -> Tensor:
        """The sum of the ranks' tensors of one shape, added in the order of ranks: the same bits everywhere."""
        if self.size == 1:
            return tensor
        self._header([len(tensor)] * self.size if tensor.ndim else [1] * self.size, kind)
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
        outgoing, incoming = self._header([len(part) for part in parts], kind)
        return list(self.exchange_rows(torch.cat(list(parts)), outgoing, incoming, kind).split(incoming))

    def announce_rows(self, counts: Tensor, kind: str) -> tuple[list[int], list[int]]:
        """The header of one ``exchange_rows``, or several, which must follow at once.

        On a GPU it is here that the host waits, for numbers that only the device knew.

        Args:
            counts: [ranks] int64 on ``device``, rows for each rank.

        Returns:
            the counts, and how many rows each rank has for this one.
        """
        return self._header(counts, kind)

    def exchange_rows(self, rows: Tensor, outgoing: Sequence[int], incoming: Sequence[int], kind: str) -> Tensor:
        """Sends each rank its part of the rows [n, ...] and returns what came [m, ...], both in the order of ranks.

        Args:
            outgoing: rows for each rank, n in all.
            incoming: rows that each rank has for this one, m in all.
        """
        self._within = True
        received = rows.new_empty(sum(incoming), *rows.shape[1:])
        with self._talking("transferred"):
            dist.all_to_all_single(received, rows.contiguous(), list(incoming), list(outgoing))
        self._within = False
        self.sent[kind] += rows.nbytes - rows[: outgoing[self.rank]].nbytes
        return received

    def broadcast(self, value: T, source: int = 0) -> T:
        """What rank ``source`` has as ``value``: any object that pickle can carry."""
        return self.share(value if self.rank == source else None)[source]  # type: ignore[return-value]

    def share(self, value: T) -> list[T]:
        """What each rank has as ``value``: any objects that pickle can carry."""
        if self.size == 1:
            return [value]
        pickled = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8).to(self.device)
        return [pickle.loads(part.cpu().numpy().tobytes()) for part in self.gather_parts(pickled)]

    def wait(self) -> None:
        """Returns once all ranks are here."""
        if self.size > 1:
            self._header([0] * self.size, "control")
            self._within = False

    # When something is amiss -------------------------------------------------------------------------------------

    def announce(self, number: int) -> None:
        """Lets all ranks know a number, with its next collective; the largest of all becomes ``heard``."""
        self._word = number
        if self.size == 1:
            self.heard = number

    def leave(self) -> bool:
        """Takes part in the collective that the other ranks begin next, in which they find a ``RankLeft``.

        Returns whether all ranks are in step again: not if this one failed in the middle of a collective, out of which
        nobody can call the others.
        """
        if self._within:
            return False
        if self.size > 1:
            self._exchange_headers([0] * self.size, _LEAVES)
        return True

    def agree(self, trouble: str | None) -> str | None:
        """What went wrong on the first rank where something did, None if nothing did anywhere."""
        return next((found for found in self.share(trouble) if found is not None), None)

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Measures how long this rank waits and transfers. On a GPU that costs synchronisation."""
        self._timed = True
        try:
            yield
        finally:
            self._timed = False

    # How it is done ----------------------------------------------------------------------------------------------

    def _header(self, counts: Sequence[int] | Tensor, kind: str) -> tuple[list[int], list[int]]:
        """Tells each rank how many rows it will get; these numbers, and how many each rank will send to this one.

        Raises:
            RankLeft: a rank cannot go on.
        """
        with self._talking("waited"):
            outgoing, incoming = self._exchange_headers(counts, self._word)
        self.sent[kind] += HEADER_BYTES * (self.size - 1)
        words = [word for _, word in incoming]
        if _LEAVES in words:
            raise RankLeft(words.index(_LEAVES))
        self.heard = max(self.heard, *words)
        self._within = True
        return [count for count, _ in outgoing], [count for count, _ in incoming]

    def _exchange_headers(self, counts: Sequence[int] | Tensor, word: int) -> list[list[list[int]]]:
        counts = torch.as_tensor(counts, device=self.device)
        outgoing = torch.stack([counts, torch.full_like(counts, word)], 1)
        incoming = torch.empty_like(outgoing)
        dist.all_to_all_single(incoming, outgoing)
        return torch.stack([outgoing, incoming]).tolist()

    def _all_gather(self, tensor: Tensor, kind: str) -> list[Tensor]:
        parts = [torch.empty_like(tensor) for _ in range(self.size)]
        with self._talking("transferred"):
            dist.all_gather(parts, tensor)
        self._within = False
        self.sent[kind] += tensor.nbytes * (self.size - 1)
        return parts

    @contextmanager
    def _talking(self, what: str) -> Iterator[None]:
        """Around what torch.distributed does."""
        if self._timed:
            self._finish()
            start = time.perf_counter()
        try:
            yield
        except RuntimeError as error:
            if exhausted(error) or isinstance(error, DEVICE_ERRORS):  # of this rank, of which others know nothing
                raise
            raise RankLost(f"Rank {self.rank} has lost the others: {error}") from error
        if self._timed:
            self._finish()
            setattr(self, what, getattr(self, what) + time.perf_counter() - start)

    def _finish(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


ALONE = Ranks()
"""One rank."""


@cache
def of_process() -> Ranks:
    """The group that this process was started in; ``ALONE`` without one."""
    if not (dist.is_available() and dist.is_initialized()):
        return ALONE
    nccl = dist.get_backend() == "nccl"
    device = torch.device("cuda", torch.cuda.current_device()) if nccl else torch.device("cpu")
    return Ranks(dist.get_rank(), dist.get_world_size(), device)
