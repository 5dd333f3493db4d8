import numpy as np
import pytest

from bytesplat_ns.photos.undistortion import Lens, LensError, Pinhole, pinhole, undistort

WIDTH, HEIGHT = 120, 90
CAMERA = Pinhole(fx=110.0, fy=115.0, cx=63.0, cy=42.5, width=WIDTH, height=HEIGHT)
LENSES = [
    Lens("perspective", CAMERA, (0.0, 0.0, 0.0, 0.0, 0.0)),
    Lens("perspective", CAMERA, (-0.2, 0.05, -0.01, 0.004, -0.003)),
    Lens("perspective", CAMERA, (0.15, 0.02, 0.0, 0.0, 0.002)),
    Lens("fisheye", CAMERA, (0.0, 0.0, 0.0, 0.0)),
    Lens("fisheye", CAMERA, (0.05, -0.02, 0.003, 0.001)),
]
LENS_IDS = ["pinhole", "barrel", "pincushion", "equidistant", "fisheye"]
DISTORTED = LENSES[1]


def photo_coordinates(lens: Lens) -> tuple[np.ndarray, np.ndarray]:
    """Where the rays of the undistorted image's pixel centres hit the photo, from the models' definitions."""
    new, old = pinhole(lens), lens.camera
    u, v = np.meshgrid(np.arange(new.width) + 0.5, np.arange(new.height) + 0.5)
    x, y = (u - new.cx) / new.fx, (v - new.cy) / new.fy
    r2 = x * x + y * y
    if lens.model == "perspective":
        k1, k2, k3, p1, p2 = lens.distortion
        radial = 1 + k1 * r2 + k2 * r2**2 + k3 * r2**3
        xd = x * radial + 2 * p1 * x * y + p2 * (r2 + 2 * x * x)
        yd = y * radial + p1 * (r2 + 2 * y * y) + 2 * p2 * x * y
    else:
        theta = np.arctan(np.sqrt(r2))
        bent = theta * (1 + sum(k * theta ** (2 * n) for n, k in enumerate(lens.distortion, start=1)))
        scale = np.where(r2 > 0, bent / np.sqrt(np.maximum(r2, 1e-12)), 1.0)
        xd, yd = x * scale, y * scale
    return xd * old.fx + old.cx, yd * old.fy + old.cy


@pytest.mark.parametrize("lens", LENSES, ids=LENS_IDS)
def test_each_pixel_shows_its_ray(lens):
    """The photo is a ramp over x and one over y, 2 levels a pixel. Tolerance: maps of 1/32 px, and rounding twice."""
    columns, rows = np.meshgrid(np.arange(WIDTH), np.arange(HEIGHT))
    photo = np.dstack([2 * columns, 2 * rows, 0 * rows]).astype(np.uint8)
    image, mask = undistort(lens, photo)
    new = pinhole(lens)
    assert image.shape == (new.height, new.width, 3)
    assert mask is None
    x, y = photo_coordinates(lens)
    inner = (slice(2, -2), slice(2, -2))  # the ramps end at the edge
    assert np.abs(image[..., 0] - 2 * (x - 0.5))[inner].max() <= 1.1
    assert np.abs(image[..., 1] - 2 * (y - 0.5))[inner].max() <= 1.1


@pytest.mark.parametrize("lens", LENSES, ids=LENS_IDS)
def test_pinhole_stays_within_the_photo(lens):
    x, y = photo_coordinates(lens)
    assert x.min() > -1
    assert y.min() > -1
    assert x.max() < WIDTH + 1
    assert y.max() < HEIGHT + 1


def test_pinhole_photo_is_left_alone():
    photo, mask = np.zeros((HEIGHT, WIDTH, 3), np.uint8), np.ones((HEIGHT, WIDTH), np.uint8)
    same_photo, same_mask = undistort(LENSES[0], photo, mask)
    assert same_photo is photo
    assert same_mask is mask
    assert pinhole(LENSES[0]) is CAMERA


def test_mask_keeps_only_what_comes_from_kept_pixels():
    photo = np.zeros((HEIGHT, WIDTH, 3), np.uint8)
    mask = np.ones((HEIGHT, WIDTH), np.uint8)
    mask[40:50, 60:80] = 0
    image, kept = undistort(DISTORTED, np.where(mask[..., None] == 0, np.uint8(255), photo), mask)
    assert kept.dtype == np.uint8
    assert 0 < (kept == 0).sum() < 600  # 200 pixels, enlarged, and a margin
    assert image[kept == 1].max() == 0  # nothing of the masked pixels was mixed in
    assert undistort(DISTORTED, photo, np.ones_like(mask))[1].all()


def test_what_the_photo_does_not_show_is_masked():
    """OpenCV measures a fisheye's edges at their middles: far from the centre, corners can miss the photo."""
    lens = Lens("fisheye", Pinhole(400.0, 400.0, 560.0, 170.0, 800, 595), (0.05, 0.01, 0.0, 0.0))
    photo = np.zeros((595, 800, 3), np.uint8)
    _, mask = undistort(lens, photo)
    x, y = photo_coordinates(lens)
    outside = (x < -1) | (x > 801) | (y < -1) | (y > 596)
    assert outside.any()
    assert not mask[outside].any()
    assert mask[(x > 0) & (x < 800) & (y > 0) & (y < 595)].all()
    assert not undistort(lens, photo, np.zeros((595, 800), np.uint8))[1].any()


def test_transparent_pixels_do_not_darken_their_neighbours():
    photo = np.zeros((HEIGHT, WIDTH, 4), np.uint8)
    photo[30:60, 40:90] = 255
    image, _ = undistort(DISTORTED, photo)
    alpha = image[..., 3]
    assert ((alpha > 0) & (alpha < 255)).any()
    assert (image[alpha > 0, :3] == 255).all()


def test_refuses_what_no_plane_can_hold():
    with pytest.raises(LensError, match=r"field of view is too wide.*Crop"):
        pinhole(Lens("fisheye", Pinhole(250.0, 250.0, 400.0, 297.5, 800, 595), (0.0, 0.0, 0.0, 0.0)))


def test_refuses_a_calibration_that_folds():
    with pytest.raises(LensError, match=r"folds the image over.*Calibrate again"):
        pinhole(Lens("perspective", Pinhole(700.0, 700.0, 399.0, 297.0, 800, 595), (-0.9, 0.0, 0.0, 0.0, 0.0)))
