"""Options of the command line: each is accepted, and does something to a short run."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
import torch
from commands import Run, arguments, parse, train
from pictures import paint, variant
from PIL import Image

STEPS = 12
"""Enough for scale regularization, which acts every ten images."""

FULL_SIZE = "--pipeline.model.num-downscales", "0"


def gaussians(run: Run, step: int = STEPS - 1) -> dict[str, torch.Tensor]:
    """The parameters after a step."""
    prefix = "_model.gauss_params."
    model = run.checkpoint(step)["pipeline"]
    return {key.removeprefix(prefix): value for key, value in model.items() if key.startswith(prefix)}


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


@pytest.fixture(scope="module")
def plain(capture, tmp_path_factory) -> Run:
    """A run with default options."""
    return train(capture, tmp_path_factory.mktemp("plain"), steps=STEPS)


def test_help_lists_our_options(capsys):
    with pytest.raises(SystemExit) as end:
        parse("bytesplat", "--help")
    assert end.value.code == 0
    printed = re.sub(r"\x1b\[[\d;]*m", "", capsys.readouterr().out)
    for option in (
        "--pipeline.model.max-gaussians",
        "--pipeline.model.schedule-length",
        "--pipeline.model.strategy",
        "--pipeline.model.noise-lr",
        "--pipeline.datamanager.views-per-round",
        "--pipeline.datamanager.image-cache-gib",
    ):
        assert option in printed


@pytest.mark.parametrize(
    "options, message",
    [
        (("--mixed-precision", "True"), "--mixed-precision"),
        (("--use-grad-scaler", "True"), "--use-grad-scaler"),
        (("--gradient-accumulation-steps", "means", "4"), "--pipeline.datamanager.views-per-round"),
        (("--log-gradients", "True"), "--log-gradients"),
        (("--optimizers.means.optimizer.max-norm", "1.0"), "max-norm"),
        (("--pipeline.model.max-gaussians", "0"), "max-gaussians is 0"),
        (("--pipeline.model.schedule-length", "-5"), "schedule-length"),
    ],
)
def test_what_cannot_work_is_refused(options, message, capture, tmp_path):
    with pytest.raises(ValueError, match=message):
        train(capture, tmp_path, *options, steps=STEPS)


def test_stock_options_that_would_do_nothing_are_refused(capture, tmp_path):
    """All in one command, as each is named."""
    options = {
        "--prompt": "a fox",
        "--steps-per-eval-batch": "10",
        "--load-scheduler": "False",
        "--logging.local-writer.enable": "True",
        "--logging.profiler": "basic",
        "--pipeline.datamanager.masks-on-gpu": "True",
        "--pipeline.datamanager.images-on-gpu": "True",
        "--pipeline.datamanager.eval-image-indices": "1",
        "--pipeline.datamanager.fps-reset-every": "7",
        "--pipeline.datamanager.consolidate-views": "on",
        "--pipeline.model.fused-rasterizer": "on",
        "--pipeline.model.gradient-exchange": "dense",
        "--pipeline.model.gradient-precision": "bfloat16",
        "--pipeline.rebalance-threshold": "2",
        "--optimizers.camera-opt.optimizer.lr": "0.1",
        "--optimizers.bilateral-grid.scheduler.max-steps": "9",
        "--steps-per-eval-image": "5",
        "--steps-per-eval-all-images": "5",
        "--vis": "viewer",
    }
    with pytest.raises(ValueError, match="Options without effect") as error:
        train(capture, tmp_path, *(word for option in options.items() for word in option), steps=STEPS)
    named = set(re.findall(r"(--\S+) \(", str(error.value)))
    whole = {  # refused with all that belongs to them
        "--logging.local-writer.enable": "--logging.local-writer",
        "--optimizers.camera-opt.optimizer.lr": "--optimizers.camera-opt",
        "--optimizers.bilateral-grid.scheduler.max-steps": "--optimizers.bilateral-grid",
    }
    expected = {whole.get(option, option) for option in options} - {"--vis"} | {"--pipeline.model.prompt"}
    assert named == expected


def test_rounds_of_three_views(capture, tmp_path, capsys):
    run = train(capture, tmp_path, "--pipeline.datamanager.views-per-round", "3", steps=15)
    printed = " ".join(re.sub(r"\w+\.py:\d+", "", capsys.readouterr().out).split())
    assert "learning rates are B times as large and Adam's betas are taken to the power of B" in printed
    assert "x 3, 0.729 and 0.997 for B = 3." in printed
    assert [line["images"] for line in run.metrics() if "loss" in line] == [3, 6, 9, 12, 15]
    assert run.checkpoint(4)["pipeline"]["_model._extra_state"]["images_seen"] == 15


@pytest.mark.parametrize("mode", ["SO3xR3", "SE3"])
def test_camera_optimizer_moves_the_poses(mode, plain, capture, tmp_path):
    run = train(capture, tmp_path, "--pipeline.model.camera-optimizer.mode", mode, steps=STEPS)
    checkpoint = run.checkpoint(STEPS - 1)
    assert checkpoint["pipeline"]["_model.camera_optimizer.pose_adjustment"].abs().amax(dim=1).gt(0).all()
    assert checkpoint["optimizers"]["camera_opt"]["state"], "its moments are kept for resuming"
    assert not equal(gaussians(run), gaussians(plain)), "they see the scene from elsewhere"


def test_pose_penalties_hold_the_poses_back(capture, tmp_path):
    moved = []
    for penalty in ("0", "1e4"):
        options = [f"--pipeline.model.camera-optimizer.{part}-l2-penalty" for part in ("trans", "rot")]
        options = [word for option in options for word in (option, penalty)]
        mode = "--pipeline.model.camera-optimizer.mode", "SO3xR3", "--optimizers.camera-opt.scheduler.warmup-steps", "0"
        # Long enough for each photo to come a third time: the penalty of a pose at rest is zero.
        run = train(capture, tmp_path / penalty, *mode, *options, steps=27)
        moved.append(run.checkpoint(26)["pipeline"]["_model.camera_optimizer.pose_adjustment"].abs().mean())
    assert moved[1] < 0.8 * moved[0]


def test_bilateral_grids_take_up_the_photos_exposure(capture, tmp_path):
    run = train(capture, tmp_path, "--pipeline.model.use-bilateral-grid", "True", steps=STEPS)
    checkpoint = run.checkpoint(STEPS - 1)
    grids = checkpoint["pipeline"]["_model.bil_grids.grids"]
    identity = torch.eye(3, 4).reshape(12, 1, 1, 1)
    assert grids.shape == (9, 12, 8, 16, 16), "one for each photo"
    assert (grids - identity).abs().flatten(1).amax(dim=1).gt(1e-4).all()
    assert checkpoint["optimizers"]["bilateral_grid"]["state"]


def test_the_shape_of_bilateral_grids(capture, tmp_path):
    options = "--pipeline.model.use-bilateral-grid", "True", "--pipeline.model.grid-shape", "5", "4", "3"
    run = train(capture, tmp_path, *options, steps=STEPS)
    assert run.checkpoint(STEPS - 1)["pipeline"]["_model.bil_grids.grids"].shape == (9, 12, 3, 4, 5)


@pytest.mark.parametrize(
    "options",
    [
        ("--pipeline.model.rasterize-mode", "antialiased"),
        ("--pipeline.model.use-scale-regularization", "True", "--pipeline.model.max-gauss-ratio", "1.0"),
        ("--pipeline.model.ssim-lambda", "0.5"),
        ("--pipeline.model.background-color", "white"),
        ("--pipeline.model.background-color", "black"),
        FULL_SIZE,
    ],
)
def test_an_option_changes_the_result(options, plain, capture, tmp_path):
    changed = gaussians(train(capture, tmp_path, *options, steps=STEPS))
    assert all(value.isfinite().all() for value in changed.values())
    assert not equal(changed, gaussians(plain))


def test_random_initialization(capture, tmp_path):
    options = "--pipeline.model.random-init", "True", "--pipeline.model.num-random", "700"
    run = train(capture, tmp_path, *options, "--pipeline.model.random-scale", "3", steps=STEPS)
    assert run.metrics()[0]["gaussians"] == 700
    # A learning rate of 1.6e-4 lets a mean move by little in twelve steps.
    assert gaussians(run)["means"].abs().max() == pytest.approx(1.5, abs=0.02), "in a cube of side 3"


@pytest.mark.parametrize("wanted", [False, True])
def test_depth_during_training(wanted, capture, tmp_path):
    options = "--pipeline.model.output-depth-during-training", str(wanted)
    config = parse(*arguments(capture, tmp_path, *options, steps=STEPS))
    config.pipeline.datamanager.data = capture
    pipeline = config.pipeline.setup(device="cpu", test_mode="val", world_size=1, local_rank=0)
    camera = pipeline.datamanager.train_dataset.cameras[:1]
    assert pipeline.model.eval().get_outputs(camera)["depth"] is not None, "evaluation always has it"
    depth = pipeline.model.train().get_outputs(camera)["depth"]
    assert (depth is not None) == wanted
    if wanted:
        assert depth.shape == (18, 24, 1) and depth.isfinite().all() and depth.max() > 0, "at a quarter of the size"


def test_the_number_of_gaussians_stays_within_its_limit(capture, tmp_path):
    run = train(capture, tmp_path, "--pipeline.model.max-gaussians", "1600", steps=40)
    counts = [line["gaussians"] for line in run.metrics() if "gaussians" in line]
    assert counts[0] == 1500 and max(counts) == 1600


def test_spherical_harmonics_of_degree_one(capture, tmp_path):
    run = train(capture, tmp_path, "--pipeline.model.sh-degree", "1", steps=STEPS)
    assert gaussians(run)["features_rest"].shape[1:] == (3, 3)


def test_color_corrected_metrics(capture, tmp_path):
    from nerfstudio.scripts.eval import ComputePSNR

    run = train(capture, tmp_path, "--pipeline.model.color-corrected-metrics", "True", steps=STEPS)
    ComputePSNR(run.config, tmp_path / "metrics.json").main()
    results = json.loads((tmp_path / "metrics.json").read_text())["results"]
    assert results["cc_psnr"] > results["psnr"], "the correction is a least-squares fit to the photo"


# Photos of which a part does not count ------------------------------------------------------------------------------


def test_masked_pixels_do_not_matter(capture, tmp_path):
    keep = np.full((72, 96), 255, np.uint8)
    keep[:, :32] = 0

    def masked(frame, photo):
        frame["mask_path"] = "mask.png"
        return photo

    folders = [
        variant(capture, tmp_path / "clean", masked),
        variant(capture, tmp_path / "painted", lambda frame, photo: paint(masked(frame, photo))),
        variant(capture, tmp_path / "unmasked", lambda frame, photo: paint(photo)),
    ]
    for folder in folders:
        Image.fromarray(keep).save(folder / "mask.png")
    # At full size: reducing a photo mixes the colours of neighbours.
    runs = [train(folder, tmp_path / f"{folder.name} run", *FULL_SIZE, steps=STEPS) for folder in folders]
    clean, painted, unmasked = map(gaussians, runs)
    assert equal(clean, painted)
    assert not equal(clean, unmasked)


def test_transparent_pixels_show_the_background(capture, tmp_path):
    def cut_out(frame, photo):
        alpha = np.full((*photo.shape[:2], 1), 255, np.uint8)
        alpha[:, :32] = 0
        return np.concatenate([photo, alpha], axis=2)

    def white(frame, photo):
        whitened = photo.copy()
        whitened[:, :32] = 255
        return whitened

    options = *FULL_SIZE, "--pipeline.model.background-color", "white"
    clear, painted, opaque = (
        train(variant(capture, tmp_path / name, change), tmp_path / f"{name} run", *options, steps=STEPS)
        for name, change in {
            "clear": cut_out,
            "painted": lambda frame, photo: cut_out(frame, paint(photo)),
            "opaque": white,
        }.items()
    )
    assert equal(gaussians(clear), gaussians(painted)), "the colour of a transparent pixel does not matter"
    losses = [[line["loss"] for line in run.metrics() if "loss" in line] for run in (clear, opaque)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4), "on white, transparent is white"


# Real photos --------------------------------------------------------------------------------------------------------


def test_real_photos(test_data, tmp_path):
    run = train(test_data / "fox_tiny", tmp_path, *FULL_SIZE, steps=30)
    losses = [line["loss"] for line in run.metrics() if "loss" in line]
    assert np.mean(losses[-5:]) < np.mean(losses[:5])
    (held_out,) = (line for line in run.metrics() if "eval_psnr" in line)
    assert held_out["eval_psnr"] > 8 and run.metrics()[0]["gaussians"] == 3000, "of 4000 points"
