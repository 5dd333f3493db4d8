"""Gaussians in another frame look the same from cameras in that frame."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from gaussians import random_gaussians, render
from scipy.spatial.transform import Rotation

from bytesplat_ns.ops.reference.harmonics import basis
from bytesplat_ns.splats.frames import FrameError, Similarity, rotate_harmonics

TURN = Rotation.from_euler("xyz", [0.4, -1.1, 2.0]).as_matrix()
MOVE = Similarity(TURN, 2.5, np.array([3.0, -1.0, 0.5]))
CAMERA = torch.tensor([[1, 0, 0, 0.1], [0, 0.8, -0.6, 0.2], [0, 0.6, 0.8, 2.5], [0, 0, 0, 1]], dtype=torch.float64)


def camera_in(move: Similarity, viewmat: torch.Tensor) -> torch.Tensor:
    """World-to-camera of the camera that went along with a (proper) move."""
    moved = viewmat.clone()
    moved[:3, :3] = viewmat[:3, :3] @ torch.from_numpy(move.rotation.T)
    moved[:3, 3] = move.scale * viewmat[:3, 3] - moved[:3, :3] @ torch.from_numpy(move.translation)
    return moved


@pytest.mark.parametrize("degree", [0, 1, 2, 3])
def test_the_same_image_from_the_moved_camera(degree):
    gaussians = random_gaussians(60, degree)
    before = render(gaussians, CAMERA)
    after = render(MOVE.apply(gaussians), camera_in(MOVE, CAMERA))
    assert before[..., :3].std() > 0.05
    # Parameters are float32. A pixel may gain or lose a contribution of 1/255 at its threshold: few do.
    off = (before[..., :3] - after[..., :3]).abs().amax(dim=-1)
    assert off.median() < 1e-5 and (off > 1e-3).sum() <= 5
    torch.testing.assert_close(after[..., 3].mean(), MOVE.scale * before[..., 3].mean(), rtol=1e-3, atol=0)


def test_only_the_right_harmonics_pass():
    """The test above sees errors: without turning the harmonics the image is another one."""
    gaussians = random_gaussians(60, 3)
    wrong = {**MOVE.apply(gaussians), "features_rest": gaussians["features_rest"]}
    assert (render(wrong, camera_in(MOVE, CAMERA)) - render(gaussians, CAMERA))[..., :3].abs().median() > 1e-2


@pytest.mark.parametrize("mirror", [1.0, -1.0])
def test_harmonics_have_the_same_values_in_turned_directions(mirror):
    rotation = TURN @ np.diag([1.0, 1.0, mirror])
    coefficients = torch.randn(7, 15, 3, dtype=torch.float64)
    directions = torch.nn.functional.normalize(torch.randn(50, 3, dtype=torch.float64), dim=1)
    before = torch.einsum("pk,nkc->npc", basis(directions, 3)[:, 1:], coefficients)
    turned = basis(directions @ torch.from_numpy(rotation.T), 3)[:, 1:]
    after = torch.einsum("pk,nkc->npc", turned, rotate_harmonics(rotation, coefficients))
    torch.testing.assert_close(after, before, rtol=0, atol=1e-12)


def test_a_mirrored_covariance():
    move = Similarity(TURN @ np.diag([1.0, 1.0, -1.0]), 1.5, np.zeros(3))
    before = random_gaussians(20, 0)
    after = move.apply(before)

    def covariance(parameters):
        w, x, y, z = torch.nn.functional.normalize(parameters["quats"].double(), dim=1).numpy().T
        axes = Rotation.from_quat(np.stack([x, y, z, w], 1)).as_matrix() * parameters["scales"].exp().numpy()[:, None]
        return axes @ axes.transpose(0, 2, 1)

    expected = move.scale**2 * move.rotation @ covariance(before) @ move.rotation.T
    np.testing.assert_allclose(covariance(after), expected, atol=1e-5 * expected.max())


def test_there_and_back():
    gaussians = random_gaussians(50, 3)
    back = MOVE.inverse().apply(MOVE.apply(gaussians))
    back["quats"] *= (back["quats"] * gaussians["quats"]).sum(dim=1, keepdim=True).sign()  # q and -q turn alike
    for name, values in gaussians.items():
        torch.testing.assert_close(back[name], values, rtol=0, atol=2e-6)
    assert MOVE.after(MOVE.inverse()).is_identity() and not MOVE.is_identity()


def test_what_nerfstudio_notes_is_applied_before_its_scale(tmp_path):
    path = tmp_path / "dataparser_transforms.json"
    path.write_text(json.dumps({"transform": np.c_[TURN, [1.0, 2.0, 3.0]].tolist(), "scale": 0.25}))
    point = torch.randn(4, 3)
    moved = Similarity.read(path).apply({**random_gaussians(4, 0), "means": point})["means"]
    expected = 0.25 * (point.double() @ torch.from_numpy(TURN.T) + torch.tensor([1.0, 2.0, 3.0]))
    torch.testing.assert_close(moved, expected.float())


@pytest.mark.parametrize(
    "content, message",
    [
        (None, "There is no"),
        ("{", "cannot be read"),
        ('{"transform": [[1, 2], [3, 4]], "scale": 1}', r"no transform \[3, 4\]"),
        ('{"transform": [[1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0]], "scale": 0}', "positive scale"),
        ('{"transform": [[1, 0, 0, 0], [0, 2, 0, 0], [0, 0, 1, 0]], "scale": 1}', "shears or flattens"),
        ('{"transform": [[1, 0, 0, 0], [0, 0, 0, 0], [0, 0, 1, 0]], "scale": 1}', "shears or flattens"),
    ],
)
def test_transforms_that_are_none(tmp_path, content, message):
    path = tmp_path / "dataparser_transforms.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(FrameError, match=message) as error:
        Similarity.read(path)
    assert str(path) in str(error.value)
