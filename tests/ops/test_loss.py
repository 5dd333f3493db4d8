"""The loss of every backend, against the reference in float64 and against pytorch_msssim."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from backends import Backend
from cases import PHOTOS, Photo, look
from oracle import cast, photo_inputs
from torch import Tensor

from bytesplat_ns.ops import reference
from bytesplat_ns.ops.layout import Image

photos = pytest.mark.parametrize("photo", PHOTOS.values(), ids=PHOTOS)

VALUE = 2e-6
"""SSIM subtracts squares of means from means of squares: 6e-8 over its constant 9e-4 at worst, less on average."""

GRADIENT = 2e-5
"""Norm-wise, for the same reason."""


@photos
def test_loss(backend: Backend, photo: Photo) -> None:
    inputs, cameras = photo_inputs(photo), look(*photo.sizes)
    values, gradients = backend.loss(cameras=cameras, **inputs)
    exact = inputs | {"image": cast(inputs["image"], torch.float64)}
    expected, truly = reference.loss(cameras=cameras, **exact)

    assert values.shape == (len(cameras),) and gradients.depth is None
    torch.testing.assert_close(values.double(), expected, rtol=0, atol=VALUE)
    for name in ("rgb", "transmittance"):
        gradient, true = getattr(gradients, name), getattr(truly, name)
        assert gradient.shape == true.shape and gradient.dtype == torch.float32
        assert (gradient - true).norm() <= GRADIENT * true.norm(), name
        for view, (width, height) in enumerate(photo.sizes):
            assert not gradient[view, height:].any() and not gradient[view, :, width:].any()


@pytest.mark.parametrize("size", [(37, 29), (11, 11), (64, 12)])
def test_loss_is_splatfactos(backend: Backend, size: tuple[int, int]) -> None:
    """Mean absolute error and pytorch_msssim's SSIM of whole images, value and gradient."""
    msssim = pytest.importorskip("pytorch_msssim")
    inputs = photo_inputs(Photo("", (size,)))
    image: Image = inputs["image"]
    rgb, transmittance = (part.double().requires_grad_() for part in (image.rgb, image.transmittance))
    composed = (rgb + transmittance[..., None] * inputs["background"]).clamp(0, 1)
    target = inputs["target"].double() / 255
    structure = msssim.SSIM(data_range=1.0, size_average=True, channel=3)
    planes = [values.permute(0, 3, 1, 2) for values in (target, composed)]
    expected = 0.8 * (composed - target).abs().mean() + 0.2 * (1 - structure(*planes))
    expected.backward()

    values, gradients = backend.loss(cameras=look(size), **inputs)
    torch.testing.assert_close(values.double(), expected.detach()[None], rtol=0, atol=VALUE)
    assert (gradients.rgb - rgb.grad).norm() <= GRADIENT * rgb.grad.norm()
    assert (gradients.transmittance - transmittance.grad).norm() <= GRADIENT * transmittance.grad.norm()


def test_a_full_mask_changes_nothing(backend: Backend) -> None:
    photo = PHOTOS["photo"]
    inputs, cameras = photo_inputs(photo), look(*photo.sizes)
    values, gradients = backend.loss(cameras=cameras, **inputs)
    mask = torch.full(inputs["target"].shape[:3], 255, dtype=torch.uint8)
    masked_values, masked = backend.loss(cameras=cameras, **(inputs | {"mask": mask}))
    torch.testing.assert_close(masked_values, values)
    torch.testing.assert_close(masked.rgb, gradients.rgb)


def test_masked_pixels_count_for_nothing(backend: Backend) -> None:
    photo = PHOTOS["masked"]
    inputs, cameras = photo_inputs(photo), look(*photo.sizes)
    values, gradients = backend.loss(cameras=cameras, **inputs)
    hidden = ~inputs["mask"]
    assert not gradients.rgb[hidden].any() and not gradients.transmittance[hidden].any()

    def scrambled(values: Tensor) -> Tensor:
        return torch.where(hidden.view(*hidden.shape, *[1] * (values.dim() - 3)), values.flip(1), values)

    image = replace(inputs["image"], rgb=scrambled(inputs["image"].rgb))
    again, _ = backend.loss(cameras=cameras, **(inputs | {"image": image, "target": scrambled(inputs["target"])}))
    assert torch.equal(again, values)


def test_without_a_pixel_to_learn_from_there_is_no_loss(backend: Backend) -> None:
    photo = PHOTOS["all_masked"]
    values, gradients = backend.loss(cameras=look(*photo.sizes), **photo_inputs(photo))
    assert not values.any() and not gradients.rgb.any() and not gradients.transmittance.any()
