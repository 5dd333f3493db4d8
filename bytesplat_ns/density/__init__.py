"""Density control: which Gaussians a scene has, and when that changes."""
