"""Stages fused on the GPU do what the separate ones do."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from backends import Backend
from cases import SCENES
from oracle import truth

from bytesplat_ns.ops.layout import Gaussians, GaussianGradients


@pytest.mark.parametrize("name", ["odd_size", "views_of_different_sizes", "lower_degree_than_stored", "no_gaussians"])
def test_projection_backward_with_adam(backend: Backend, name: str) -> None:
    if backend.name != "cuda":
        pytest.skip("only the CUDA backend fuses them")
    projection = pytest.importorskip("bytesplat_ns.ops.cuda.projection")
    scene, expected = SCENES[name], truth(name)
    generator = torch.Generator().manual_seed(1)

    def place(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(backend.device, copy=True)

    names = Gaussians.PARAMETERS
    separate, fused = ({n: place(getattr(scene.gaussians, n)) for n in names} for _ in range(2))
    start = {n: [0.1 * torch.randn(separate[n].shape, generator=generator).abs() for _ in range(2)] for n in names}
    moments_separate = {n: tuple(map(place, pair)) for n, pair in start.items()}
    moments_fused = {n: tuple(map(place, pair)) for n, pair in start.items()}
    rates = {n: 0.01 * (i + 1) for i, n in enumerate(names)}
    ids = place(scene.gaussians.ids)
    cameras = replace(
        scene.cameras, **{n: place(getattr(scene.cameras, n)) for n in ("viewmats", "intrinsics", "sizes")}
    )
    records = expected.records
    records = replace(records, **{n: place(t) for n, t in vars(records).items()})
    rows, poses = place(expected.d_rows), torch.zeros_like(cameras.viewmats)

    gradients: GaussianGradients = projection.project_backward(
        Gaussians(**separate, ids=ids), cameras, scene.settings, records, rows
    )
    for n, gradient in gradients.parameters().items():
        backend.module.adam(separate[n], gradient, *moments_separate[n], lr=rates[n], step=3)
    projection.project_backward_adam(
        Gaussians(**fused, ids=ids),
        cameras,
        scene.settings,
        records,
        rows,
        moments_fused,
        rates,
        step=3,
        viewmats=poses,
    )

    # The same operations on the same numbers; only the compiler may contract them differently.
    torch.testing.assert_close(fused, separate, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(moments_fused, moments_separate, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(poses, gradients.viewmats, rtol=1e-4, atol=1e-5)
