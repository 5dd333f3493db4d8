"""Training runs without ``ns-train``, for benchmarks that make many or look inside: one process, one start."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import torch

from bytesplat_ns.config import bytesplat
from bytesplat_ns.pipeline import ByteSplatPipeline
from bytesplat_ns.run.metrics import psnr
from bytesplat_ns.trainer import ByteSplatTrainerConfig

HELD_OUT = 8
"""Every so many photos one is not trained on."""


def configured(data: Path, seed: int) -> ByteSplatTrainerConfig:
    """Method bytesplat for a capture in nerfstudio's format, with the photos held out that benchmarks hold out."""
    config = deepcopy(bytesplat.config)
    manager = config.pipeline.datamanager
    manager.data, manager.train_cameras_sampling_seed = data, seed
    manager.dataparser.eval_mode, manager.dataparser.eval_interval = "interval", HELD_OUT
    manager.dataparser.downscale_factor = 1
    return config


def train(data: Path, images: int, seed: int, views_per_round: int = 1, **model: Any) -> ByteSplatPipeline:
    """The pipeline of method bytesplat after so many images, or a few more, of a capture in nerfstudio's format.

    Args:
        model: options of the model that differ from the method's.
    """
    config = configured(data, seed)
    config.pipeline.datamanager.views_per_round = views_per_round
    for name, value in model.items():
        setattr(config.pipeline.model, name, value)
    torch.manual_seed(seed)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    pipeline = config.pipeline.setup(device=device, test_mode="val")
    pipeline.datamanager.setup_train()
    pipeline.train()
    pipeline.start_training(images, config.optimizers)
    pipeline.share_views()
    while pipeline.model.images_seen < images:
        pipeline.train_round()
    return pipeline


def quality(pipeline: ByteSplatPipeline) -> float:
    """Mean PSNR of the held-out photos, dB."""
    model, values = pipeline.model.eval(), []
    for camera, data in pipeline.datamanager.fixed_indices_eval_dataloader:
        with torch.no_grad():
            rgb = model.get_outputs(camera)["rgb"]
        values.append(float(psnr(rgb, model.get_gt_img(data["image"]))))
    model.train()
    return sum(values) / len(values)
