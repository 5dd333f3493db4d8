"""Gaussians out of a run and into another: ``bytesplat-export``, ``ns-export``, ``--pipeline.model.init-from``."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from commands import STEPS, Run, export, train

from bytesplat_ns.export.command import main as bytesplat_export
from bytesplat_ns.splats import ply
from bytesplat_ns.splats.read import SplatError

INIT, FRAME = "--pipeline.model.init-from", "--pipeline.model.init-frame"


def written(run: Run, output: Path, *options: str) -> Path:
    bytesplat_export(["--load-config", str(run.config), "--output", str(output), *options])
    return output


def said(capsys) -> str:
    """What was printed since the last time, with the breaks of lines undone."""
    return " ".join(word for word in capsys.readouterr().out.split() if not word.startswith("model.py:"))


def loaded(run: Run):
    """The pipeline of a run, as nerfstudio's tools load it."""
    from nerfstudio.utils.eval_utils import eval_setup

    return eval_setup(run.config)[1]


# Out ----------------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:To copy construct:UserWarning")
@pytest.mark.parametrize(
    "options",
    [
        "",
        "--ply-color-mode rgb",
        "--obb-center 0.1 0 0.1 --obb-rotation 0.3 -0.2 1 --obb-scale 0.8 1 0.9",
    ],
)
def test_both_exporters_write_the_same_gaussians(trained, tmp_path, options):
    theirs = ply.read_vertices(export("gaussian-splat", trained, tmp_path, *options.split()) / "splat.ply")
    ours = ply.read_vertices(written(trained, tmp_path / "ours.ply", *options.split()))
    assert list(ours) == list(theirs)
    assert 0 < len(ours["x"]) < len(trained.checkpoint(STEPS - 1)["pipeline"]["_model.ids"]) or "obb" not in options
    for name, values in theirs.items():
        np.testing.assert_array_equal(ours[name], values)


def test_ns_export_drops_only_what_is_not_finite(trained, tmp_path, capsys):
    whole = ply.read_vertices(export("gaussian-splat", trained, tmp_path / "whole") / "splat.ply")
    broken = Run(tmp_path / "scene/bytesplat/run")
    broken.models.mkdir(parents=True)
    broken.config.write_text(with_output(trained.config.read_text(), tmp_path))
    state = trained.checkpoint(STEPS - 1)
    drawn = (state["pipeline"]["_model.gauss_params.opacities"][:, 0] > -5).nonzero()[:, 0]
    state["pipeline"]["_model.gauss_params.means"][drawn[3], 0] = float("nan")
    state["pipeline"]["_model.gauss_params.scales"][drawn[5], 2] = float("inf")
    torch.save(state, broken.models / f"step-{STEPS - 1:09d}.ckpt")
    capsys.readouterr()
    rest = ply.read_vertices(export("gaussian-splat", broken, tmp_path / "rest") / "splat.ply")
    assert len(rest["x"]) == len(whole["x"]) - 2
    printed = said(capsys)
    assert f"2 of {len(state['pipeline']['_model.ids']):,} Gaussians have NaN or infinite values" in printed
    assert "NaN/Inf elements" not in printed, "said once"


def with_output(config: str, folder: Path) -> str:
    """The text of a ``config.yml`` with another ``output_dir``, where nerfstudio looks for checkpoints."""
    import yaml

    loaded = yaml.load(config, Loader=yaml.Loader)
    loaded.output_dir = folder
    return yaml.dump(loaded)


def test_the_original_frame_is_that_of_the_capture(capture, tmp_path):
    """A run of no steps has one Gaussian a point; its export must lie where the point cloud of the capture does."""
    run = train(capture, tmp_path, steps=0)
    training = ply.read_vertices(written(run, tmp_path / "training.ply"))
    original = ply.read_vertices(written(run, tmp_path / "original.ply", "--frame", "original"))
    points = ply.read_vertices(capture / json.loads((capture / "transforms.json").read_text())["ply_file_path"])
    extent = np.ptp(points["x"])
    for axis in "xyz":
        np.testing.assert_allclose(original[axis], points[axis], rtol=0, atol=1e-5 * extent)
    assert np.abs(training["x"] - points["x"]).max() > 0.1 * extent, "training moves the capture"


