"""Moving Gaussians between coordinate frames: means, sizes, orientations and the colours that depend on direction."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from scipy.spatial.transform import Rotation
from torch import Tensor

from bytesplat_ns.ops.reference.harmonics import basis


class FrameError(ValueError):
    """A transform is not a similarity, or is not there."""


@dataclass(frozen=True)
class Similarity:
    """x -> scale * rotation @ x + translation, in float64.

    The rotation may be improper (a reflection): Gaussians are symmetric, so they can be mirrored too.
    """

    rotation: np.ndarray  # [3, 3] orthogonal
    scale: float
    translation: np.ndarray  # [3]

    @staticmethod
    def identity() -> Similarity:
        return Similarity(np.eye(3), 1.0, np.zeros(3))

    @staticmethod
    def from_dataparser(transform: np.ndarray, scale: float, source: str) -> Similarity:
        """From the original frame of a capture to the frame that nerfstudio trains in.

        Args:
            transform: [3, 4], applied to original coordinates first.
            scale: of the result.
            source: what to name in an error.

        Raises:
            FrameError: the transform shears or flattens.
        """
        matrix = np.asarray(transform, dtype=np.float64)
        if matrix.shape != (3, 4) or not np.isfinite(matrix).all() or not (np.isfinite(scale) and scale > 0):
            raise FrameError(f"{source} holds no transform [3, 4] with a positive scale: {matrix.tolist()}, {scale}.")
        size = np.cbrt(abs(np.linalg.det(matrix[:, :3])))
        rotation = matrix[:, :3] / size if size > 0 else np.zeros((3, 3))
        if np.abs(rotation @ rotation.T - np.eye(3)).max() > 1e-4:  # written as float32
            raise FrameError(
                f"{source}: the transform shears or flattens space, which Gaussians with harmonics cannot follow. "
                "Stay in the training frame."
            )
        # The float32 of the file would leave the quaternions and harmonics a little off: the nearest rotation instead.
        u, _, vt = np.linalg.svd(rotation)
        return Similarity(u @ vt, float(scale * size), scale * matrix[:, 3])

    @staticmethod
    def read(path: Path) -> Similarity:
        """The same from the ``dataparser_transforms.json`` of a run.

        Raises:
            FrameError: the file is missing or damaged.
        """
        if not path.is_file():
            raise FrameError(
                f"There is no {path}, in which a run notes how the frame of its capture was moved and scaled. "
                "Without it, only the training frame is known."
            )
        try:
            content = json.loads(path.read_text())
            transform, scale = np.array(content["transform"], dtype=np.float64), float(content["scale"])
        except (ValueError, KeyError, TypeError) as error:
            raise FrameError(f"{path} cannot be read as a dataparser transform: {error!r}.") from error
        return Similarity.from_dataparser(transform, scale, str(path))

    def inverse(self) -> Similarity:
        back = self.rotation.T
        return Similarity(back, 1 / self.scale, -back @ self.translation / self.scale)

    def after(self, first: Similarity) -> Similarity:
        """This one applied to the result of ``first``."""
        return Similarity(
            self.rotation @ first.rotation,
            self.scale * first.scale,
            self.scale * self.rotation @ first.translation + self.translation,
        )

    def is_identity(self) -> bool:
        """Whether it changes nothing beyond float32's precision."""
        return (
            bool(np.abs(self.rotation - np.eye(3)).max() < 1e-6)
            and abs(self.scale - 1) < 1e-6
            and bool(np.abs(self.translation).max() < 1e-6)
        )

    def apply(self, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Raw parameters (shapes as in ``ops.layout.Gaussians``) of the same Gaussians in the other frame."""
        rotation = torch.from_numpy(self.rotation)
        means = parameters["means"].double() @ (self.scale * rotation).T + torch.from_numpy(self.translation)
        return {
            **parameters,
            "means": means.to(parameters["means"].dtype),
            "scales": parameters["scales"] + float(np.log(self.scale)),
            "quats": _rotate_quats(self.rotation, parameters["quats"]),
            "features_rest": rotate_harmonics(self.rotation, parameters["features_rest"]),
        }


def _rotate_quats(rotation: np.ndarray, quats: Tensor) -> Tensor:
    """Quaternions [N, 4] (wxyz) of Gaussians turned by ``rotation`` [3, 3]; norms are kept."""
    if np.linalg.det(rotation) < 0:  # a Gaussian is its own point reflection
        rotation = -rotation
    x, y, z, w = Rotation.from_matrix(rotation).as_quat()
    left = torch.tensor([[w, -x, -y, -z], [x, w, -z, y], [y, z, w, -x], [z, -y, x, w]], dtype=torch.float64)
    return (quats.double() @ left.T).to(quats.dtype)


def rotate_harmonics(rotation: np.ndarray, features_rest: Tensor) -> Tensor:
    """Coefficients [N, (D + 1)^2 - 1, 3] of degrees 1 to D, of the same colours seen from turned directions.

    The turned function f'(d) = f(R^T d) has only basis functions of the same degree, so its coefficients follow
    exactly from its values in sufficiently many directions.
    """
    degree = round((features_rest.shape[1] + 1) ** 0.5) - 1
    directions = torch.from_numpy(np.random.default_rng(0).standard_normal((64, 3)))
    directions = directions / directions.norm(dim=1, keepdim=True)
    values, turned = basis(directions, degree), basis(directions @ torch.from_numpy(rotation), degree)
    result = torch.empty_like(features_rest)
    for level in range(1, degree + 1):
        of_level = slice(level**2, (level + 1) ** 2)
        matrix = torch.linalg.lstsq(values[:, of_level], turned[:, of_level]).solution.to(features_rest.dtype)
        rows = slice(level**2 - 1, (level + 1) ** 2 - 1)
        result[:, rows] = torch.einsum("ij,njc->nic", matrix, features_rest[:, rows])
    return result
