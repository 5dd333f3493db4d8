import numpy as np
import pytest
import torch
from PIL import Image

from bytesplat_ns.photos.images import (
    PhotoError,
    check_mask_size,
    decode_mask,
    decode_photo,
    downscale_image,
    downscale_mask,
    photo_channels,
    premultiply,
    resize,
    unpremultiply,
)

SIZE = (6, 4)  # width, height
GREYS = np.linspace(0, 255, 24).astype(np.uint8).reshape(4, 6)
COLOURS = np.random.default_rng(0).integers(0, 256, (4, 6, 3), dtype=np.uint8)


def save(path, pixels, **options):
    image = pixels if isinstance(pixels, Image.Image) else Image.fromarray(pixels)
    image.save(path, **options)
    return path


def grey_as_rgb(values):
    return np.repeat(np.asarray(values, dtype=np.uint8)[..., None], 3, axis=2)


def photos():
    """Name of the file, image to save, pixels to find."""
    alpha = GREYS[..., None]
    palette = Image.fromarray(COLOURS).quantize(16)
    colours = np.asarray(palette.convert("RGB"))
    wide = GREYS.astype(np.uint16) * 257
    bits = GREYS > 100
    yield "rgb.png", COLOURS, COLOURS
    yield "rgba.png", np.dstack([COLOURS, alpha]), np.dstack([COLOURS, alpha])
    yield "grey.png", GREYS, grey_as_rgb(GREYS)
    yield "grey_alpha.png", np.dstack([GREYS, alpha]), np.dstack([grey_as_rgb(GREYS), alpha])
    yield "bits.png", bits, grey_as_rgb(bits * 255)
    yield "palette.png", palette, colours
    yield "grey16.png", wide, grey_as_rgb(GREYS)
    yield "grey16.tif", wide, grey_as_rgb(GREYS)
    yield "grey32.tif", wide.astype(np.int32), grey_as_rgb(GREYS)
    yield "cmyk.tif", Image.fromarray(COLOURS).convert("CMYK"), COLOURS


@pytest.mark.parametrize(("name", "pixels", "expected"), list(photos()), ids=lambda v: v if isinstance(v, str) else "")
def test_decodes_every_pixel_type(tmp_path, name, pixels, expected):
    path = save(tmp_path / name, pixels)
    photo = decode_photo(path, SIZE)
    assert photo.dtype == np.uint8
    np.testing.assert_array_equal(photo, expected)
    assert photo_channels(path, SIZE) == expected.shape[2]


def test_transparent_palette_colour_becomes_alpha(tmp_path):
    palette = Image.fromarray(COLOURS).quantize(16)
    path = save(tmp_path / "photo.png", palette, transparency=3)
    photo = decode_photo(path, SIZE)
    np.testing.assert_array_equal(photo[..., 3], np.where(np.asarray(palette) == 3, 0, 255))
    assert photo_channels(path, SIZE) == 4


def test_16_bits_are_rounded_not_clipped(tmp_path):
    wide = np.array([[0, 128, 129, 32767, 32768, 65535]] * 4, dtype=np.uint16)
    photo = decode_photo(save(tmp_path / "photo.png", wide), SIZE)
    assert photo[0, :, 0].tolist() == [0, 0, 1, 127, 128, 255]


def test_cmyk_jpeg_is_not_inverted(tmp_path):
    path = save(tmp_path / "photo.jpg", Image.new("CMYK", SIZE, (0, 255, 255, 0)))
    assert np.abs(decode_photo(path, SIZE).astype(int) - [255, 0, 0]).max() <= 3  # JPEG is lossy


