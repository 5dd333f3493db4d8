"""Turning vectors by quaternions."""

from __future__ import annotations

import torch
from torch import Tensor


def rotate(quats: Tensor, vectors: Tensor) -> Tensor:
    """Vectors [n, 3] turned by quaternions [n, 4] (w, x, y, z; of any norm)."""
    return _turn(*_split(quats), vectors)


def rotate_back(quats: Tensor, vectors: Tensor) -> Tensor:
    """Vectors [n, 3] turned by the inverse of quaternions [n, 4] (w, x, y, z; of any norm)."""
    w, axis = _split(quats)
    return _turn(w, -axis, vectors)


def _split(quats: Tensor) -> tuple[Tensor, ...]:
    return torch.nn.functional.normalize(quats, dim=1).split([1, 3], dim=1)


def _turn(w: Tensor, axis: Tensor, vectors: Tensor) -> Tensor:
    turned = 2.0 * torch.linalg.cross(axis, vectors)
    return vectors + w * turned + torch.linalg.cross(axis, turned)
