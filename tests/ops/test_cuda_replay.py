"""Rounds that are replayed from a recording leave the very parameters that launching each stage leaves.

Sums over pixels are formed in no fixed order on a GPU. Here every Gaussian stays within one square of 8 x 8 pixels, so
that each of its sums has one contribution and what comes out can be compared bit by bit.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from backends import Backend, _moved
from torch import Tensor

from bytesplat_ns.ops.cuda import ahead, counts, optimizer, projection, replay
from bytesplat_ns.ops.cuda.buffers import HALTED
from bytesplat_ns.ops.layout import AdamStep, Cameras, Gaussians, Image, Observations, RenderSettings

pytestmark = pytest.mark.parametrize("backend", ["cuda"], indirect=True)

WIDTH, HEIGHT, FOCAL, DEPTH = 72, 40, 40.0, 5.0


class Emulated:
    """In place of ``replay.Recorder`` where the emulator is in place of the GPU: plays by running the stages again.

    As in a recording, they work on the tables of then.
    """

    training: Training

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def record(self, run: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        training, then, expected = self.training, self.training.held(), counts._of_recording.get()
        before = [table.clone() for table in training.tables()]
        result = run()
        for table, value in zip(training.tables(), before, strict=True):
            table.copy_(value)

        def play() -> None:
            now = training.held()
            vars(training).update(then)
            with counts.recording(expected):
                for mine, new in zip(result, run(), strict=True):
                    mine.copy_(new)
            vars(training).update(now)

        return play, result


class Training:
    """A small scene in training, on the stages of ``ops.cuda``."""

    def __init__(self, backend: Backend, run: replay.Replay) -> None:
        self.backend, self.run = backend, run
        generator = torch.Generator().manual_seed(0)
        x, y = torch.meshgrid(torch.arange(4, WIDTH, 8.0), torch.arange(4, HEIGHT, 8.0), indexing="ij")
        pixels = torch.stack([x, y], dim=-1).view(-1, 2).repeat(3, 1)
        count = len(pixels)
        depth = DEPTH + 0.01 * (torch.arange(count) // (count // 3))
        middle = torch.tensor([WIDTH, HEIGHT]) / 2
        gaussians = Gaussians(
            means=torch.cat([(pixels - middle) / FOCAL * depth[:, None], depth[:, None]], dim=1),
            quats=torch.randn(count, 4, generator=generator),
            scales=torch.full((count, 3), -7.0),
            opacities=torch.randn(count, 1, generator=generator),
            features_dc=torch.randn(count, 3, generator=generator),
            features_rest=0.1 * torch.randn(count, 3, 3, generator=generator),
            ids=torch.arange(count),
        )
        self.gaussians = _moved(gaussians, backend.device)
        self.moments = {
            name: tuple(torch.zeros_like(getattr(self.gaussians, name)) for _ in range(2))
            for name in Gaussians.PARAMETERS
        }
        self.observations = Observations(
            gradient=torch.zeros(count, dtype=torch.int64, device=backend.device),
            views=torch.zeros(count, dtype=torch.int32, device=backend.device),
            radius=torch.zeros(count, device=backend.device),
        )
        self.step: AdamStep | None = None

    def tables(self) -> list[Tensor]:
        moments = [moment for pair in self.moments.values() for moment in pair]
        return [*vars(self.gaussians).values(), *moments, *vars(self.observations).values()]

    def held(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("gaussians", "moments", "observations")}

    def drop(self, rows: slice, place: Callable[[Tensor], Tensor]) -> None:
        """What a refinement does: other tables, of other lengths, that need not lie elsewhere."""
        self.gaussians = Gaussians(**{name: place(t[rows]) for name, t in vars(self.gaussians).items()})
        self.moments = {name: tuple(place(t[rows]) for t in pair) for name, pair in self.moments.items()}
        self.observations = Observations(**{name: place(t[rows]) for name, t in vars(self.observations).items()})

    def round(self, number: int, shifts: tuple[int, ...], record: bool) -> Tensor:
        """A round of views, moved by so many squares each. Returns their losses."""
        generator = torch.Generator().manual_seed(number)
        viewmats = torch.eye(4).repeat(len(shifts), 1, 1)
        viewmats[:, 0, 3] = 8 / FOCAL * DEPTH * torch.tensor(shifts)
        cameras = Cameras(
            viewmats=viewmats,
            intrinsics=torch.tensor([FOCAL, FOCAL, WIDTH / 2, HEIGHT / 2]).repeat(len(shifts), 1),
            sizes=torch.tensor([WIDTH, HEIGHT], dtype=torch.int32).repeat(len(shifts), 1),
            width=WIDTH,
            height=HEIGHT,
        )
        shape = len(shifts), HEIGHT, WIDTH, 3
        target = torch.randint(256, shape, dtype=torch.uint8, generator=generator)
        background = torch.rand(len(shifts), 3, generator=generator)
        inputs = _moved((cameras, target, background), self.backend.device)
        rates = dict.fromkeys(Gaussians.PARAMETERS, 0.001 / number)
        device = inputs[1].device
        step = AdamStep(rates, (0.9 - 0.01 * number, 0.999), 1e-15, number)
        self.step = optimizer.place(step, device, None if self.step is None else self.step.table)
        settings = RenderSettings(sh_degree=1)

        def stages(cameras: Cameras, target: Tensor, background: Tensor) -> tuple[Tensor, Tensor]:
            def loss(image: Image) -> Any:
                return self.backend.module.loss(image, target, background, cameras)

            there = ahead.differentiate(self.gaussians, cameras, settings, loss)
            projection.project_backward_adam(
                self.gaussians, cameras, settings, there.records, there.rows, self.moments, self.step, {}, False
            )
            self.backend.module.observe(there.records, there.rows, cameras, self.observations, True)
            return there.losses, there.image.rgb

        Emulated.training = self
        losses, rgb = self.run(stages, inputs, self.tables(), settings if record else None)
        assert not rgb.isnan().any()
        return losses.cpu()


@pytest.fixture
def train(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], tuple[Training, Tensor]]:
    if backend.device == "cpu":
        monkeypatch.setattr(replay, "Recorder", Emulated)

    def run(record: bool) -> tuple[Training, Tensor]:
        for capacity in (ahead.record_capacity, ahead.pair_capacity):
            monkeypatch.setattr(capacity, "_needed", {})
            monkeypatch.setattr(capacity, "SMALLEST", 7)
        training = Training(backend, replay.Replay(torch.device(backend.device)))
        losses = []
        for number in range(1, 16):
            if number == 9:
                training.drop(slice(None, -10), torch.Tensor.detach)  # at the same addresses
            if number == 11:
                training.drop(slice(10, None), torch.Tensor.clone)
            # At first only a third is in sight: later rounds find their buffers too short. Two views, now and then.
            shifts = (6,) if number < 5 else (number % 2,) if number % 6 else (0, -1)
            losses.append(training.round(number, shifts, record).sum())
        return training, torch.stack(losses)

    return run


def assert_same(one: tuple[Training, Tensor], other: tuple[Training, Tensor]) -> None:
    for mine, theirs in zip(one[0].tables(), other[0].tables(), strict=True):
        assert torch.equal(mine, theirs)
    torch.testing.assert_close(one[1], other[1], rtol=1e-6, atol=0)  # sums over the image, in no fixed order


def test_the_same_parameters_bit_by_bit(
    train: Callable[[bool], tuple[Training, Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    played, play = [], replay.Recording.run
    monkeypatch.setattr(replay.Recording, "run", lambda *args: played.append(play(*args)) or played[-1])
    launched = train(False)
    assert not played
    replayed = train(True)
    assert_same(launched, replayed)
    assert launched[0].gaussians.means.isfinite().all() and launched[0].observations.views.min() > 0
    # Most rounds were replayed, and among them some in whose buffers not everything fitted.
    assert len(played) >= 6 and any(state[HALTED] for state in played)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="the emulator has one thread")
def test_a_viewer_renders_meanwhile(backend: Backend, train: Callable[[bool], tuple[Training, Tensor]]) -> None:
    """Another thread uses the same kernels, allocates and waits while rounds are recorded."""
    expected, stop, rendered = train(False), threading.Event(), []
    cameras = Cameras(
        viewmats=torch.eye(4, device=backend.device)[None],
        intrinsics=torch.tensor([[FOCAL, FOCAL, WIDTH / 2, HEIGHT / 2]], device=backend.device),
        sizes=torch.tensor([[WIDTH, HEIGHT]], dtype=torch.int32, device=backend.device),
        width=WIDTH,
        height=HEIGHT,
    )
    scene = replace(expected[0].gaussians)

    def view() -> None:
        while not stop.is_set():
            records = backend.module.project(scene, cameras, RenderSettings(sh_degree=1))
            image = backend.module.rasterize(
                records, backend.module.bin(records, cameras), cameras, RenderSettings(sh_degree=1)
            )
            rendered.append(image.rgb.cpu())

    viewer = threading.Thread(target=view)
    viewer.start()
    try:
        for _ in range(10):
            assert_same(expected, train(True))
    finally:
        stop.set()
        viewer.join()
    assert len(rendered) > 10 and all(torch.equal(image, rendered[0]) for image in rendered)
