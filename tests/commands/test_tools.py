"""What ``ns-train`` leaves, and what nerfstudio's other tools make of it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from commands import SAVE_EVERY, STEPS, export, render
from pictures import decibels, read

from bytesplat_ns import ops
from bytesplat_ns.ops.layout import Cameras, Gaussians
from bytesplat_ns.splats import ply
from bytesplat_ns.views import world_to_camera

HELD_OUT = [1, 5, 9]
"""Numbers of the held-out photos in their file names."""


# ns-train -----------------------------------------------------------------------------------------------------------


def test_train_says_what_it_does(trained):
    printed = trained.printed
    assert "9 photos" in printed, "of 12, three are held out"
    step = re.search(
        rf"step {STEPS}/{STEPS}  [\d.]+ steps/s  [\d,]+ Gaussians  loss 0\.\d{{4}}  PSNR \d+\.\d\d dB  ETA 0 min 00 s",
        printed,
    )
    assert step, printed
    assert "LPIPS is left out" in printed and "PSNR" in printed.split("held-out photos")[1]
    assert "Training Finished" in printed


def test_train_leaves_what_tools_read(trained, capture):
    names = {path.name for path in trained.folder.iterdir()}
    assert {"config.yml", "metrics.jsonl", "dataparser_transforms.json"} <= names
    saved = [*range(SAVE_EVERY, STEPS - 1, SAVE_EVERY), STEPS - 1]
    assert sorted(p.name for p in trained.models.iterdir()) == [f"step-{step:09d}.ckpt" for step in saved]
    checkpoint = trained.checkpoint(STEPS - 1)
    assert {"step", "pipeline", "optimizers", "schedulers", "scalers"} <= set(checkpoint)
    frame = json.loads((trained.folder / "dataparser_transforms.json").read_text())
    assert np.shape(frame["transform"]) == (3, 4) and frame["scale"] > 0


def test_metrics_follow_the_run(trained):
    steps = [line for line in trained.metrics() if "loss" in line]
    assert [line["step"] for line in steps] == [line["images"] for line in steps] == list(range(1, STEPS + 1))
    assert len({line["gaussians"] for line in steps}) > 2, "Gaussians were added and removed"
    losses = [line["loss"] for line in steps if line["images"] > STEPS / 5]  # at full resolution by then
    assert np.mean(losses[-9:]) < 0.9 * np.mean(losses[:9])
    assert steps[-1]["gaussians"] == len(trained.checkpoint(STEPS - 1)["pipeline"]["_model.gauss_params.means"])
    (held_out,) = (line for line in trained.metrics() if "eval_psnr" in line)
    assert held_out["step"] == STEPS and 0 < held_out["eval_ssim"] < 1 and "eval_lpips" not in held_out


# ns-render and ns-eval ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def renders(trained, tmp_path_factory) -> Path:
    """What ``ns-render dataset`` writes of the held-out photos: a folder for each output, an image for each photo."""
    return render("dataset", trained, tmp_path_factory.mktemp("renders")) / "test"


def test_render_writes_every_held_out_photo(renders, capture):
    names = [f"frame_{number:05d}.png" for number in HELD_OUT]
    for output in ("rgb", "gt-rgb", "depth", "accumulation"):
        assert sorted(p.name for p in (renders / output).iterdir()) == names
    for name in names:
        assert np.array_equal(read(renders / "gt-rgb" / name), read(capture / "images" / name))


def test_render_is_what_the_model_sees(renders, pipeline):
    seen = pipeline.model.get_outputs_for_camera(pipeline.datamanager.eval_dataset.cameras[1:2])["rgb"]
    written = read(renders / "rgb" / f"frame_{HELD_OUT[1]:05d}.png")
    assert np.abs(255 * seen.numpy() - written).max() <= 1, "up to the file's 8 bits"


def test_eval_agrees_with_the_rendered_files(terminal, trained, renders, tmp_path):
    printed = terminal.run("ns-eval", "--load-config", trained.config, "--output-path", tmp_path / "metrics.json")
    assert "LPIPS is left out" in printed
    written = json.loads((tmp_path / "metrics.json").read_text())
    assert written["method_name"] == "bytesplat"
    assert written["checkpoint"].endswith(f"step-{STEPS - 1:09d}.ckpt")
    results = written["results"]
    files = sorted(p.name for p in (renders / "rgb").iterdir())
    psnr = [decibels(read(renders / "rgb" / name), read(renders / "gt-rgb" / name)) for name in files]
    assert results["psnr"] == pytest.approx(np.mean(psnr), abs=0.05), "the files' 8 bits cost less"
    assert 0 < results["ssim"] < 1 and "lpips" not in results
    assert results["psnr_std"] == pytest.approx(np.std(psnr, ddof=1), abs=0.05)


# ns-export ----------------------------------------------------------------------------------------------------------


def test_exported_gaussians_render_the_same_image(trained, pipeline, tmp_path):
    read_back = ply.read_gaussians(export("gaussian-splat", trained, tmp_path) / "splat.ply")
    model, camera = pipeline.model, pipeline.datamanager.eval_dataset.cameras[0:1]
    with torch.no_grad():
        own, _ = model.render(camera)
    gaussians = Gaussians(**read_back, ids=torch.arange(len(read_back["means"])))
    cameras = Cameras(
        viewmats=world_to_camera(camera.camera_to_worlds),
        intrinsics=torch.cat([camera.fx, camera.fy, camera.cx, camera.cy], dim=1),
        sizes=torch.cat([camera.width, camera.height], dim=1).int(),
        width=int(camera.width),
        height=int(camera.height),
    )
    again, _ = ops.render(gaussians, cameras, model.settings())
    # To the last bit, though the file leaves out Gaussians: they are too faint to be drawn.
    assert torch.equal(again.rgb, own.rgb) and own.rgb.std() > 0.05
    assert torch.equal(again.transmittance, own.transmittance)


def test_exported_poses_are_those_of_the_capture(trained, pipeline, tmp_path):
    export("cameras", trained, tmp_path)
    data = pipeline.datamanager
    for name, dataset in ("train", data.train_dataset), ("eval", data.eval_dataset):
        frames = json.loads((tmp_path / f"transforms_{name}.json").read_text())
        poses = torch.tensor([frame["transform"] for frame in frames])
        assert torch.equal(poses, dataset.cameras.camera_to_worlds)


# Camera paths, as the viewer saves them -----------------------------------------------------------------------------


@pytest.fixture
def follow(trained, pipeline, tmp_path, monkeypatch):
    """Renders a path with the pose of the first held-out photo, cropped to a cube: uint8 [72, 96, 3]."""
    monkeypatch.setattr("nerfstudio.scripts.render.install_checks.check_ffmpeg_installed", lambda: None)  # no video
    camera = pipeline.datamanager.eval_dataset.cameras[0]
    pose = [*camera.camera_to_worlds.flatten().tolist(), 0, 0, 0, 1]
    fov = float(torch.rad2deg(2 * torch.atan(camera.height / 2 / camera.fy)))

    def follow(crop: dict | None) -> np.ndarray:
        path = {"render_height": 72, "render_width": 96, "seconds": 1, "crop": crop}
        path["camera_path"] = [{"camera_to_world": pose, "fov": fov}]
        (tmp_path / "path.json").write_text(json.dumps(path))
        options = "--camera-path-filename", tmp_path / "path.json", "--output-format", "images"
        return read(render("camera-path", trained, tmp_path / "path", *options) / "00000.png")

    return follow


def cube(x: float, side: float) -> dict:
    """A crop of the viewer: an axis-parallel cube around (x, 0, 0). Splatfacto keeps its own background there."""
    black = {"r": 0, "g": 0, "b": 0}
    return {"crop_bg_color": black, "crop_center": [x, 0.0, 0.0], "crop_scale": [side] * 3}


def test_a_path_through_a_photo_renders_it(follow, renders):
    photo = read(renders / "rgb" / f"frame_{HELD_OUT[0]:05d}.png")
    assert np.abs(follow(None).astype(int) - photo).max() <= 1, "8 bits, and the angle's last digits"


def test_a_crop_leaves_the_rest_to_the_background(follow):
    whole, part, nothing = follow(cube(0.0, side=100.0)), follow(cube(0.0, side=0.5)), follow(cube(1000.0, side=1.0))
    assert np.array_equal(whole, follow(None))
    assert nothing.std(axis=(0, 1)).max() == 0, "one colour"
    share = [(picture == nothing).all(axis=2).mean() for picture in (whole, part)]
    assert share[0] < share[1] < 1
