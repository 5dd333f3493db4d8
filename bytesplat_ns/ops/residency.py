"""How many records of a tile's list stay on chip from the forward to the backward direction.

One rule, fixed before anything is measured, for the kernel that keeps them (``csrc/cuda/fused.cu``) and for pruning, so
that tiles fit it. It follows from what the kernel declares and from what the device says of itself through cuda.core:
a multiprocessor works on as many tiles at a time as it has registers for, and what is left of its shared memory after
the working space of each holds records.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

from bytesplat_ns.ops.layout import TILE
from bytesplat_ns.ops.nvrtc import SharedMemory, capability, multiprocessors, shared_memory

PART = 8
"""Side of the pixels that a warp blends. It keeps the records that reach them."""

QUARTERS = (TILE // PART) ** 2
"""Parts of a tile."""

RECORD_BYTES = 40
"""A record on chip (``Queue`` in ``csrc/cuda/raster.h``)."""

GROUP = 8
"""Records whose gradient rows are formed together: the last group may have to be filled up."""

FEWEST_SLOTS = 64
"""A multiprocessor works on fewer tiles rather than that a part has room for fewer records."""

WARP = 32
ALLOCATION = 128  # bytes: a block gets shared memory in multiples of it


@dataclass(frozen=True)
class Budget:
    """What the kernel keeps on chip from the forward to the backward pass."""

    blocks: int  # tiles that a multiprocessor works on at a time
    slots: int  # records of 8 x 8 pixels for which shared memory has room
    resident: int  # tiles that the whole GPU works on at a time

    @property
    def records(self) -> int:
        """Records of 8 x 8 pixels that stay. All of a tile do, if its list is no longer."""
        return self.slots - (GROUP - 1)


@cache
def budget(device: torch.device, statistics: bool, exact: bool) -> Budget:
    """The rule for a GPU; the more a kernel computes, the less it keeps (``rasterize_photometric``)."""
    limits = shared_memory(device)
    blocks = most_blocks(capability(device), exact)
    while blocks > 1 and slots_for(limits, blocks, statistics, exact) < FEWEST_SLOTS:
        blocks -= 1
    return Budget(blocks, slots_for(limits, blocks, statistics, exact), blocks * multiprocessors(device))


def residency_budget(device: torch.device) -> int | None:
    """Entries of a tile's list with which it stays on chip as a whole; None on a CPU, whose caches nobody divides up.

    That is the budget of rounds without statistics: pruning begins when densification has ended.
    """
    return None if device.type != "cuda" else budget(device, statistics=False, exact=False).records


def most_blocks(capability: tuple[int, int], exact: bool) -> int:
    """Tiles that a multiprocessor has registers for: as the compiler uses them there, none is spilled."""
    return 6 if capability == (9, 0) and not exact else 4


def slots_for(limits: SharedMemory, blocks: int, statistics: bool, exact: bool) -> int:
    """Records of 8 x 8 pixels that fit if a multiprocessor works on so many tiles."""
    room = min(limits.multiprocessor // blocks - limits.reserved, limits.block) // ALLOCATION * ALLOCATION
    return (room - working_space(statistics, exact)) // (2 * QUARTERS * RECORD_BYTES) * 2  # even: 16-byte alignment


def working_space(statistics: bool, exact: bool) -> int:
    """Bytes of a tile's shared memory besides its records (``Shared`` in ``fused.cu``), and for their alignment."""
    words = 2 if exact else 1
    rows = GROUP * WARP * 8 * (words + statistics)
    reduction = rows + 2 * words * WARP * 16 + WARP * 4 + 16
    filtered = 2 * (TILE + 10) * TILE * 16
    return max(QUARTERS * reduction, filtered) + QUARTERS * 8 + 16
