"""Options that would do nothing, because of what other options say or of what this method is, are errors.

So are those of the stock trainer whose purpose would not be met.

An option counts as set where it differs from what its method sets: bytesplat-big has other thresholds than bytesplat.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from functools import reduce
from typing import TYPE_CHECKING, Any

from nerfstudio.engine.optimizers import AdamOptimizerConfig

from bytesplat_ns.density.mcmc import MCMCOptions
from bytesplat_ns.density.pruning import PruningOptions
from bytesplat_ns.density.strategy import DensityOptions
from bytesplat_ns.optim import EPSILON

if TYPE_CHECKING:
    from bytesplat_ns.model import ByteSplatModelConfig
    from bytesplat_ns.trainer import ByteSplatTrainerConfig

PIPELINE, MODEL, DATA, LOGGING = "pipeline", "pipeline.model", "pipeline.datamanager", "logging"
"""Where options are: attributes of the trainer's configuration, and the beginning of their names."""

_SAMPLED = {f.name for f in fields(MCMCOptions)}
_REFINED = {f.name for f in fields(DensityOptions)} | {"reset_alpha_every", "stop_screen_size_at"}
_PRUNED = {f.name for f in fields(PruningOptions)} - {"prune_share"} | {"prune_start", "prune_stop", "prune_every"}
_NERF = {"enable_collider", "collider_params", "loss_coefficients", "eval_num_rays_per_chunk", "prompt"}
_RANDOM_START = {"num_random", "random_scale"}
_EVERY_PHOTO = {"eval_num_images_to_sample_from", "eval_num_times_to_repeat_images", "eval_image_indices"}

Idle = tuple[bool, str, str, set[str]]
"""Whether it is so, why, and where which options then do nothing."""


def refuse_idle_options(config: ByteSplatTrainerConfig, ranks: int) -> None:
    """Raises a ValueError that names the options that are set but have no effect on a run of so many ranks."""
    usual = _method_defaults(config.method_name)
    found = [*_idle(config, usual, _what_is_idle(config, ranks)), *_idle_optimizers(config, usual)]
    _refuse(found)


def refuse_random_start(config: ByteSplatModelConfig, has_points: bool) -> None:
    """The same for options of a random start, once it is known whether the data has a point cloud to start from."""
    usual, reason = type(config)(), f"without --{MODEL}.random-init True: the data has a point cloud"
    if has_points and not config.random_init and config.init_from is None:
        names = (name for name in sorted(_RANDOM_START) if getattr(config, name) != getattr(usual, name))
        _refuse([f"{_option(MODEL, name)} ({reason})" for name in names])


def refuse_unsupported(config: ByteSplatTrainerConfig, ranks: int) -> None:
    """Raises a ValueError that names the options of the stock trainer that mean what this method does not do."""
    found: list[str] = []
    if ranks > 1 and config.is_viewer_legacy_enabled():
        found.append("--vis viewer_legacy with several ranks (--vis viewer can)")
    if config.mixed_precision or config.use_grad_scaler:
        found.append("--mixed-precision, --use-grad-scaler (gradients are computed in float32)")
    if config.gradient_accumulation_steps:
        found.append("--gradient-accumulation-steps (use --pipeline.datamanager.views-per-round)")
    if config.log_gradients:
        found.append("--log-gradients")
    for group, options in config.optimizers.items():
        fixed = vars(AdamOptimizerConfig(lr=options["optimizer"].lr, eps=EPSILON))
        found += [
            f"--optimizers.{group}.optimizer.{name.replace('_', '-')} {value} (it is always {fixed.get(name)})"
            for name, value in vars(options["optimizer"]).items()
            if value != fixed.get(name)
        ]
    if ranks > 1 and config.pipeline.deferred_adam == "on":
        found.append("--pipeline.deferred-adam on with several ranks (auto and off can)")
    if found:
        raise ValueError("bytesplat does not support: " + "; ".join(found) + ". Remove the option to go on.")


