"""The demo's ray tracer against geometry that can be written down."""

from __future__ import annotations

import numpy as np
import pytest

from bytesplat_ns.demo import shapes, textures
from bytesplat_ns.demo.raytracer import Solid
from bytesplat_ns.demo.scene import CEILING, FLOOR, WALL, still_life


def unit_directions(count, seed=0):
    d = np.random.default_rng(seed).normal(size=(3, count))
    return (d / np.linalg.norm(d, axis=0)).astype(np.float32)


@pytest.mark.parametrize("index", range(len(still_life().solids)))
def test_distances_are_never_overestimated(index):
    """Sphere tracing may step by the distance only if it changes no faster than the point moves."""
    solid = still_life().solids[index]
    draw = np.random.default_rng(index)
    a = (solid.extent * draw.uniform(-1, 1, (3, 20_000))).astype(np.float32)
    b = a + 0.01 * unit_directions(20_000)
    change = np.abs(solid.distance(a) - solid.distance(b)) / np.linalg.norm(a - b, axis=0)
    assert change.max() < 1.02  # rounding of float32


@pytest.mark.parametrize("index", range(len(still_life().solids)))
def test_solids_fit_into_their_boxes(index):
    """What sticks out of the box would be cut off."""
    solid = still_life().solids[index]
    draw = np.random.default_rng(index)
    p = draw.uniform(-1.3, 1.3, (3, 50_000)) * solid.extent
    outside = p[:, (np.abs(p) > solid.extent + 2e-3).any(0)].astype(np.float32)
    assert (solid.distance(outside) > 0).all()


def test_rays_meet_a_ball_where_the_quadratic_says():
    ball = Solid(shapes.ball(0.5), textures.plain("ffffff"), (0.5, 0.5, 0.5), (1.0, -2.0, 0.5))
    draw = np.random.default_rng(1)
    origin = ball.center + 3 * unit_directions(5000)
    direction = ball.center + draw.uniform(-1, 1, (3, 5000)).astype(np.float32) - origin
    direction /= np.linalg.norm(direction, axis=0)
    hit = ball.intersect(origin, direction)

    o, d = (origin - ball.center).astype(float), direction.astype(float)
    along = (o * d).sum(0)
    beside = np.linalg.norm(o - along * d, axis=0)  # distance of the line from the centre
    passing, meeting = beside > 0.503, beside < 0.49  # grazing rays may go either way
    assert meeting.sum() > 500 and passing.sum() > 500
    assert np.isinf(hit[passing]).all()
    # Tracing stops within 2 mm of the surface; at the slant of 0.49 / 0.5 a ray has five times as far to go.
    np.testing.assert_allclose(hit[meeting], -along[meeting] - np.sqrt(0.25 - beside[meeting] ** 2), atol=0.011)


def test_normals_point_out_of_a_turned_box():
    turn = np.array([[0, -1, 0], [1, 0, 0], [0, 0, 1]], np.float32)
    box = Solid(shapes.box((0.5, 0.2, 0.1), 0.01), textures.plain("ffffff"), (0.5, 0.2, 0.1), (0, 0, 0), turn)
    points = np.array([[0.2, 0, 0], [0, 0.5, 0], [0, 0, 0.1]], np.float32).T  # local y is world -x, local x world y
    np.testing.assert_allclose(box.surface(points).normal, np.eye(3), atol=1e-3)


def test_the_room_is_closed_and_faces_inwards():
    room, direction = still_life().room, unit_directions(5000)
    origin = np.random.default_rng(2).uniform(-1, 1, (3, 5000)).astype(np.float32) * np.float32(0.8)
    distance = room.intersect(origin, direction)
    points = origin + distance * direction
    assert np.isfinite(distance).all() and (distance > 0).all()
    on_wall = np.abs(np.hypot(points[0], points[1]) - WALL) < 1e-3
    on_flat = (np.abs(points[2] - FLOOR) < 1e-3) | (np.abs(points[2] - CEILING) < 1e-3)
    assert (on_wall | on_flat).all()
    assert ((room.surface(points).normal * direction).sum(0) < 0).all()


def test_a_view_of_bare_walls_needs_no_mirror():
    scene = still_life()
    eye, up = np.array([[3.0], [0], [1]], np.float32), np.array([[0], [0], [1]], np.float32)
    light = scene.radiance(eye, up, scene.light.points(1))
    assert light.shape == (3, 1) and (light > 0).all()


def test_things_hide_the_lamp_and_the_sky():
    scene = still_life()
    lamp = scene.light.points(1)
    spots = np.array([[0.0, 0.0, FLOOR + 0.01], [1.3, -0.9, 0.01]], np.float32).T  # under the table, and on it
    way = lamp - spots
    reach = np.linalg.norm(way, axis=0)
    assert scene.visible(spots, way / reach, reach).tolist() == [False, True]
    up = np.tile(np.array([[0], [0], [1]], np.float32), (1, 2))
    # Beside the pedestal under the table, and in the middle of nowhere.
    places = np.array([[0.5, 0.0, FLOOR], [4.5, 0.0, FLOOR]], np.float32).T
    under, free = scene.openness(places, up, np.array([-1, -1]))
    assert under < 0.8 * free and free > 0.9


def test_the_lamp_is_a_disc_that_faces_the_table():
    light = still_life().light
    points = light.points(64)
    center = np.array(light.position)
    offset = points - center[:, None]
    assert np.linalg.norm(offset, axis=0).max() < light.radius
    np.testing.assert_allclose(center @ offset, 0, atol=1e-5)
    np.testing.assert_allclose(points.mean(1), center, atol=0.05 * light.radius)
