"""Schedules count images and stretch with the run; learning rates follow nerfstudio's formula."""

import pytest
import torch

from bytesplat_ns.ops.reference import adam
from bytesplat_ns.schedules import REFERENCE_IMAGES, LearningRate, RoundScale, Timeline


def test_reference_run_keeps_the_reference_values():
    timeline = Timeline(total=30_000, length=30_000)
    assert [timeline.images(v) for v in (100, 500, 3_000, 15_000)] == [100, 500, 3_000, 15_000]


def test_a_short_run_shrinks_every_span():
    timeline = Timeline(total=1_000, length=1_000)
    assert [timeline.images(v) for v in (500, 3_000, 15_000)] == [17, 100, 500]
    assert timeline.images(1) == 1, "a span never vanishes"
    assert timeline.images(100, at_least=22) == 22


def test_absolute_steps_do_not_depend_on_the_run():
    assert Timeline(total=1_000, length=REFERENCE_IMAGES).images(3_000) == 3_000


@pytest.mark.parametrize("total, length", [(0, 0), (1, 0), (-5, 30_000)])
def test_an_empty_run_is_an_error(total, length):
    with pytest.raises(ValueError, match="at least one image"):
        Timeline(total, length)


def test_learning_rate_decays_exponentially_after_the_warmup():
    rate = LearningRate(initial=1e-2, final=1e-4, decay=1_000, warmup=100, pre_warmup=0.0)
    assert rate(0) == 0.0
    assert rate(50) == pytest.approx(1e-2 * 2**-0.5)  # a quarter turn of the sine
    assert rate(100) == pytest.approx(1e-2)
    assert rate(550) == pytest.approx(1e-3)  # half way in the logarithm
    assert rate(1_000) == rate(5_000) == pytest.approx(1e-4)


def test_a_round_scale_of_one_changes_nothing():
    scale = RoundScale(1)
    assert (scale.learning_rate(0.3), scale.betas(0.9, 0.999)) == (0.3, (0.9, 0.999))


def test_a_round_moves_parameters_as_far_per_image_as_single_views_do():
    """Seen by all views or by few, of one mind or of many: one step on B views is worth B steps on one view each."""
    generator, images = torch.Generator().manual_seed(0), 64 * 300
    shown = torch.rand(images, 4, generator=generator) < torch.tensor([1.0, 1.0, 0.3, 1 / 64])
    noise = torch.tensor([0.0, 1.0, 0.0, 0.5]) * torch.randn(images, 4, generator=generator)
    gradients = shown * (torch.tensor([1.0, 0.3, 1.0, 1.0]) + noise)

    def travel(views: int, squared_sum: bool = False) -> torch.Tensor:
        scale, x, moments = RoundScale(views), torch.zeros(4), (torch.zeros(4), torch.zeros(4))
        beta1, beta2 = scale.betas(0.9, 0.999)
        for number, given in enumerate(gradients.split(views), start=1):
            square = given.mean(0).square() if squared_sum else given.square().mean(0)
            constants = {"lr": scale.learning_rate(1e-3), "beta1": beta1, "beta2": beta2, "step": number}
            adam(x, given.mean(0), *moments, **constants, square=square)
        return x.abs()

    one = travel(1)
    for views in (2, 4, 8):
        torch.testing.assert_close(travel(views) / one, torch.ones(4), rtol=0.03, atol=0)
    # With the square of the round's sum it would be too far, unless all views of a parameter said the same.
    agreement = gradients.mean(0).square() / gradients.square().mean(0)
    too_far = (8 / (1 + 7 * agreement)).sqrt()
    assert too_far[0] == 1 and (too_far[1:] > 1.5).all()
    torch.testing.assert_close(travel(8, squared_sum=True) / one, too_far, rtol=0.1, atol=0)
