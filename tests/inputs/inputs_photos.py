"""Photos and masks of all kinds."""

from __future__ import annotations

import numpy as np
from input_table import FULL_SIZE, RANDOM, Words, stops, trains
from PIL import Image
from scene import Scene, noise

# Photos ---------------------------------------------------------------------------------------------------------------


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


@stops("PhotoError", r"Cannot read .*photo_0\d\.png.*truncated", width=200)
def truncated_photos_that_are_decoded_at_each_use(scene):
    last = scene.nerfstudio()
    for number in range(scene.count):
        scene.photo(number).write_bytes(scene.photo(number).read_bytes()[:-2000])
    return ("--pipeline.datamanager.image-cache-gib", "0", *last)


@stops("PhotoError", r"Cannot read .*photo_02\.png.*truncated", width=200)
def truncated_held_out_photo(scene):
    last = scene.nerfstudio()
    whole = scene.photo(2).read_bytes()
    scene.photo(2).write_bytes(whole[: len(whole) // 2])
    return last


@stops("PhotoError", r"photo_0\d\.tif: floating-point pixels.*save 8 or 16 bits", mode="F", extension="tif")
def photos_of_floating_point_numbers(scene):
    return scene.nerfstudio()


@trains()
def photos_reduced_beforehand(scene):
    last = scene.nerfstudio()
    (scene.folder / "images_2").mkdir()
    for number in range(scene.count):
        noise(number, scene.width // 2, scene.height // 2).save(scene.folder / "images_2" / scene.photo(number).name)
    return (*last, "--downscale-factor", "2")


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


@trains(says=r"SSIM \d")
def held_out_photos_of_which_one_is_tiny(scene):
    """It has no SSIM; the others have."""
    last = scene.nerfstudio(w=None, h=None, cx=None, cy=None)

    def edit(content):
        for number, frame in enumerate(content["frames"]):
            width, height = (9, 7) if number == 2 else (scene.width, scene.height)
            noise(number, width, height).save(scene.photo(number))
            frame |= {"w": width, "h": height, "cx": width / 2, "cy": height / 2}

    scene.change(edit)
    return last


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


# Masks ----------------------------------------------------------------------------------------------------------------


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
