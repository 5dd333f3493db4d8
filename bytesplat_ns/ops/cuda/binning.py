"""Tile lists (``csrc/cuda/bin.cu``, ``sort.cu``)."""

from __future__ import annotations

import torch
from torch import Tensor

from bytesplat_ns.ops.layout import Cameras, Records, TileLists
from bytesplat_ns.ops.nvrtc import Program, multiprocessors

from .buffers import HALTED, PAIRS, Capacity, DeviceRecords, on_device

BINNING = Program("bin.cu")
SORTING = Program("sort.cu")
THREADS = 256
DIGITS = 256
BLOCKS_OF_MULTIPROCESSOR = 6
DEPTH_PLACES = 4
BY_DEPTH = {"COUNT": 0, "ITEMS": 8}
BY_TILE = {"COUNT": 1, "ITEMS": 16}

MOST_PAIRS = 2**32 - 2**16
"""Places of pairs have 32 bits in the kernels, and the rasterizer looks a little beyond the end of a list."""

pair_capacity = Capacity(MOST_PAIRS, "pairs of a tile and a Gaussian that reaches it")


def bin(records: Records, cameras: Cameras) -> TileLists:
    """Lists each record in the tiles it reaches, near to far; see ``ops.reference.bin``. Waits for their length."""
    records = on_device(records)
    device = records.table.device
    while True:
        lists = bin_ahead(records, cameras, pair_capacity(device))
        state = records.state.tolist()
        pair_capacity.learn(device, state[PAIRS])
        if not state[HALTED]:
            lists.records = lists.records[: state[PAIRS]]
            return lists
        records.state[HALTED] = 0


def bin_ahead(records: DeviceRecords, cameras: Cameras, capacity: int) -> TileLists:
    """The same into buffers of ``capacity`` pairs, without waiting for their number."""
    device, rows = records.table.device, len(records)
    tiles = len(cameras) * cameras.tiles_y * cameras.tiles_x
    places = max(1, -(-(tiles - 1).bit_length() // 8))
    blocks = -(-rows // THREADS)
    resident = min(blocks, BLOCKS_OF_MULTIPROCESSOR * multiprocessors(device))
    inputs = (records.table, records.view, cameras.sizes.contiguous())
    scratch = _Scratch(device, rows, capacity, places, blocks)

    # 1. Records in the order of depth, equal depths by id.
    tile_counts, keys, order = (torch.empty(rows, dtype=torch.int32, device=device) for _ in range(3))
    BINNING.kernel("count_tiles")(
        resident, THREADS, *inputs, tile_counts, keys, order, scratch.depth_histograms, records.state
    )
    if not records.ascending:  # the sort is stable: what comes in the order of ids stays so where depths are equal
        by_id = records.ids.argsort()
        keys, order = keys[by_id], order[by_id]
    keys, order = _sort(keys, order, scratch.depth_histograms, scratch.depth_sort, BY_DEPTH, records.state)

    # 2. Their pairs, in that order.
    tile, record = (torch.empty(capacity, dtype=torch.int32, device=device) for _ in range(2))
    BINNING.kernel("make_pairs")(
        resident,
        THREADS,
        *inputs,
        cameras.tiles_x,
        cameras.tiles_y,
        order,
        tile_counts,
        tile,
        record,
        capacity,
        places,
        scratch.tile_histograms,
        scratch.pairs_counter,
        scratch.pairs_lookback,
        records.state,
    )

    # 3. Pairs in the order of tiles; those of one tile stay in the order of depth.
    tile, record = _sort(tile, record, scratch.tile_histograms, scratch.tile_sort, BY_TILE, records.state)
    offsets = torch.empty(tiles + 1, dtype=torch.int64, device=device)
    BINNING.kernel("find_offsets")(capacity // THREADS + 1, THREADS, tile, tiles, offsets, records.state)
    none = torch.empty(0, dtype=torch.int64, device=device)
    return TileLists(offsets, record, pair=none, pair_offsets=none)


class _Scratch:
    """Everything that the kernels want to find zeroed, in one allocation."""

    def __init__(self, device: torch.device, rows: int, capacity: int, places: int, blocks: int) -> None:
        depth_words, tile_words = (
            1 + DIGITS * _sort_blocks(count, constants) for count, constants in ((rows, BY_DEPTH), (capacity, BY_TILE))
        )
        words = [DEPTH_PLACES * DIGITS, places * DIGITS, 1, blocks, DEPTH_PLACES * depth_words, places * tile_words]
        parts = torch.zeros(sum(words), dtype=torch.int64, device=device).split(words)
        self.depth_histograms, self.tile_histograms = (part.view(-1, DIGITS) for part in parts[:2])
        self.pairs_counter, self.pairs_lookback = parts[2].view(torch.int32), parts[3]
        self.depth_sort, self.tile_sort = parts[4].view(DEPTH_PLACES, -1), parts[5].view(places, -1)


def _sort_blocks(count: int, constants: dict[str, int]) -> int:
    return -(-count // (DIGITS * constants["ITEMS"]))


def _sort(
    keys: Tensor, values: Tensor, histograms: Tensor, scratch: Tensor, constants: dict[str, int], state: Tensor
) -> tuple[Tensor, Tensor]:
    """Sorts by the lowest bytes of the keys, stably: as many as there are rows of ``histograms`` [places, DIGITS]."""
    kernel = SORTING.kernel("sort_digit", **constants)
    other = torch.empty_like(keys), torch.empty_like(values)
    for place in range(len(histograms)):
        counter, lookback = scratch[place, :1].view(torch.int32), scratch[place, 1:]
        kernel(
            _sort_blocks(len(keys), constants),
            DIGITS,
            keys,
            values,
            *other,
            8 * place,
            histograms[place],
            counter,
            lookback,
            state,
        )
        (keys, values), other = other, (keys, values)
    return keys, values
