"""The stages by device, and their autograd wrappers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from backends import Backend
from cases import PHOTOS, ball, look
from oracle import photo_inputs

from bytesplat_ns import ops
from bytesplat_ns.ops import cpu, cuda
from bytesplat_ns.ops.layout import Gaussians, ImageGradients, RenderSettings


@pytest.fixture
def dispatched(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> Backend:
    """``ops`` with the backend under test behind it, whatever it would choose for the device."""
    if backend.device != "cpu":
        pytest.skip("the tests of this file hold their tensors on the host")
    monkeypatch.setattr(ops, "backend", lambda device_type: backend.module)
    return backend


@pytest.mark.usefixtures("dispatched")
@pytest.mark.parametrize("parts", [("rgb",), ("depth",), ("transmittance",), ("rgb", "depth", "transmittance")])
def test_render_differentiates_as_the_stages_do(parts: tuple[str, ...]) -> None:
    gaussians, cameras = ball(60, 60), look((40, 24), (17, 33))
    settings = RenderSettings(statistics=False)
    leaves = {name: getattr(gaussians, name).requires_grad_() for name in Gaussians.PARAMETERS}
    viewmats = cameras.viewmats.requires_grad_()
    image, records = ops.render(gaussians, cameras, settings)
    # A sum hands down expanded gradients, which no kernel may read as if they were full.
    sum(getattr(image, part).sum() for part in parts).backward()

    with torch.no_grad():
        tiles = ops.bin(records, cameras)
        again = ops.rasterize(records, tiles, cameras, settings)
        assert torch.equal(image.rgb, again.rgb)
        ones = {part: torch.ones_like(getattr(again, part)) for part in parts}
        upstream = ImageGradients(**({"rgb": torch.zeros_like(again.rgb)} | ones))
        rows = ops.rasterize_backward(records, tiles, cameras, settings, again, upstream)
        expected = ops.project_backward(gaussians, cameras, settings, records, rows)
    for name, leaf in (leaves | {"viewmats": viewmats}).items():
        assert torch.equal(leaf.grad, getattr(expected, name)), name


@pytest.mark.usefixtures("dispatched")
def test_the_loss_can_be_weighted_view_by_view() -> None:
    photo = PHOTOS["views_of_different_sizes"]
    inputs, cameras = photo_inputs(photo), look(*photo.sizes)
    image = inputs.pop("image")
    _, gradients = ops.loss(image, cameras=cameras, **inputs)
    rgb, transmittance = image.rgb.requires_grad_(), image.transmittance.requires_grad_()
    values = ops.photometric_loss(rgb, transmittance, cameras=cameras, **inputs)
    weights = torch.tensor([1.0, -2.0, 3.0])
    (values * weights).sum().backward()
    torch.testing.assert_close(rgb.grad, gradients.rgb * weights[:, None, None, None])
    torch.testing.assert_close(transmittance.grad, gradients.transmittance * weights[:, None, None])


@pytest.mark.usefixtures("dispatched")
def test_autocast_changes_nothing() -> None:
    gaussians, cameras, settings = ball(60, 61), look((40, 24)), RenderSettings()
    photo = photo_inputs(replace(PHOTOS["photo"], sizes=((40, 24),)))
    photo.pop("image")

    def step() -> tuple[torch.Tensor, torch.Tensor]:
        leaves = [getattr(gaussians, name).detach().requires_grad_() for name in Gaussians.PARAMETERS]
        image, _ = ops.render(Gaussians(*leaves, ids=gaussians.ids), cameras, settings)
        value = ops.photometric_loss(image.rgb, image.transmittance, cameras=cameras, **photo)
        value.sum().backward()
        return value.detach(), leaves[0].grad

    value, gradient = step()
    with torch.autocast("cpu", torch.bfloat16):
        again, gradient_again = step()
    assert again.dtype == torch.float32
    assert torch.equal(again, value) and torch.equal(gradient_again, gradient)


def test_the_reference_stands_in_with_one_clear_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ops.backend.cache_clear()
    monkeypatch.setattr(cpu, "available", lambda: False)
    parameter = torch.ones(3)
    for step in (1, 2):
        ops.adam(parameter, parameter, parameter.clone(), parameter.clone(), lr=0.1, step=step)
    ops.backend.cache_clear()
    assert len(caplog.records) == 1 and "cpu" in caplog.text and "reference" in caplog.text


def test_compiled_kernels_are_used_where_they_are_built() -> None:
    assert ops.backend("cuda") is cuda
    if not cpu.available():
        pytest.skip("the CPU library is not built")
    assert ops.backend("cpu") is cpu
