"""Projection: what each Gaussian looks like in each view (EWA splatting), and its derivative."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ..layout import (
    ALPHA_MIN,
    DEPTH,
    MEAN2D,
    OPACITY,
    RECORD_WIDTH,
    Cameras,
    GaussianGradients,
    Gaussians,
    Records,
    RenderSettings,
)
from .harmonics import basis
from .stage import stage


@stage
def project(gaussians: Gaussians, cameras: Cameras, settings: RenderSettings) -> Records:
    """Records of the Gaussians that can reach a pixel of a view.

    A (view, Gaussian) pair is left out when its depth is outside (near, far), when anything about it is not
    finite, or when the box around its ellipse {alpha >= 1/255} holds no pixel centre of the view.

    Sources: Zwicker et al., "EWA Splatting" (2002); Kerbl et al., 3DGS (2023), equations 5 and 6; the
    opacity-aware bound is that of Ye et al., gsplat (2024), kept exact instead of rounded to a radius.
    """
    device = gaussians.device
    gaussian = torch.arange(len(gaussians), device=device).repeat(len(cameras))
    view = torch.arange(len(cameras), device=device).repeat_interleave(len(gaussians))
    table, covariance, sound = _splat(gaussians, cameras, settings, gaussian, view)

    xx, xy, yy = covariance.unbind(-1)
    depth, opacity = table[:, DEPTH], table[:, OPACITY]
    visible = sound & (depth > settings.near) & (depth < settings.far) & (opacity >= ALPHA_MIN)
    # alpha >= 1/255 where d^T conic d <= 2 ln(255 opacity): +- sqrt(2 ln(255 opacity) cov_xx) in x, so in y.
    half_extent = (2 * torch.log(opacity / ALPHA_MIN)[:, None] * torch.stack([xx, yy], -1)).sqrt()
    first = (table[:, MEAN2D] - half_extent - 0.5).ceil().clamp(min=0)
    last = torch.minimum((table[:, MEAN2D] + half_extent - 0.5).floor(), cameras.sizes[view] - 1)
    visible &= (first <= last).all(-1)

    major_variance = (xx + yy) / 2 + torch.hypot((xx - yy) / 2, xy)
    gaussian, view = gaussian[visible], view[visible]
    return Records(
        table=table[visible],
        gaussian=gaussian.int(),
        view=view.int(),
        radius=3 * major_variance[visible].sqrt(),
        ids=gaussians.ids[gaussian],
    )


@stage
def project_backward(
    gaussians: Gaussians,
    cameras: Cameras,
    settings: RenderSettings,
    records: Records,
    rows: Tensor,
    squares: bool = False,
) -> GaussianGradients:
    """Gradients of the trained parameters and of the poses, summed over the records.

    Args:
        rows: [M, 10 or more] dL/d(record) in the record's columns; statistics behind them are not read.
        squares: whether the sums of the squares of each view's gradient are wanted too.
    """
    if squares:
        of_views = [records.view == view for view in range(len(cameras))]
        parts = [(replace(records, **{n: t[of_view] for n, t in vars(records).items()}), rows[of_view])
                 for of_view in of_views]  # fmt: skip
        views = [project_backward(gaussians, cameras, settings, *part).parameters() for part in parts]
        sums = {n: sum((view[n].square() for view in views), torch.zeros_like(views[0][n])) for n in views[0]}
        return replace(project_backward(gaussians, cameras, settings, records, rows), squares=sums)
    names = (*Gaussians.PARAMETERS, "viewmats")
    leaves = [getattr(gaussians, name) for name in Gaussians.PARAMETERS] + [cameras.viewmats]
    leaves = [leaf.detach().to(rows.dtype).requires_grad_() for leaf in leaves]
    with torch.enable_grad():
        table, _, _ = _splat(
            replace(gaussians, **dict(zip(Gaussians.PARAMETERS, leaves[:-1], strict=True))),
            replace(cameras, viewmats=leaves[-1]),
            settings,
            records.gaussian.long(),
            records.view.long(),
        )
        gradients = torch.autograd.grad(table, leaves, rows[:, :RECORD_WIDTH])
    return GaussianGradients(**dict(zip(names, gradients, strict=True)))


def _splat(
    gaussians: Gaussians, cameras: Cameras, settings: RenderSettings, gaussian: Tensor, view: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The record of each pair (gaussian, view), each [P] int64, visible or not.

    Returns:
        Record table [P, 10]; dilated 2D covariance [P, 3] as xx, xy, yy in pixel^2; soundness [P] bool: the
        covariance is invertible and everything is finite.
    """
    dtype = gaussians.means.dtype
    viewmats = cameras.viewmats.to(dtype)
    rotation, translation = viewmats[:, :3, :3], viewmats[:, :3, 3]  # world to camera
    fx, fy, cx, cy = cameras.intrinsics.to(dtype)[view].unbind(-1)
    width, height = cameras.sizes.to(dtype)[view].unbind(-1)

    # Mean: a pinhole projection.
    mean = gaussians.means[gaussian]  # [P, 3] world
    camera_mean = (rotation[view] @ mean[..., None]).squeeze(-1) + translation[view]  # [P, 3] camera
    x, y, z = camera_mean.unbind(-1)
    mean2d = torch.stack([fx * x / z + cx, fy * y / z + cy], -1)

    # Covariance: with J the Jacobian of the projection (Zwicker et al. 2002, equation 29), W the view's
    # rotation and R S the Gaussian's own, cov = A A^T with A = J W R S. Far off the axis the affine
    # approximation explodes, so J is taken at most 0.3 of the half field of view outside the image.
    tan_x = (x / z).clamp(-(cx / fx + 0.15 * width / fx), (width - cx) / fx + 0.15 * width / fx)
    tan_y = (y / z).clamp(-(cy / fy + 0.15 * height / fy), (height - cy) / fy + 0.15 * height / fy)
    zero = torch.zeros_like(z)
    jacobian = torch.stack([fx / z, zero, -fx * tan_x / z, zero, fy / z, -fy * tan_y / z], -1).view(-1, 2, 3)
    axes = _rotation(gaussians.quats[gaussian]) * gaussians.scales[gaussian].exp()[:, None, :]  # R S
    root_x, root_y = (jacobian @ rotation[view] @ axes).unbind(-2)  # rows of A, [P, 3] pixels
    xx, xy, yy = (root_x * root_x).sum(-1), (root_x * root_y).sum(-1), (root_y * root_y).sum(-1)
    # det(A A^T) = |a_x cross a_y|^2 (Cauchy-Binet): unlike xx yy - xy^2 it keeps its digits for needles.
    undilated = torch.linalg.cross(root_x, root_y).square().sum(-1)
    dilation = settings.dilation
    determinant = undilated + dilation * (xx + yy) + dilation**2
    xx, yy = xx + dilation, yy + dilation
    conic = torch.stack([yy, -xy, xx], -1) / determinant[:, None]

    # Opacity: dilation spreads a Gaussian, so its peak is lowered to keep its mass (Yu et al., Mip-Splatting,
    # 2024, equation 12). The root of a visible Gaussian is at least 1/255, so its derivative is finite.
    opacity = gaussians.opacities[gaussian, 0].sigmoid()
    if settings.antialiased:
        opacity = opacity * (undilated / determinant).sqrt()

    # Colour: seen from the camera's centre. Poses are free 3x4 matrices to the derivative, hence the inverse
    # and not the transpose of the rotation.
    centre = -torch.linalg.solve(rotation, translation)  # [V, 3] world
    direction = mean - centre[view]
    direction = direction / direction.norm(dim=-1, keepdim=True)
    stored = gaussians.features_rest.shape[1] + 1
    values = basis(direction, settings.sh_degree)[:, :stored]
    features = torch.cat([gaussians.features_dc[:, None], gaussians.features_rest], 1)[gaussian]
    rgb = (values[:, :, None] * features[:, : values.shape[1]]).sum(1) + 0.5

    table = torch.cat([mean2d, conic, opacity[:, None], rgb.clamp(min=0), z[:, None]], -1)
    # Colour is judged before the clamp, which would make minus infinity look like black.
    sound = table.isfinite().all(-1) & rgb.isfinite().all(-1) & determinant.isfinite() & (determinant > 0)
    return table, torch.stack([xx, xy, yy], -1), sound


def _rotation(quats: Tensor) -> Tensor:
    """Rotation matrices [P, 3, 3] of quaternions [P, 4], w x y z, of any norm but zero (that gives NaN)."""
    w, x, y, z = (quats / quats.norm(dim=-1, keepdim=True)).unbind(-1)
    rows = [
        1 - 2 * (y * y + z * z),
        2 * (x * y - w * z),
        2 * (x * z + w * y),
        2 * (x * y + w * z),
        1 - 2 * (x * x + z * z),
        2 * (y * z - w * x),
        2 * (x * z - w * y),
        2 * (y * z + w * x),
        1 - 2 * (x * x + y * y),
    ]
    return torch.stack(rows, -1).view(-1, 3, 3)
