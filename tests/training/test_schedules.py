"""Schedules count images and stretch with the run; learning rates follow nerfstudio's formula."""

import pytest
import torch
from torch.optim import Adam

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
    assert (scale.learning_rate(0.3), scale.betas(0.9, 0.999), scale.epsilon(1e-15)) == (0.3, (0.9, 0.999), 1e-15)


def test_a_round_moves_a_rarely_seen_parameter_as_far_per_image_as_single_views_do():
    """A parameter that one view in 64 sees: one step on B views has to be worth B steps on one view each."""

    def travel(views: int, images: int = 64 * 400) -> float:
        scale = RoundScale(views)
        x = torch.zeros(1, requires_grad=True)
        optimizer = Adam([x], lr=scale.learning_rate(1e-3), betas=scale.betas(0.9, 0.999), eps=scale.epsilon(1e-15))
        for first in range(0, images, views):
            x.grad = torch.tensor([1.0 if first % 64 == 0 else 0.0])
            optimizer.step()
        return abs(x.item())

    one = travel(1)
    assert [travel(b) / one for b in (2, 4, 8)] == pytest.approx([1, 1, 1], rel=0.1)
    # Without the rule a round of 8 covers the distance of about sqrt(1 / 8) of its images.
