"""The inputs people really have: each trains, evaluates and exports, or stops with a message that helps.

Each function below writes one data set and returns the last words of ``ns-train``; its decorator is the right outcome.
"""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
from entry import STEPS, Run, evaluate, export, train
from PIL import Image
from scene import Scene, cloud, noise

Words = tuple[str, ...]
RANDOM = ("--pipeline.model.num-random", "200")
FULL_SIZE = ("--pipeline.model.num-downscales", "0")


@dataclass(frozen=True)
class Input:
    """A line of the table."""

    write: Callable[[Scene], Words]
    scene: dict[str, object]  # what the scene is made with
    says: str = ""  # regular expression for what ns-train prints, or for the message it stops with
    error: str | None = None  # name of the exception, or None if it trains
    evaluates: str | None = None  # regular expression of ns-eval's message if it must stop
    gaussians: int | None = None  # that the run starts with


TABLE: dict[str, Input] = {}


def trains(says: str = "", evaluates: str | None = None, gaussians: int | None = None, **scene: object):
    def add(write: Callable[[Scene], Words]) -> Callable[[Scene], Words]:
        TABLE[write.__name__] = Input(write, scene, says, None, evaluates, gaussians)
        return write

    return add


def stops(error: str, says: str, **scene: object):
    def add(write: Callable[[Scene], Words]) -> Callable[[Scene], Words]:
        TABLE[write.__name__] = Input(write, scene, says, error)
        return write

    return add


# Formats ------------------------------------------------------------------------------------------------------------


@trains(gaussians=60)
def nerfstudio_format(scene):
    return scene.nerfstudio()


@trains(gaussians=60)
def colmap_format(scene):
    return scene.colmap()


@trains(gaussians=60)
def colmap_in_another_folder(scene):
    return (*scene.colmap(at="sparse/0"), "--colmap-path", "sparse/0")


@stops("DataError", r"images\.bin does not exist.*Use --colmap-path sparse/0")
def colmap_not_where_expected(scene):
    return scene.colmap(at="sparse/0")


@trains(gaussians=60)
def blender_format_with_points(scene):
    return scene.blender("--ply-path", "cloud.ply")


@trains("The data has no point cloud", mode="RGBA", gaussians=200)
def blender_format_with_alpha(scene):
    return (*RANDOM, *scene.blender())


@trains("The data has no point cloud")
def instant_ngp_format(scene):
    return (*RANDOM, *scene.instant_ngp())


# Photos -------------------------------------------------------------------------------------------------------------


@trains()
def photos_of_different_sizes(scene):
    last = scene.nerfstudio(w=None, h=None, cx=None, cy=None)

    def edit(content):
        for number, frame in enumerate(content["frames"]):
            width, height = 40 + 8 * number, 52 - 4 * number
            noise(number, width, height).save(scene.photo(number))
            frame |= {"w": width, "h": height, "cx": width / 2, "cy": height / 2}

    scene.change(edit)
    return ("--pipeline.datamanager.views-per-round", "3", *last)


@trains(mode="L")
def grey_photos(scene):
    return scene.nerfstudio()


@trains(mode="P")
def photos_with_a_palette(scene):
    return scene.nerfstudio()


@trains(mode="1")
def photos_of_one_bit(scene):
    return scene.nerfstudio()


@trains(mode="I;16")
def photos_of_sixteen_bits(scene):
    return scene.nerfstudio()


@trains(mode="CMYK", extension="jpg")
def photos_for_print(scene):
    return scene.nerfstudio()


@trains(mode="LA")
def grey_photos_with_alpha(scene):
    return scene.nerfstudio()


@trains(mode="RGBA")
def photos_with_alpha(scene):
    return scene.nerfstudio()


@trains()
def photos_of_all_kinds_at_once(scene):
    last = scene.nerfstudio()
    for number, mode in enumerate(("RGBA", "L", "LA", "P", "I;16", "1")):
        noise(number, scene.width, scene.height, mode).save(scene.photo(number))
    return ("--pipeline.datamanager.views-per-round", "3", *last)


