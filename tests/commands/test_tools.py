"""What ``ns-train`` leaves, and what nerfstudio's other tools make of it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from commands import SAVE_EVERY, STEPS, export
from pictures import decibels, read

from bytesplat_ns import ops, ply
from bytesplat_ns.ops.layout import Cameras, Gaussians

HELD_OUT = [1, 5, 9]
"""Numbers of the held-out photos in their file names."""


# ns-train -----------------------------------------------------------------------------------------------------------


def test_train_says_what_it_does(trained):
    _, printed = trained
    assert "9 photos" in printed, "of 12, three are held out"
    step = re.search(
        rf"step {STEPS}/{STEPS}  [\d.]+ steps/s  [\d,]+ Gaussians  loss 0\.\d{{4}}  PSNR \d+\.\d\d dB  ETA 0 min 00 s",
        printed,
    )
    assert step, printed
    assert "LPIPS is left out" in printed and "PSNR" in printed.split("held-out photos")[1]
    assert "Training Finished" in printed


def test_train_leaves_what_tools_read(trained, capture):
    run, _ = trained
    names = {path.name for path in run.folder.iterdir()}
    assert {"config.yml", "metrics.jsonl", "dataparser_transforms.json"} <= names
    saved = [*range(SAVE_EVERY, STEPS - 1, SAVE_EVERY), STEPS - 1]
    assert sorted(p.name for p in run.models.iterdir()) == [f"step-{step:09d}.ckpt" for step in saved]
    checkpoint = run.checkpoint(STEPS - 1)
    assert {"step", "pipeline", "optimizers", "schedulers", "scalers"} <= set(checkpoint)
    frame = json.loads((run.folder / "dataparser_transforms.json").read_text())
    assert np.shape(frame["transform"]) == (3, 4) and frame["scale"] > 0


def test_metrics_follow_the_run(trained):
    run, _ = trained
    steps = [line for line in run.metrics() if "loss" in line]
    assert [line["step"] for line in steps] == [line["images"] for line in steps] == list(range(1, STEPS + 1))
    assert len({line["gaussians"] for line in steps}) > 2, "Gaussians were added and removed"
    losses = [line["loss"] for line in steps if line["images"] > STEPS / 5]  # at full resolution by then
    assert np.mean(losses[-9:]) < 0.9 * np.mean(losses[:9])
    assert steps[-1]["gaussians"] == len(run.checkpoint(STEPS - 1)["pipeline"]["_model.gauss_params.means"])
    (held_out,) = (line for line in run.metrics() if "eval_psnr" in line)
    assert held_out["step"] == STEPS and 0 < held_out["eval_ssim"] < 1 and "eval_lpips" not in held_out


# ns-render and ns-eval ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def renders(trained, tmp_path_factory) -> Path:
    """What ``ns-render dataset`` writes: a folder for each output, with an image for each held-out photo."""
    import tyro
    from nerfstudio.scripts import render

    output = tmp_path_factory.mktemp("renders")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: False)
        words = "--load-config", trained[0].config, "--output-path", output, "--image-format", "png"
        tyro.cli(render.Commands, args=["dataset", *map(str, words)]).main()
    return output / "test"


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
    run, _ = trained
    printed = terminal.run("ns-eval", "--load-config", run.config, "--output-path", tmp_path / "metrics.json")
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
    read_back = ply.read_gaussians(export(trained[0], tmp_path))
    model, camera = pipeline.model, pipeline.datamanager.eval_dataset.cameras[0:1]
    with torch.no_grad():
        own, _ = model.render(camera)
    gaussians = Gaussians(**read_back, ids=torch.arange(len(read_back["means"])))
    to_world = torch.eye(4)
    to_world[:3] = camera.camera_to_worlds[0] * torch.tensor([1.0, -1.0, -1.0, 1.0])  # OpenGL to OpenCV axes
    cameras = Cameras(
        viewmats=to_world.inverse().contiguous()[None],
        intrinsics=torch.cat([camera.fx, camera.fy, camera.cx, camera.cy], dim=1),
        sizes=torch.cat([camera.width, camera.height], dim=1).int(),
        width=int(camera.width),
        height=int(camera.height),
    )
    again, _ = ops.render(gaussians, cameras, model.settings())
    # Left out of the file are Gaussians too faint to be drawn; the inverse above differs in the last bits.
    assert torch.allclose(again.rgb, own.rgb, atol=1e-3) and own.rgb.std() > 0.05
    assert torch.allclose(again.transmittance, own.transmittance, atol=1e-3)
