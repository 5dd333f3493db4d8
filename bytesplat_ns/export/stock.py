"""Makes nerfstudio's exporter write a PLY in one piece: its own loop goes value by value, minutes for large scenes."""

from __future__ import annotations

import sys

from bytesplat_ns.ply import write_vertices


def speed_up_exporter() -> None:
    """Replaces ``ExportGaussianSplat.write_ply`` where the exporter is what runs (it is never imported for this)."""
    exporter = getattr(sys.modules.get("nerfstudio.scripts.exporter"), "ExportGaussianSplat", None)
    if exporter is None:  # run as a script, or another command
        exporter = getattr(sys.modules.get("__main__"), "ExportGaussianSplat", None)
    if exporter is not None:
        exporter.write_ply = staticmethod(write_vertices)
