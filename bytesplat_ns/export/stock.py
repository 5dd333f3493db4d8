"""``ns-export gaussian-splat`` on our models: quick, and without dropping a scene for one number.

Nerfstudio's own loop writes value by value, which takes minutes for large scenes, and its filter lets one NaN in a
coordinate drop all Gaussians. Nothing else about the command is changed.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import torch
from nerfstudio.utils.rich_utils import CONSOLE

from bytesplat_ns.splats.ply import write_vertices

if TYPE_CHECKING:
    from bytesplat_ns.model import ByteSplatModel


def exporter() -> Any | None:
    """Nerfstudio's ``ExportGaussianSplat`` where the exporter is what runs (it is never imported for this)."""
    found = getattr(sys.modules.get("nerfstudio.scripts.exporter"), "ExportGaussianSplat", None)
    return found or getattr(sys.modules.get("__main__"), "ExportGaussianSplat", None)  # run as a script


def speed_up_exporter() -> None:
    """Replaces the exporter's ``write_ply`` by one that writes in blocks."""
    found = exporter()
    if found is not None:
        found.write_ply = staticmethod(write_vertices)


def leave_out_non_finite(model: ByteSplatModel) -> None:
    """Drops Gaussians with NaN or infinite values, one by one, and says how many. They are never drawn."""
    parameters = model.gauss_params
    finite = torch.stack([p.detach().isfinite().flatten(1).all(dim=1) for p in parameters.values()]).all(dim=0)
    lost = int((~finite).sum())
    if lost:
        for name, parameter in list(parameters.items()):
            parameters[name] = torch.nn.Parameter(parameter.detach()[finite])
        model.ids = model.ids[finite]
        CONSOLE.print(f"{lost:,} of {len(finite):,} Gaussians have NaN or infinite values and are left out.")
