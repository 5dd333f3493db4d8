"""Gaussians out of a run: ``bytesplat-export``, and what makes nerfstudio's own exporter fast and forgiving."""
