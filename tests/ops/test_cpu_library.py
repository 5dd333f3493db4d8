"""The CPU's libraries: which one is loaded, and what holds for all of them. (Results: test_stages, test_loss, ...)"""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import PHOTOS, ball, look
from oracle import photo_inputs
from torch import Tensor

from bytesplat_ns.ops import cpu, cpu_build, cpu_library
from bytesplat_ns.ops.layout import ImageGradients, RenderSettings

LEVELS = [
    name
    for name, needed in cpu_library.CPU_FLAGS.items()
    if cpu_build.library(cpu_library.FOLDER, name).exists() and needed <= cpu_library.cpu_flags()
]

needs_library = pytest.mark.skipif(not LEVELS, reason="not built: python -m bytesplat_ns.ops.cpu_build")


@needs_library
def test_a_library_of_other_sources_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As after a pull: what it would be called with is not what it expects."""
    assert cpu_library.load.__wrapped__(LEVELS[0])
    monkeypatch.setattr(cpu_build, "fingerprint", lambda: "another")
    with pytest.raises(RuntimeError, match=r"changed since\. Build it anew: python -m bytesplat_ns\.ops\.cpu_build"):
        cpu_library.load.__wrapped__(LEVELS[0])


# Results -------------------------------------------------------------------------------------------------------------


def all_stages() -> dict[str, Tensor]:
    """What every stage returns for a scene large enough to occupy several threads in each of them, by name."""
    gaussians, cameras, settings = ball(40_000, 60, scale=0.05), look((100, 70), (61, 90)), RenderSettings()
    records = cpu.project(gaussians, cameras, settings)
    tiles = cpu.bin(records, cameras)
    image = cpu.rasterize(records, tiles, cameras, settings)
    d_image = ImageGradients(image.rgb - 0.5, image.depth - 4, image.transmittance - 0.5)
    rows = cpu.rasterize_backward(records, tiles, cameras, settings, image, d_image)
    gradients = cpu.project_backward(gaussians, cameras, settings, records, rows)
    moments = [torch.zeros_like(gaussians.features_rest) for _ in range(2)]
    cpu.adam(gaussians.features_rest, gradients.features_rest, *moments, lr=0.1, step=1)
    photo = replace(PHOTOS["masked"], sizes=((100, 70), (61, 90)))
    loss, d_photo = cpu.loss(**photo_inputs(photo), cameras=cameras)
    results = [records, tiles, image, rows, gradients, gaussians.features_rest, moments, loss, d_photo]
    return dict(tensors("", results))


def tensors(name: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    """All tensors in a structure, with names of their own."""
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, list):
        for i, item in enumerate(value):
            yield from tensors(f"{name}.{i}", item)
    elif is_dataclass(value):
        for field in fields(value):
            yield from tensors(f"{name}.{field.name}", getattr(value, field.name))


@needs_library
@pytest.mark.parametrize("level", LEVELS)
def test_threads_do_not_change_a_bit(level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_library, "level", lambda: level)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        expected = all_stages()
        for count in (2, 3):
            torch.set_num_threads(count)
            for name, value in all_stages().items():
                assert torch.equal(value, expected[name]), f"{name} with {count} threads"
    finally:
        torch.set_num_threads(threads)


@needs_library
def test_callers_at_once_and_after_a_fork(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pool of threads serves one caller; others, and a child process, do their work alone."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    expected = all_stages()
    with ThreadPoolExecutor(4) as callers:
        for results in callers.map(lambda _: all_stages(), range(8)):
            assert all(torch.equal(value, expected[name]) for name, value in results.items())

    child = os.fork()
    if child == 0:  # a deadlock here would end by the alarm's signal
        signal.alarm(60)
        results = all_stages()
        os._exit(0 if all(torch.equal(value, expected[name]) for name, value in results.items()) else 1)
    assert os.waitpid(child, 0)[1] == 0


@needs_library
@pytest.mark.parametrize("level", LEVELS[1:])
def test_levels_agree(level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_library, "level", lambda: LEVELS[0])
    expected = all_stages()
    monkeypatch.setattr(cpu_library, "level", lambda: level)
    for name, value in all_stages().items():
        if value.is_floating_point() and value.shape == expected[name].shape:
            # Now and then a Gaussian falls on the other side of a threshold: norm-wise, and with room for that.
            assert (value - expected[name]).norm() <= 1e-3 * expected[name].norm(), name


# No memory -----------------------------------------------------------------------------------------------------------


@needs_library
def test_no_memory_is_an_error_of_python() -> None:
    """Not the end of the process, whether a stage asks for it at its start or in a part of a loop."""
    with pytest.raises(MemoryError, match=r"could not allocate memory \(project\)"):
        cpu_library.call("project", cpu._ProjectInput(count=2**59, views=1), cpu._RecordOutput())

    size = (200_000, 11)  # one row of windows, whose inputs are kept in buffers of 26 MB
    inputs = photo_inputs(replace(PHOTOS["photo"], sizes=(size,)))
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (taken + 100 * 2**20,) * 2)
        try:
            cpu.loss(**inputs, cameras=look(size))
        except MemoryError as error:
            os._exit(0 if "(loss)" in str(error) else 2)
        os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    projected()  # the next call is as good as ever


# Choice of a library -------------------------------------------------------------------------------------------------


def folder_with(folder: Path, *levels: str) -> Path:
    for level in levels:
        cpu_build.library(folder, level).touch()
    return folder


V4, V3 = cpu_library.CPU_FLAGS["v4"], cpu_library.CPU_FLAGS["v3"]


@pytest.mark.parametrize(
    ("asked", "built", "flags", "expected"),
    [
        ("", ("v4", "v3", "base"), V4, "v4"),
        ("", ("v4", "v3", "base"), V3, "v3"),
        ("", ("v4", "v3", "base"), set(), "base"),
        ("", ("v4", "v3", "base"), V4 - {"avx512vl"}, "v3"),
        ("", ("base",), V4, "base"),
        ("", ("v4",), V3, None),
        ("", (), V4, None),
        ("v3", ("v4", "v3", "base"), V4, "v3"),
        ("base", ("v4", "base"), V4, "base"),
        ("none", ("v4", "v3", "base"), V4, None),
    ],
)
def test_choice(tmp_path: Path, asked: str, built: tuple[str, ...], flags: set[str], expected: str | None) -> None:
    assert cpu_library.choose_level(asked, folder_with(tmp_path, *built), flags) == expected


def test_unknown_level(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"BYTESPLAT_CPU_LIBRARY=v5: expected one of v4, v3, base, none"):
        cpu_library.choose_level("v5", tmp_path, V4)


def test_level_that_is_not_built(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"there is no .*_cpu_v3\.so; build it with"):
        cpu_library.choose_level("v3", folder_with(tmp_path, "v4", "base"), V4)


def test_level_that_the_cpu_lacks(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"this CPU .* lacks avx512bw"):
        cpu_library.choose_level("v4", folder_with(tmp_path, "v4", "v3"), V3)


def test_compiler_that_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(cpu_build.BuildError, match=r"cannot run the C\+\+ compiler 'no-such-compiler'"):
        cpu_build.build(tmp_path, ["base"])
    assert not list(tmp_path.iterdir())


def test_compiler_that_rejects_the_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "false")
    with pytest.raises(cpu_build.BuildError, match=r"false -std=c\+\+17 .*rasterize\.cpp"):
        cpu_build.build(tmp_path, ["base"])
    assert not list(tmp_path.iterdir())


# Wrong arguments -----------------------------------------------------------------------------------------------------

GAUSSIANS, CAMERAS, SETTINGS = ball(20, 61), look((20, 12)), RenderSettings()


def projected(**changes: Tensor) -> None:
    cpu.project(replace(GAUSSIANS, **changes), CAMERAS, SETTINGS)


def photographed(**changes: Tensor) -> None:
    photo = replace(PHOTOS["photo"], sizes=((20, 12),))
    cpu.loss(**{**photo_inputs(photo), **changes}, cameras=CAMERAS)


def back(rows: Tensor) -> None:
    cpu.project_backward(GAUSSIANS, CAMERAS, SETTINGS, cpu.project(GAUSSIANS, CAMERAS, SETTINGS), rows)


def optimized(gradient: Tensor, step: int = 1) -> None:
    cpu.adam(*(torch.zeros(4, 3), gradient, torch.zeros(4, 3), torch.zeros(4, 3)), lr=0.1, step=step)


@needs_library
@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: projected(means=GAUSSIANS.means.double()), r"means: expected \[20, 3\] of torch.float32.*float64"),
        (lambda: projected(quats=GAUSSIANS.quats[:, :3]), r"quats: expected \[20, 4\].*found \[20, 3\]"),
        (lambda: projected(quats=GAUSSIANS.quats.T.contiguous().T), r"quats: .*not contiguous \(call .contiguous"),
        (lambda: projected(opacities=GAUSSIANS.opacities[:, 0]), r"opacities: expected \[20, 1\].*found \[20\]"),
        (lambda: projected(ids=GAUSSIANS.ids.int()), "ids: .*torch.int64.*torch.int32"),
        (lambda: projected(features_dc=GAUSSIANS.features_dc[:5]), r"features_dc: expected \[20, 3\]"),
        (lambda: cpu.project(GAUSSIANS, CAMERAS, RenderSettings(sh_degree=4)), "sh_degree: expected 0 to 3, found 4"),
        (lambda: cpu.project(GAUSSIANS, replace(CAMERAS, sizes=CAMERAS.sizes.long()), SETTINGS), "cameras.sizes: "),
        (lambda: photographed(target=torch.zeros(1, 12, 20, 2)), r"target: expected \[V, H, W, 3 or 4\].*20, 2\]"),
        (lambda: photographed(target=torch.zeros(1, 12, 20, 3).double()), "target: .*uint8 or float32"),
        (lambda: photographed(mask=torch.ones(1, 12, 20)), "mask: .*torch.uint8.*torch.float32"),
        (lambda: photographed(background=torch.zeros(3)), r"background: expected \[1, 3\]"),
        (lambda: back(torch.zeros(0, 11)), "rows: expected 10 columns, or 14 with statistics"),
        (lambda: back(torch.zeros(1000, 10)), "rows: expected"),
        (lambda: optimized(torch.zeros(4)), r"gradient: expected \[4, 3\]"),
        (lambda: optimized(torch.zeros(4, 3), step=0), "step: Adam counts steps from 1, found 0"),
    ],
)  # fmt: skip
def test_wrong_argument(call: Callable[[], None], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


@needs_library
def test_needles_stay_in_their_tiles() -> None:
    """A diagonal needle crosses few tiles of its bounding box; ten million times as long as wide it is still sound."""
    gaussians = ball(1, 62, degree=0, spread=0, logit=6.0, logit_spread=0)
    gaussians.quats[0] = torch.tensor([0.92388, 0, 0, 0.382683])  # 45 degrees around the line of sight
    cameras, settings = look((256, 256)), RenderSettings(sh_degree=0)
    for length in (0.5, 1e4):
        gaussians.scales[0] = torch.tensor([length, 1e-3, 1e-3]).log()
        records = cpu.project(gaussians, cameras, settings)
        tiles = cpu.bin(records, cameras)
        image = cpu.rasterize(records, tiles, cameras, settings)
        assert 16 <= len(tiles.records) <= 60
        assert image.rgb.isfinite().all() and image.transmittance.min() < 0.1
