"""Whole runs on a GPU: they learn what runs on the CPU learn, end as they should, and leave what tools read.

Sums on a GPU have no fixed order, so runs drift apart: the first losses agree closely, the results nearly.
"""

from __future__ import annotations

import json
import os
import re
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from commands import Run, export, render, train
from pictures import decibels, paint, read, variant
from PIL import Image
from reports import gaussians, losses, quality

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

STEPS = 300
COMPARED = 30
"""Images whose losses are compared one by one; no refinement has taken place by then."""

MODEL = "--pipeline.model."
ROUNDS = "--pipeline.datamanager.views-per-round", "4"


def masked(capture: Path, output: Path) -> Path:
    """The capture with a left third that is painted over and masked."""

    def change(frame: dict[str, Any], photo: np.ndarray) -> np.ndarray:
        frame["mask_path"] = "mask.png"
        return paint(photo)

    folder = variant(capture, output, change)
    keep = np.full((72, 96), 255, np.uint8)
    keep[:, :32] = 0
    Image.fromarray(keep).save(folder / "mask.png")
    return folder


def cut_out(capture: Path, output: Path) -> Path:
    """The capture with a left third that is transparent."""

    def change(frame: dict[str, Any], photo: np.ndarray) -> np.ndarray:
        alpha = np.full((*photo.shape[:2], 1), 255, np.uint8)
        alpha[:, :32] = 0
        return np.concatenate([paint(photo), alpha], axis=2)

    return variant(capture, output, change)


def as_it_is(capture: Path, output: Path) -> Path:
    return capture


Change = Callable[[Path, Path], Path]
CASES: dict[str, tuple[str, Change, tuple[str, ...]]] = {
    "plain": ("bytesplat", as_it_is, ()),
    "mcmc": ("bytesplat-mcmc", as_it_is, ()),
    "big": ("bytesplat-big", as_it_is, ()),
    "antialiased": ("bytesplat", as_it_is, (f"{MODEL}rasterize-mode", "antialiased")),
    "poses": ("bytesplat", as_it_is, (f"{MODEL}camera-optimizer.mode", "SO3xR3")),
    "grids": ("bytesplat", as_it_is, (f"{MODEL}use-bilateral-grid", "True")),
    "needles": ("bytesplat", as_it_is, (f"{MODEL}use-scale-regularization", "True")),
    "rounds": ("bytesplat", as_it_is, ROUNDS),
    "rounds of mcmc with poses and grids": (
        "bytesplat-mcmc",
        as_it_is,
        (*ROUNDS, f"{MODEL}camera-optimizer.mode", "SE3", f"{MODEL}use-bilateral-grid", "True"),
    ),
    "masks": ("bytesplat", masked, ()),
    "alpha": ("bytesplat", cut_out, ()),
}


@pytest.mark.parametrize("case", CASES)
def test_a_run_learns_what_it_learns_on_the_cpu(case, capture, tmp_path):
    method, change, options = CASES[case]
    data = change(capture, tmp_path / "data")
    options = *options, f"{MODEL}warmup-length", "4000"  # no refinement before image 40
    options = *options, f"{MODEL}prune-share", "0"  # on a CPU nothing is pruned
    on_gpu, on_cpu = (
        train(data, tmp_path / device, *options, steps=STEPS, method=method, device=device)
        for device in ("cuda", "cpu")
    )
    compared = COMPARED // 4 if "rounds" in case else COMPARED
    np.testing.assert_allclose(losses(on_gpu)[:compared], losses(on_cpu)[:compared], rtol=0.02)
    assert quality(on_gpu) == pytest.approx(quality(on_cpu), abs=1.0)
    assert quality(on_gpu) > (12 if change is as_it_is else 9), "where a third of a held-out photo is another one"
    assert gaussians(on_gpu) == pytest.approx(gaussians(on_cpu), rel=0.1)
    step = len(losses(on_gpu)) - 1
    state = on_gpu.checkpoint(step)
    assert all(p.isfinite().all() for p in state["pipeline"].values() if torch.is_tensor(p) and p.is_floating_point())
    for group in ("camera_opt", "bilateral_grid"):
        assert (group in state["optimizers"]) == (group in on_cpu.checkpoint(step)["optimizers"])


def test_how_lists_fit_is_told_where_density_has_changed(capture, tmp_path):
    run = train(capture, tmp_path, f"{MODEL}fused-rasterizer", "on", steps=STEPS, device="cuda")
    told = [line for line in run.metrics() if "lists_within" in line]
    assert 2 < len(told) < STEPS / 4 and told[-1]["step"] == STEPS
    for line in told:
        assert line["lists_budget"] > 0 and 0 < line["reads_on_chip"] <= 1
        assert 0 <= line["lists_within"] <= 1 and line["lists_median"] <= line["lists_p95"] <= line["lists_longest"]


# The end of a run, and what follows ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(capture, tmp_path_factory) -> Run:
    keep = "--steps-per-save", "100", "--save-only-latest-checkpoint", "False"
    return train(capture, tmp_path_factory.mktemp("trained"), *keep, steps=STEPS, device="cuda")


@pytest.mark.parametrize("where", ["cuda", "cpu"])
def test_a_checkpoint_is_gone_on_from(where, trained, capture, tmp_path):
    """On the same device, and on another."""
    start = "--load-dir", str(trained.models), "--load-step", "100"
    run = train(capture, tmp_path, *start, steps=STEPS, device=where)
    assert len(losses(run)) == STEPS - 101
    np.testing.assert_allclose(losses(run)[:10], losses(trained)[101:111], rtol=0.02)
    assert quality(run) == pytest.approx(quality(trained), abs=1.0)


