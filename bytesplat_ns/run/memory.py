"""How much memory a run will need, told at its start, and advice when there was not enough."""

from __future__ import annotations

import math
import platform
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import torch

from bytesplat_ns.density.store import GaussianStore
from bytesplat_ns.ops.cuda.buffers import GRADIENT_ROW_STRIDE, RECORD_STRIDE
from bytesplat_ns.ops.layout import RECORD_WIDTH, ROW_WIDTH_WITH_STATISTICS
from bytesplat_ns.photos.cache import GIB, MIB

if TYPE_CHECKING:
    from bytesplat_ns.pipeline import ByteSplatPipeline

PAIRS = 2
"""Pairs per Gaussian and view: 0.8 to 2.1 in a synthetic city, 3 in a room (benchmarks/results), up to 9 where few
Gaussians fill the view."""

HOST_VIEW_BYTES = (4 * RECORD_WIDTH + 3 * 4 + 8) + 4 * ROW_WIDTH_WITH_STATISTICS
"""A Gaussian that a view shows, on the CPU: row of the record table, Gaussian, view, radius, id; its gradient row."""

HOST_PAIR_BYTES = 4 + 8 + 4 * ROW_WIDTH_WITH_STATISTICS
"""One (record, tile) pair: its place in the tile's list, its number, and the gradient row it leaves on the CPU."""

GPU_VIEW_BYTES = 1.25 * ((4 * RECORD_STRIDE + 3 * 4 + 8) + 4 * GRADIENT_ROW_STRIDE)
"""The same on a GPU, whose tables are a quarter longer than they have to be (``ops.cuda.buffers.Capacity``)."""

GPU_PAIR_BYTES = 1.25 * 4
"""A pair's place in a tile's list. It is sorted with three more numbers, but before there are gradient rows."""

TRAINING_PIXEL_BYTES = 4 * (5 + 4 + 9 + 18) + 4
"""One pixel of a training view: image, its gradient, derivatives of SSIM, what the log compares; and the photo."""

EVALUATION_PIXEL_BYTES = 250
"""One pixel of the one view that is evaluated or shown at a time: image, and what SSIM and LPIPS make of it."""


@dataclass(frozen=True)
class Need:
    """Bytes that a run takes on its device at its fullest moment, its photos not counted."""

    state: int  # each Gaussian, always: parameters, moments, statistics, id
    step: int  # each Gaussian, for a moment: records, rows and pairs of each view, and gradients or an edit's copies
    images: int  # views in the making, whatever the number of Gaussians

    @staticmethod
    def of(store: GaussianStore, views: int, pixels: int, edits: bool = True) -> Need:
        """For rounds of ``views`` views of up to ``pixels`` pixels. ``edits``: density control will act."""
        parameters = sum(_row_bytes(p) for p in store.parameters.values())
        state = parameters + sum(_row_bytes(column) for column in store.columns.values()) + store.ids.element_size()
        if store.device.type == "cuda":
            # Gradients of parameters never reach memory, but an edit copies the largest columns.
            step = parameters * edits + views * (GPU_VIEW_BYTES + PAIRS * GPU_PAIR_BYTES)
        else:
            # Of several views the squares of their gradients too.
            step = parameters * (1 + (views > 1)) + views * (HOST_VIEW_BYTES + PAIRS * HOST_PAIR_BYTES)
        images = pixels * (views * TRAINING_PIXEL_BYTES + EVALUATION_PIXEL_BYTES)
        return Need(state, round(step), images)

    def total(self, gaussians: int) -> int:
        return gaussians * (self.state + self.step) + self.images

    def fitting(self, room: int) -> int:
        """How many Gaussians fit into ``room`` bytes."""
        return max(room - self.images, 0) // (self.state + self.step)


def free_bytes(device: torch.device) -> int:
    """What this process can still have on a device; host memory for the CPU."""
    if device.type != "cuda":
        return min([psutil.virtual_memory().available, *limits_of_control_groups()])
    held = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + held


