"""Gaussians out of a run: ``bytesplat-export``, and what makes nerfstudio's own exporter fast."""

from bytesplat_ns.export.stock import speed_up_exporter

__all__ = ["speed_up_exporter"]