def turned(scene: Scene, width: int, height: int) -> None:
    """Photos of this stored size, each with an EXIF tag that turns it by 90 degrees."""
    for number in range(scene.count):
        image = noise(number, width, height)
        tags = image.getexif()
        tags[0x0112] = 6
        image.save(scene.photo(number), exif=tags)


@trains(extension="jpg")
def exif_rotation_that_makes_the_size_match(scene):
    last = scene.nerfstudio()
    turned(scene, scene.height, scene.width)
    return last


@trains(extension="jpg")
def exif_rotation_that_would_spoil_the_size(scene):
    last = scene.nerfstudio()
    turned(scene, scene.width, scene.height)
    return last


@stops("PhotoError", r"photo_02\.png is 48x40 pixels, but its camera is 48x36.*Correct the camera's w and h")
def photo_of_another_size(scene):
    last = scene.nerfstudio()
    noise(0, 48, 40).save(scene.photo(2))
    return last


@trains(name="naïve Straße 東京 {:02d}".format)
def names_with_spaces_and_other_letters(scene):
    return scene.nerfstudio()


@trains(name="naïve Straße 東京 {:02d}".format)
def colmap_names_with_spaces_and_other_letters(scene):
    return scene.colmap()


@stops("PhotoError", r"Cannot read .*photo_03\.png.*Replace the file, or remove its frame")
def unreadable_photo(scene):
    last = scene.nerfstudio()
    scene.photo(3).write_bytes(b"not a photo")
    return last


