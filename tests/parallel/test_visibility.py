from __future__ import annotations

import pytest
import torch
from scenes import cameras, gaussians

from bytesplat_ns import ops
from bytesplat_ns.ops.layout import RenderSettings
from bytesplat_ns.parallel import visibility


@pytest.mark.parametrize("settings", [RenderSettings(sh_degree=1), RenderSettings(1, antialiased=True, dilation=0.1)])
@pytest.mark.parametrize("block", [1, 3])
def test_no_record_is_missed_and_most_of_the_unseen_are_left_out(settings, block, monkeypatch):
    """Blocks of one to a few Gaussians, so that nothing else in their bounds can hide a mistake."""
    monkeypatch.setattr(visibility, "BLOCK", block)
    missed = unseen = left_out = 0
    for seed in range(50):
        scale = 10.0 ** (seed % 5 - 1)
        scene, views = gaussians(60, seed, spread=2 * scale), cameras(8, seed, spread=2 * scale)
        bounds, records = visibility.blocks(scene), ops.project(scene, views, settings)
        means = scene.means.double()[:, None]
        within = ((means >= bounds.low) & (means <= bounds.high)).all(dim=2)  # [N, B]
        for v, of_view in enumerate(visibility.seen(bounds, views, settings)):
            seen = (within & of_view).any(dim=1)
            visible = torch.zeros_like(seen).index_fill_(0, records.gaussian[records.view == v].long(), True)
            missed += int((visible & ~seen).sum())
            unseen, left_out = unseen + int((~visible).sum()), left_out + int((~visible & ~seen).sum())
    assert missed == 0
    assert left_out > (0.9 if block == 1 else 0.3) * unseen, (left_out, unseen)


def test_blocks_are_of_neighbours_and_hold_all_that_can_be_drawn(monkeypatch):
    scene = gaussians(3000, seed=1)
    scene.means[:5] = torch.tensor([torch.nan, torch.inf, -torch.inf, 1e30, -1e30])[:, None]
    scene.opacities[5:10] = -9.0
    bounds = visibility.blocks(scene)
    assert int(bounds.count.sum()) == 3000 - 3 - int((scene.opacities[3:] < -5.5373).sum())
    assert len(bounds) == -(-int(bounds.count.sum()) // visibility.BLOCK)
    inner = (bounds.high - bounds.low).amax(dim=1).sort().values[: len(bounds) - 2]
    assert inner.mean() < 0.6 * (scene.means[10:].amax() - scene.means[10:].amin())


def test_views_are_looked_at_some_at_a_time(monkeypatch):
    bounds, views = visibility.blocks(gaussians(2000, seed=1)), cameras(9, seed=2)
    expected = (visibility.seen(bounds, views, RenderSettings()) * bounds.count).sum(dim=1)
    monkeypatch.setattr(visibility, "CHUNK", 20)
    assert torch.equal(visibility.footprints(bounds, views, RenderSettings()), expected)


def test_a_shard_without_gaussians_is_seen_by_no_view():
    nothing = visibility.blocks(gaussians(0, seed=0))
    assert len(nothing) == 0
    assert visibility.footprints(nothing, cameras(3, 0), RenderSettings()).tolist() == [0, 0, 0]


def test_what_all_cameras_turn_their_backs_on_is_in_no_view():
    scene, views = gaussians(50, seed=3, spread=0.01), cameras(4, seed=4, spread=0.0)
    scene.scales[:], scene.opacities[:] = -5.0, 0.0
    views.viewmats[:, :3, 3] = torch.tensor([0.0, 0.0, -5.0])
    bounds = visibility.blocks(scene)
    assert visibility.footprints(bounds, views, RenderSettings()).tolist() == [0] * 4
    views.viewmats[:, :3, 3] = torch.tensor([0.0, 0.0, 5.0])
    views.intrinsics[:, 2:] = views.sizes / 2
    assert visibility.footprints(bounds, views, RenderSettings()).tolist() == [50] * 4
