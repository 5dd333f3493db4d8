"""The arithmetic of floors, and the count that it rests on."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from floors import STEP, TO_GRADIENTS, Ceilings, Work, count_evaluations, floors
from room import room

from bytesplat_ns.ops import reference
from bytesplat_ns.ops.layout import ALPHA_MAX, ALPHA_MIN, TILE, TRANSMITTANCE_MIN, RenderSettings

WORK = Work(gaussians=1000, records=600, pairs=3000, tiles=100, pixels=25_600, evaluations=8000)


def by_hand(records, tiles, cameras) -> int:
    """Pixel by pixel, record by record."""
    met = set()
    for tile in range(len(tiles.offsets) - 1):
        row, column = divmod(tile, cameras.tiles_x)
        view, row = divmod(row, cameras.tiles_y)
        width, height = cameras.sizes[view].tolist()
        for y in range(TILE * row, min(TILE * row + TILE, height)):
            for x in range(TILE * column, min(TILE * column + TILE, width)):
                left = 1.0
                for place in range(int(tiles.offsets[tile]), int(tiles.offsets[tile + 1])):
                    mx, my, a, b, c, opacity = records.table[tiles.records[place], :6].tolist()
                    dx, dy = x + 0.5 - mx, y + 0.5 - my
                    alpha = min(ALPHA_MAX, opacity * math.exp(-0.5 * (a * dx * dx + c * dy * dy) - b * dx * dy))
                    if alpha >= ALPHA_MIN:
                        met.add((place, x // 8, y // 8, view))
                        left *= 1 - alpha
                    if left <= TRANSMITTANCE_MIN:
                        break
    return len(met)


def test_evaluations_are_those_of_the_scene():
    """A view smaller than the image, tiles cut off at its borders, pixels that saturate early."""
    gaussians, cameras = room(400, 44, 27, device="cpu")
    gaussians.opacities[:] += 3
    cameras = replace(
        cameras,
        viewmats=cameras.viewmats.repeat(2, 1, 1),
        intrinsics=cameras.intrinsics.repeat(2, 1),
        sizes=torch.tensor([[44, 27], [30, 20]], dtype=torch.int32),
    )
    records = reference.project(gaussians, cameras, RenderSettings())
    tiles = reference.bin(records, cameras)
    counted = count_evaluations(records, tiles, cameras)
    assert counted == by_hand(records, tiles, cameras)
    assert 0 < counted < 4 * len(tiles.records), "some parts are not reached, or saturated before"
    none = reference.project(replace(gaussians, means=gaussians.means - 100), cameras, RenderSettings())
    assert count_evaluations(none, reference.bin(none, cameras), cameras) == 0


def test_a_stage_is_bound_by_bytes_or_by_instructions():
    unlimited = math.inf
    by_bytes, by_issue = floors(WORK, Ceilings(1e9, unlimited)), floors(WORK, Ceilings(unlimited, 1e9))
    both = floors(WORK, Ceilings(1e9, 1e9))
    for stage in ("rasterize", "loss", "rasterize_backward"):
        assert both[stage] == max(by_bytes[stage], by_issue[stage])
    # 59 parameters; each and its two moments are read and written; rows and indices of records are read.
    assert by_bytes["project_backward_adam"] == pytest.approx(1e3 * (1000 * 59 * 4 * 6 + 600 * 44) / 1e9)
    assert by_issue["rasterize"] == pytest.approx(1e3 * 30 * 8000 / 1e9)
    assert by_issue["project"] == by_issue["bin"] == 0


def test_runs_of_stages_are_their_sums():
    found = floors(WORK, Ceilings(4e12, 1e12))
    assert found["step eager"] == pytest.approx(sum(found[stage] for stage in STEP))
    assert found["projection to gradients eager"] == pytest.approx(sum(found[stage] for stage in TO_GRADIENTS))
    for name in ("rasterize_backward", "forward + backward", "projection to gradients eager"):
        assert found[f"{name} without absgrad"] < found[name]