def limits_of_control_groups(
    groups: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")
) -> list[int]:
    """Bytes left under each memory limit that a scheduler or a container has set for this process (cgroup v2)."""
    lines = groups.read_text().splitlines() if groups.exists() else []
    group = next((root / line[len("0::/") :] for line in lines if line.startswith("0::/")), root)
    left = []
    while group.is_relative_to(root):
        limit = group / "memory.max"
        if limit.exists() and (most := limit.read_text().strip()) != "max":
            counters = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
            # Files that were read count too, but give way.
            used = int((group / "memory.current").read_text()) - int(counters["inactive_file"])
            left.append(max(int(most) - used, 0))
        group = group.parent
    return left


def preflight(pipeline: ByteSplatPipeline) -> tuple[str, bool]:
    """One line on what a run that is about to begin will need, and whether that is more than there is.

    Of several ranks, which call this together, each is asked for its share, and the first speaks for all.
    """
    model, data, ranks = pipeline.model, pipeline.datamanager, pipeline.ranks
    cameras = data.train_dataset.cameras
    pixels = int((cameras.width * cameras.height).max())
    need = Need.of(pipeline.store, data.views_per_round, pixels, pipeline.strategy.schedule.observes(model.images_seen))
    caches = [data.train_photos, data.eval_photos] if data.eval_dataset else [data.train_photos]
    photos = sum(cache.pending for cache in caches if cache.place.type == model.device.type)
    # Ranks on CPUs of one machine share its memory.
    here = ranks.share(platform.node()).count(platform.node()) if model.device.type == "cpu" else 1
    # The state of the Gaussians that are there already is not free any more.
    room = free_bytes(model.device) // here + model.num_points * need.state
    if ranks.size > 1:
        # A rank has what all views show of its Gaussians, and as much again of the others' for the views it owns.
        need = replace(need, step=2 * need.step, images=-(-need.images // ranks.size))
    return judge(need, -(-model.config.max_gaussians // ranks.size), photos, room, ranks.size)


def judge(need: Need, at_most: int, photos: int, room: int, ranks: int = 1) -> tuple[str, bool]:
    """The line of ``preflight``, and whether it is bad news.

    Args:
        at_most: Gaussians that there may be, on each rank.
        photos: bytes that photos will still take.
        room: bytes for all of this.
        ranks: how many need as much.
    """
    whose = "this run" if ranks == 1 else f"each of {ranks} ranks"
    fit = need.fitting(room - photos)
    line = (
        f"Memory: {whose} will need about {_size(need.total(at_most) + photos)} for {at_most:,} Gaussians (at most), "
        f"views and photos; {fit:,} Gaussians fit into the {_size(room)} that it can have."
    )
    if fit >= at_most:
        return line, False
    return (
        f"{line} Unless the scene needs fewer, it will run out of memory: lower --pipeline.model.max-gaussians to "
        f"{max(fit, 1) * ranks}, or {_ADVICE}.",
        True,
    )


class OutOfMemory(SystemExit):
    """Ends the command with a message instead of a stack trace (exit code 1)."""

    @staticmethod
    def explain(error: BaseException, moment: str, outcome: str) -> OutOfMemory:
        """``moment``: when it happened; ``outcome``: what is saved and how to go on."""
        return OutOfMemory(
            f"Out of memory {moment}: {str(error).strip() or type(error).__name__}\n"
            f"What helps: lower --pipeline.model.max-gaussians, or {_ADVICE}.\n{outcome}"
        )


def exhausted(error: BaseException) -> bool:
    """Whether an error says that there was not enough memory, on the GPU or on the host."""
    # torch has no type for its failure to allocate host memory.
    host = isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
    return host or isinstance(error, (MemoryError, torch.cuda.OutOfMemoryError))


_ADVICE = (
    "keep fewer photos in memory (--pipeline.datamanager.image-cache-gib, or --pipeline.datamanager.cache-images cpu "
    "for those on a GPU), show fewer views a step (--pipeline.datamanager.views-per-round) or smaller ones "
    "(--downscale-factor of the data parser)"
)


def _row_bytes(table: torch.Tensor) -> int:
    return math.prod(table.shape[1:]) * table.element_size()


def _size(size: int) -> str:
    return f"{size / GIB:,.1f} GiB" if size >= GIB else f"{size / MIB:,.0f} MiB"
