"""The reference against gsplat's own functions in plain torch, on random scenes."""

from __future__ import annotations

import pytest
import torch
from cases import ball, look
from oracle import cast

from bytesplat_ns.ops import reference
from bytesplat_ns.ops.layout import ALPHA_MIN, CONIC, DEPTH, MEAN2D, OPACITY, TILE, RenderSettings
from bytesplat_ns.ops.reference.harmonics import basis
from bytesplat_ns.ops.reference.raster import _power

gsplat = pytest.importorskip("gsplat.cuda._torch_impl", reason="gsplat is not installed")


@pytest.mark.parametrize("degree", [0, 1, 2, 3])
def test_harmonics(degree: int) -> None:
    directions = torch.nn.functional.normalize(torch.randn(50, 3, dtype=torch.float64), dim=-1)
    coefficients = torch.randn(50, 16, 3, dtype=torch.float64)
    colours = (basis(directions, degree)[..., None] * coefficients[:, : (degree + 1) ** 2]).sum(1)
    torch.testing.assert_close(colours, gsplat._spherical_harmonics(degree, directions, coefficients))


@pytest.mark.parametrize("antialiased", [False, True])
def test_projection_and_lists(antialiased: bool) -> None:
    """The same records; fewer of them and shorter lists, without losing a pair that reaches a pixel centre."""
    gaussians = cast(ball(60, 40, degree=0, spread=1.5, scale=0.08), torch.float64)
    cameras = cast(look((50, 37), (50, 37), distance=3.0, focal=0.6), torch.float64)
    settings = RenderSettings(sh_degree=0, antialiased=antialiased)
    records = reference.project(gaussians, cameras, settings)
    tiles = reference.bin(records, cameras)
    view, gaussian = records.view.long(), records.gaussian.long()

    covariances, _ = gsplat._quat_scale_to_covar_preci(gaussians.quats, gaussians.scales.exp(), compute_preci=False)
    fx, fy, cx, cy = cameras.intrinsics.unbind(-1)
    zero, one = torch.zeros_like(fx), torch.ones_like(fx)
    matrices = torch.stack([fx, zero, cx, zero, fy, cy, zero, zero, one], -1).view(-1, 3, 3)
    radii, means2d, depths, conics, compensations = gsplat._fully_fused_projection(
        gaussians.means, covariances, cameras.viewmats, matrices, 50, 37, calc_compensations=True
    )
    assert (radii[view, gaussian] > 0).all()
    torch.testing.assert_close(records.table[:, MEAN2D], means2d[view, gaussian])
    torch.testing.assert_close(records.table[:, CONIC], conics[view, gaussian])
    torch.testing.assert_close(records.table[:, DEPTH], depths[view, gaussian])
    opacities = gaussians.opacities[:, 0].sigmoid() * (compensations if antialiased else torch.ones_like(depths))
    torch.testing.assert_close(records.table[:, OPACITY], opacities[view, gaussian])

    # What reaches a pixel centre, by trying all of gsplat's visible pairs at all pixels.
    seen_view, seen_gaussian = (radii > 0).nonzero(as_tuple=True)
    table = torch.zeros(len(seen_view), 10, dtype=torch.float64)
    table[:, MEAN2D], table[:, CONIC] = means2d[seen_view, seen_gaussian], conics[seen_view, seen_gaussian]
    y, x = torch.meshgrid(torch.arange(37), torch.arange(50), indexing="ij")
    centres = torch.stack([x, y], -1).view(-1, 2) + 0.5
    alpha = opacities[seen_view, seen_gaussian][:, None] * torch.exp(-_power(table, centres))
    pair, pixel = (alpha >= ALPHA_MIN).nonzero(as_tuple=True)
    tile = (y // TILE * cameras.tiles_x + x // TILE).flatten()[pixel]
    needed = {*zip(seen_view[pair].tolist(), tile.tolist(), seen_gaussian[pair].tolist(), strict=True)}

    per_view = cameras.tiles_x * cameras.tiles_y
    tile = torch.arange(len(tiles.offsets) - 1).repeat_interleave(tiles.offsets.diff())
    record = tiles.records.long()
    assert torch.equal(tile // per_view, view[record])
    ours = {*zip(view[record].tolist(), (tile % per_view).tolist(), gaussian[record].tolist(), strict=True)}

    _, keys, indices = gsplat._isect_tiles(
        means2d.float(), radii, depths.float(), TILE, cameras.tiles_x, cameras.tiles_y
    )
    bits = per_view.bit_length()
    tile = (keys >> 32) & ((1 << bits) - 1)
    count = len(gaussians)
    theirs = {*zip((indices // count).tolist(), tile.tolist(), (indices % count).tolist(), strict=True)}
    assert needed <= ours < theirs
