"""nerfstudio's dataset with all photos and cameras turned into pinhole images.

The viewer, ns-render and the data manager read the same dataset. It is corrected when it is made, so none of them sees
a camera that does not fit its photo, whichever photos have been opened.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from nerfstudio.cameras.cameras import Cameras, CameraType
from nerfstudio.data.dataparsers.base_dataparser import DataparserOutputs
from nerfstudio.data.datasets.base_dataset import InputDataset

from bytesplat_ns.photos.cache import Photo
from bytesplat_ns.photos.images import PhotoError, check_mask_size, decode_mask, decode_photo, photo_channels, resize
from bytesplat_ns.photos.undistortion import Lens, LensError, Pinhole, pinhole, undistort


class PinholeDataset(InputDataset):
    """Photos and cameras of one split, undistorted.

    `cameras` is final after construction: perspective, no distortion, the size of the undistorted photos.

    Raises:
        LensError: a camera cannot be rendered as a pinhole.
    """

    def __init__(self, dataparser_outputs: DataparserOutputs, scale_factor: float = 1.0) -> None:
        super().__init__(dataparser_outputs, scale_factor)
        self.metadata["dataparser"] = dataparser_outputs.dataparser_transform, dataparser_outputs.dataparser_scale
        files = dataparser_outputs.cameras  # before scaling
        self._file_sizes = list(zip(files.width.flatten().tolist(), files.height.flatten().tolist(), strict=True))
        self._circle = _image_circle(files)
        self.lenses = _lenses(self.cameras, self.image_filenames)
        if not all(lens.is_pinhole for lens in self.lenses):
            self.cameras = _pinhole_cameras(self.cameras, [pinhole(lens) for lens in self.lenses])

    def nbytes(self, index: int) -> int:
        """Bytes that the photo and its mask take as uint8, from their headers; raises PhotoError as `photo` does."""
        size, mask = self._file_sizes[index], self._mask_filename(index)
        channels = photo_channels(self.image_filenames[index], size)
        if mask is not None:
            check_mask_size(mask, size)
        if self._dataparser_outputs.alpha_color is not None:
            channels = 3
        camera, masked = pinhole(self.lenses[index]), mask is not None or self._circle is not None
        return camera.width * camera.height * (channels + masked)

    def photo(self, index: int) -> Photo:
        """Decodes and undistorts a photo and its mask.

        Raises:
            PhotoError: a file cannot be read or has another size than the camera, or the mask keeps no pixel.
        """
        path, mask_path, size = self.image_filenames[index], self._mask_filename(index), self._file_sizes[index]
        image = decode_photo(path, size)
        mask = None if mask_path is None else decode_mask(mask_path, size)
        if mask is not None and self.mask_color:
            image[mask == 0, :3] = np.round(255 * np.asarray(self.mask_color))
        if self._circle is not None:
            mask = self._inside_circle(index) if mask is None else mask & self._inside_circle(index)
        if self.scale_factor != 1.0:
            image = resize(image, self.scale_factor)
            mask = None if mask is None else (resize(mask * 255, self.scale_factor) == 255).astype(np.uint8)
        image, mask = undistort(self.lenses[index], image, mask)
        if mask is not None and not mask.any():
            raise PhotoError(
                f"The mask {mask_path or 'by fisheye_crop_radius'} keeps no pixel of {path} (nonzero pixels are kept). "
                f"Invert the mask, or remove the frame from the data set."
            )
        colour = self._dataparser_outputs.alpha_color  # [3], 0 to 1
        if colour is not None and image.shape[2] == 4:
            alpha = image[..., 3:] / np.float32(255)
            image = (image[..., :3] * alpha + 255 * colour.numpy() * (1 - alpha) + 0.5).astype(np.uint8)
        return Photo(torch.from_numpy(image), None if mask is None else torch.from_numpy(mask))

    def as_data(self, index: int, photo: Photo, image_type: Literal["uint8", "float32"]) -> dict[str, Any]:
        """A photo as stock code wants it: image [H, W, 3 | 4], uint8 or 0 to 1; mask [H, W, 1] bool if there is one."""
        image = photo.image if image_type == "uint8" else photo.image.float() / 255.0
        mask = {} if photo.mask is None else {"mask": photo.mask.bool()[..., None]}
        return {"image_idx": index, "image": image, **mask}

    def get_data(self, image_idx: int, image_type: Literal["uint8", "float32"] = "float32") -> dict[str, Any]:
        """The photo as stock code wants it, decoded afresh."""
        return self.as_data(image_idx, self.photo(image_idx), image_type)

    def _inside_circle(self, index: int) -> np.ndarray:
        """[H, W] uint8 of the file: 1 where a circular fisheye photo shows something."""
        assert self._circle is not None
        (width, height), (centres, radius) = self._file_sizes[index], self._circle
        x, y = np.arange(width) + 0.5 - centres[index][0], np.arange(height) + 0.5 - centres[index][1]
        return (np.hypot(x, y[:, None]) < radius).astype(np.uint8)

    def _mask_filename(self, index: int) -> Path | None:
        masks = self._dataparser_outputs.mask_filenames
        return None if masks is None else masks[index]


def _image_circle(cameras: Cameras) -> tuple[list[list[float]], float] | None:
    """Centres [N][2] and radius, in pixels, of what fisheye photos show, where a data set says so."""
    radius = (cameras.metadata or {}).get("fisheye_crop_radius")
    if radius is None:
        return None
    return torch.cat([cameras.cx, cameras.cy], dim=-1).tolist(), float(radius)


def _lenses(cameras: Cameras, files: list[Path]) -> list[Lens]:
    """The lens of each camera, checked; errors name the photo."""
    distortion = cameras.distortion_params
    if distortion is None:
        distortion = torch.zeros(len(files), 6)
    intrinsics = (getattr(cameras, name).flatten().tolist() for name in ("fx", "fy", "cx", "cy", "width", "height"))
    kinds = cameras.camera_type.flatten().tolist()
    lenses = []
    for file, kind, params, *numbers in zip(files, kinds, distortion.tolist(), *intrinsics, strict=True):
        try:
            model, coefficients = _model(CameraType(kind), params)
            lens = Lens(model, _pinhole(*numbers), coefficients)
            pinhole(lens)
        except LensError as error:
            raise LensError(f"The camera of {file} cannot be used: {error}") from error
        lenses.append(lens)
    return lenses


def _pinhole(fx: float, fy: float, cx: float, cy: float, width: int, height: int) -> Pinhole:
    """Intrinsics in pixels that an image can have."""
    if not (0 < fx < math.inf and 0 < fy < math.inf):
        raise LensError(f"its focal lengths are {fx:g} and {fy:g} pixels. Correct them (fl_x, fl_y) in the data set.")
    if not (math.isfinite(cx) and math.isfinite(cy)):
        raise LensError(f"its principal point is ({cx:g}, {cy:g}). Correct it (cx, cy) in the data set.")
    if width < 1 or height < 1:
        raise LensError(f"its size is {width}x{height} pixels. Correct it (w, h) in the data set.")
    return Pinhole(fx, fy, cx, cy, width, height)


def _model(kind: CameraType, params: list[float]) -> tuple[Literal["perspective", "fisheye"], tuple[float, ...]]:
    """Model and distortion of a Lens, from nerfstudio's camera type and k1, k2, k3, k4, p1, p2."""
    if kind is CameraType.FISHEYE:
        return "fisheye", tuple(params[:4])
    if kind is not CameraType.PERSPECTIVE:
        raise LensError(
            f"its model is {kind.name}, and only perspective and fisheye photos can be made pinhole images. Cut the "
            f"photos into planar views first (panoramas: ns-process-data images --camera-type equirectangular)."
        )
    if len(params) != 6:
        raise LensError(
            f"it has {len(params)} distortion_params, but k1, k2, k3, k4, p1, p2 are needed. Write all six."
        )
    k1, k2, k3, k4, p1, p2 = params
    if k4 != 0:
        raise LensError(f"its k4 is {k4}, and perspective cameras have k1, k2, k3, p1, p2. Calibrate without k4.")
    return "perspective", (k1, k2, k3, p1, p2)


def _pinhole_cameras(cameras: Cameras, pinholes: list[Pinhole]) -> Cameras:
    """The same poses with other intrinsics."""

    def column(name: str) -> torch.Tensor:  # [N, 1]
        return torch.tensor([[getattr(p, name)] for p in pinholes])

    return Cameras(
        camera_to_worlds=cameras.camera_to_worlds,
        **{name: column(name) for name in ("fx", "fy", "cx", "cy", "width", "height")},
        distortion_params=torch.zeros(len(pinholes), 6),
        camera_type=CameraType.PERSPECTIVE,
        times=cameras.times,
        metadata=cameras.metadata,
    )