def test_a_signal_saves_what_was_trained(capture, tmp_path, capsys):
    run = Run(tmp_path / "scene/bytesplat/run")

    def interrupt() -> None:
        while not (run.folder / "metrics.jsonl").exists() or len(run.metrics()) < 20:
            ended.wait(0.005)
            if ended.is_set():
                return
        os.kill(os.getpid(), signal.SIGINT)

    ended = threading.Event()
    watch = threading.Thread(target=interrupt)
    watch.start()
    try:
        with pytest.raises(SystemExit) as end:
            train(capture, tmp_path, steps=20_000, device="cuda")
    finally:
        ended.set()
        watch.join()
    assert end.value.code == 130
    (path,) = run.models.iterdir()
    saved = torch.load(path, weights_only=True)["step"]
    assert 18 <= saved < 19_999
    more = saved + 12
    again = train(capture, tmp_path / "again", "--load-dir", str(run.models), steps=more, device="cuda")
    assert f"{saved + 1:,} images seen" in " ".join(capsys.readouterr().out.split())
    assert len(losses(again)) == more - saved - 1


# Memory -------------------------------------------------------------------------------------------------------------

MANY = (
    *(f"{MODEL}random-init", "True", f"{MODEL}num-random", "400000", f"{MODEL}max-gaussians", "400000"),
    *(f"{MODEL}random-scale", "2", f"{MODEL}cull-alpha-thresh", "0.001", f"{MODEL}prune-share", "0"),
)
"""A number of Gaussians that stays what it is."""


@pytest.fixture
def memory() -> Iterator[None]:
    """Memory counted from nothing, and no limit on it afterwards."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)
    torch.cuda.empty_cache()


def test_a_run_takes_about_what_it_says(memory, capture, tmp_path, capsys):
    before = torch.cuda.memory_allocated()
    train(capture, tmp_path, *MANY, steps=60, device="cuda")
    printed = " ".join(capsys.readouterr().out.split())
    amount, unit = re.search(r"will need about ([\d.,]+) (GiB|MiB)", printed).groups()
    said = float(amount.replace(",", "")) * {"GiB": 2**30, "MiB": 2**20}[unit]
    taken = torch.cuda.max_memory_allocated() - before
    assert said / 2 < taken < 1.5 * said


def test_a_run_that_is_too_large_for_the_gpu_is_told_so(capture, tmp_path, capsys):
    train(capture, tmp_path, f"{MODEL}max-gaussians", "2000000000", steps=2, device="cuda")
    printed = " ".join(capsys.readouterr().out.split())
    assert "it will run out of memory: lower --pipeline.model.max-gaussians to" in printed


def test_no_memory_saves_what_was_trained(memory, test_data, tmp_path, monkeypatch):
    """Photos double their size after 20 and 40 images; the GPU gives no more than what was needed before."""
    from bytesplat_ns.pipeline import ByteSplatPipeline

    stock = ByteSplatPipeline.train_round

    def limited(self: ByteSplatPipeline) -> Any:
        if self.model.images_seen == 12:  # setting up may take more than a round does
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        if self.model.images_seen == 16:
            torch.cuda.empty_cache()
            room = torch.cuda.max_memory_reserved() + 2**23
            torch.cuda.set_per_process_memory_fraction(room / torch.cuda.get_device_properties(0).total_memory)
        return stock(self)

    schedule = f"{MODEL}schedule-length", "30000", f"{MODEL}resolution-schedule", "20"
    options = *schedule, *ROUNDS, "--pipeline.datamanager.cache-images", "cpu", f"{MODEL}max-gaussians", "3000"
    run = Run(tmp_path / "first/scene/bytesplat/run")
    with monkeypatch.context() as patch, pytest.raises(SystemExit, match="Out of memory with 3,000") as end:
        patch.setattr(ByteSplatPipeline, "train_round", limited)
        train(test_data / "fox", tmp_path / "first", *options, steps=100, device="cuda")
    assert "--load-dir" in str(end.value.code)
    (path,) = run.models.iterdir()
    state = torch.load(path, weights_only=True)
    seen = state["pipeline"]["_model._extra_state"]["images_seen"]
    assert 20 <= seen < 100, "when depends on what the allocator still holds of smaller photos"
    torch.cuda.set_per_process_memory_fraction(1.0)
    start = "--load-dir", str(run.models)
    again = train(test_data / "fox", tmp_path / "again", *options, *start, steps=seen + 4, device="cuda")
    assert [line["images"] for line in again.metrics() if "loss" in line] == [seen + 4]


# Tools --------------------------------------------------------------------------------------------------------------


def test_tools_read_what_a_gpu_has_trained(trained, capture, tmp_path):
    from nerfstudio.scripts.eval import ComputePSNR

    ComputePSNR(trained.config, tmp_path / "metrics.json").main()
    results = json.loads((tmp_path / "metrics.json").read_text())["results"]
    assert results["psnr"] == pytest.approx(quality(trained), abs=0.01)
    rendered = render("dataset", trained, tmp_path / "renders") / "test"
    files = sorted(path.name for path in (rendered / "rgb").iterdir())
    psnr = [decibels(read(rendered / "rgb" / name), read(rendered / "gt-rgb" / name)) for name in files]
    assert len(files) == 3 and np.mean(psnr) == pytest.approx(results["psnr"], abs=0.1)
    splat = export("gaussian-splat", trained, tmp_path / "splat") / "splat.ply"
    # The file as a run of its own, on the other device, sees what was trained.
    options = f"{MODEL}init-from", str(splat)
    again = train(capture, tmp_path / "again", *options, steps=0, device="cpu")
    ComputePSNR(again.config, tmp_path / "again.json").main()
    assert json.loads((tmp_path / "again.json").read_text())["results"]["psnr"] == pytest.approx(
        results["psnr"], abs=0.05
    )
