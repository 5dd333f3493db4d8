"""Several ranks train the model that one trains: the same Gaussians, to the last bit."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from group import Group
from training_runs import Course, by_id, losses, total, train

from bytesplat_ns.demo.capture import Capture, write_capture


@pytest.fixture(scope="module")
def course(tmp_path_factory: pytest.TempPathFactory) -> Course:
    """Rounds of three views over ten small photos, and shorter ones as these are no multiple: some of four ranks have
    none in a round, and one of two ranks has two."""
    folder = tmp_path_factory.mktemp("small")
    write_capture(folder, Capture(views=10, width=64, height=48, supersample=1, points=700, workers=1))
    return Course(Path(folder), images=600, views_per_round=3, model={"max_gaussians": 1200})


def check_same(results: list[dict[str, Any]], alone: dict[str, Any]) -> None:
    """All that was trained on several ranks is what one has trained."""
    assert losses(results) == losses([alone])
    expected = by_id([alone])
    for name, table in by_id(results).items():
        assert torch.equal(table, expected[name]), name
    for result in results:
        assert result["changes"] == alone["changes"] and result["next_id"] == alone["next_id"]
        assert result["pruned"] == alone["pruned"] and result["lists"] == alone["lists"]


def test_every_number_of_ranks_trains_the_same_model(group: Callable[[int], Group], course: Course) -> None:
    (alone,) = group(1)(train, course)
    counts = total(alone["changes"])
    assert min(counts.values()) > 10, f"density changes in all ways: {counts}"
    for size in (2, 3, 4):
        results = group(size)(train, course)
        check_same(results, alone)
        assert all(len(result["ids"]) and result["photos"] for result in results), "each rank has a part"


@pytest.mark.parametrize(
    "options",
    [
        {"strategy": "mcmc", "max_gaussians": 1000},
        {"use_scale_regularization": True, "rasterize_mode": "antialiased", "max_gauss_ratio": 2.0},
        {"use_absgrad": False, "densify_grad_thresh": 1e-4},
        {"prune_share": 0.2, "prune_budget": 4, "prune_cost": "root", "prune_start": 9_000},
    ],
    ids=["mcmc", "penalties", "signed_gradients", "pruning"],
)
def test_whatever_the_options(group: Callable[[int], Group], course: Course, options: dict[str, Any]) -> None:
    course = replace(course, images=120, model=course.model | options)
    (alone,) = group(1)(train, course)
    prunes = any(count > 0 for count, *_ in alone["pruned"])
    assert ("prune_share" in options) == prunes == ("lists_within" in alone["lists"])
    for encoding in ("compact", "dense"):
        results = group(3)(train, replace(course, model=course.model | {"gradient_exchange": encoding}))
        check_same(results, alone)
        rows, zero = (sum(result["zero"][i] for result in results) for i in range(2))
        assert rows > 0 and (zero > 0) == (encoding == "compact")


def test_ranks_without_gaussians(group: Callable[[int], Group], course: Course) -> None:
    course = replace(course, images=30, model={"max_gaussians": 3})
    (alone,) = group(1)(train, course)
    results = group(4)(train, course)
    check_same(results, alone)
    assert min(len(result["ids"]) for result in results) == 0


def test_ranks_without_photos_and_a_view_that_shows_nothing(
    group: Callable[[int], Group], course: Course, tmp_path: Path
) -> None:
    content = json.loads((course.data / "transforms.json").read_text())
    content["frames"] = content["frames"][:3]
    for frame in content["frames"][:2]:
        pose = np.array(frame["transform_matrix"])
        pose[:3, 3] -= 20 * pose[:3, 2]  # straight ahead, until everything is behind it
        frame["transform_matrix"] = pose.tolist()
    shutil.copytree(course.data, tmp_path / "few")
    (tmp_path / "few/transforms.json").write_text(json.dumps(content))
    for consolidate in ("off", "on"):
        course = replace(
            course, data=tmp_path / "few", images=30, views_per_round=2, consolidate_views=consolidate, model={}
        )
        (alone,) = group(1)(train, course)
        assert min(alone["records"]) == 0 < max(alone["records"])
        results = group(4)(train, course)
        check_same(results, alone)
        assert sorted(result["photos"] for result in results) == [0, 1, 1, 1]


def test_shared_parameters_are_the_same_on_all_ranks(group: Callable[[int], Group], course: Course) -> None:
    """Poses: their gradients are sums over all Gaussians, which several ranks add up in another order than one does."""
    from nerfstudio.cameras.camera_optimizers import CameraOptimizerConfig

    options = {"camera_optimizer": CameraOptimizerConfig(mode="SO3xR3"), "use_bilateral_grid": True}
    course = replace(course, images=12, model=course.model | options | {"grid_shape": (4, 4, 2)})
    (alone,) = group(1)(train, course)
    results, again = group(3)(train, course), group(3)(train, course)
    for result, other in zip(results, again, strict=True):
        for name, value in result["shared"].items():
            assert torch.equal(value, results[0]["shared"][name]) and torch.equal(value, other["shared"][name]), name
            torch.testing.assert_close(value, alone["shared"][name], rtol=1e-4, atol=1e-6)
        assert all(torch.equal(value, other["tables"][name]) for name, value in result["tables"].items())
    assert losses(results) == losses(again)
    for several, one in zip(losses(results), losses([alone]), strict=True):
        torch.testing.assert_close(torch.tensor(several), torch.tensor(one), rtol=1e-4, atol=0)
