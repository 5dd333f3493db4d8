"""Means over photos."""

import pytest

pytest.importorskip("nerfstudio")

from bytesplat_ns.run.evaluation import averages


def test_a_metric_is_averaged_over_the_photos_that_have_it():
    rows = [{"psnr": 20.0}, {"psnr": 30.0, "ssim": 0.5}, {"psnr": 25.0, "ssim": 0.7}]
    assert averages(rows, with_std=False) == pytest.approx({"psnr": 25.0, "ssim": 0.6})
    both = averages(rows, with_std=True)
    assert both == pytest.approx({"psnr": 25.0, "psnr_std": 5.0, "ssim": 0.6, "ssim_std": 0.02**0.5})


def test_one_photo_has_no_deviation():
    assert averages([{"psnr": 20.0}], with_std=True) == {"psnr": 20.0}
