"""Pictures as arrays, and how close two of them are."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image


def decibels(a: np.ndarray, b: np.ndarray) -> float:
    """PSNR of images uint8 [H, W, 3]."""
    return -10 * np.log10(np.mean((a / 255.0 - b / 255.0) ** 2))


def read(path: Path) -> np.ndarray:
    return np.asarray(Image.open(path).convert("RGB"))