def exif_photo(path, orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    return save(path, COLOURS, exif=exif)


def test_exif_turns_a_photo_only_to_fit_its_camera(tmp_path):
    path = exif_photo(tmp_path / "turned.png", 6)
    np.testing.assert_array_equal(decode_photo(path, SIZE), COLOURS)
    np.testing.assert_array_equal(decode_photo(path, SIZE[::-1]), np.rot90(COLOURS, -1))
    upside_down = exif_photo(tmp_path / "upside_down.png", 3)  # fits as it is stored
    np.testing.assert_array_equal(decode_photo(upside_down, SIZE), COLOURS)


def test_errors_name_the_file_what_was_found_and_what_to_do(tmp_path):
    good = save(tmp_path / "good.jpg", np.repeat(COLOURS, 50, axis=0))
    truncated = tmp_path / "truncated.jpg"
    truncated.write_bytes(good.read_bytes()[:-500])
    text = tmp_path / "text.png"
    text.write_text("not a photo")
    floats = save(tmp_path / "floats.tif", GREYS.astype(np.float32))
    cases = [
        (good, (200, 6), r"6x200 pixels, but its camera is 200x6.*Correct"),
        (truncated, (6, 200), "truncated.*Replace"),
        (text, SIZE, "cannot identify.*Replace"),
        (tmp_path / "missing.png", SIZE, "No such file.*Replace"),
        (floats, SIZE, "floating-point.*Replace"),
    ]
    for path, size, message in cases:
        with pytest.raises(PhotoError, match=message) as error:
            decode_photo(path, size)
        assert str(path) in str(error.value)


@pytest.mark.parametrize(
    "pixels", [GREYS, GREYS > 0, GREYS.astype(np.uint16), np.dstack([GREYS * 0, GREYS, GREYS * 0])]
)
def test_mask_keeps_nonzero(tmp_path, pixels):
    mask = decode_mask(save(tmp_path / "mask.png", pixels), SIZE)
    assert mask.dtype == np.uint8
    np.testing.assert_array_equal(mask, GREYS > 0)


def test_mask_of_another_size(tmp_path):
    path = save(tmp_path / "mask.png", GREYS)
    check_mask_size(path, SIZE)
    for check in (check_mask_size, decode_mask):
        with pytest.raises(PhotoError, match=r"mask\.png is 6x4 pixels, but its camera is 6x5"):
            check(path, (6, 5))


@pytest.mark.parametrize("factor", [2, 3, 4])
def test_downscale_is_the_rounded_mean_of_blocks(factor):
    image = torch.from_numpy(np.random.default_rng(1).integers(0, 256, (13, 22, 3), dtype=np.uint8))
    reduced = downscale_image(image, factor)
    assert reduced.dtype == torch.uint8
    assert reduced.shape == (13 // factor, 22 // factor, 3)
    for row in range(reduced.shape[0]):
        for column in range(reduced.shape[1]):
            block = image[row * factor : (row + 1) * factor, column * factor : (column + 1) * factor].double()
            assert (reduced[row, column] - block.mean(dim=(0, 1))).abs().max() <= 0.5


def test_downscale_by_one_is_free():
    image = torch.zeros(4, 6, 3, dtype=torch.uint8)
    assert downscale_image(image, 1) is image


def test_downscale_of_alpha_is_the_mean_of_composites():
    """Straight averages would mix in the colour of transparent pixels. Rounding colour and alpha costs a level."""
    generator = np.random.default_rng(2)
    image = torch.from_numpy(generator.integers(0, 256, (8, 8, 4), dtype=np.uint8))
    image[:4, :4, 3] = 0
    reduced = downscale_image(image, 2)
    for background in (0.0, 255.0):

        def composite(pixels, background=background):
            alpha = pixels[..., 3:].double() / 255
            return pixels[..., :3].double() * alpha + (1 - alpha) * background

        means = composite(image).reshape(4, 2, 4, 2, 3).mean(dim=(1, 3))
        assert (composite(reduced) - means).abs().max() <= 1.0
    assert reduced[:2, :2].eq(0).all()


def test_downscale_refuses_to_leave_nothing():
    with pytest.raises(ValueError, match="6x3 pixels cannot be downscaled by 4: lower num_downscales"):
        downscale_image(torch.zeros(3, 6, 3, dtype=torch.uint8), 4)


def test_downscaled_mask_lets_no_masked_pixel_in():
    mask = torch.ones(5, 7, dtype=torch.uint8)
    mask[1, 2] = 0  # in the second block of the first row
    mask[4, 6] = 0  # in no block
    assert downscale_mask(mask, 2).tolist() == [[1, 0, 1], [1, 1, 1]]


def test_premultiply_round_trip():
    image = torch.from_numpy(np.random.default_rng(3).integers(0, 256, (5, 5, 4), dtype=np.uint8))
    image[..., 3].clamp_(min=1)
    assert unpremultiply(premultiply(image)).equal(image)


@pytest.mark.parametrize("scale", [0.5, 0.3, 2.0])
def test_resize_keeps_the_camera_exact(scale):
    """On a ramp the pixel centred at x has the value x, also when both are scaled; 0.6 covers rounding twice."""
    ramp = np.repeat(np.arange(0, 200, dtype=np.uint8)[None, :199], 31, axis=0)  # value = x - 0.5
    reduced = resize(ramp, scale)
    assert reduced.shape == (int(31 * scale), int(199 * scale))
    expected = (np.arange(reduced.shape[1]) + 0.5) / scale - 0.5
    inner = slice(3, -3)  # the ramp ends at the edge
    assert np.abs(reduced[5, inner].astype(float) - expected[inner]).max() <= 0.6


def test_resized_mask_stays_binary():
    mask = np.ones((9, 9), dtype=np.uint8)
    assert (resize(mask * 255, 0.5) == 255).all()
