"""What reaches training of data sets that nerfstudio's parsers read wrongly."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import tyro
from entry import words
from PIL import Image
from scene import Scene

HERE = (0.0, 0.0, 0.0)
UTM = (412_345.6, 5_678_901.2, 312.5)
"""Metres."""


def manager(scene: Scene, *last: str):
    """The data manager that ``ns-train`` makes for these words."""
    from nerfstudio.configs.method_configs import AnnotatedBaseConfigUnion

    config = tyro.cli(AnnotatedBaseConfigUnion, args=words(scene.folder, scene.folder / "runs", *last))
    config.pipeline.datamanager.data = config.data
    return config.pipeline.datamanager.setup(device="cpu", test_mode="val")


@pytest.mark.parametrize("form", ["nerfstudio", "colmap"])
@pytest.mark.parametrize("method", ["up", "none"])
def test_far_scenes_keep_their_shape(tmp_path, form, method):
    """Against the same scene near the origin, up to a common shift, which nothing sees.

    Tolerance: positions of about 1 in float32, scaled by a factor that float32 far from the origin gets 10 % wrong.
    """
    shapes = []
    for name, offset in {"near": HERE, "far": UTM}.items():
        scene = Scene(tmp_path / name, offset=offset)
        last = getattr(scene, form)("--orientation-method", method, "--eval-mode", "interval", "--eval-interval", "2")
        data = manager(scene, *last)
        assert data.train_dataparser_outputs.dataparser_scale == pytest.approx(0.57, rel=0.2)
        poses = [dataset.cameras.camera_to_worlds for dataset in (data.train_dataset, data.eval_dataset)]
        positions = torch.cat([pose[..., 3] for pose in poses] + [data.train_dataset.metadata["points3D_xyz"]])
        assert positions.mean(dim=0).abs().max() < 1.5, "near the origin, though not with the centre in it"
        shapes.append(((positions - positions[0]) / data.train_dataparser_outputs.dataparser_scale, poses))
    (near, near_poses), (far, far_poses) = shapes
    torch.testing.assert_close(near, far, rtol=0, atol=1e-5)
    for a, b in zip(near_poses, far_poses, strict=True):
        torch.testing.assert_close(a[..., :3], b[..., :3], rtol=0, atol=1e-5)


def seen_at(poses: np.ndarray, focal: np.ndarray, centre: np.ndarray, points: np.ndarray) -> np.ndarray:
    """[V, P, 2] pixels at which cameras [V, 4, 4] (OpenGL), [V, 2], [V, 2] see points [P, 3]."""
    rays = np.einsum("vji,vpj->vpi", poses[:, :3, :3], points - poses[:, None, :3, 3])
    return focal[:, None] * rays[..., :2] * [1, -1] / -rays[..., 2:] + centre[:, None]


@pytest.mark.parametrize(
    "form, offset",
    [("nerfstudio", HERE), ("nerfstudio", UTM), ("colmap", HERE), ("colmap", UTM), ("blender", HERE)],
    ids=["nerfstudio", "nerfstudio far", "colmap", "colmap far", "blender"],
)
def test_cameras_see_points_where_the_data_set_has_them(tmp_path, form, offset):
    """Tolerance: a 100th of a pixel; poses and points pass through float32 once."""
    scene = Scene(tmp_path, offset=offset)
    options = ("--ply-path", "cloud.ply") if form == "blender" else ()
    data = manager(scene, *getattr(scene, form)(*options))
    cameras = data.train_dataset.cameras
    chosen = scene.poses[1:] if form == "blender" else scene.poses[1::2]
    focal, centre = (
        np.full((len(chosen), 2), scene.focal),
        np.tile([scene.width / 2, scene.height / 2], (len(chosen), 1)),
    )
    expected = seen_at(chosen, focal, centre, scene.points)
    found = seen_at(
        cameras.camera_to_worlds.double().numpy(),
        torch.cat([cameras.fx, cameras.fy], dim=1).double().numpy(),
        torch.cat([cameras.cx, cameras.cy], dim=1).double().numpy(),
        data.train_dataset.metadata["points3D_xyz"].double().numpy(),
    )
    assert np.ptp(expected, axis=(0, 1)).min() > 20
    np.testing.assert_allclose(found, expected, rtol=0, atol=0.01)


def test_the_reported_transform_leads_back_to_the_world(tmp_path):
    scene = Scene(tmp_path, offset=UTM)
    outputs = manager(scene, *scene.nerfstudio()).train_dataparser_outputs
    transform, scale = outputs.dataparser_transform.double(), outputs.dataparser_scale
    positions = outputs.cameras.camera_to_worlds[..., 3].double() / scale - transform[:, 3]
    world = torch.linalg.solve(transform[:, :3], positions.T).T
    np.testing.assert_allclose(world.numpy(), scene.poses[1::2, :3, 3], rtol=0, atol=1e-5)


def test_instant_ngps_second_focal_length_is_used(tmp_path):
    scene = Scene(tmp_path)
    data = manager(scene, *scene.instant_ngp(fl_y=44.0))
    for dataset in (data.train_dataset, data.eval_dataset):
        assert (dataset.cameras.fx == scene.focal).all() and (dataset.cameras.fy == 44.0).all()


@pytest.mark.parametrize("factor", [1, 2])
def test_what_a_circular_fisheye_does_not_show_is_masked(tmp_path, factor):
    """Photos are black outside of the circle; where the mask keeps a pixel, there is no black."""
    scene = Scene(tmp_path, count=2, width=80, height=80, focal=60.0)
    last = scene.nerfstudio(camera_model="OPENCV_FISHEYE", fisheye_crop_radius=34.0)
    folder = tmp_path / ("images" if factor == 1 else f"images_{factor}")
    folder.mkdir(exist_ok=True)
    side = 80 // factor
    x = np.arange(side) + 0.5 - side / 2
    photo = np.where(np.hypot(x, x[:, None]) < 34.0 / factor, 255, 0).astype(np.uint8)
    for number in range(2):
        Image.fromarray(photo).save(folder / scene.photo(number).name)
    dataset = manager(scene, *last, "--downscale-factor", str(factor)).train_dataset
    seen = dataset.photo(0)
    share = math.pi / 4 * (math.tan(34 / 60) / math.tan(40 / 60)) ** 2  # the photo's edge is at 40 / 60 radians
    assert float(seen.mask.float().mean()) == pytest.approx(share, abs=0.04), "less the pixels on the circle"
    assert seen.image[seen.mask == 1].min() == 255 and not seen.image[0, 0].any()
    assert seen.nbytes == dataset.nbytes(0)
