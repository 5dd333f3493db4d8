"""Photos in memory, as many as a byte budget allows, where they are needed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import psutil
import torch
from torch import Tensor

from bytesplat_ns.photos.images import downscale_image, downscale_mask

MIB, GIB = 1024**2, 1024**3


@dataclass(frozen=True)
class Photo:
    """A decoded, undistorted photo."""

    image: Tensor  # [H, W, 3 | 4] uint8, straight alpha
    mask: Tensor | None = None  # [H, W] uint8, nonzero = keep

    @property
    def nbytes(self) -> int:
        return self.image.nbytes + (0 if self.mask is None else self.mask.nbytes)

    def to(self, device: torch.device) -> Photo:
        """The same photo on a device."""
        return Photo(self.image.to(device), None if self.mask is None else self.mask.to(device))

    def downscale(self, factor: int) -> Photo:
        """The photo at 1 / factor of its size."""
        mask = None if self.mask is None else downscale_mask(self.mask, factor)
        return Photo(downscale_image(self.image, factor), mask)


def default_budget(place: torch.device) -> int:
    """Bytes that photos may take where nothing else was asked for.

    A quarter of a GPU's free memory, since Gaussians will need the rest; half of the host's.
    """
    if place.type == "cuda":
        return torch.cuda.mem_get_info(place)[0] // 4
    return psutil.virtual_memory().available // 2


class PhotoCache:
    """Photos by index. Asked for a photo, it answers from memory if it may keep it there, else decodes it again.

    If all photos fit on the device they are kept there, else in host memory if all fit there. Else host memory keeps
    those that were asked for first. Nothing is evicted: an epoch shows every photo once, in a new order, so a fixed
    share of the photos is hit as often as it is large, and least-recently-used eviction does worse at any size
    (with room for half of the photos it would hit 15 % of the time).

    Args:
        decode: makes the photo of an index, on the CPU; called from several threads.
        nbytes: bytes that each photo is expected to take.
        device: where photos are used.
        budget: bytes; None: `default_budget` of the place.
        host_only: keep nothing on the device.
        workers: number of decoding threads.
    """

    def __init__(
        self,
        decode: Callable[[int], Photo],
        nbytes: Sequence[int],
        device: torch.device | str,
        budget: int | None = None,
        host_only: bool = False,
        workers: int = 4,
    ) -> None:
        self.device = torch.device(device)
        self.total = sum(nbytes)
        host = torch.device("cpu")
        for place in (host,) if host_only else (self.device, host):
            self.place, self.budget = place, default_budget(place) if budget is None else budget
            if self.complete:
                break
        self._count = len(nbytes)
        self._decode = decode
        self._kept: dict[int, Photo] = {}
        self._room = self.budget  # bytes not yet taken
        self._coming: dict[int, Future[Photo]] = {}
        self._workers = workers
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="decode")

    @property
    def complete(self) -> bool:
        """Whether all photos fit the budget."""
        return self.total <= self.budget

    @property
    def pending(self) -> int:
        """Bytes that photos will still take, once all have been asked for."""
        return max(min(self.total, self.budget) - (self.budget - self._room), 0)

    def describe(self) -> str:
        """One line: how much there is, where it goes and why."""
        where = "host memory" if self.place.type == "cpu" else str(self.place)
        share = "all" if self.complete else f"{self.budget / self.total:.0%}"
        rest = "" if self.complete else ", the others are decoded at each use"
        size, budget = f"{self.total / MIB:,.1f} MiB", f"{self.budget / GIB:,.2f} GiB"
        return f"{len(self)} photos of {size}: {share} kept in {where} (budget {budget}){rest}"

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Photo:
        """The photo, on `device`."""
        photo = self._kept.get(index)
        if photo is None:
            coming = self._coming.pop(index, None)
            photo = coming.result() if coming else self._decode(index)
            if photo.nbytes <= self._room:
                self._room -= photo.nbytes
                photo = self._kept[index] = photo.to(self.place)
        return photo.to(self.device)

    def prefetch(self, indices: Iterable[int]) -> None:
        """Starts to decode photos that will be asked for next, in the background."""
        for index in indices:
            if index not in self._kept and index not in self._coming:
                self._coming[index] = self._pool.submit(self._decode, index)

    def fill(self, indices: Sequence[int]) -> Iterator[int]:
        """Decodes these photos, a few at a time, and yields each index once its photo is there."""
        for place, index in enumerate(indices):
            self.prefetch(indices[place : place + 2 * self._workers])
            self[index]
            yield index
