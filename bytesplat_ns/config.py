"""The methods that this package registers with nerfstudio."""

from __future__ import annotations

from typing import Any

import torch
from nerfstudio.configs.base_config import LocalWriterConfig, LoggingConfig, MachineConfig, ViewerConfig
from nerfstudio.data.dataparsers.nerfstudio_dataparser import NerfstudioDataParserConfig
from nerfstudio.engine.optimizers import AdamOptimizerConfig
from nerfstudio.engine.schedulers import ExponentialDecaySchedulerConfig
from nerfstudio.plugins.types import MethodSpecification

from bytesplat_ns.datamanager import ByteSplatDataManagerConfig
from bytesplat_ns.model import ByteSplatModelConfig
from bytesplat_ns.pipeline import ByteSplatPipelineConfig
from bytesplat_ns.schedules import REFERENCE_IMAGES
from bytesplat_ns.trainer import ByteSplatTrainerConfig


def _adam(lr: float, final: float | None = None, warmup: int = 0) -> dict:
    """An optimizer group: Adam, with exponential decay over the run if there is a final rate (reference images)."""
    decay = None
    if final is not None:
        decay = ExponentialDecaySchedulerConfig(
            lr_final=final, max_steps=REFERENCE_IMAGES, warmup_steps=warmup, lr_pre_warmup=0
        )
    return {"optimizer": AdamOptimizerConfig(lr=lr, eps=1e-15), "scheduler": decay}


def _method(name: str, description: str, **model: Any) -> MethodSpecification:
    """A method that differs from the others in these options of the model only."""
    config = ByteSplatTrainerConfig(
        method_name=name,
        machine=MachineConfig(device_type="cuda" if torch.cuda.is_available() else "cpu"),
        steps_per_eval_image=100,
        steps_per_eval_batch=0,
        steps_per_save=2000,
        steps_per_eval_all_images=1000,
        max_num_iterations=REFERENCE_IMAGES,
        pipeline=ByteSplatPipelineConfig(
            datamanager=ByteSplatDataManagerConfig(
                dataparser=NerfstudioDataParserConfig(load_3D_points=True), cache_images_type="uint8"
            ),
            model=ByteSplatModelConfig(**model),
        ),
        optimizers={
            "means": _adam(1.6e-4, final=1.6e-6),
            "features_dc": _adam(0.0025),
            "features_rest": _adam(0.0025 / 20),
            "opacities": _adam(0.05),
            "scales": _adam(0.005),
            "quats": _adam(0.001),
            "camera_opt": _adam(1e-4, final=5e-7, warmup=1000),
            "bilateral_grid": _adam(2e-3, final=1e-4, warmup=1000),
        },
        logging=LoggingConfig(steps_per_log=50, local_writer=LocalWriterConfig(enable=False), profiler="none"),
        viewer=ViewerConfig(num_rays_per_chunk=1 << 15),
        vis="viewer",
    )
    return MethodSpecification(config, description)


bytesplat = _method("bytesplat", "3D Gaussian Splatting with fused kernels, on CPU and CUDA (a faster splatfacto).")
bytesplat_big = _method(
    "bytesplat-big",
    "bytesplat with more Gaussians and higher quality (as splatfacto-big).",
    cull_alpha_thresh=0.005,
    densify_grad_thresh=0.0005,
)
bytesplat_mcmc = _method(
    "bytesplat-mcmc",
    "bytesplat with Gaussians sampled by opacity up to a fixed number (3DGS-MCMC).",
    strategy="mcmc",
    max_gaussians=1_000_000,
    stop_split_at=25_000,
    prune_share=0.0,  # it grows back to the number that it is given
)
