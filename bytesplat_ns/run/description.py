"""What a run will do and when, told at its start."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bytesplat_ns import ops
from bytesplat_ns.optim import BETAS
from bytesplat_ns.schedules import REFERENCE_IMAGES, RoundScale

if TYPE_CHECKING:
    from bytesplat_ns.pipeline import ByteSplatPipeline


def describe(pipeline: ByteSplatPipeline) -> list[str]:
    """Lines for the log of a run that is about to start; moments are in images seen."""
    model, options, schedule = pipeline.model, pipeline.config.model, pipeline.strategy.schedule
    timeline, views = model.timeline, pipeline.datamanager.views_per_round
    halvings = [timeline.images(options.resolution_schedule) * k for k in range(1, options.num_downscales + 1)]
    rising = range(model.initial_sh_degree + 1, options.sh_degree + 1)
    degrees = [timeline.images(options.sh_degree_interval) * k for k in rising]
    resets = [m for m in range(timeline.total) if schedule.resets_at(m, m + 1)]
    scaled = "splatfacto's absolute steps" if timeline.length == REFERENCE_IMAGES else f"x {timeline.scale:.3g}"
    lines = [
        f"{pipeline.strategy.total:,} Gaussians (at most {options.max_gaussians:,}), {model.num_train_data} photos, "
        f"{timeline.total:,} images in rounds of {views}, on {model.device} "
        f"({ops.backend(model.device.type).__name__.rpartition('.')[2]} kernels).",
        f"Schedules for {timeline.length:,} images ({scaled}), in images: "
        f"resolution doubles at {_moments(halvings)}; SH degree rises at {_moments(degrees)}; "
        f"refinement every {schedule.every} from {schedule.start} to {schedule.stop}; "
        f"opacity reset at {_moments([m + 1 for m in resets])}.",
    ]
    if views > 1:
        lines.append(pipeline.datamanager.sharing.describe())
        scale = RoundScale(views)
        steps, images = pipeline.rounds_until(timeline.total), timeline.total - model.images_seen
        lines.append(
            f"Rounds of {views} views: {steps:,} steps for {images:,} images. In a round of B views learning rates "
            f"are B times as large and Adam's betas are taken to the power of B: x {scale.learning_rate(1):.3g}, "
            f"{' and '.join(f'{b:.4g}' for b in scale.betas(*BETAS))} for B = {views}. Adam's moments average the "
            f"gradients of the views and their squares, so that B views move a model as far as B steps on one."
        )
    return lines


def _moments(images: list[int]) -> str:
    return ", ".join(f"{image:,}" for image in images) or "never"