def _what_is_idle(config: ByteSplatTrainerConfig, ranks: int) -> list[Idle]:
    model, data = config.pipeline.model, config.pipeline.datamanager
    sampled, started = "strategy mcmc", "init-from"
    no_budget = config.machine.device_type == "cpu" and model.prune_budget is None and model.prune_share > 0
    events = config.is_tensorboard_enabled() or config.is_wandb_enabled() or config.is_comet_enabled()
    intervals = ("steps_per_eval_image", "steps_per_eval_all_images")
    unseen = {name for name in intervals if getattr(config, name) < config.max_num_iterations}  # beyond: "never"
    return [
        (model.strategy == "mcmc", f"with --{MODEL}.{sampled}", MODEL, _REFINED - _SAMPLED),
        (model.strategy != "mcmc", f"without --{MODEL}.{sampled}", MODEL, _SAMPLED - _REFINED),
        (model.prune_share == 0, f"with --{MODEL}.prune-share 0", MODEL, _PRUNED),
        (no_budget, f"on a CPU without --{MODEL}.prune-budget", MODEL, _PRUNED | {"prune_share"}),
        (model.init_from is not None, f"with --{MODEL}.{started}", MODEL, _RANDOM_START | {"random_init"}),
        (model.init_from is None, f"without --{MODEL}.{started}", MODEL, {"init_frame"}),
        (
            not model.use_scale_regularization,
            f"without --{MODEL}.use-scale-regularization True",
            MODEL,
            {"max_gauss_ratio"},
        ),
        (not model.use_bilateral_grid, f"without --{MODEL}.use-bilateral-grid True", MODEL, {"grid_shape"}),
        (
            model.camera_optimizer.mode == "off",
            f"without --{MODEL}.camera-optimizer.mode",
            f"{MODEL}.camera_optimizer",
            {"trans_l2_penalty", "rot_l2_penalty"},
        ),
        (model.num_downscales == 0, f"with --{MODEL}.num-downscales 0", MODEL, {"resolution_schedule"}),
        (model.sh_degree == 0, f"with --{MODEL}.sh-degree 0", MODEL, {"sh_degree_interval"}),
        (model.use_bilateral_grid, f"with --{MODEL}.use-bilateral-grid True", MODEL, {"fused_rasterizer"}),
        (config.machine.device_type != "cuda", "without a GPU", MODEL, {"fused_rasterizer"}),
        (ranks == 1, "with one rank", MODEL, {"gradient_exchange", "gradient_precision"}),
        (model.gradient_exchange == "dense", f"with --{MODEL}.gradient-exchange dense", MODEL, {"gradient_precision"}),
        ((data.views_per_round or ranks) == 1, "with one view a round", DATA, {"consolidate_views"}),
        (ranks == 1, "with one rank", PIPELINE, {"rebalance_threshold"}),
        (True, "for Gaussians", MODEL, _NERF),
        (True, "for Gaussians", "", {"prompt"}),
        (True, "a training step hands out no images", MODEL, {"output_depth_during_training"}),
        (True, f"--{DATA}.cache-images says where photos and masks are", DATA, {"masks_on_gpu", "images_on_gpu"}),
        (True, "evaluation is of one photo at random or of all", DATA, _EVERY_PHOTO),
        (True, f"with --{DATA}.train-cameras-sampling-strategy random", DATA, {"fps_reset_every"}),
        (True, "there are no batches of rays", "", {"steps_per_eval_batch"}),
        (True, "learning rates follow from the images seen", "", {"load_scheduler"}),
        (not events, f"with --vis {config.vis}, held-out photos are evaluated at the end only", "", unseen),
        (True, "progress lines and metrics.jsonl take its place", LOGGING, {"local_writer"}),
        (True, "a step is not made of the functions that it times", LOGGING, {"profiler"}),
    ]


def _idle(config: ByteSplatTrainerConfig, usual: ByteSplatTrainerConfig, table: list[Idle]) -> Iterator[str]:
    for applies, reason, place, names in table:
        ours, theirs = _at(config, place), _at(usual, place)
        for name in sorted(names):
            if applies and getattr(ours, name) != getattr(theirs, name):
                yield f"{_option(place, name)} ({reason})"


def _idle_optimizers(config: ByteSplatTrainerConfig, usual: ByteSplatTrainerConfig) -> Iterator[str]:
    """Optimizers of parameters that the model does not have."""
    model = config.pipeline.model
    missing = {
        "camera_opt": model.camera_optimizer.mode == "off" and f"without --{MODEL}.camera-optimizer.mode",
        "bilateral_grid": not model.use_bilateral_grid and f"without --{MODEL}.use-bilateral-grid True",
    }
    for group, reason in missing.items():
        if reason and config.optimizers.get(group) != usual.optimizers.get(group):
            yield f"{_option('optimizers', group)} ({reason})"


def _method_defaults(name: str | None) -> ByteSplatTrainerConfig:
    """What a method of ours sets; for another one that is built on ours, what bytesplat does."""
    from bytesplat_ns import config

    methods = (config.bytesplat, config.bytesplat_big, config.bytesplat_mcmc)
    by_name = {method.config.method_name: method.config for method in methods}
    return by_name.get(name, config.bytesplat.config)


def _at(config: Any, place: str) -> Any:
    return reduce(getattr, place.split("."), config) if place else config


def _option(place: str, name: str) -> str:
    return "--" + ".".join(filter(None, (place, name))).replace("_", "-")


def _refuse(found: list[str]) -> None:
    if found:
        raise ValueError("Options without effect: " + "; ".join(found) + ". Remove them to go on.")
