"""Pictures as arrays, how close two of them are, and captures whose photos are changed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image


def decibels(a: np.ndarray, b: np.ndarray) -> float:
    """PSNR of images uint8 [H, W, 3]."""
    return -10 * np.log10(np.mean((a / 255.0 - b / 255.0) ** 2))


def read(path: Path) -> np.ndarray:
    return np.asarray(Image.open(path).convert("RGB"))


def variant(capture: Path, output: Path, change: Callable[[dict[str, Any], np.ndarray], np.ndarray]) -> Path:
    """A copy of the capture whose frames and photos (uint8 [H, W, 3]) went through ``change``."""
    shutil.copytree(capture, output)
    transforms = json.loads((output / "transforms.json").read_text())
    for frame in transforms["frames"]:
        path = output / frame["file_path"]
        Image.fromarray(change(frame, np.asarray(Image.open(path)))).save(path)
    (output / "transforms.json").write_text(json.dumps(transforms))
    return output


def paint(photo: np.ndarray) -> np.ndarray:
    """The photo with a magenta left third."""
    painted = photo.copy()
    painted[:, : photo.shape[1] // 3, :3] = 255, 0, 255
    return painted
