"""Starting a run from Gaussians that exist: which of them, with which harmonics, in which frame."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from bytesplat_ns.splats import read as splats
from bytesplat_ns.splats.frames import Similarity
from bytesplat_ns.splats.initialization import Parameters
from bytesplat_ns.splats.read import SplatError, Splats

Frame = Literal["training", "original"]


@dataclass
class Start:
    """Gaussians to start from."""

    parameters: Parameters
    sh_degree: int  # up to which harmonics are meant to be seen from the beginning
    notes: list[str]  # what was done to them, for the log


def start_from(
    path: Path, frame: Frame, to_training: Similarity, sh_degree: int, max_gaussians: int, antialiased: bool
) -> Start:
    """Reads Gaussians and fits them to a run.

    Args:
        path: a checkpoint (of this method or splatfacto), a PLY or an SPZ.
        frame: of the file; a checkpoint's ``training`` frame is that of its own run.
        to_training: from the original frame of this run's capture to its training frame.
        sh_degree: of this run; missing harmonics are zero, higher ones are cut off.
        max_gaussians: if there are more, those of the largest opacity x area are kept.
        antialiased: how this run draws Gaussians.

    Raises:
        SplatError: the file cannot be read, or holds no usable Gaussian.
    """
    found = splats.read(path)
    notes = [f"Starting from {path} ({found.source}): {len(found):,} Gaussians, SH degree {found.sh_degree}."]
    usable = found.usable()
    if not usable.any():
        raise SplatError(f"{path}: all {len(found):,} Gaussians have NaN or infinite values. Choose another file.")
    if not usable.all():
        notes.append(f"{int((~usable).sum()):,} Gaussians with NaN or infinite values are left out.")
        found.keep(usable)
    if len(found) > max_gaussians:
        notes.append(
            f"The {max_gaussians:,} of the largest opacity x area are kept, of {len(found):,} "
            "(--pipeline.model.max-gaussians)."
        )
        found.keep(_prominence(found.parameters).topk(max_gaussians).indices.sort().values)
    degree, parameters = found.sh_degree, found.parameters
    if degree != sh_degree:
        what = "padded with zeros" if degree < sh_degree else "cut off"
        notes.append(f"Harmonics of degree {degree} are {what} to degree {sh_degree} (--pipeline.model.sh-degree).")
        rest = torch.zeros(len(found), (sh_degree + 1) ** 2 - 1, 3)
        shared = min(rest.shape[1], parameters["features_rest"].shape[1])
        rest[:, :shared] = parameters["features_rest"][:, :shared]
        parameters = {**parameters, "features_rest": rest}
    move, note = _move(found, frame, to_training)
    if not move.is_identity():
        parameters = move.apply(parameters)
    notes.append(note)
    if found.antialiased not in (None, antialiased):
        mode = "antialiased" if found.antialiased else "classic"
        notes.append(f"WARNING: they were made for --pipeline.model.rasterize-mode {mode}, and look different without.")
    return Start(parameters, min(degree, sh_degree), notes)


def _prominence(parameters: Parameters) -> Tensor:
    """[N] log of opacity times the area of the largest cross-section."""
    area = parameters["scales"].sum(dim=1) - parameters["scales"].amin(dim=1)
    return logsigmoid(parameters["opacities"][:, 0]) + area


def _move(found: Splats, frame: Frame, to_training: Similarity) -> tuple[Similarity, str]:
    """How to bring the Gaussians into this run's training frame, and what to say about it."""
    if frame == "original":
        return to_training, "They are moved from the original frame of the capture into the training frame."
    theirs = None if found.run is None else found.run / "dataparser_transforms.json"
    if theirs is not None and theirs.is_file():
        move = to_training.after(Similarity.read(theirs).inverse())
        if move.is_identity():
            return move, "Its run has the same training frame."
        return move, f"They are moved from the training frame of their run ({theirs}) into this run's."
    return Similarity.identity(), (
        "They are taken to be in this run's training frame, as ns-export writes them; for Gaussians in the original "
        "frame of the capture give --pipeline.model.init-frame original."
    )
