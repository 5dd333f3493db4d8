"""``bytesplat-export``: Gaussians of a run as a file for viewers and other programs."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, fields
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
from bytesplat_ns.splats.read import FADED, ShardedSplats, SplatError, Splats, open_checkpoint

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
        found = open_checkpoint(path)
        move = Similarity.identity()
        if self.frame == "original":
            move = Similarity.read(self.load_config.parent / "dataparser_transforms.json").inverse()

        # Rows, in the training frame.
        choice = _Choice.cat([self._choose(block) for block in found.blocks()])
        kept = choice.kept
        if not kept.any():
            raise ExportError(f"{path}: nothing is left to write. {choice.left_out()}")

        extent = _Extent()
        self._write(self._blocks(found, kept, move, extent), int(kept.sum()), run.antialiased)
        count, size = int(kept.sum()), self.output.stat().st_size / 1e6
        return (
            f"{self.output}: {count:,} of {len(found):,} Gaussians, SH degree {found.sh_degree}, {self.frame} frame, "
            f"{size:,.1f} MB, in {time.monotonic() - begin:.1f} s. {choice.left_out()}"
            f"{self._rounding(extent)}"
        ).rstrip()

    def _choose(self, block: Splats) -> _Choice:
        usable = block.usable()
        faint = usable & (block.parameters["opacities"][:, 0] < FADED)
        kept, cropped = usable & ~faint, torch.zeros_like(usable)
        if self.obb_center is not None and self.obb_scale is not None:
            inside = within_box(block.parameters["means"], self.obb_center, self.obb_rotation, self.obb_scale)
            kept, cropped = kept & inside, kept & ~inside
        return _Choice(usable, faint, cropped, kept)

    def _blocks(
        self, found: Splats | ShardedSplats, kept: Tensor, move: Similarity, extent: _Extent
    ) -> Iterator[dict[str, Tensor]]:
        """What is to be written, some at a time."""
        first = 0
        for block in found.blocks():
            rows = kept[first : first + len(block)]
            first += len(block)
            block.keep(rows)
            parameters = block.parameters if move.is_identity() else move.apply(block.parameters)
            extent.add(parameters)
            yield parameters

    def _rounding(self, extent: _Extent) -> str:
        """A warning where the file's numbers are too coarse for the Gaussians, as far from the origin they may be."""
        farthest, size = extent.farthest, extent.typical_size()
        is_spz = self.output.suffix.lower() == ".spz"
        rounding = 0.5 ** spz.fractional_bits(torch.tensor(farthest)[None]) / 2 if is_spz else farthest * 2**-24
        if rounding < 0.1 * size:
            return ""
        advice = "Crop away what is far, or" if is_spz else "In other programs,"
        advice += " stay in the training frame and move the result by dataparser_transforms.json."
        return (
            f"\nWARNING: coordinates up to {farthest:,.4g} are rounded to {rounding:.2g} in this format, and most "
            f"Gaussians are only {size:.2g} wide. {advice}"
        )

    def _write(self, blocks: Iterator[dict[str, Tensor]], count: int, antialiased: bool) -> None:
        """Writes the file aside and renames it: a full disk leaves what was there before."""
        aside = self.output.with_name(self.output.name + ".part")
        try:
            self.output.parent.mkdir(parents=True, exist_ok=True)
            if self.output.suffix.lower() == ".spz":
                parts = list(blocks)  # the format has all positions first, then all opacities, and so on
                parameters = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
                spz.write(aside, parameters, antialiased, self.spz_version)
            else:
                rgb = self.ply_color_mode == "rgb"
                ply.write_gaussian_blocks(aside, count, blocks, rgb, comments=[f"frame: {self.frame}"])
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


@dataclass
class _Choice:
    """Which of N Gaussians are written, and why the others are not: [N] bool."""

    usable: Tensor
    faint: Tensor
    cropped: Tensor
    kept: Tensor

    @staticmethod
    def cat(choices: list[_Choice]) -> _Choice:
        return _Choice(*[torch.cat([vars(choice)[f.name] for choice in choices]) for f in fields(_Choice)])

    def left_out(self) -> str:
        """The Gaussians that are not written, by reason."""
        reasons = {
            "with NaN or infinite values": ~self.usable,
            "fainter than 1/255": self.faint,
            "outside the box": self.cropped,
        }
        parts = [f"{int(rows.sum()):,} {reason}" for reason, rows in reasons.items() if rows.any()]
        return f"Left out: {', '.join(parts)}." if parts else ""


class _Extent:
    """How far from the origin Gaussians are, and how wide."""

    def __init__(self) -> None:
        self.farthest = 0.0
        self._sizes: list[Tensor] = []

    def add(self, parameters: dict[str, Tensor]) -> None:
        if len(parameters["means"]):
            self.farthest = max(self.farthest, float(parameters["means"].abs().max()))
            self._sizes.append(parameters["scales"].amax(dim=1))

    def typical_size(self) -> float:
        return float(torch.cat(self._sizes).median().exp())


def main(arguments: list[str] | None = None) -> None:
    """Entry point of ``bytesplat-export``."""
    import tyro

    try:
        print(tyro.cli(Export, args=arguments, description=Export.__doc__).main())
    except (ExportError, RunConfigError, CheckpointError, SplatError, FrameError, spz.SpzError) as error:
        sys.exit(f"bytesplat-export: {error}")
