"""How many records of a tile's list can stay on chip from the forward to the backward direction.

The rule is fixed before anything is measured: a multiprocessor works on four tiles at a time, one for each of its
schedulers, and shares its shared memory out among them; all of a tile's share holds records. What the device has is
asked of it through cuda.core.
"""

from __future__ import annotations

from functools import cache

import torch

TILES_AT_ONCE = 4
"""Tiles that a multiprocessor works on at the same time."""

RECORD_BYTES = 48
"""A record on chip: its row of the table, padded to three times 16 bytes."""


@cache
def residency_budget(device: torch.device) -> int | None:
    """Records of one tile that stay on chip; None on a CPU, whose caches nobody divides up by hand."""
    if device.type != "cuda":
        return None
    from cuda.core import Device

    limits = Device(device.index).properties
    return resident_records(
        limits.max_shared_memory_per_multiprocessor,
        limits.max_shared_memory_per_block_optin,
        limits.reserved_shared_memory_per_block,
    )


def resident_records(multiprocessor: int, block: int, reserved: int) -> int:
    """The rule.

    Args:
        multiprocessor: shared memory of a multiprocessor, bytes.
        block: the most of it that one block may have, bytes.
        reserved: what the driver keeps of each block's part, bytes.
    """
    return min(multiprocessor // TILES_AT_ONCE - reserved, block) // RECORD_BYTES