# In -----------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def original(trained, tmp_path_factory) -> Path:
    """The trained Gaussians in the frame of the capture, nothing left out but what is too faint to be drawn."""
    return written(trained, tmp_path_factory.mktemp("original") / "original.ply", "--frame", "original")


def test_a_ply_becomes_a_run_without_training(trained, pipeline, original, capture, tmp_path, capsys):
    mine = tmp_path / "mine.ply"
    shutil.copy(original, mine)
    run = train(capture, tmp_path, INIT, str(mine), FRAME, "original", steps=0)
    printed = said(capsys)
    assert f"{mine} (PLY)" in printed and "moved from the original frame" in printed
    mine.unlink()  # tools do not need it any more
    camera = pipeline.datamanager.eval_dataset.cameras[0:1]
    again, before = loaded(run).model, pipeline.model
    assert again.settings().sh_degree == 3, "harmonics are there from the beginning"
    difference = (again.get_outputs_for_camera(camera)["rgb"] - before.get_outputs_for_camera(camera)["rgb"]).abs()
    # Turned and turned back in float32; a pixel at the threshold of 1/255 may gain or lose a contribution.
    assert difference.median() < 1e-5 and difference.max() < 0.02


def test_training_goes_on_from_a_checkpoint(trained, capture, tmp_path, capsys):
    checkpoint = trained.models / f"step-{STEPS - 1:09d}.ckpt"
    run = train(capture, tmp_path, INIT, str(checkpoint), steps=20)
    printed = said(capsys)
    assert "(checkpoint of bytesplat)" in printed and "Its run has the same training frame." in printed
    first = lambda run: next(line for line in run.metrics() if "loss" in line)  # noqa: E731
    assert first(run)["psnr"] > first(trained)["psnr"] + 3
    assert run.checkpoint(19)["pipeline"]["_model._extra_state"]["initial_sh_degree"] == 3

    (tmp_path / "gone").mkdir()
    resumed = train(
        capture, tmp_path / "on", INIT, str(tmp_path / "gone/a.ckpt"), "--load-dir", str(run.models), steps=25
    )
    assert "Going on from a checkpoint" in said(capsys)
    assert resumed.checkpoint(24)["pipeline"]["_model._extra_state"]["initial_sh_degree"] == 3


def test_a_run_of_no_steps_can_be_trained_later(original, capture, tmp_path):
    start = train(capture, tmp_path / "start", INIT, str(original), FRAME, "original", steps=0)
    run = train(capture, tmp_path, "--load-dir", str(start.models), steps=5)
    assert [line["step"] for line in run.metrics() if "loss" in line] == [1, 2, 3, 4, 5]
    assert run.checkpoint(4)["pipeline"]["_model._extra_state"]["images_seen"] == 5


def test_the_cap_holds(original, capture, tmp_path, capsys):
    options = INIT, str(original), FRAME, "original", "--pipeline.model.max-gaussians", "500"
    run = train(capture, tmp_path, *options, steps=0)
    assert len(run.checkpoint(0)["pipeline"]["_model.ids"]) == 500
    assert "The 500 of the largest opacity x area are kept" in said(capsys)


@pytest.mark.parametrize(
    "options, kind, message",
    [
        ((INIT, "none.ply"), SplatError, "There is no file none.ply"),
        ((INIT, "a.ply", "--pipeline.model.random-init", "True"), ValueError, "random-init .with .*init-from"),
        ((FRAME, "original"), ValueError, "init-frame .without .*init-from"),
    ],
)
def test_options_that_do_not_fit(capture, tmp_path, options, kind, message):
    with pytest.raises(kind, match=message):
        train(capture, tmp_path, *options, steps=0)
