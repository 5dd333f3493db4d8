"""The Gaussians a run starts from."""

import pytest
import torch

from bytesplat_ns.splats.initialization import SH_C0, from_points, random_cube

BIG = 10**9


def grid(n: int) -> torch.Tensor:
    axis = torch.arange(n, dtype=torch.float32)
    return torch.cartesian_prod(axis, axis, axis)


def test_gaussians_have_the_points_colours_and_spacing():
    points = grid(4) * 0.5
    colors = torch.arange(3 * len(points)).reshape(-1, 3) % 256
    start = from_points(points, colors, 3, BIG, seed=1)
    assert torch.equal(start["means"], points)
    torch.testing.assert_close(start["features_dc"] * SH_C0 + 0.5, colors / 255.0)
    torch.testing.assert_close(start["scales"].exp(), torch.full((64, 3), 0.5))  # as far as the nearest points
    torch.testing.assert_close(start["opacities"].sigmoid(), torch.full((64, 1), 0.1))
    torch.testing.assert_close(start["quats"].norm(dim=1), torch.ones(64))
    assert start["features_rest"].shape == (64, 15, 3) and not start["features_rest"].any()


@pytest.mark.parametrize("degree, rest", [(0, 0), (1, 3), (2, 8)])
def test_room_for_harmonics(degree, rest):
    assert from_points(grid(2), None, degree, BIG, 0)["features_rest"].shape == (8, rest, 3)


@pytest.mark.parametrize("points", [torch.zeros(1, 3), torch.zeros(50, 3), grid(2)[:3], torch.eye(3)[:2]])
def test_few_and_duplicate_points_give_finite_sizes(points):
    start = from_points(points, None, 1, BIG, seed=0)
    assert all(value.isfinite().all() for value in start.values())


def test_points_that_are_not_finite_are_left_out():
    points = grid(2)
    points[3, 1] = float("nan")
    points[5, 0] = float("inf")
    start = from_points(points, torch.arange(24).reshape(8, 3), 0, BIG, seed=0)
    assert torch.equal(start["means"], points[[0, 1, 2, 4, 6, 7]])
    torch.testing.assert_close(start["features_dc"][3] * SH_C0 + 0.5, torch.tensor([12, 13, 14]) / 255)
    with pytest.raises(ValueError, match="no finite point"):
        from_points(torch.full((4, 3), float("nan")), None, 0, BIG, seed=0)


def test_a_cap_keeps_a_random_subset_in_order():
    points = grid(10)
    start = from_points(points, None, 0, 100, seed=3)["means"]
    assert len(start) == 100
    rows = (start @ torch.tensor([100.0, 10.0, 1.0])).long()
    assert (rows.diff() > 0).all()
    assert rows.float().mean() == pytest.approx(500, abs=100), "from the whole scene"
    assert not torch.equal(start, from_points(points, None, 0, 100, seed=4)["means"])


def test_wrong_shapes_are_named():
    with pytest.raises(ValueError, match=r"shape \[P, 3\], found \[4, 2\]"):
        from_points(torch.zeros(4, 2), None, 0, BIG, 0)
    with pytest.raises(ValueError, match="4 points but colours of shape"):
        from_points(torch.zeros(4, 3), torch.zeros(5, 3), 0, BIG, 0)


def test_a_random_cube_fills_the_cube():
    means = random_cube(2_000, 10.0, 3, seed=0)["means"]
    assert means.abs().max() <= 5.0
    torch.testing.assert_close(means.std(dim=0), torch.full((3,), 10 / 12**0.5), rtol=0.05, atol=0)
