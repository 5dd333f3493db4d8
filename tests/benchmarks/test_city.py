"""The city benchmark: what it trains is a city, deterministic, and the pipeline's own step improves it."""

from __future__ import annotations

import json
import sys

import city
import city_scene
import pytest
import torch

SMALL = ["--views", "9", "--width", "96", "--height", "64", "--device", "cpu"]


def run(monkeypatch: pytest.MonkeyPatch, *options: object) -> None:
    monkeypatch.setattr(sys, "argv", ["city.py", *SMALL, *map(str, options)])
    monkeypatch.setenv("BYTESPLAT_COMMIT", "of the test")
    city.main()


def test_any_part_can_be_made_anywhere(monkeypatch):
    whole = city_scene.City(5000, seed=3)
    monkeypatch.setattr(city_scene, "CHUNK", 999)
    gaussians, rows = whole.gaussians("cpu"), torch.tensor([4999, 0, 1234])
    for name, part in whole.parameters(rows).items():
        assert torch.equal(getattr(gaussians, name)[rows], part), name
        assert getattr(gaussians, name).isfinite().all()
    assert not torch.equal(whole.parameters(rows)["means"], city_scene.City(5000, seed=4).parameters(rows)["means"])
    sides = gaussians.means.abs().amax(dim=0)
    assert 0.9 < sides[0] < 1.1 and 0.9 < sides[1] < 1.1 and gaussians.means[:, 2].min() >= 0

    # The perturbed copy holds each Gaussian at most once, whatever its order.
    untouched = city_scene.Disorder(kept=0.8, noise=0.0)
    lots, mixed = (city_scene.start(whole, 4000, untouched, "cpu", order)["means"] for order in ("lots", "mixed"))
    assert not torch.equal(lots, mixed)
    assert torch.equal(lots.unique(dim=0), mixed.unique(dim=0)) and len(lots.unique(dim=0)) == 4000


@pytest.mark.parametrize("density", ["fixed", "mcmc"])
def test_training_improves_the_city(density, monkeypatch, tmp_path):
    out = tmp_path / "city.json"
    run(monkeypatch, "--gaussians", 4000, "--steps", 15, "--density", density, "--out", out)
    (row,) = json.loads(out.read_text())["sizes"]
    assert row["gaussians"] == row["gaussians_after"] == 4000
    assert row["psnr_after"]["training"] > row["psnr_before"]["training"] + 1
    assert 0 < row["records_mean"] <= row["records_max"] <= 4000 < row["pairs_max"]
    assert row["ms_per_step"] > 0 and row["images_per_s"] > 0


def test_deferred_adam_changes_nothing(monkeypatch, tmp_path):
    """Through the whole pipeline: density control, and views that are looked at in between."""
    after = []
    for choice in ("on", "off"):
        out = tmp_path / f"{choice}.json"
        options = ("--gaussians", 2000, "--steps", 25, "--density", "default", "--deferred-adam", choice, "--out", out)
        run(monkeypatch, *options)
        (row,) = json.loads(out.read_text())["sizes"]
        assert row["deferred"] == (choice == "on")
        after.append([row["gaussians_after"], *row["psnr_after"].values()])
    assert after[0] == pytest.approx(after[1], abs=2e-3)


def test_the_folder_is_a_capture(monkeypatch, tmp_path):
    from nerfstudio.data.dataparsers.nerfstudio_dataparser import NerfstudioDataParserConfig

    run(monkeypatch, "--gaussians", 3000, "--write", tmp_path / "city")
    parser = NerfstudioDataParserConfig(data=tmp_path / "city", load_3D_points=True, downscale_factor=1).setup()
    outputs = parser.get_dataparser_outputs("train")
    assert len(outputs.image_filenames) == 9
    assert len(outputs.metadata["points3D_xyz"]) == 3750
