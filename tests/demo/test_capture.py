"""The demo's capture: what is written is a consistent set of posed photos with points on its surfaces."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from bytesplat_ns.demo.capture import Capture, photograph, poses, take_all, write_capture
from bytesplat_ns.demo.scene import still_life
from bytesplat_ns.splats.ply import read_vertices

SMALL = Capture(views=8, width=96, height=72, supersample=2, points=1200, workers=1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("capture")
    write_capture(folder, SMALL)
    return folder


@pytest.fixture(scope="module")
def photos(folder):
    return np.stack([np.asarray(Image.open(path)) for path in sorted((folder / "images").iterdir())]) / 255.0


@pytest.fixture(scope="module")
def cloud(folder):
    vertices = read_vertices(folder / "sparse_pc.ply")
    points = np.stack([vertices[name] for name in ("x", "y", "z")], 1).astype(float)
    return points, np.stack([vertices[name] for name in ("red", "green", "blue")], 1) / 255.0


def project(transforms, pose, points):
    """Pixel positions [N, 2] and depths [N], written from the format's definition, not from the capture's code."""
    x, y, z = np.linalg.inv(np.array(pose))[:3] @ np.c_[points, np.ones(len(points))].T  # OpenGL: looks along -z
    u = transforms["fl_x"] * x / -z + transforms["cx"]
    v = transforms["fl_y"] * -y / -z + transforms["cy"]
    return np.stack([u, v], 1), -z


def test_photos_are_defined_everywhere_and_differ(photos):
    assert photos.shape == (SMALL.views, SMALL.height, SMALL.width, 3)
    for photo in photos:
        assert photo.std() > 0.1  # textured
        assert 0.2 < photo.mean() < 0.8  # neither under- nor overexposed
        assert (photo.max(-1) < 0.01).mean() < 0.02  # nothing left black
    for a, b in itertools.pairwise(photos):
        assert np.abs(a - b).mean() > 0.03


def test_points_carry_the_colours_of_the_photos_they_project_into(folder, photos, cloud):
    """Points that nothing hides from a photo find their colour in it. A wrong camera convention breaks this."""
    transforms = json.loads((folder / "transforms.json").read_text())
    points, colors = cloud
    scene = still_life()
    agreement, chance = [], []
    for frame, photo in zip(transforms["frames"], photos, strict=True):
        pixels, depth = project(transforms, frame["transform_matrix"], points)
        column, row = np.floor(pixels).astype(int).T
        inside = (depth > 0) & (column > 0) & (column < SMALL.width - 1) & (row > 0) & (row < SMALL.height - 1)
        eye = np.array(frame["transform_matrix"], np.float32)[:3, 3:]
        way = points.T.astype(np.float32) - eye
        reach = np.linalg.norm(way, axis=0)
        seen = np.flatnonzero(inside & scene.visible(np.broadcast_to(eye, way.shape), way / reach, reach - 0.1))
        assert seen.size > 0.2 * len(points)
        # The nearest colour of 3 x 3 pixels: points sit on texture edges and are half a pixel off.
        around = np.stack([photo[row[seen] + dy, column[seen] + dx] for dy in (-1, 0, 1) for dx in (-1, 0, 1)])
        agreement.append(np.abs(around - colors[seen]).mean(-1).min(0))
        chance.append(np.abs(around - np.roll(colors[seen], 97, axis=0)).mean(-1).min(0))
    agreement, chance = np.concatenate(agreement), np.concatenate(chance)
    assert np.median(agreement) < 0.04  # ten of 255 levels
    assert np.median(agreement) < 0.3 * np.median(chance)


def test_own_points_project_back_to_where_they_were_seen():
    """Points of one photo, without noise to speak of, return to their pixel's colour."""
    camera = poses(SMALL)[2:3]
    [(photo, points, colors)] = take_all(replace(SMALL, views=1, points=300), camera)
    transforms = {"fl_x": SMALL.focal, "fl_y": SMALL.focal, "cx": SMALL.width / 2, "cy": SMALL.height / 2}
    pixels, _ = project(transforms, camera[0], points)
    column, row = np.floor(pixels).astype(int).T
    near = np.full(len(points), False)
    # Noise has a standard deviation of half a pixel on each axis: 3 pixels are six of them.
    for dy, dx in itertools.product(range(-3, 4), repeat=2):
        y, x = np.clip(row + dy, 0, SMALL.height - 1), np.clip(column + dx, 0, SMALL.width - 1)
        near |= (photo[y, x] == colors).all(-1)
    assert near.all()


