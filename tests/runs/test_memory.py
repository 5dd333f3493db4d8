"""Memory: what a run says it needs, what it takes, and what happens when there is not enough."""

from __future__ import annotations

import json

import pytest
import torch
from ns_train import Run

from bytesplat_ns.demo.capture import Capture, write_capture
from bytesplat_ns.density.store import GaussianStore
from bytesplat_ns.ops.layout import Gaussians
from bytesplat_ns.optim import GaussianAdam
from bytesplat_ns.photos.cache import Photo, PhotoCache
from bytesplat_ns.run import memory
from bytesplat_ns.run.memory import Need

GIB = 1024**3


def store(gaussians: int) -> GaussianStore:
    shapes = {"means": (3,), "quats": (4,), "scales": (3,), "opacities": (1,), "features_dc": (3,)}
    shapes["features_rest"] = (15, 3)
    parameters = {name: torch.nn.Parameter(torch.zeros(gaussians, *shapes[name])) for name in Gaussians.PARAMETERS}
    store = GaussianStore(torch.nn.ParameterDict(parameters))
    GaussianAdam(store)
    return store


def test_a_gaussian_needs_its_parameters_moments_gradients_and_id():
    need = Need.of(store(7), views=1, pixels=1000)
    assert need.state == 3 * 59 * 4 + 8
    assert need.step >= 59 * 4 + 4 * (10 + 14)
    assert Need.of(store(0), views=1, pixels=1000) == need
    assert Need.of(store(7), views=3, pixels=1000).step > need.step
    assert need.total(need.fitting(GIB)) <= GIB < need.total(need.fitting(GIB) + 1)
    assert need.fitting(0) == 0


def test_what_fits_is_told_and_what_does_not_is_warned_of():
    need = Need(state=700, step=300, images=0)
    line, bad = memory.judge(need, at_most=1_000_000, photos=GIB, room=4 * GIB)
    assert not bad
    assert "about 1.9 GiB for 1,000,000 Gaussians" in line and "3,221,225 Gaussians fit into the 4.0 GiB" in line
    line, bad = memory.judge(need, at_most=5_000_000, photos=GIB, room=4 * GIB)
    assert bad and "lower --pipeline.model.max-gaussians to 3221225" in line


def test_photos_count_until_they_are_there():
    photo = Photo(torch.zeros(10, 10, 3, dtype=torch.uint8))
    cache = PhotoCache(lambda index: photo, [300, 300, 300], "cpu", budget=700)
    assert cache.pending == 700
    cache[1]
    assert cache.pending == 400
    assert PhotoCache(lambda index: photo, [300], "cpu", budget=700).pending == 300


def test_limits_of_containers_and_schedulers_count(tmp_path):
    (tmp_path / "self").write_text("0::/system/job\n")
    root = tmp_path / "root"
    for group, most, used, files in (("", "max", 900, 0), ("system", "1000", 800, 300), ("system/job", "700", 650, 0)):
        (root / group).mkdir(exist_ok=True)
        (root / group / "memory.max").write_text(f"{most}\n")
        (root / group / "memory.current").write_text(f"{used}\n")
        (root / group / "memory.stat").write_text(f"anon 1\ninactive_file {files}\n")
    assert memory.limits_of_control_groups(tmp_path / "self", root) == [50, 500]
    assert memory.limits_of_control_groups(tmp_path / "none", tmp_path / "none") == []


def measure(server, run, tmp_path, *options: object, gaussians: int) -> dict[str, int]:
    """Resident bytes before and at the fullest moment of training with this many Gaussians; none of them goes."""
    report = tmp_path / "report.json"
    fixed = {
        "--pipeline.model.random-init": "True",
        "--pipeline.model.num-random": gaussians,
        "--pipeline.model.max-gaussians": gaussians,
        "--pipeline.model.random-scale": 2,
        "--pipeline.model.cull-alpha-thresh": 0.001,
        "--pipeline.model.num-downscales": 0,
    }
    words = run.words(*(word for option in fixed.items() for word in option), *options, steps=24)
    child = server.start("measured", report, *words)
    assert child.end(120) == 0, child.output
    assert f"{gaussians:,} Gaussians (at most {gaussians:,})" in " ".join(child.output.split())
    assert child.output.count("Memory: this run will need about") == 1
    return json.loads(report.read_text())


def test_what_a_gaussian_is_said_to_need_is_near_what_it_takes(server, run, tmp_path):
    few, many = 20_000, 220_000
    small, large = (measure(server, run, tmp_path, gaussians=gaussians) for gaussians in (few, many))
    need = Need.of(store(1), views=1, pixels=64 * 48)
    # Pairs differ by scene and resolution, densification comes and goes, and the allocator rounds up.
    measured = (large["peak"] - small["peak"]) / (many - few)
    assert measured / 1.5 < need.state + need.step < measured * 1.5


def test_what_a_pixel_is_said_to_need_is_near_what_it_takes(server, run, tmp_path):
    folder, width, height = tmp_path / "larger", 640, 480
    write_capture(folder, Capture(views=4, width=width, height=height, supersample=1, points=700, workers=1))
    larger = Run(folder, tmp_path / "runs of larger")
    small, large = (measure(server, r, tmp_path, gaussians=2000) for r in (run, larger))
    growth = (large["peak"] - large["before"]) - (small["peak"] - small["before"])
    need = Need.of(store(1), views=1, pixels=width * height - 64 * 48)
    # LPIPS, for which there are no weights here, is part of the need.
    assert growth < need.images < 2 * growth


def test_no_memory_in_a_step_saves_what_was_there_before_it(server, run):
    child = server.start("allocation_fails", "loss", 6, *run.words(steps=50))
    assert child.end() == 1
    assert run.steps() == [5]
    assert "Traceback" not in child.output
    for words in ("Out of memory with", "can't allocate memory", "lower --pipeline.model.max-gaussians", "--load-dir"):
        assert words in child.output
    words = run.words("--pipeline.model.max-gaussians", 500, steps=8)
    resumed = server.start("ns_train", words[0], "--load-dir", run.models, *words[1:])
    assert resumed.end() == 0 and run.steps() == [7], resumed.output
    assert len(run.checkpoint(7)["bytesplat"]["gaussians"]["ids"]) == 500, "the advice can be followed"


@pytest.mark.parametrize("stage", ["observe", "edit"])
def test_no_memory_once_parameters_have_moved_leaves_the_last_checkpoint(stage, server, run):
    child = server.start("allocation_fails", stage, 6, *run.words("--steps-per-save", 4, steps=100))
    assert child.end(120) == 1, child.output
    assert "Traceback" not in child.output
    assert len(run.steps()) == 1 and run.steps()[0] % 4 == 0
    assert f"To go on from step-{run.steps()[0]:09d}.ckpt" in child.output


def test_no_memory_for_the_model_is_told_before_a_step(server, run):
    child = server.start("allocation_fails", "neighbours", 0, *run.words(steps=5))
    assert child.end() == 1, child.output
    assert "Traceback" not in child.output
    assert "Out of memory while data and model were loaded" in child.output


@pytest.mark.parametrize(
    "error, is_exhaustion",
    [
        (MemoryError(), True),
        (torch.cuda.OutOfMemoryError("CUDA out of memory."), True),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes."), True),
        (RuntimeError("shapes differ"), False),
    ],
)
def test_what_counts_as_exhaustion(error, is_exhaustion):
    assert memory.exhausted(error) == is_exhaustion
