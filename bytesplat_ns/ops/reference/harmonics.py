"""Real spherical harmonics up to degree 3, in the order and with the signs of 3DGS (Kerbl et al. 2023)."""

from __future__ import annotations

import torch
from torch import Tensor


def basis(directions: Tensor, degree: int) -> Tensor:
    """Values of the basis functions of degrees 0 to ``degree``.

    Written as polynomials in the direction (Sloan, "Efficient Spherical Harmonic Evaluation", JCGT 2013),
    with the Condon-Shortley phase: functions of odd order m carry a minus sign.

    Args:
        directions: [P, 3] unit vectors, world axes, from the camera to the Gaussian.
        degree: 0 to 3.

    Returns:
        [P, (degree + 1)^2], ordered by degree, then by order m from -degree to degree.
    """
    x, y, z = directions.unbind(-1)
    xx, yy, zz = x * x, y * y, z * z
    values = [torch.full_like(x, 0.28209479177387814)]
    if degree >= 1:
        values += [-0.4886025119029199 * y, 0.4886025119029199 * z, -0.4886025119029199 * x]
    if degree >= 2:
        values += [
            1.0925484305920792 * x * y,
            -1.0925484305920792 * y * z,
            0.31539156525252005 * (2 * zz - xx - yy),
            -1.0925484305920792 * x * z,
            0.5462742152960396 * (xx - yy),
        ]
    if degree >= 3:
        values += [
            -0.5900435899266435 * y * (3 * xx - yy),
            2.890611442640554 * x * y * z,
            -0.4570457994644658 * y * (4 * zz - xx - yy),
            0.3731763325901154 * z * (2 * zz - 3 * xx - 3 * yy),
            -0.4570457994644658 * x * (4 * zz - xx - yy),
            1.445305721320277 * z * (xx - yy),
            -0.5900435899266435 * x * (xx - 3 * yy),
        ]
    return torch.stack(values, -1)
