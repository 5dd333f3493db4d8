"""Options of the model that would do nothing, because of what other options say, are errors."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING

from bytesplat_ns.density.mcmc import MCMCOptions
from bytesplat_ns.density.strategy import DensityOptions

if TYPE_CHECKING:
    from bytesplat_ns.model import ByteSplatModelConfig

PREFIX = "--pipeline.model."

_SAMPLED = {f.name for f in fields(MCMCOptions)}
_REFINED = {f.name for f in fields(DensityOptions)} | {"reset_alpha_every", "stop_screen_size_at"}
_NERF = {"enable_collider", "collider_params", "loss_coefficients", "eval_num_rays_per_chunk"}


def refuse_idle_options(config: ByteSplatModelConfig, has_points: bool) -> None:
    """Raises a ValueError that names the options that differ from their defaults but have no effect.

    Args:
        has_points: whether the data has a point cloud to start from.
    """
    camera, random = config.camera_optimizer, config.random_init or config.init_from is not None or not has_points
    idle = [
        (config.strategy == "mcmc", "with {}strategy mcmc", _REFINED - _SAMPLED),
        (config.strategy != "mcmc", "without {}strategy mcmc", _SAMPLED - _REFINED),
        (not random, "without {}random-init True: the data has a point cloud", {"num_random", "random_scale"}),
        (config.init_from is not None, "with {}init-from", {"random_init", "num_random", "random_scale"}),
        (config.init_from is None, "without {}init-from", {"init_frame"}),
        (not config.use_scale_regularization, "without {}use-scale-regularization True", {"max_gauss_ratio"}),
        (not config.use_bilateral_grid, "without {}use-bilateral-grid True", {"grid_shape"}),
        (config.num_downscales == 0, "with {}num-downscales 0", {"resolution_schedule"}),
        (config.sh_degree == 0, "with {}sh-degree 0", {"sh_degree_interval"}),
        (True, "for Gaussians", _NERF),
    ]
    usual = type(config)()
    found = [
        f"{PREFIX}{name.replace('_', '-')} ({reason.format(PREFIX)})"
        for applies, reason, names in idle
        for name in sorted(names)
        if applies and getattr(config, name) != getattr(usual, name)
    ]
    for name in ("trans_l2_penalty", "rot_l2_penalty"):
        if camera.mode == "off" and getattr(camera, name) != getattr(usual.camera_optimizer, name):
            option = f"{PREFIX}camera-optimizer."
            found.append(f"{option}{name.replace('_', '-')} (without {option}mode)")
    if found:
        raise ValueError("Options without effect: " + "; ".join(found) + ". Remove them to go on.")
