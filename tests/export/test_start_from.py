"""Fitting Gaussians that exist to a run."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gaussians import random_gaussians, write_ply
from saved import checkpoint, run
from scipy.spatial.transform import Rotation

from bytesplat_ns.splats.frames import Similarity
from bytesplat_ns.splats.read import SplatError
from bytesplat_ns.splats.start_from import start_from

HERE = Similarity(Rotation.from_euler("xyz", [0.3, 0.2, -1.0]).as_matrix(), 0.5, np.array([1.0, 0.0, -2.0]))
"""Frame of this run."""

MANY = 10**6


@pytest.fixture
def splat(tmp_path):
    """A PLY of 50 Gaussians with harmonics of degree 2."""
    path = tmp_path / "splat.ply"
    write_ply(path, random_gaussians(50, 2))
    return path


def test_a_ply_is_in_the_training_frame(splat):
    start = start_from(splat, "training", HERE, 2, MANY, False)
    for name, values in random_gaussians(50, 2).items():
        assert torch.equal(start.parameters[name], values)
    assert start.sh_degree == 2 and len(start.notes) == 2
    assert start.notes[0] == f"Starting from {splat} (PLY): 50 Gaussians, SH degree 2."
    assert "taken to be in this run's training frame" in start.notes[1]
    assert "--pipeline.model.init-frame original" in start.notes[1]


def test_or_in_the_original_frame_if_one_says_so(splat):
    start = start_from(splat, "original", HERE, 2, MANY, False)
    for name, values in HERE.apply(random_gaussians(50, 2)).items():
        assert torch.equal(start.parameters[name], values)
    assert "moved from the original frame" in start.notes[-1]


@pytest.mark.parametrize("degree, verb", [(0, "cut off"), (1, "cut off"), (3, "padded with zeros")])
def test_harmonics_fit_the_run(splat, degree, verb):
    start = start_from(splat, "training", HERE, degree, MANY, False)
    rest, original = start.parameters["features_rest"], random_gaussians(50, 2)["features_rest"]
    assert rest.shape == (50, (degree + 1) ** 2 - 1, 3)
    assert torch.equal(rest[:, :8], original[:, : rest.shape[1]]) and not rest[:, 8:].any()
    assert start.sh_degree == min(degree, 2)
    assert f"degree 2 are {verb} to degree {degree}" in start.notes[1]


def test_the_cap_keeps_what_shows_most(splat):
    start = start_from(splat, "training", HERE, 2, 20, False)
    original = random_gaussians(50, 2)
    largest = original["scales"].sort(dim=1).values[:, 1:].sum(dim=1).exp()
    prominence = original["opacities"].sigmoid()[:, 0] * largest
    expected = original["means"][prominence >= prominence.sort(descending=True).values[19]]
    assert torch.equal(start.parameters["means"], expected), "in their order"
    assert any("The 20 of the largest opacity x area are kept, of 50" in note for note in start.notes)


def test_what_is_not_finite_is_left_out(tmp_path):
    gaussians = random_gaussians(10, 0)
    gaussians["scales"][4, 1] = float("nan")
    write_ply(tmp_path / "a.ply", gaussians)
    start = start_from(tmp_path / "a.ply", "training", HERE, 0, MANY, False)
    assert len(start.parameters["means"]) == 9 and "1 Gaussians with NaN" in start.notes[1]
    gaussians["scales"][:] = float("nan")
    write_ply(tmp_path / "a.ply", gaussians)
    with pytest.raises(SplatError, match="all 10 Gaussians have NaN or infinite values"):
        start_from(tmp_path / "a.ply", "training", HERE, 0, MANY, False)


def test_a_checkpoint_knows_its_frame(tmp_path):
    gaussians = random_gaussians(20, 3)
    transform = np.c_[HERE.rotation, HERE.translation / HERE.scale]
    same = run(tmp_path / "same", gaussians, transform, HERE.scale).parent / "nerfstudio_models/step-000029999.ckpt"
    start = start_from(same, "training", HERE, 3, MANY, False)
    assert torch.equal(start.parameters["means"], gaussians["means"])
    assert start.notes[-1] == "Its run has the same training frame."

    other = run(tmp_path / "other", gaussians, np.eye(4)[:3], 1.0).parent / "nerfstudio_models/step-000029999.ckpt"
    start = start_from(other, "training", HERE, 3, MANY, False)
    for name, values in HERE.apply(gaussians).items():
        torch.testing.assert_close(start.parameters[name], values)
    assert "moved from the training frame of their run" in start.notes[-1]


def test_a_checkpoint_without_its_run(tmp_path):
    gaussians = random_gaussians(20, 1)
    start = start_from(checkpoint(tmp_path / "alone.ckpt", gaussians), "training", HERE, 1, MANY, False)
    assert torch.equal(start.parameters["means"], gaussians["means"])
    assert "taken to be in this run's training frame" in start.notes[-1]


def test_a_warning_where_they_would_be_drawn_in_another_way(tmp_path):
    config = run(tmp_path / "run", random_gaussians(20, 1), mode="antialiased")
    path = config.parent / "nerfstudio_models/step-000029999.ckpt"
    assert not any("WARNING" in note for note in start_from(path, "training", HERE, 1, MANY, True).notes)
    note = start_from(path, "training", HERE, 1, MANY, False).notes[-1]
    assert "WARNING: they were made for --pipeline.model.rasterize-mode antialiased" in note
