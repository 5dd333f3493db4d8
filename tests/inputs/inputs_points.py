"""Point clouds that a run starts from."""

from __future__ import annotations

import math

import numpy as np
from input_table import RANDOM, stops, trains
from scene import cloud


@trains("The data has no point cloud: starting from 200 random Gaussians", points=None, gaussians=200)
def no_point_cloud(scene):
    return *RANDOM, *scene.nerfstudio()


@stops("DataError", r"The point cloud .*gone\.ply does not exist.*Restore it, or train without it")
def missing_point_cloud(scene):
    return scene.nerfstudio(ply_file_path="gone.ply")


@stops("DataError", r"cloud\.ply is not a PLY file with vertices")
def unreadable_point_cloud(scene):
    last = scene.nerfstudio()
    (scene.folder / "cloud.ply").write_bytes(b"x y z\n1 2 3\n")
    return last


@stops("DataError", r"cloud\.ply ends too early: it has [\d,]+ bytes, and its vertices need [\d,]+")
def point_cloud_cut_off(scene):
    last = scene.nerfstudio()
    file = scene.folder / "cloud.ply"
    file.write_bytes(file.read_bytes()[:-400])
    return last


@stops("DataError", r"cameras\.bin or points3D\.bin ends too early.*The model is damaged")
def colmap_points_cut_off(scene):
    last = scene.colmap()
    file = scene.folder / "colmap/sparse/0/points3D.bin"
    file.write_bytes(file.read_bytes()[:-400])
    return last


@trains("1 of the 4 points", gaussians=3)
def point_cloud_as_text(scene):
    last = scene.nerfstudio()
    header = "ply\r\nformat ascii 1.0\r\nelement vertex 4\r\n"
    axes = "".join(f"property float {axis}\r\n" for axis in "xyz")
    rows = "0 0 0\r\nnan 0 0\r\n1 0 0\r\n0 1 0\r\n"
    (scene.folder / "cloud.ply").write_bytes(f"{header}{axes}end_header\r\n{rows}".encode())
    return last


@trains("The data has no point cloud: starting from 200 random", points=np.zeros((0, 3)), gaussians=200)
def empty_point_cloud(scene):
    return *RANDOM, *scene.nerfstudio()


@stops("DataError", r"points3D\.bin holds no points.*--load-3D-points False", points=None)
def colmap_without_points(scene):
    return scene.colmap()


@trains("The data has no point cloud", points=None, gaussians=200)
def colmap_without_points_from_random_ones(scene):
    return (*RANDOM, *scene.colmap(), "--load-3D-points", "False")


@trains(r"20 of the 60 points in .*cloud\.ply are not finite and left out", gaussians=40)
def point_cloud_with_values_that_are_not_finite(scene):
    scene.points[:10, 1], scene.points[10:20, 2] = math.nan, math.inf
    return scene.nerfstudio()


@stops("DataError", r"cloud\.ply has no finite point \(60 found\).*train without it", points=np.full((60, 3), math.nan))
def point_cloud_without_a_finite_point(scene):
    return scene.nerfstudio()


@trains(gaussians=180)
def point_cloud_full_of_duplicates(scene):
    scene.points = np.repeat(scene.points, 3, axis=0)
    return scene.nerfstudio()


@trains(gaussians=50)
def point_cloud_of_one_place(scene):
    scene.points = np.repeat(scene.points[:1], 50, axis=0)
    return scene.nerfstudio()


@trains(points=cloud(3), gaussians=3)
def point_cloud_of_three_points(scene):
    return scene.nerfstudio()


@trains(points=cloud(1), gaussians=1)
def point_cloud_of_one_point(scene):
    return scene.nerfstudio()


@trains(colours=False, gaussians=60)
def point_cloud_without_colours(scene):
    return scene.nerfstudio()


@trains(points=cloud(1000), gaussians=300)
def point_cloud_above_the_limit(scene):
    return scene.nerfstudio()
