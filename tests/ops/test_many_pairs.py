"""Tile lists of any length: what counts pairs and what makes them agree, and what cannot be numbered is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from backends import Backend, _moved
from cases import SCENES, ball, look

from bytesplat_ns import ops
from bytesplat_ns.ops import reference
from bytesplat_ns.ops.cuda import ahead, binning, projection
from bytesplat_ns.ops.layout import DEPTH, OPACITY, Cameras, Image, ImageGradients, Records, RenderSettings, TileLists

pytestmark = pytest.mark.parametrize("backend", ["cuda"], indirect=True)


def test_every_pair_that_is_made_was_counted(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two kernels find a record's tiles, one to count them, one to list them: an off-by-one rounding between them would
    leave holes in the lists."""
    made = []

    class Kept(binning._Scratch):
        def __init__(self, *arguments: object) -> None:
            super().__init__(*arguments)
            made.append(self)

    monkeypatch.setattr(binning, "_Scratch", Kept)
    scenes = [(scene.gaussians, scene.cameras, scene.settings) for scene in SCENES.values()]
    needles = ball(300, 70, degree=0, spread=1.5)
    needles.scales[:, 0], needles.scales[:, 1:] = 1.0, -6.0
    # Several digits of tiles, needles along and across them, and ellipses whose edge is on a pixel's centre.
    scenes.append((needles, look((4100, 37), (33, 2200)), RenderSettings(sh_degree=0)))
    grid = ball(64, 71, degree=0, scale=0.25)
    place = torch.arange(64)
    grid.means[:] = torch.stack([place % 8 - 4.0, place // 8 - 4.0, torch.full((64,), 4.0)], dim=1)
    grid.scales[:] = grid.scales[0]
    straight = replace(look((128, 128)), viewmats=torch.eye(4)[None])
    straight.intrinsics[:] = torch.tensor([64.0, 64.0, 64.5, 64.5])
    scenes.append((grid, straight, RenderSettings(sh_degree=0)))
    for gaussians, cameras, settings in scenes:
        gaussians, cameras = _moved(gaussians, backend.device), _moved(cameras, backend.device)
        records = backend.module.project(gaussians, cameras, settings)
        tiles = backend.module.bin(records, cameras)
        scratch, pairs = made[-1], len(tiles.records)
        assert (scratch.depth_histograms.sum(dim=1) == len(records)).all()
        assert (scratch.tile_histograms.sum(dim=1) == pairs).all()
        assert int(tiles.offsets[-1]) == pairs


def test_what_cannot_be_numbered_is_refused(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    scene = SCENES["two_views"]
    gaussians, cameras = _moved(scene.gaussians, backend.device), _moved(scene.cameras, backend.device)
    records = backend.module.project(gaussians, cameras, scene.settings)
    pairs = len(backend.module.bin(records, cameras).records)

    def loss(image: Image) -> tuple[torch.Tensor, ImageGradients]:
        return image.depth.sum((1, 2)), ImageGradients(image.rgb, None, image.transmittance)

    for capacity, count in ((binning.pair_capacity, pairs), (projection.record_capacity, len(records))):
        with monkeypatch.context() as patch:
            patch.setattr(capacity, "most", count)
            ahead.differentiate(gaussians, cameras, scene.settings, loss)
            patch.setattr(capacity, "most", count - 1)
            with pytest.raises(ValueError, match=f"has {count} .* can number {count - 1}.*views-per-round"):
                ahead.differentiate(gaussians, cameras, scene.settings, loss)
            with pytest.raises(ValueError, match="can number"):
                backend.module.bin(backend.module.project(gaussians, cameras, scene.settings), cameras)


def test_rounds_beyond_31_bits_are_refused_where_room_is_made_for_all(backend: Backend) -> None:
    del backend
    gaussians, cameras = SCENES["one_gaussian"].gaussians, SCENES["one_gaussian"].cameras
    many = replace(gaussians, means=gaussians.means.expand(2**30, 3))
    with pytest.raises(ValueError, match=r"1,073,741,824 Gaussians in a round of 2 views.*views-per-round"):
        ops.project(many, replace(cameras, viewmats=cameras.viewmats.expand(2, 4, 4)), RenderSettings())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: an emulator would take hours")
def test_tens_of_millions_of_pairs(backend: Backend) -> None:
    """Lists of 2M Gaussians in 4K, against the reference's, and rows that are finite."""
    gaussians = _moved(ball(2_000_000, 72, degree=0, spread=1.2, scale=0.02, logit=-1.0), backend.device)
    gaussians.ids = torch.arange(len(gaussians), device=backend.device)
    cameras, settings = _moved(look((3840, 2160)), backend.device), RenderSettings(sh_degree=0)
    records = backend.module.project(gaussians, cameras, settings)
    tiles = backend.module.bin(records, cameras)
    assert len(tiles.records) > 30_000_000

    listed = keys_of(tiles, len(records))
    fewer, more = (keys_of(reference_lists(records, cameras, f), len(records)) for f in (1 - 1e-4, 1 + 1e-4))
    assert contains(listed, fewer) and contains(more, listed)
    depth = records.table[:, DEPTH][tiles.records.long()]
    falls = (depth[1:] < depth[:-1]).nonzero().squeeze(1) + 1
    assert torch.isin(falls, tiles.offsets).all(), "depth falls from one list to the next only"

    image = backend.module.rasterize(records, tiles, cameras, settings)
    upstream = ImageGradients(torch.ones_like(image.rgb), None, torch.ones_like(image.transmittance))
    rows = backend.module.rasterize_backward(records, tiles, cameras, settings, image, upstream)
    assert rows.isfinite().all() and image.rgb.isfinite().all()
    assert image.transmittance.min() >= 0 and image.transmittance.max() <= 1


def keys_of(tiles: TileLists, records: int) -> torch.Tensor:
    """The (tile, record) pairs as sorted numbers."""
    tile = torch.arange(len(tiles.offsets) - 1, device=tiles.offsets.device).repeat_interleave(tiles.offsets.diff())
    keys = (tile * records + tiles.records).sort().values
    assert (keys[1:] > keys[:-1]).all(), "a pair is listed once"
    return keys


def contains(outer: torch.Tensor, inner: torch.Tensor) -> bool:
    """Whether sorted numbers are all among others, sorted too."""
    place = torch.searchsorted(outer, inner).clamp(max=len(outer) - 1)
    return bool((outer[place] == inner).all())


def reference_lists(records: Records, cameras: Cameras, factor: float) -> TileLists:
    """The reference's lists if all opacities were larger by a factor, those that would vanish left out."""
    table = records.table.double()
    table[:, OPACITY] *= factor
    table[:, OPACITY].clamp_(min=1 / 255)
    rows = {name: getattr(records, name) for name in ("gaussian", "view", "radius", "ids")}
    return reference.bin(Records(table=table, **rows), cameras)
