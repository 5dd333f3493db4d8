"""The demo's pictures, from made-up results."""

from __future__ import annotations

import json

import numpy as np
import pytest
from PIL import Image

from bytesplat_ns.demo import report


def comparison(path, noise, seed=0):
    """Writes photo and noisy rendering side by side, as the evaluation does."""
    draw = np.random.default_rng(seed)
    photo = draw.uniform(0.2, 0.8, (18, 24, 3))
    rendering = photo + noise * draw.choice([-1.0, 1.0], photo.shape)
    Image.fromarray((255 * np.concatenate([photo, rendering], 1) + 0.5).astype(np.uint8)).save(path)
    return path


def test_a_comparison_is_split_into_photo_and_rendering(tmp_path):
    photo, rendering = report.read_comparison(comparison(tmp_path / "a.png", 0.1))
    assert photo.shape == rendering.shape == (18, 24, 3)
    assert report.psnr(photo, rendering) == pytest.approx(20.0, abs=0.2)  # error 0.1, rounded to 8 bits


def test_the_typical_comparison_is_the_median(tmp_path):
    paths = [comparison(tmp_path / f"{i}.png", noise) for i, noise in enumerate((0.2, 0.01, 0.05, 0.1, 0.02))]
    assert report.typical(paths) == paths[2]


def test_the_picture_shows_photo_rendering_and_error(tmp_path):
    photo = np.zeros((18, 24, 3))
    photo[..., 0] = 1.0  # red
    rendering = np.zeros((18, 24, 3))
    rendering[..., 2] = 1.0  # blue
    report.draw_picture(photo, rendering, tmp_path / "picture.png")
    picture = np.asarray(Image.open(tmp_path / "picture.png").convert("RGB"))
    height, width = picture.shape[:2]
    middle = picture[height // 2]
    assert tuple(middle[width // 6]) == (255, 0, 0)
    assert tuple(middle[width // 2]) == (0, 0, 255)
    assert middle[width * 5 // 6].min() > 150  # an error beyond the scale: the brightest end of the colour map


def test_the_curve_reads_training_and_evaluation_lines(tmp_path):
    lines = [
        {"step": s, "images": s, "loss": 1 / s, "psnr": 10 + s / 10, "gaussians": 100 * s, "seconds": s / 5}
        for s in range(10, 200, 10)
    ]
    lines.insert(5, {"step": 55, "images": 55, "eval_psnr": 17.5, "eval_ssim": 0.6, "seconds": 11.0})
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))

    training, evaluation = report.read_metrics(metrics)
    np.testing.assert_allclose(training["loss"], 1 / training["step"])
    assert evaluation["step"].tolist() == [55] and evaluation["eval_psnr"].tolist() == [17.5]

    report.draw_curve(metrics, tmp_path / "curve.png")
    assert np.asarray(Image.open(tmp_path / "curve.png").convert("L")).std() > 5  # something is drawn


def test_a_run_that_reported_nothing_is_named(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "eval_psnr": 9.0}\n')
    with pytest.raises(ValueError, match=r"metrics\.jsonl"):
        report.read_metrics(tmp_path / "metrics.jsonl")