@stops("PhotoError", r"Cannot read .*photo_03\.png.*truncated.*Replace the file, or remove its frame", width=200)
def truncated_photo(scene):
    last = scene.nerfstudio()
    whole = scene.photo(3).read_bytes()
    scene.photo(3).write_bytes(whole[: len(whole) // 2])
    return last


@stops("PhotoError", r"Cannot read .*photo_02\.png.*No such file")
def missing_held_out_photo(scene):
    last = scene.nerfstudio()
    scene.photo(2).unlink()
    return last


@stops("DataError", r"No such file.*photo_00\.png.*Correct the data set")
def missing_first_photo(scene):
    last = scene.nerfstudio()
    scene.photo(0).unlink()
    return last


@trains("couldn't find", count=8)
def instant_ngp_leaves_missing_photos_out(scene):
    last = scene.instant_ngp()
    scene.photo(3).unlink()
    return (*RANDOM, *last)


@trains(width=10, height=9, focal=9.0)
def photos_smaller_than_the_window_of_ssim(scene):
    return (*FULL_SIZE, *scene.nerfstudio())


@trains(width=1, height=1, focal=1.0)
def photos_of_one_pixel(scene):
    return (*FULL_SIZE, *scene.nerfstudio())


@stops("PhotoError", r"photo_0\d\.png has 3x2 pixels, too few.*--pipeline\.model\.num-downscales", width=3, height=2)
def photos_too_small_to_start_reduced(scene):
    return scene.nerfstudio()


@trains(r"0 % kept|0% kept", count=60, width=16, height=12)
def many_photos_and_hardly_any_cache(scene):
    return ("--pipeline.datamanager.image-cache-gib", "1e-9", *scene.nerfstudio())


@trains()
def more_views_a_round_than_photos(scene):
    return ("--pipeline.datamanager.views-per-round", "50", *scene.nerfstudio())


# Masks --------------------------------------------------------------------------------------------------------------


def masked(scene: Scene, mask: np.ndarray) -> Words:
    last = scene.nerfstudio()
    Image.fromarray(mask).save(scene.folder / "mask.png")
    scene.change(lambda content: [frame.update(mask_path="mask.png") for frame in content["frames"]])
    return last


@trains()
def mask(scene):
    keep = np.full((scene.height, scene.width), 255, np.uint8)
    keep[:, :20] = 0
    return masked(scene, keep)


@stops("PhotoError", r"The mask .*mask\.png keeps no pixel of .*photo_0\d\.png.*Invert the mask, or remove the frame")
def mask_that_keeps_nothing(scene):
    return masked(scene, np.zeros((scene.height, scene.width), np.uint8))


@stops("PhotoError", r"mask\.png is 48x35 pixels, but its camera is 48x36")
def mask_of_another_size(scene):
    return masked(scene, np.full((35, 48), 255, np.uint8))


@stops("DataError", r"Different number of image and mask filenames.*Correct the data set")
def mask_for_some_photos_only(scene):
    last = masked(scene, np.full((scene.height, scene.width), 255, np.uint8))
    scene.change(lambda content: content["frames"][2].pop("mask_path"))
    return last


# Lenses -------------------------------------------------------------------------------------------------------------


@trains()
def distorted_photos(scene):
    return scene.nerfstudio(k1=-0.05, k2=0.01, p1=0.001, p2=-0.002)


@trains()
def fisheye_photos(scene):
    return scene.nerfstudio(camera_model="OPENCV_FISHEYE", k1=0.02, k2=0.001)


@trains()
def colmap_fisheye_photos(scene):
    return scene.colmap(model="OPENCV_FISHEYE", parameters=(0.02, 0.001, 0.0, 0.0))


@trains()
def instant_ngp_fisheye_photos(scene):
    return *RANDOM, *scene.instant_ngp(is_fisheye=True, k1=0.02)


@stops("LensError", r"photo_0\d\.png cannot be used.*field of view is too wide.*Crop", focal=12.0)
def fisheye_too_wide_for_a_plane(scene):
    return scene.nerfstudio(camera_model="OPENCV_FISHEYE")


@stops("LensError", r"photo_0\d\.png cannot be used: its model is EQUIRECTANGULAR.*planar views")
def panoramas(scene):
    return scene.nerfstudio(camera_model="EQUIRECTANGULAR")


@stops("DataError", r"transforms\.json: camera_model 'PINHOLE_RADIAL' is not known\. Use one of")
def unknown_camera_model(scene):
    return scene.nerfstudio(camera_model="PINHOLE_RADIAL")


@stops("DataError", r"cannot read the data set .*FULL_OPENCV")
def colmap_model_that_nerfstudio_does_not_know(scene):
    return scene.colmap(model="FULL_OPENCV", parameters=(0.1,) * 8)


@stops("LensError", r"it has 4 distortion_params, which must be k1, k2, k3, k4, p1, p2")
def distortion_of_another_length(scene):
    return scene.nerfstudio(distortion_params=[0.1, 0.0, 0.0, 0.0])


@stops("LensError", r"photo_0\d\.png cannot be used: its focal lengths are 0 and 40 pixels\. Correct them")
def focal_length_of_zero(scene):
    return scene.nerfstudio(fl_x=0.0)


@stops("LensError", r"photo_0\d\.png cannot be used: its size is 48x-36 pixels\. Correct it")
def negative_size(scene):
    return scene.nerfstudio(h=-36)


@stops("LensError", r"photo_0\d\.png cannot be used: its size is 0x36 pixels\. Correct it")
def size_of_zero(scene):
    return scene.nerfstudio(w=0)


@trains()
def principal_point_far_outside(scene):
    return scene.nerfstudio(cx=500.0, cy=-300.0)


# Poses --------------------------------------------------------------------------------------------------------------


@stops("DataError", r"transforms\.json: the pose of .*photo_01\.png holds values that are not finite")
def pose_that_is_not_a_number(scene):
    scene.poses[1, 0, 3] = math.nan
    return scene.nerfstudio()


@stops("DataError", r"images\.bin: the pose of .*photo_01\.png holds values that are not finite")
def colmap_pose_that_is_not_a_number(scene):
    scene.poses[1, 0, 3] = math.nan
    return scene.colmap()


@stops("DataError", r"transforms\.json: the pose of .*photo_04\.png is not a rotation.*lengths 2, 2, 2.*Take scale")
def pose_with_a_scale(scene):
    scene.poses[4, :3, :3] *= 2
    return scene.nerfstudio()


@stops("DataError", r"the pose of .*photo_04\.png is not a rotation.*determinant is -1.*mirroring")
def mirrored_pose(scene):
    scene.poses[4, :3, 0] *= -1
    return scene.blender()


@stops("DataError", r"transform_matrix of images/photo_02\.png is not 4 x 4 numbers \(found shape \[3, 4\]\)")
def pose_of_another_shape(scene):
    last = scene.nerfstudio()
    scene.change(lambda content: content["frames"][2]["transform_matrix"].pop())
    return last


@trains(count=6)
def frames_listed_twice(scene):
    last = scene.nerfstudio()
    scene.change(lambda content: content["frames"].extend(content["frames"][:3]))
    return last


@stops("DataError", r"transforms\.json lists .*photo_00\.png twice with different poses")
def one_photo_at_two_places(scene):
    last = scene.nerfstudio()
    frames = scene.frames()
    frames[1]["file_path"] = frames[0]["file_path"]
    scene.change(lambda content: content.update(frames=frames))
    return last


@trains("The only camera of .* keeps the data set's own unit", "No evaluation photos in .*eval mode", count=1)
def single_photo(scene):
    return scene.nerfstudio("--eval-mode", "fraction")


@trains("The only camera of", count=1)
def single_photo_for_training_and_evaluation(scene):
    return scene.nerfstudio("--eval-mode", "all")


@trains(evaluates=r"No evaluation photos in .*split 'test'.*Check its eval mode, or test_filenames")
def no_held_out_photos(scene):
    return scene.nerfstudio("--eval-mode", "fraction", "--train-split-fraction", "1.0")


@stops("ValueError", r"No training photos in .*split 'train'", count=1)
def no_training_photos(scene):
    return scene.nerfstudio()


@trains(r"All 6 cameras of .*transforms\.json at one place: the scene keeps")
def cameras_all_at_one_place(scene):
    scene.poses[:, :3, 3] = [3.1, -2.7, 1.3]
    return scene.nerfstudio()


@trains(r"All 6 cameras of .*images\.bin at one place: the scene keeps")
def colmap_cameras_all_at_one_place(scene):
    scene.poses[:, :3, 3] = [3.1, -2.7, 1.3]
    return scene.colmap()


UTM = (412_345.6, 5_678_901.2, 312.5)
"""Metres: east and north of a zone's origin, and height."""


@trains(r"cameras and points are centred in float64", offset=UTM, gaussians=60)
def georeferenced(scene):
    return scene.nerfstudio()


@trains(r"cameras and points are centred in float64", offset=UTM, gaussians=60)
def colmap_georeferenced(scene):
    return scene.colmap()


@stops("DataError", r"units from the origin but only .* subtract a common offset", offset=UTM)
def instant_ngp_georeferenced(scene):
    return scene.instant_ngp()


@stops("DataError", r"units from the origin but only .*--center-method poses", offset=UTM)
def georeferenced_and_not_centred(scene):
    return scene.nerfstudio("--center-method", "none")


# Point clouds -------------------------------------------------------------------------------------------------------


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


@trains("The data has no point cloud: starting from 200 random", points=np.zeros((0, 3)), gaussians=200)
def empty_point_cloud(scene):
    return *RANDOM, *scene.nerfstudio()


@stops("DataError", r"points3D\.bin holds no points.*--load-3D-points False", points=None)
def colmap_without_points(scene):
    return scene.colmap()


@trains("The data has no point cloud", points=None, gaussians=200)
def colmap_without_points_from_random_ones(scene):
    return (*RANDOM, *scene.colmap(), "--load-3D-points", "False")


@trains(gaussians=40)
def point_cloud_with_values_that_are_not_finite(scene):
    scene.points[:10, 1], scene.points[10:20, 2] = math.nan, math.inf
    return scene.nerfstudio()


@stops("ValueError", r"no finite point \(60 found\).*--pipeline\.model\.random-init", points=np.full((60, 3), math.nan))
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


# Descriptions -------------------------------------------------------------------------------------------------------


@stops("DataError", r"The data folder .* does not exist\. Correct --data")
def folder_that_does_not_exist(scene):
    return ("nerfstudio-data",)


@stops("DataError", r"transforms\.json does not exist \(found images\)\. Correct --data, or name the data's format")
def folder_without_a_description(scene):
    scene.write_photos()
    return ("nerfstudio-data",)


@stops("DataError", r"Cannot read .*transforms\.json: .*Write the file again")
def description_cut_off(scene):
    last = scene.nerfstudio()
    file = scene.folder / "transforms.json"
    file.write_text(file.read_text()[:300])
    return last


@stops("DataError", r"transforms\.json needs a list of 'frames', found none")
def description_without_frames(scene):
    return scene.nerfstudio(frames=None)


@stops("DataError", r"transforms\.json needs a list of 'frames', found an empty list")
def description_with_no_frame(scene):
    return scene.nerfstudio(frames=[])


@stops("DataError", r"frame 3 \(images/photo_03\.png\) has no 'transform_matrix'")
def frame_without_a_pose(scene):
    last = scene.nerfstudio()
    scene.change(lambda content: content["frames"][3].pop("transform_matrix"))
    return last


@stops("DataError", r"frame 3 \(without a path\) has no 'file_path'")
def frame_without_a_path(scene):
    last = scene.nerfstudio()
    scene.change(lambda content: content["frames"][3].pop("file_path"))
    return last


@stops("DataError", r"transforms\.json has no 'fl_x', and neither has its frame images/photo_00\.png.*in pixels")
def description_without_a_focal_length(scene):
    return scene.nerfstudio(fl_x=None)


@stops("DataError", r"transforms_train\.json: 'camera_angle_x' is None")
def blender_without_an_angle(scene):
    last = scene.blender()
    file = scene.folder / "transforms_train.json"
    file.write_text(json.dumps({"frames": json.loads(file.read_text())["frames"]}))
    return last


@stops("DataError", r"Cannot read .*images\.bin: the file ends too early.*export it again from COLMAP")
def colmap_model_cut_off(scene):
    last = scene.colmap()
    file = scene.folder / "colmap/sparse/0/images.bin"
    file.write_bytes(file.read_bytes()[:300])
    return last


@stops("DataError", r"images\.bin holds no images")
def colmap_model_without_images(scene):
    last = scene.colmap()
    (scene.folder / "colmap/sparse/0/images.bin").write_bytes(struct.pack("<Q", 0))
    return last


@stops("DataError", r"Some filenames for split train were not found.*photo_99\.png.*Correct the data set")
def split_that_names_other_photos(scene):
    return scene.nerfstudio(train_filenames=["images/photo_99.png"], val_filenames=[], test_filenames=[])


# The table ----------------------------------------------------------------------------------------------------------


def test_the_table_is_long_enough():
    assert len(TABLE) >= 40


@pytest.fixture
def scene(request, tmp_path) -> Scene:
    return Scene(tmp_path / "data", **TABLE[request.param].scene)


@pytest.mark.parametrize("name, scene", [(name, name) for name in TABLE], ids=list(TABLE), indirect=["scene"])
def test_input(name, scene, tmp_path, capsys):
    line = TABLE[name]
    last = line.write(scene)
    if line.error is not None:
        with pytest.raises(ValueError) as stopped:
            train(scene.folder, tmp_path, *last)
        assert type(stopped.value).__name__ == line.error
        assert re.search(line.says, str(stopped.value), re.DOTALL), stopped.value
        return
    run = train(scene.folder, tmp_path, *last)
    printed = " ".join(capsys.readouterr().out.split())
    assert re.search(line.says, printed), printed
    assert_trained(run, line)
    if line.evaluates is not None:
        with pytest.raises(ValueError, match=line.evaluates):
            evaluate(run)
    else:
        assert math.isfinite(evaluate(run)["psnr"])
    assert export(run) == len(run.means())


def assert_trained(run: Run, line: Input) -> None:
    steps = run.steps()
    assert steps[-1]["images"] >= STEPS
    assert all(math.isfinite(step["loss"]) and step["loss"] > 0 for step in steps)
    assert run.means().isfinite().all()
    if line.gaussians is not None:
        assert steps[0]["gaussians"] == line.gaussians
