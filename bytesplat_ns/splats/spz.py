"""Gaussians as SPZ files, versions 2 to 4 of the open format: quantised attributes, compressed.

After the description at github.com/nianticlabs/spz: for all Gaussians the positions (24-bit fixed point), then alphas,
colours, scales, rotations and harmonics (a byte each; rotations 3 or 4 bytes), in a container. Axes in the file are
right-up-back, while a PLY of Gaussians counts as right-down-front: reading and writing here turn by 180 degrees
about x, so that a PLY and an SPZ of the same Gaussians look alike in viewers.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from bytesplat_ns.ops.reference.harmonics import basis
from bytesplat_ns.splats.spz_container import Header, SpzError, pack, unpack

_TURN = torch.tensor([1.0, -1.0, -1.0])  # of positions: 180 degrees about x
_DIRECTION = torch.tensor([[0.36, 0.48, 0.8]])
_TURN_HARMONICS = (basis(_DIRECTION * _TURN, 3) / basis(_DIRECTION, 3)).sign()[0, 1:, None]  # [15, 1]
_COLOR = 0.15  # share of a byte's range that one unit of the constant harmonic takes
_LIMIT = 2**23 - 1
_THREADS = min(16, os.cpu_count() or 1)
_ROWS = 1 << 14  # Gaussians that are quantised at a time


def write(path: str | Path, parameters: Mapping[str, Tensor], antialiased: bool, version: Literal[3, 4] = 3) -> None:
    """Writes a file.

    Positions get as many fractional bits as the farthest Gaussian leaves; harmonics are rounded to 5 bits (degree 1)
    and 4 bits (degrees 2, 3), the format's defaults, which compress well.

    Args:
        parameters: raw, finite; shapes as in ``ops.layout.Gaussians``.
        antialiased: whether the Gaussians are to be drawn with opacities compensated for dilation.
        version: of the format; 4 differs from 3 in its compression only.

    Raises:
        SpzError: a coordinate is beyond the format's range.
    """
    n, bases = parameters["features_rest"].shape[:2]
    degree = round((bases + 1) ** 0.5) - 1
    header = Header(version, n, degree, fractional_bits(parameters["means"]), antialiased)
    parts = [np.empty((n, width), np.uint8) for width in header.widths()]

    def encode(start: int) -> None:
        rows = slice(start, start + _ROWS)
        block = {name: tensor[rows].detach().cpu() for name, tensor in parameters.items()}
        for part, values in zip(parts, _encode(block, header.bits), strict=True):
            part[rows] = values

    with ThreadPoolExecutor(_THREADS) as pool:
        list(pool.map(encode, range(0, n, _ROWS)))
    with open(path, "wb") as file:
        for chunk in pack(header, parts):
            file.write(chunk)


def fractional_bits(means: Tensor) -> int:
    """How many bits after the point positions [N, 3] leave of the 24, at most 20.

    Raises:
        SpzError: a coordinate is beyond the format's range.
    """
    farthest = float(means.abs().max()) if len(means) else 0.0
    for bits in range(20, -1, -1):
        if farthest * 2**bits <= _LIMIT:
            return bits
    raise SpzError(
        f"A Gaussian lies {farthest:.3g} from the origin, SPZ holds coordinates up to {_LIMIT:,}. "
        "Export in the training frame, crop, or write a .ply."
    )


def read(path: str | Path) -> tuple[dict[str, Tensor], bool]:
    """Raw parameters by name (float32, as ``ply.read_gaussians``), and whether they are meant for antialiased drawing.

    Raises:
        SpzError: the file is damaged, or of another version, degree or axes.
    """
    header, (positions, alphas, colors, scales, rotations, harmonics) = unpack(path)
    n, bases = header.count, (header.degree + 1) ** 2 - 1
    fixed = np.zeros((n, 3, 4), np.uint8)
    fixed[:, :, 1:] = positions.reshape(n, 3, 3)  # into the high bytes, for the sign
    # Within their rounding, so that alphas of 0 and 255 are finite logits.
    alpha = alphas.astype(np.float64).clip(0.25, 254.75) / 255
    rotation = _from_xyz(rotations) if header.version == 2 else _from_smallest_three(rotations)
    values = {
        "means": (fixed.reshape(n, 12).view("<i4") >> 8) / 2.0**header.bits,
        "quats": rotation,
        "scales": scales / 16.0 - 10,
        "opacities": np.log(alpha / (1 - alpha)),
        "features_dc": (colors / 255.0 - 0.5) / _COLOR,
        "features_rest": (harmonics.reshape(n, bases, 3) - 128.0) / 128,
    }
    tensors = {name: torch.from_numpy(np.ascontiguousarray(value, np.float32)) for name, value in values.items()}
    return _turn(tensors), header.antialiased


def _turn(parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """From the axes of a PLY to those of the file, or back."""
    return {
        **parameters,
        "means": parameters["means"] * _TURN,
        "quats": parameters["quats"] * torch.tensor([1.0, 1.0, -1.0, -1.0]),
        "features_rest": parameters["features_rest"] * _TURN_HARMONICS[: parameters["features_rest"].shape[1]],
    }


def _encode(parameters: Mapping[str, Tensor], bits: int) -> list[np.ndarray]:
    """The six attributes of n Gaussians, uint8 [n, width]."""
    values = {name: tensor.numpy() for name, tensor in _turn(parameters).items()}
    n = len(values["means"])
    fixed = np.rint(values["means"].astype(np.float64) * 2**bits).astype("<i4")
    harmonics = _byte(values["features_rest"].reshape(n, -1) * np.float32(128) + 128).astype(np.uint16)
    for columns, shift in ((slice(0, 9), 3), (slice(9, None), 4)):
        harmonics[:, columns] = harmonics[:, columns] + (1 << shift - 1) >> shift << shift
    return [
        fixed.view(np.uint8).reshape(n, 3, 4)[:, :, :3].reshape(n, 9),
        _byte(255 / (1 + np.exp(-values["opacities"].astype(np.float64).clip(-50, 50)))),
        _byte((values["features_dc"] * _COLOR + 0.5) * 255),
        _byte((values["scales"] + 10) * 16),
        _smallest_three(values["quats"]).view(np.uint8).reshape(n, 4),
        _byte(harmonics),
    ]


def _byte(values: np.ndarray) -> np.ndarray:
    """Rounded and limited to 0..255."""
    return np.rint(values).clip(0, 255).astype(np.uint8)


def _smallest_three(quats: np.ndarray) -> np.ndarray:
    """[N, 4] wxyz to [N] uint32: two bits say which of xyzw is largest, ten (sign, magnitude) each the others."""
    xyzw = np.roll(quats, -1, axis=1).astype(np.float32)
    xyzw /= np.linalg.norm(xyzw, axis=1, keepdims=True).clip(1e-30)
    largest = np.abs(xyzw).argmax(axis=1)
    rows = np.arange(len(xyzw))
    negative = (xyzw < 0) ^ (xyzw[rows, largest] < 0)[:, None]
    magnitude = np.rint(np.abs(xyzw) * (511 * np.sqrt(np.float32(2)))).clip(0, 511).astype(np.uint32)
    packed = largest.astype(np.uint32)
    for i in range(4):
        ten = packed << 10 | negative[:, i].astype(np.uint32) << 9 | magnitude[:, i]
        packed = np.where(largest == i, packed, ten)
    return packed.astype("<u4")


def _from_smallest_three(rotations: np.ndarray) -> np.ndarray:
    """[N, 4] uint8 to [N, 4] wxyz."""
    packed = np.ascontiguousarray(rotations).view("<u4")[:, 0]
    largest = packed >> 30
    xyzw = np.zeros((len(packed), 4))
    for i in reversed(range(4)):
        here = largest != i
        magnitude = (packed & 511) * (np.sqrt(0.5) / 511)
        xyzw[:, i] = np.where(here, np.where(packed >> 9 & 1, -magnitude, magnitude), 0)
        packed = np.where(here, packed >> 10, packed)
    xyzw[np.arange(len(xyzw)), largest] = np.sqrt((1 - np.square(xyzw).sum(axis=1)).clip(0))
    return np.roll(xyzw, 1, axis=1)


def _from_xyz(rotations: np.ndarray) -> np.ndarray:
    """[N, 3] uint8 (version 2) to [N, 4] wxyz, w positive."""
    xyz = rotations / 127.5 - 1
    w = np.sqrt((1 - np.square(xyz).sum(axis=1)).clip(0))
    return np.concatenate([w[:, None], xyz], axis=1)
