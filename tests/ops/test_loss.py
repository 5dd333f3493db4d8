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


def test_a_target_with_alpha_is_composed_over_the_background(backend: Backend) -> None:
    photo = PHOTOS["float_rgba"]
    inputs, cameras = photo_inputs(photo), look(*photo.sizes)
    colour, alpha = inputs["target"][..., :3], inputs["target"][..., 3:]
    composed = colour * alpha + inputs["background"][:, None, None] * (1 - alpha)
    values, gradients = backend.loss(cameras=cameras, **inputs)
    expected, truly = backend.loss(cameras=cameras, **(inputs | {"target": composed}))
    torch.testing.assert_close(values, expected, rtol=0, atol=VALUE)
    assert (gradients.rgb - truly.rgb).norm() <= GRADIENT * truly.rgb.norm()


def test_masked_ssim_by_its_definition(backend: Backend) -> None:
    """Window by window: hidden pixels are black in both images, windows with a hidden centre do not count."""
    photo = Photo("", ((14, 13),), uint8=False, masked="some", ssim_lambda=1.0)
    inputs, cameras = photo_inputs(photo), look(*photo.sizes)
    image, mask = inputs["image"], inputs["mask"][0]
    composed = (image.rgb + image.transmittance[..., None] * inputs["background"]).clamp(0, 1)
    one, two = ((side[0] * mask[..., None]).double() for side in (composed, inputs["target"]))
    falloff = torch.exp(-(torch.arange(-5, 6, dtype=torch.float64) ** 2) / (2 * 1.5**2))
    weight = torch.outer(falloff, falloff)[..., None] / falloff.sum() ** 2

    scores = []
    for y, x in (mask[5:-5, 5:-5]).nonzero().tolist():
        a, b = one[y : y + 11, x : x + 11], two[y : y + 11, x : x + 11]
        mean_a, mean_b = (weight * a).sum((0, 1)), (weight * b).sum((0, 1))
        variance_a, variance_b = (weight * (a - mean_a) ** 2).sum((0, 1)), (weight * (b - mean_b) ** 2).sum((0, 1))
        covariance = (weight * (a - mean_a) * (b - mean_b)).sum((0, 1))
        luminance = (2 * mean_a * mean_b + 1e-4) / (mean_a**2 + mean_b**2 + 1e-4)
        scores.append(luminance * (2 * covariance + 9e-4) / (variance_a + variance_b + 9e-4))
    assert 0 < len(scores) < 12

    values, _ = backend.loss(cameras=cameras, **inputs)
    torch.testing.assert_close(values.double(), 1 - torch.stack(scores).mean()[None], rtol=0, atol=VALUE)


def test_a_view_does_not_feel_the_others(backend: Backend) -> None:
    photo = PHOTOS["views_of_different_sizes"]
    inputs, cameras = photo_inputs(photo), look(*photo.sizes)
    values, gradients = backend.loss(cameras=cameras, **inputs)
    for view, (width, height) in enumerate(photo.sizes):
        own = (slice(view, view + 1), slice(height), slice(width))
        alone = replace(
            cameras,
            viewmats=cameras.viewmats[own[0]],
            intrinsics=cameras.intrinsics[own[0]],
            sizes=cameras.sizes[own[0]],
            width=width,
            height=height,
        )
        image = Image(*(part[own].contiguous() for part in vars(inputs["image"]).values()))
        target, mask = inputs["target"][own].contiguous(), inputs["mask"][own].contiguous()
        value, gradient = backend.loss(image, target, inputs["background"][own[0]], alone, photo.ssim_lambda, mask)
        torch.testing.assert_close(value, values[own[0]])
        torch.testing.assert_close(gradient.rgb, gradients.rgb[own])
