"""``bytesplat-export``: Gaussians of a run as a file for viewers and other programs."""

from __future__ import annotations

import os
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from scipy.spatial.transform import Rotation
from torch import Tensor

from bytesplat_ns.run import checkpoint
from bytesplat_ns.run.checkpoint import CheckpointError
from bytesplat_ns.run.stored_config import RunConfigError, read_run_config
from bytesplat_ns.splats import ply, spz
from bytesplat_ns.splats.frames import FrameError, Similarity
from bytesplat_ns.splats.read import FADED, SplatError, read_checkpoint

Triple = tuple[float, float, float]


class ExportError(ValueError):
    """Options that do not fit together, or nothing to write."""


@dataclass
class Export:
    """Write the Gaussians of a run (of bytesplat or splatfacto) to a file. Needs neither its photos nor a GPU."""

    load_config: Path
    """config.yml of the run"""
    output: Path
    """file to write; its ending chooses the format: .ply (3DGS, float32) or .spz (a tenth of the size)"""
    load_step: int | None = None
    """step of the checkpoint (default: the latest)"""
    frame: Literal["training", "original"] = "training"
    """frame of the result: of training, as ns-export writes it and the viewer shows it, or the original one of the
    capture (COLMAP's, for data from ns-process-data)"""
    ply_color_mode: Literal["sh_coeffs", "rgb"] = "sh_coeffs"
    """colours of a .ply: spherical harmonics, or red, green, blue of the constant one"""
    spz_version: Literal[3, 4] = 3
    """version of an .spz: 3, which more programs read, or 4, which is smaller (zstd instead of gzip)"""
    obb_center: Triple | None = None
    """centre of the box to crop to, in the training frame, as the viewer gives it"""
    obb_rotation: Triple = (0.0, 0.0, 0.0)
    """roll, pitch and yaw of the box, radians"""
    obb_scale: Triple | None = None
    """sides of the box"""

    def __post_init__(self) -> None:
        ending = self.output.suffix.lower()
        if ending not in (".ply", ".spz") or self.output.name.lower().endswith(".compressed.ply"):
            raise ExportError(
                f"--output {self.output}: the ending must be .ply or .spz. Other formats (.compressed.ply, .sog, "
                ".splat) can be made from a .ply, for instance with PlayCanvas' splat-transform."
            )
        if ending == ".spz" and self.ply_color_mode == "rgb":
            raise ExportError("--ply-color-mode rgb is for .ply; an .spz always holds harmonics.")
        if ending == ".ply" and self.spz_version != 3:
            raise ExportError("--spz-version is for .spz, and --output ends in .ply.")
        if (self.obb_center is None) != (self.obb_scale is None) or (any(self.obb_rotation) and not self.obb_scale):
            raise ExportError("A crop box needs both --obb-center and --obb-scale (--obb-rotation is optional).")

    def main(self) -> str:
        """Writes the file; returns the line that says what was written and left out."""
        begin = time.monotonic()
        run = read_run_config(self.load_config)
        if not run.models.is_dir():
            raise ExportError(f"{run.models} is missing: the checkpoints must lie beside {self.load_config}.")
        path = checkpoint.find(run.models, self.load_step)
        found = read_checkpoint(path)
        move = Similarity.identity()
        if self.frame == "original":
            move = Similarity.read(self.load_config.parent / "dataparser_transforms.json").inverse()

        # Rows, in the training frame.
        total, usable = len(found), found.usable()
        faint = usable & (found.parameters["opacities"][:, 0] < FADED)
        kept = usable & ~faint
        cropped = torch.zeros_like(kept)
        if self.obb_center is not None and self.obb_scale is not None:
            inside = within_box(found.parameters["means"], self.obb_center, self.obb_rotation, self.obb_scale)
            kept, cropped = kept & inside, kept & ~inside
        if not kept.any():
            raise ExportError(f"{path}: nothing is left to write. {_left_out(usable, faint, cropped)}")
        found.keep(kept)

        parameters = found.parameters if move.is_identity() else move.apply(found.parameters)
        self._write(parameters, run.antialiased)
        size = self.output.stat().st_size / 1e6
        return (
            f"{self.output}: {len(found):,} of {total:,} Gaussians, SH degree {found.sh_degree}, {self.frame} frame, "
            f"{size:,.1f} MB, in {time.monotonic() - begin:.1f} s. {_left_out(usable, faint, cropped)}"
            f"{self._rounding(parameters)}"
        ).rstrip()

    def _rounding(self, parameters: dict[str, Tensor]) -> str:
        """A warning where the file's numbers are too coarse for the Gaussians, as far from the origin they may be."""
        means = parameters["means"]
        farthest, size = float(means.abs().max()), float(parameters["scales"].amax(dim=1).median().exp())
        is_spz = self.output.suffix.lower() == ".spz"
        rounding = 0.5 ** spz.fractional_bits(means) / 2 if is_spz else farthest * 2**-24
        if rounding < 0.1 * size:
            return ""
        advice = "Crop away what is far, or" if is_spz else "In other programs,"
        advice += " stay in the training frame and move the result by dataparser_transforms.json."
        return (
            f"\nWARNING: coordinates up to {farthest:,.4g} are rounded to {rounding:.2g} in this format, and most "
            f"Gaussians are only {size:.2g} wide. {advice}"
        )

    def _write(self, parameters: dict[str, Tensor], antialiased: bool) -> None:
        """Writes the file aside and renames it: a full disk leaves what was there before."""
        aside = self.output.with_name(self.output.name + ".part")
        try:
            self.output.parent.mkdir(parents=True, exist_ok=True)
            if self.output.suffix.lower() == ".spz":
                spz.write(aside, parameters, antialiased, self.spz_version)
            else:
                rgb = self.ply_color_mode == "rgb"
                ply.write_gaussians(aside, parameters, rgb, comments=[f"frame: {self.frame}"])
            os.replace(aside, self.output)
        except OSError as error:
            raise ExportError(
                f"--output {self.output} could not be written: {error}. Free some space, or choose another place."
            ) from error
        finally:
            with suppress(OSError):
                aside.unlink()


def within_box(points: Tensor, center: Triple, rotation: Triple, sides: Triple) -> Tensor:
    """[N] bool: which points [N, 3] lie inside a box, turned by roll, pitch and yaw (radians) about its centre."""
    turn = torch.from_numpy(Rotation.from_euler("xyz", rotation).as_matrix())
    local = (points.double() - torch.tensor(center, dtype=torch.float64)) @ turn
    return (local.abs() < torch.tensor(sides, dtype=torch.float64) / 2).all(dim=1)


def _left_out(usable: Tensor, faint: Tensor, cropped: Tensor) -> str:
    """The Gaussians that are not written, by reason."""
    reasons = {
        "with NaN or infinite values": ~usable,
        "fainter than 1/255": faint,
        "outside the box": cropped,
    }
    parts = [f"{int(rows.sum()):,} {reason}" for reason, rows in reasons.items() if rows.any()]
    return f"Left out: {', '.join(parts)}." if parts else ""


def main(arguments: list[str] | None = None) -> None:
    """Entry point of ``bytesplat-export``."""
    import tyro

    try:
        print(tyro.cli(Export, args=arguments, description=Export.__doc__).main())
    except (ExportError, RunConfigError, CheckpointError, SplatError, FrameError, spz.SpzError) as error:
        sys.exit(f"bytesplat-export: {error}")
