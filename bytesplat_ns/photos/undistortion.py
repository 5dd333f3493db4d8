"""From the lens that took a photo to the pinhole camera that can be rendered.

The pinhole follows from the lens alone, so that cameras are final before any photo is opened. It is nerfstudio's:
the largest view without pixels from beyond the photo, as OpenCV estimates it (alpha or balance of 0).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import cv2
import numpy as np
import torch

from bytesplat_ns.photos.images import premultiply, unpremultiply

_CENTRE = 0.5  # of the first pixel; OpenCV has it at 0


class LensError(ValueError):
    """A lens that no pinhole image can replace; the message says what was found and what to do."""


@dataclass(frozen=True)
class Pinhole:
    """An image without distortion."""

    fx: float  # pixels
    fy: float  # pixels
    cx: float  # pixels, the centre of the first pixel is at 0.5
    cy: float  # pixels
    width: int  # pixels
    height: int  # pixels

    def matrix(self) -> np.ndarray:
        """[3, 3] float64 in OpenCV's pixel coordinates."""
        cx, cy = self.cx - _CENTRE, self.cy - _CENTRE
        return np.array([[self.fx, 0, cx], [0, self.fy, cy], [0, 0, 1]], dtype=np.float64)


@dataclass(frozen=True)
class Lens:
    """A calibrated camera: a pinhole, and how far from it the photo is."""

    model: Literal["perspective", "fisheye"]
    camera: Pinhole
    distortion: tuple[float, ...]
    """perspective: k1, k2, k3, p1, p2 (Brown-Conrady); fisheye: k1 to k4 (Kannala-Brandt; zeros: equidistant)."""

    @property
    def is_pinhole(self) -> bool:
        return self.model == "perspective" and not any(self.distortion)

    def coefficients(self) -> np.ndarray:
        """The distortion in OpenCV's order, float64."""
        if self.model == "fisheye":
            return np.array(self.distortion, dtype=np.float64)
        k1, k2, k3, p1, p2 = self.distortion
        return np.array([k1, k2, p1, p2, k3], dtype=np.float64)

    def distorted(self, radius: np.ndarray) -> np.ndarray:
        """Radii in the photo of rays at `radius` in a pinhole image, in focal lengths; tangential parts left out."""
        fisheye = self.model == "fisheye"
        r = np.arctan(radius) if fisheye else radius
        radial = self.distortion if fisheye else self.distortion[:3]
        return r * (1 + sum(k * r ** (2 * n) for n, k in enumerate(radial, start=1)))


def _new_matrix(lens: Lens) -> tuple[np.ndarray, tuple[int, int, int, int]]:
    """The undistorted image's matrix [3, 3] in OpenCV's coordinates, and the crop x, y, width, height of it to keep."""
    size = (lens.camera.width, lens.camera.height)
    matrix, coefficients = lens.camera.matrix(), lens.coefficients()
    if lens.model == "fisheye":
        estimate = cv2.fisheye.estimateNewCameraMatrixForUndistortRectify
        return estimate(matrix, coefficients, size, np.eye(3), balance=0), (0, 0, *size)
    return cv2.getOptimalNewCameraMatrix(matrix, coefficients, size, 0)


@lru_cache(maxsize=1024)
def pinhole(lens: Lens) -> Pinhole:
    """The camera of the undistorted photo.

    Raises:
        LensError: the field of view is too wide for a plane, or the calibration maps two rays to one pixel.
    """
    if lens.is_pinhole:
        return lens.camera
    new, (x, y, width, height) = _new_matrix(lens)
    fx, fy = float(new[0, 0]), float(new[1, 1])
    cx, cy = float(new[0, 2]) - x + _CENTRE, float(new[1, 2]) - y + _CENTRE
    if not (min(fx / lens.camera.fx, fy / lens.camera.fy) > 0.1 and 0 < cx < width and 0 < cy < height):
        raise LensError(
            f"its field of view is too wide for a pinhole image ({lens}). "
            f"Crop the photos, or cut them into planar views first."
        )
    corner = np.hypot(max(cx, width - cx) / fx, max(cy, height - cy) / fy)
    if np.any(np.diff(lens.distorted(np.linspace(0.0, corner, 512))) <= 0):
        raise LensError(
            f"its calibration folds the image over before the corners ({lens}). "
            f"Calibrate again with fewer coefficients, or undistort the photos first."
        )
    return Pinhole(fx, fy, cx, cy, width, height)


@lru_cache(maxsize=4)
def _rectification(lens: Lens) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Where the pixels of the undistorted image lie in the photo, and which lie in it at all.

    Returns OpenCV's fixed-point maps, [H, W, 2] int16 and [H, W] uint16, and [H, W] uint8, or None if all lie in it.
    Up to a pixel beyond the photo's edge counts as the edge.
    """
    new, (x, y, width, height) = _new_matrix(lens)
    init = cv2.fisheye.initUndistortRectifyMap if lens.model == "fisheye" else cv2.initUndistortRectifyMap
    size = (lens.camera.width, lens.camera.height)
    maps = init(lens.camera.matrix(), lens.coefficients(), np.eye(3), new, size, cv2.CV_16SC2)
    whole, fraction = (np.ascontiguousarray(m[y : y + height, x : x + width]) for m in maps)
    inside = ((whole >= -1) & (whole < size)).all(axis=2)
    return whole, fraction, None if inside.all() else inside.astype(np.uint8)


def undistort(lens: Lens, photo: np.ndarray, mask: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray | None]:
    """The photo and its mask as `pinhole(lens)` sees them, bilinearly interpolated.

    Args:
        photo: [H, W, 3 | 4] uint8, straight alpha.
        mask: [H, W] uint8, nonzero = keep. A pixel stays kept only if all pixels it is interpolated from are.
            Parts of the pinhole's view that the photo does not show are masked, with or without a mask here.
    """
    if lens.is_pinhole:
        return photo, mask
    whole, fraction, inside = _rectification(lens)

    def remap(pixels: np.ndarray) -> np.ndarray:
        return cv2.remap(pixels, whole, fraction, cv2.INTER_LINEAR, borderMode=cv2.BORDER_REPLICATE)

    if photo.shape[2] == 4:
        photo = unpremultiply(torch.from_numpy(remap(premultiply(torch.from_numpy(photo)).numpy()))).numpy()
    else:
        photo = remap(photo)
    if mask is not None:
        mask = (remap(np.where(mask != 0, 255, 0).astype(np.uint8)) == 255).astype(np.uint8)
    if inside is not None:
        mask = inside if mask is None else mask & inside
    return photo, mask
