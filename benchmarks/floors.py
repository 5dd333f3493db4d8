"""How fast the stages could be at best on a GPU: what a scene makes them do, over what the device can do.

A stage takes at least the time to move its bytes, each input read and each output written once, at the bandwidth of a
large copy; and the time to issue its instructions, one for each scheduler and clock. Its floor is the larger one. What
is counted is the least that a kernel of this kind needs: loads, culling, queues and loop control are left out, so a
ratio to the floor says what they and all waiting cost. Inputs that the L2 cache still holds from the run before can
bring a small scene below the floor.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from bytesplat_ns.ops.layout import (
    ALPHA_MAX,
    ALPHA_MIN,
    CONIC,
    MEAN2D,
    OPACITY,
    RECORD_WIDTH,
    ROW_WIDTH,
    ROW_WIDTH_WITH_STATISTICS,
    TILE,
    TRANSMITTANCE_MIN,
    Cameras,
    Records,
    TileLists,
)

PART = 8
"""Side of the pixels that a warp blends, each lane two of them."""

LANES = 32
SCHEDULERS = 4
"""Of a multiprocessor, in all GPUs since compute capability 7.0."""

# Warp instructions for one record on one part ------------------------------------------------------------------------

COLUMN = 4  # dx, two for what is linear and quadratic in it, the slope along y: the same for both pixels of a lane
ALPHA = 9  # dy, two for the power, exp2, clamp, test, transmittance, test, weight
FORWARD = COLUMN + 2 * (ALPHA + 4)  # red, green, blue, depth
# Gradient times colour (3), the rest behind (1), 1 / (1 - alpha) (2), dL/d(alpha) (2), dL/d(power) (1).
BACKWARD = COLUMN + 2 * (ALPHA + 9) + 5  # sums over pixels by matrix products: pack, store, load, multiply
ABSOLUTE = 2 * 4 + 4  # |dL/d(mean2d)| in x and y, and their sums

# Of a pixel -----------------------------------------------------------------------------------------------------------

# Three channels; four maps of moments and three of derivatives; a separable window of 11 taps in two directions.
SSIM = 3 * (4 + 3) * 2 * 11


@dataclass(frozen=True)
class Ceilings:
    """What a device can do at best."""

    bandwidth: float  # bytes a second, read and written
    issue: float  # warp instructions a second

    @staticmethod
    def measure() -> Ceilings:
        """Of the current GPU: bandwidth of a large copy; peak clock of all schedulers."""
        from cuda.core import Device

        source = torch.ones(1 << 28, device="cuda")
        target = torch.empty_like(source)
        times = []
        for _ in range(10):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            target.copy_(source)
            end.record()
            end.synchronize()
            times.append(1e-3 * start.elapsed_time(end))
        properties = Device(torch.cuda.current_device()).properties
        schedulers = SCHEDULERS * properties.multiprocessor_count
        return Ceilings(2 * source.nbytes / min(times), schedulers * 1e3 * properties.clock_rate)


@dataclass(frozen=True)
class Work:
    """What a scene makes a step do."""

    gaussians: int
    records: int
    pairs: int
    tiles: int
    pixels: int
    evaluations: int  # records on parts, see ``count_evaluations``
    harmonics: int = 16  # of a Gaussian and channel

    @property
    def parameters(self) -> int:
        """Floats of a Gaussian."""
        return 3 + 4 + 3 + 1 + 3 * self.harmonics


SHAPE = 4 * (3 + 4 + 3 + 1)  # bytes of a Gaussian without its colour
RECORD = 4 * RECORD_WIDTH
NAMES = 4 + 4 + 4 + 8  # of a record: Gaussian, view, radius, id
IMAGE = 4 * (3 + 1 + 1)
GRADIENT = 4 * (3 + 1)  # without depth
PHOTO = 3

STEP = ("project", "bin", "rasterize", "loss", "rasterize_backward", "project_backward_adam")
TO_GRADIENTS = ("project", "bin", "rasterize", "rasterize_backward", "project_backward")


def floors(work: Work, ceilings: Ceilings) -> dict[str, float]:
    """Least milliseconds of each stage, by the names of ``raster.py``."""
    n, m, pairs, pixels = work.gaussians, work.records, work.pairs, work.pixels
    colour, parameters = 4 * 3 * work.harmonics, 4 * work.parameters
    lists = RECORD * m + 4 * pairs
    rows, narrow_rows = 4 * ROW_WIDTH_WITH_STATISTICS * m, 4 * ROW_WIDTH * m
    backward = lists + (IMAGE + GRADIENT) * pixels
    warps = pixels / LANES
    needs = {  # bytes, warp instructions
        "project": (SHAPE * n + (colour + 8) * m + (RECORD + NAMES) * m, 0),
        "bin": ((4 * 7 + 4) * m + 4 * pairs + 8 * (work.tiles + 1), 0),
        "rasterize": (lists + IMAGE * pixels, FORWARD * work.evaluations),
        "loss": ((4 * (3 + 1) + PHOTO + GRADIENT) * pixels, SSIM * warps),
        "rasterize_backward": (backward + rows, (BACKWARD + ABSOLUTE) * work.evaluations),
        "rasterize_backward without absgrad": (backward + narrow_rows, BACKWARD * work.evaluations),
        "project_backward": (narrow_rows + (SHAPE + colour + 4) * m + parameters * n, 0),
        "project_backward_adam": (narrow_rows + 4 * m + 6 * parameters * n, 0),
    }
    least = {
        stage: 1e3 * max(size / ceilings.bandwidth, instructions / ceilings.issue)
        for stage, (size, instructions) in needs.items()
    }
    plain = {stage: f"{stage} without absgrad" for stage in ("rasterize_backward",)}
    least["forward + backward"] = least["rasterize"] + least["rasterize_backward"]
    least["forward + backward without absgrad"] = least["rasterize"] + least[plain["rasterize_backward"]]
    least["projection to gradients eager"] = sum(least[stage] for stage in TO_GRADIENTS)
    least["projection to gradients eager without absgrad"] = sum(least[plain.get(s, s)] for s in TO_GRADIENTS)
    least["step eager"] = least["step replayed"] = sum(least[stage] for stage in STEP)
    return least


@dataclass(frozen=True)
class Walk:
    """What the parts (8 x 8 pixels, four a tile) do with their tiles' lists."""

    evaluations: int  # how often a record meets a part of which a pixel, not yet saturated, takes it
    batches: Tensor  # [tiles, parts] int64: of LANES entries, that begin while a pixel of the part is not saturated


