"""Formats, and descriptions of cameras that are incomplete or damaged."""

from __future__ import annotations

import json
import struct

from input_table import RANDOM, stops, trains

# Formats --------------------------------------------------------------------------------------------------------------


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


# Descriptions ---------------------------------------------------------------------------------------------------------


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


@stops("DataError", r"Cannot read .*transforms\.json: Unexpected UTF-8 BOM.*Write the file again as JSON in UTF-8")
def description_with_a_byte_order_mark(scene):
    last = scene.nerfstudio()
    file = scene.folder / "transforms.json"
    file.write_bytes(b"\xef\xbb\xbf" + file.read_bytes())
    return last


@stops("DataError", r"applied_transform is not 3 x 4 numbers")
def transform_of_another_shape(scene):
    return scene.nerfstudio(applied_transform=[1.0, 2.0])


@stops("DataError", r"No such file.*transforms_val\.json.*Correct the data set")
def blender_without_held_out_photos(scene):
    last = scene.blender()
    (scene.folder / "transforms_val.json").unlink()
    return last


@stops("DataError", r"frame should contain train/eval in its name")
def names_that_do_not_tell_the_split(scene):
    return scene.nerfstudio("--eval-mode", "filename")


@trains(gaussians=60)
def description_named_on_the_command_line(scene):
    last = scene.nerfstudio()
    (scene.folder / "transforms.json").rename(scene.folder / "cameras.json")
    scene.folder /= "cameras.json"
    return last


@stops(
    "DataError",
    r"it asked whether to change the data set .*there is no terminal.*--downscale-factor 1",
    width=1604,
    height=8,
)
def colmap_with_photos_to_be_reduced(scene):
    return scene.colmap()


@trains(width=1604, height=16)
def colmap_with_large_photos(scene):
    return (*scene.colmap(), "--downscale-factor", "1")


@stops("DataError", r"No image files found.*Correct the data set")
def instant_ngp_without_any_photo(scene):
    last = scene.instant_ngp()
    for number in range(scene.count):
        scene.photo(number).unlink()
    return last


@stops("DataError", r"file_path of frame 2 is 7\. Write a path in quotes")
def frame_with_a_number_as_path(scene):
    last = scene.nerfstudio()
    scene.change(lambda content: content["frames"][2].update(file_path=7))
    return last
