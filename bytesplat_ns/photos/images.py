"""From image files to uint8 pixels, and from many pixels to fewer without moving the camera."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, ImageOps
from torch import Tensor

_EXIF_ORIENTATION = 0x0112
_GREY_MODES = ("1", "L", "I", "I;16", "I;16L", "I;16B", "I;16N", "F")


class PhotoError(ValueError):
    """A photo or a mask cannot be used; the message names the file, what was found and what to do."""


@contextmanager
def _opened(path: Path, size: tuple[int, int]) -> Iterator[Image.Image]:
    """Opens an image file, not yet decoded, that must be `size` = (width, height) pixels.

    The camera was calibrated on pixels either as they are stored or as EXIF says to turn them, and only its
    size tells which: the orientation tag is applied only where that makes the size match.
    """
    try:
        with Image.open(path) as image:
            if image.size != size and image.getexif().get(_EXIF_ORIENTATION, 1) >= 5:  # 5 to 8 turn by 90 degrees
                image = ImageOps.exif_transpose(image)
            if image.size != size:
                raise PhotoError(
                    f"{path} is {image.size[0]}x{image.size[1]} pixels, but its camera is {size[0]}x{size[1]}. "
                    f"Correct the camera's w and h in the data set, or restore the file it was calibrated on "
                    f"(a folder images_N must hold images of size / N, rounded down)."
                )
            yield image
    except PhotoError:
        raise
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise PhotoError(
            f"Cannot read {path}: {error}. Replace the file, or remove its frame from the data set."
        ) from error


def photo_channels(path: Path, size: tuple[int, int]) -> Literal[3, 4]:
    """Channels `decode_photo` will return, from the file's header alone; `size` and errors as there."""
    with _opened(path, size) as image:
        return 4 if image.has_transparency_data else 3


def check_mask_size(path: Path, size: tuple[int, int]) -> None:
    """Raises PhotoError unless the mask's header can be read and says `size` = (width, height) pixels."""
    with _opened(path, size):
        pass


def decode_photo(path: Path, size: tuple[int, int]) -> np.ndarray:
    """The photo as [H, W, 3] uint8 RGB, or as [H, W, 4] with straight alpha if the file holds any transparency.

    Args:
        path: any format Pillow reads, of any integer pixel type. 16-bit values are scaled to 8 bits.
        size: (width, height) in pixels that the photo must have.

    Raises:
        PhotoError: the file cannot be read, has another size, or holds floating-point pixels.
    """
    with _opened(path, size) as image:
        if image.mode == "F":
            raise ValueError("floating-point pixels have no defined range (save 8 or 16 bits a channel)")
        if image.mode.startswith("I"):  # 16 bits: Pillow's own conversion clips at 255
            wide = np.asarray(image)
            if wide.min() < 0 or wide.max() > 65535:
                raise ValueError("grey values go beyond 16 bits (save 8 or 16 bits a channel)")
            grey = ((wide.astype(np.uint32) + 128) // 257).astype(np.uint8)
            return np.repeat(grey[..., None], 3, axis=2)
        return np.array(image.convert("RGBA" if image.has_transparency_data else "RGB"))


def decode_mask(path: Path, size: tuple[int, int]) -> np.ndarray:
    """The mask as [H, W] uint8: 1 (keep) where any colour channel of the file is nonzero; errors as for photos."""
    with _opened(path, size) as image:
        values = np.asarray(image if image.mode in _GREY_MODES else image.convert("RGB"))
    keep = values != 0
    return (keep.any(axis=2) if keep.ndim == 3 else keep).astype(np.uint8)


def resize(pixels: np.ndarray, scale: float) -> np.ndarray:
    """Resizes [H, W] or [H, W, 3 | 4] uint8 (straight alpha) to [int(H * scale), int(W * scale), ...], bilinear.

    A new pixel stands for exactly 1 / scale old ones (what is left over at the right and at the bottom is
    dropped), so a pinhole camera stays exact when fx, fy, cx, cy are multiplied by the scale.
    """
    height, width = pixels.shape[:2]
    size = int(width * scale), int(height * scale)
    box = (0, 0, min(width, size[0] / scale), min(height, size[1] / scale))
    return np.array(Image.fromarray(pixels).resize(size, Image.Resampling.BILINEAR, box=box))


def premultiply(image: Tensor) -> Tensor:
    """[..., 4] straight RGBA in 0..255 to float32 with the colours multiplied by alpha: what may be averaged."""
    alpha = image[..., 3:].float()
    return torch.cat([image[..., :3] * (alpha / 255.0), alpha], dim=-1)


def unpremultiply(image: Tensor) -> Tensor:
    """The inverse of `premultiply`, rounded to uint8; the colour of a fully transparent pixel is black."""
    alpha = image[..., 3:]
    colour = torch.where(alpha > 0, image[..., :3] * 255.0 / alpha.clamp(min=1e-6), 0.0)
    return torch.cat([colour, alpha], dim=-1).add_(0.5).clamp_(0, 255).to(torch.uint8)


def downscale_image(image: Tensor, factor: int) -> Tensor:
    """Means over blocks of factor x factor pixels.

    Blocks start at the top left, and rows and columns that fill no block are left out, so a pinhole camera stays
    exact when fx, fy, cx, cy are divided by the factor. Colours are weighted by alpha, so that the composite over
    any background is the mean of the composites.

    Args:
        image: [H, W, 3 | 4] uint8, straight alpha.
        factor: at least 1.

    Returns:
        [H // factor, W // factor, 3 | 4] uint8, rounded to nearest.
    """
    if factor == 1:
        return image
    if min(image.shape[:2]) < factor:
        height, width = image.shape[:2]
        raise ValueError(f"A photo of {width}x{height} pixels cannot be downscaled by {factor}: lower num_downscales.")
    has_alpha = image.shape[2] == 4
    planes = (premultiply(image) if has_alpha else image.float()).permute(2, 0, 1)
    means = F.avg_pool2d(planes, factor).permute(1, 2, 0)
    return unpremultiply(means) if has_alpha else means.add(0.5).to(torch.uint8)


def downscale_mask(mask: Tensor, factor: int) -> Tensor:
    """[H, W] uint8 to [H // factor, W // factor]. A block is kept only if all of it is: no masked colour leaks in."""
    height, width = mask.shape[0] // factor, mask.shape[1] // factor
    blocks = mask[: height * factor, : width * factor].reshape(height, factor, width, factor)
    return blocks.amin(dim=(1, 3))
