"""Two pictures of a run: a held-out photo beside its rendering and their difference, and the training curve."""

from __future__ import annotations

import json
from pathlib import Path

import matplotlib
import numpy as np
from numpy import ndarray as Array
from PIL import Image

matplotlib.use("Agg")
from matplotlib import pyplot as plt

ERROR_SCALE = 0.2
"""Mean absolute difference over the channels, of 0 to 1, that is drawn brightest."""


def read_comparison(path: Path) -> tuple[Array, Array]:
    """Photo and rendering, both float [H, W, 3] in 0 to 1, from the picture that holds them side by side."""
    both = np.asarray(Image.open(path).convert("RGB")) / 255.0
    half = both.shape[1] // 2
    return both[:, :half], both[:, half:]


def psnr(photo: Array, rendering: Array) -> float:
    """Peak signal-to-noise ratio in dB of images in 0 to 1."""
    return float(-10 * np.log10(max(np.mean((photo - rendering) ** 2), 1e-12)))


def typical(comparisons: list[Path]) -> Path:
    """The comparison of median quality: neither the best view nor the worst stands for the run."""
    return sorted(comparisons, key=lambda path: psnr(*read_comparison(path)))[(len(comparisons) - 1) // 2]


def draw_picture(photo: Array, rendering: Array, output: Path) -> None:
    """Writes photo | rendering | error, images float [H, W, 3] in 0 to 1."""
    error = np.abs(photo - rendering).mean(-1)
    height, width = error.shape
    figure, axes = plt.subplots(1, 3, figsize=(12.8, 12 / 3 * height / width + 0.5), layout="constrained")
    axes[0].imshow(photo)
    axes[0].set_title("held-out photo")
    axes[1].imshow(rendering)
    axes[1].set_title(f"rendering, {psnr(photo, rendering):.1f} dB")
    shown = axes[2].imshow(error, cmap="magma", vmin=0, vmax=ERROR_SCALE)
    axes[2].set_title("absolute error")
    for axis in axes:
        axis.set_axis_off()
    figure.colorbar(shown, ax=axes[2], fraction=0.036, pad=0.02)
    figure.savefig(output, dpi=120)
    plt.close(figure)


def read_metrics(path: Path) -> tuple[dict[str, Array], dict[str, Array]]:
    """Columns of the training reports and of the evaluations in a run's ``metrics.jsonl`` (one object a line).

    Raises:
        ValueError: the file holds no training report.
    """
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    trained = [line for line in lines if "loss" in line]
    evaluated = [line for line in lines if "eval_psnr" in line]
    if not trained:
        raise ValueError(f"{path} holds no line with 'loss': the run was too short to report its training.")
    return _columns(trained, ("step", "loss", "psnr", "gaussians")), _columns(evaluated, ("step", "eval_psnr"))


def _columns(lines: list[dict[str, float]], names: tuple[str, ...]) -> dict[str, Array]:
    return {name: np.array([line[name] for line in lines], float) for name in names}


def draw_curve(metrics: Path, output: Path) -> None:
    """Writes PSNR, loss and number of Gaussians against the step, from a run's ``metrics.jsonl``."""
    training, evaluation = read_metrics(metrics)
    figure, axes = plt.subplots(1, 3, figsize=(12.8, 3.4), layout="constrained")
    axes[0].plot(training["step"], training["psnr"], lw=1, label="training photo")
    if evaluation["step"].size:
        axes[0].plot(evaluation["step"], evaluation["eval_psnr"], "o-", label="held-out photos")
    axes[0].legend()
    axes[1].plot(training["step"], training["loss"], lw=1)
    axes[1].set_yscale("log")
    axes[2].plot(training["step"], training["gaussians"], lw=1)
    for axis, title in zip(axes, ("PSNR, dB", "loss", "Gaussians"), strict=True):
        axis.set_title(title)
        axis.set_xlabel("step")
        axis.grid(alpha=0.3)
    figure.savefig(output, dpi=120)
    plt.close(figure)
