"""Checkpoints and run folders as nerfstudio leaves them, made without it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

CONFIG = """\
!!python/object:nerfstudio.engine.trainer.TrainerConfig
_target: !!python/name:nerfstudio.engine.trainer.Trainer ''
output_dir: !!python/object/apply:pathlib.PosixPath
- outputs
relative_model_dir: !!python/object/apply:pathlib.PosixPath
- nerfstudio_models
pipeline: !!python/object:nerfstudio.pipelines.base_pipeline.VanillaPipelineConfig
  model: !!python/object:nerfstudio.models.splatfacto.SplatfactoModelConfig
    _target: &id001 !!python/name:nerfstudio.models.splatfacto.SplatfactoModel ''
    collider_params: &id002
      far_plane: 6.0
    rasterize_mode: {mode}
    grid_shape: !!python/tuple
    - 16
    - 16
    - 8
    again: *id002
"""
"""The parts of a ``config.yml`` that matter, with every kind of tag that nerfstudio writes."""


def checkpoint(path: Path, parameters: dict[str, Tensor], layout: str = "new", **sections: Any) -> Path:
    """A checkpoint of splatfacto, numpy scalars and all. ``layout``: names of parameters, "new" or "old"."""
    prefix = "_model.gauss_params." if layout == "new" else "_model."
    state = {
        "step": 29_999,
        "pipeline": {
            "datamanager.unused": torch.zeros(1),
            **{prefix + name: values for name, values in parameters.items()},
            "_model.device_indicator_param": torch.zeros(0),
        },
        "optimizers": {"means": {"param_groups": [{"lr": np.float64(1.6e-6)}]}},
        "schedulers": {"means": {"_last_lr": [np.float64(1.6e-6)]}},
        "scalers": {},
        **sections,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(state, path)
    return path


def run(
    folder: Path,
    parameters: dict[str, Tensor],
    transform: np.ndarray | None = None,
    scale: float = 1.0,
    mode: str = "classic",
    step: int = 29_999,
) -> Path:
    """A run with one checkpoint; returns its ``config.yml``."""
    checkpoint(folder / f"nerfstudio_models/step-{step:09d}.ckpt", parameters)
    if transform is not None:
        content = {"transform": np.asarray(transform).tolist(), "scale": scale}
        (folder / "dataparser_transforms.json").write_text(json.dumps(content))
    config = folder / "config.yml"
    config.write_text(CONFIG.replace("{mode}", mode))
    return config