def test_points_lie_on_surfaces_but_leave_some_bare(cloud):
    points, _ = cloud
    scene = still_life()
    height = points[:, 2]
    assert len(points) == SMALL.points
    local = points.T.astype(np.float32)
    distance = np.min([np.abs(s.distance(s.rotation.T @ (local - s.center))) for s in scene.solids], axis=0)
    room = np.minimum(np.abs(height + 0.9), np.abs(np.hypot(points[:, 0], points[:, 1]) - 5.5))
    # Half a pixel at this small size is 2 cm at the table and 4 cm at the far wall; six deviations.
    assert (np.minimum(distance, room) < 0.25).all()
    assert (distance < 0.1).mean() > 0.3  # the still life itself has its share


def test_the_same_seed_gives_the_same_capture(folder, tmp_path):
    write_capture(tmp_path, replace(SMALL, workers=2))
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        assert path.read_bytes() == (tmp_path / path.relative_to(folder)).read_bytes(), path.name


def test_another_seed_moves_the_cameras():
    assert np.abs(poses(SMALL) - poses(replace(SMALL, seed=1))).max() > 0.01


def test_poses_are_rigid_upright_and_look_at_the_table():
    matrices = poses(Capture())
    rotation, position = matrices[:, :3, :3], matrices[:, :3, 3]
    np.testing.assert_allclose(rotation @ rotation.transpose(0, 2, 1), np.tile(np.eye(3), (48, 1, 1)), atol=1e-12)
    assert (np.linalg.det(rotation) > 0).all() and (rotation[:, 2, 1] > 0).all()
    to_table = -position / np.linalg.norm(position, axis=1, keepdims=True)
    assert (np.einsum("vi,vi->v", -rotation[:, :, 2], to_table) > 0.98).all()


def test_shading_depends_on_the_view():
    """The same spot of the varnished table looks different from two sides: reflections and highlights."""
    scene, lamp = still_life(), still_life().light.points(1)
    spot = np.array([[-0.2], [0.9], [0.0]], np.float32)
    eyes = [np.array(eye, np.float32)[:, None] for eye in ((-1.5, 3.0, 1.5), (-3.0, 1.4, 1.5))]
    lights = []
    for eye in eyes:
        ray = (spot - eye) / np.linalg.norm(spot - eye)
        distance, _ = scene.cast(eye, ray)
        np.testing.assert_allclose(distance, np.linalg.norm(spot - eye), atol=0.01)  # nothing in between
        lights.append(scene.radiance(eye, ray, lamp))
    assert np.abs(lights[0] - lights[1]).max() > 0.01


def test_supersampling_smooths_edges():
    scene, pose = still_life(), poses(SMALL)[0]
    rough, smooth = (photograph(scene, replace(SMALL, supersample=n), pose).astype(float) for n in (1, 3))
    assert np.abs(np.diff(smooth, 2, axis=1)).mean() < np.abs(np.diff(rough, 2, axis=1)).mean()


@pytest.mark.parametrize("option", ["views", "width", "supersample", "points"])
def test_sizes_below_one_are_refused(option):
    with pytest.raises(ValueError, match=f"{option} is 0"):
        Capture(**{option: 0})


def test_more_points_than_pixels_are_refused():
    with pytest.raises(ValueError, match="lower points"):
        Capture(views=1, width=4, height=4, points=17)
