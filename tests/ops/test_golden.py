"""Images and gradients against those of gsplat 1.5.3 on a GPU (see ``tests/golden/README.md``)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from backends import Backend
from torch import Tensor

from bytesplat_ns.ops.layout import ABSGRAD, CONIC, MEAN2D, Cameras, Gaussians, ImageGradients, RenderSettings

FOLDER = Path(__file__).parents[1] / "golden"

SLACK = {"needles": 20.0}
"""gsplat forms the determinant of a 2D covariance as a c - b^2, which loses most digits of a needle's."""

IMAGE = 1e-5
"""Rounding of some hundred float32 operations with fast math, on values of order one. No pixel of these scenes is so
close to the stop rule's threshold that ours and gsplat's stop at different Gaussians."""

GRADIENT = 5e-4
"""Norm-wise. gsplat walks back to front and recovers T by division from a rounded 1 - alpha, worst where T is small."""


@pytest.mark.parametrize("name", sorted(path.stem for path in FOLDER.glob("*.npz")))
def test_golden(backend: Backend, name: str) -> None:
    with np.load(FOLDER / f"{name}.npz") as stored:
        golden = {k: torch.from_numpy(v) for k, v in stored.items() if v.dtype.kind in "fi" and v.ndim}
        width, height = int(stored["width"]), int(stored["height"])
        settings = RenderSettings(int(stored["sh_degree"]), antialiased=str(stored["mode"]) == "antialiased")
    views, count = golden["radii"].shape[:2]
    opacities = golden["opacities"].double()
    gaussians = Gaussians(
        means=golden["means"],
        quats=golden["quats"],
        scales=golden["scales"].double().log().float(),
        opacities=opacities.logit().float()[:, None],
        features_dc=golden["sh"][:, 0].contiguous(),
        features_rest=golden["sh"][:, 1:].contiguous(),
        ids=torch.arange(count),
    )
    intrinsics = golden["Ks"][:, [0, 1, 0, 1], [0, 1, 2, 2]]
    sizes = torch.tensor([[width, height]] * views, dtype=torch.int32)
    cameras = Cameras(golden["viewmats"], intrinsics, sizes, width, height)
    background = golden["background"][:, None, None]
    slack = SLACK.get(name, 1.0)

    def close(value: Tensor, expected: Tensor, tolerance: float) -> bool:
        return bool((value - expected).norm() <= slack * tolerance * expected.norm())

    records = backend.project(gaussians, cameras, settings)
    view, gaussian = records.view.long(), records.gaussian.long()
    # gsplat rounds radii up and asks less of a visible Gaussian: ours are some of its own.
    assert (golden["radii"][view, gaussian] > 0).all()
    assert close(records.table[:, MEAN2D], golden["means2d"][view, gaussian], 1e-6)
    assert close(records.table[:, CONIC], golden["conics"][view, gaussian], 1e-5)

    tiles = backend.bin(records, cameras)
    image = backend.rasterize(records, tiles, cameras, settings)
    rgb = image.rgb + image.transmittance[..., None] * background
    depth_scale = 1 + float(golden["depths"][view, gaussian].abs().max()) if len(records) else 1.0
    assert (rgb - golden["rgb"]).abs().max() <= slack * IMAGE
    assert (image.depth - golden["depth"][..., 0]).abs().max() <= slack * IMAGE * depth_scale
    assert (1 - image.transmittance - golden["alpha"][..., 0]).abs().max() <= slack * IMAGE

    upstream = golden["grad_rgbd"]
    gradients = ImageGradients(
        rgb=upstream[..., :3].contiguous(),
        depth=upstream[..., 3].contiguous(),
        # rgb was composed as C + T background, and alpha is 1 - T.
        transmittance=(upstream[..., :3] * background).sum(-1) - golden["grad_alpha"][..., 0],
    )
    rows = backend.rasterize_backward(records, tiles, cameras, settings, image, gradients)
    dense = torch.zeros(views, count, rows.shape[1])
    dense[view, gaussian] = rows
    # Whatever we cull has no gradient there either, so all (view, Gaussian) pairs are compared.
    assert close(dense[..., MEAN2D], golden["d_means2d"], GRADIENT)
    assert close(dense[..., ABSGRAD], golden["absgrad"], GRADIENT)

    result = backend.project_backward(gaussians, cameras, settings, records, rows)
    assert close(result.means, golden["d_means"], GRADIENT)
    assert close(result.quats, golden["d_quats"], GRADIENT)
    # Ours are gradients of logarithms and logits: d/d log s = s d/ds, d/d logit o = o (1 - o) d/do.
    assert close(result.scales, golden["scales"] * golden["d_scales"], GRADIENT)
    slope = (opacities * (1 - opacities)).float()
    assert close(result.opacities[:, 0], slope * golden["d_opacities"], GRADIENT)
    assert close(result.features_dc, golden["d_sh"][:, 0], GRADIENT)
    assert close(result.features_rest, golden["d_sh"][:, 1:], GRADIENT)
    assert close(result.viewmats[:, :3], golden["d_viewmats"][:, :3], GRADIENT)
