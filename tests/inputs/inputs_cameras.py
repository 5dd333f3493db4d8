"""Lenses and poses."""

from __future__ import annotations

import math

from input_table import RANDOM, stops, trains

# Lenses ---------------------------------------------------------------------------------------------------------------


@trains()
def distorted_photos(scene):
    return scene.nerfstudio(k1=-0.05, k2=0.01, p1=0.001, p2=-0.002)


@trains()
def fisheye_photos(scene):
    return scene.nerfstudio(camera_model="OPENCV_FISHEYE", k1=0.02, k2=0.001)


@trains()
def circular_fisheye_photos(scene):
    return scene.nerfstudio(camera_model="OPENCV_FISHEYE", fisheye_crop_radius=20.0)


@stops("PhotoError", r"The mask by fisheye_crop_radius keeps no pixel of .*photo_0\d\.png")
def circular_fisheye_photos_that_show_nothing(scene):
    return scene.nerfstudio(camera_model="OPENCV_FISHEYE", fisheye_crop_radius=0.0)


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


@stops("DataError", r"cannot read the data set .*FULL_OPENCV.*Undistort the photos first")
def colmap_model_that_nerfstudio_does_not_know(scene):
    return scene.colmap(model="FULL_OPENCV", parameters=(0.1,) * 8)


@stops("LensError", r"it has 4 distortion_params, but k1, k2, k3, k4, p1, p2 are needed")
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


# Poses ----------------------------------------------------------------------------------------------------------------


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


@trains(r"The only camera of .*cameras and points are centred in float64", offset=UTM, count=1)
def single_georeferenced_photo(scene):
    return scene.nerfstudio("--eval-mode", "all")


@stops("DataError", r"5,678,90\d units from the origin but only 0\.\d+ from each other.*subtract a common offset")
def georeferenced_table_top(scene):
    scene.poses[:, :3, 3] = 0.1 * scene.poses[:, :3, 3] + UTM
    return scene.nerfstudio()


@stops("DataError", r"units from the origin but only .* subtract a common offset", offset=UTM)
def instant_ngp_georeferenced(scene):
    return scene.instant_ngp()


@stops("DataError", r"units from the origin but only .*--center-method poses", offset=UTM)
def georeferenced_and_not_centred(scene):
    return scene.nerfstudio("--center-method", "none")