def count_evaluations(records: Records, tiles: TileLists, cameras: Cameras) -> int:
    """How often a record meets a part of which a pixel, not yet saturated, takes it.

    No kernel that blends in this order can do with fewer; one that walks lists or tests boxes does more.
    """
    return walk(records, tiles, cameras).evaluations


def walk(records: Records, tiles: TileLists, cameras: Cameras) -> Walk:
    """Goes down all lists in step, the longest ones first."""
    device, lengths = records.table.device, tiles.offsets.diff()
    order = lengths.argsort(descending=True)
    begins, lengths = tiles.offsets[order], lengths[order].cpu()
    within = torch.arange(TILE, device=device).view(2, PART)
    x = within[None, :, None, :].expand(2, 2, PART, PART).reshape(4, -1)  # [parts, pixels of a part]
    y = within[:, None, :, None].expand(2, 2, PART, PART).reshape(4, -1)
    row = order // cameras.tiles_x
    x = (x + TILE * (order % cameras.tiles_x)[:, None, None]).float() + 0.5  # [tiles, parts, pixels]
    y = (y + TILE * (row % cameras.tiles_y)[:, None, None]).float() + 0.5
    sizes = cameras.sizes.to(device)[row // cameras.tiles_y]
    transmittance = ((x < sizes[:, :1, None]) & (y < sizes[:, 1:, None])).float()
    total = torch.zeros((), dtype=torch.int64, device=device)
    batches = torch.zeros(x.shape[:2], dtype=torch.int64, device=device)
    for place in range(int(lengths.max()) if len(lengths) else 0):
        busy = int((lengths > place).sum())
        table = records.table[tiles.records[begins[:busy] + place].long()][..., None, None]
        alpha = _alpha(table, x[:busy], y[:busy])
        ahead = transmittance[:busy]
        going_on = ahead > TRANSMITTANCE_MIN
        if place % LANES == 0:
            batches[:busy] += going_on.any(-1)
        taken = (alpha >= ALPHA_MIN) & going_on
        total += taken.any(-1).sum()
        ahead.mul_(torch.where(taken, 1 - alpha, 1.0))  # a pixel that is stopped stays below the limit
    return Walk(int(total), torch.empty_like(batches).index_copy_(0, order, batches))


def _alpha(table: Tensor, x: Tensor, y: Tensor) -> Tensor:
    dx, dy = (position - table[:, MEAN2D.start + axis] for axis, position in enumerate((x, y)))
    a, b, c = (table[:, column] for column in range(CONIC.start, CONIC.stop))
    return (table[:, OPACITY] * torch.exp(-0.5 * (a * dx * dx + c * dy * dy) - b * dx * dy)).clamp_max(ALPHA_MAX)
