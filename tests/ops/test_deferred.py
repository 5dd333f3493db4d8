"""Adam that moves colours only when a view shows them ends where dense Adam ends."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest
import torch
from backends import Backend, _moved
from cases import ball, look
from torch import Tensor

from bytesplat_ns import ops
from bytesplat_ns.ops import fused, reference
from bytesplat_ns.ops.cuda import deferred, optimizer, projection
from bytesplat_ns.ops.layout import (
    COLOURS,
    ROW_WIDTH,
    AdamStep,
    Cameras,
    GaussianGradients,
    Gaussians,
    Lag,
    RenderSettings,
)

Moments = Mapping[str, tuple[Tensor, Tensor]]

STEPS = 200
COUNT = 120


class Optimization:
    """Gaussians under Adam, step after step, by one backend."""

    def __init__(self, backend: Backend, gaussians: Gaussians, settings: RenderSettings, defers: bool) -> None:
        self.backend, self.settings = backend, settings
        own = {name: tensor.clone() for name, tensor in vars(gaussians).items()}
        self.gaussians = _moved(replace(gaussians, **own), backend.device)
        self.moments: Moments = {
            name: (torch.zeros_like(parameter), torch.zeros_like(parameter)) for name, parameter in self.parameters()
        }
        device = self.gaussians.device
        lag_of = deferred.lag_of if backend.name == "cuda" else fused.lag_of
        self.lag: Lag | None = lag_of(len(gaussians), STEPS, device) if defers else None

    def parameters(self) -> list[tuple[str, Tensor]]:
        return [(name, getattr(self.gaussians, name)) for name in Gaussians.PARAMETERS]

    def catch_up(self, cameras: Cameras | None) -> None:
        if self.lag is not None:
            function = deferred.catch_up if self.backend.name == "cuda" else fused.catch_up
            function(self.gaussians, self.moments, self.lag, cameras, self.settings)

    def settle(self) -> None:
        if self.lag is not None:
            self.catch_up(None)
            assert (self.lag.caught_up == len(self.lag.past)).all()
            self.lag.clear()

    def step(self, cameras: Cameras, step: AdamStep, rows_of: Callable[[int], Tensor]) -> GaussianGradients | None:
        """Catches up, projects, and steps on random gradient rows; returns the gradients of a dense step."""
        cameras = _moved(cameras, self.backend.device)
        self.catch_up(cameras)
        records = self.backend.module.project(self.gaussians, cameras, self.settings)
        rows = rows_of(len(records)).to(self.backend.device)
        arguments = self.gaussians, cameras, self.settings, records, rows
        gradients = None if self.lag else self.backend.module.project_backward(*arguments, squares=True)
        if self.backend.name == "cuda":
            step = optimizer.place(step, self.gaussians.device)
            projection.project_backward_adam(*arguments, self.moments, step, {}, False, self.lag)
            if self.lag is not None:
                deferred.put_on_record(self.lag, step, records)
        else:
            fused.project_backward_adam(*arguments, self.moments, step, {}, False, self.lag)
        if self.lag is not None:
            self.lag.past.append(step)
        return gradients


def scene(degree: int) -> Gaussians:
    """Spread so far that a view shows a part; some are always out of sight, some colours clamped, some zero."""
    gaussians = ball(COUNT, 80, degree=degree, spread=1.6, scale=0.05)
    gaussians.means[:5, 2] = -100.0
    gaussians.features_rest[::3] = 0.0
    return gaussians


def a_round(generator: torch.Generator) -> Cameras:
    """One or two small views, each in a direction of its own and turned away from the middle."""
    views = 1 + int(torch.rand((), generator=generator) < 0.3)
    cameras = look(*[(24, 20)] * views, distance=2.5, focal=2.0)
    angle = 6.3 * torch.rand(views, generator=generator)
    turn = torch.eye(4).repeat(views, 1, 1)
    turn[:, 0, 0], turn[:, 0, 2], turn[:, 2, 0], turn[:, 2, 2] = angle.cos(), angle.sin(), -angle.sin(), angle.cos()
    return replace(cameras, viewmats=cameras.viewmats @ turn)


@pytest.mark.parametrize("degree, antialiased, steps", [(2, False, STEPS), (0, True, 70)])
def test_deferred_is_dense_is_torchs(
    backend: Backend, degree: int, antialiased: bool, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over hundreds of rounds of changing size, with rates that rise from zero and jump."""
    if backend.name != "cuda":
        if backend.device != "cpu":
            pytest.skip("runs on the host")
        monkeypatch.setattr(ops, "backend", lambda device_type: backend.module)
    steps = min(steps, 70) if backend.name == "reference" else steps
    generator = torch.Generator().manual_seed(5)
    gaussians, settings = scene(degree), RenderSettings(sh_degree=1, antialiased=antialiased, statistics=False)
    dense, late = (Optimization(backend, gaussians, settings, defers) for defers in (False, True))
    double = {name: parameter.cpu().double().requires_grad_() for name, parameter in dense.parameters()}
    torchs = torch.optim.Adam([{"params": [p]} for p in double.values()], eps=1e-15)

    age, behind, unseen = 0, 0, torch.zeros(COUNT, dtype=torch.int64)
    for number in range(steps):
        cameras = a_round(generator)
        views = len(cameras)
        age += views
        rate = 0.01 * (min(number / 20, 1.0) if number < 55 else 4.0)
        rates = {name: rate / (k + 1) for k, name in enumerate(Gaussians.PARAMETERS)}
        betas = 0.9**views, 0.999**views
        step = AdamStep(rates, betas, 1e-15, number=age / views)
        seed = int(torch.randint(2**31, (), generator=generator))

        def rows_of(count: int, seed: int = seed, size: float = 10.0 ** -(number % 5)) -> Tensor:
            return size * torch.randn(count, ROW_WIDTH, generator=torch.Generator().manual_seed(seed))

        gradients = dense.step(cameras, step, rows_of)
        for group, (name, p) in zip(torchs.param_groups, double.items(), strict=True):
            group["lr"], group["betas"], p.grad = rates[name], betas, getattr(gradients, name).cpu().double() / views
            if p in torchs.state:  # so that torch's bias correction is that of the product of all betas
                torchs.state[p]["step"].fill_(age / views - 1)
                # Torch takes in the square of the mean: what the mean of the squares is beyond it goes ahead.
                beyond = gradients.squares[name].cpu().double() / views - p.grad**2
                torchs.state[p]["exp_avg_sq"] += beyond * (1 - betas[1]) / betas[1]
        assert number > 0 or views == 1
        torchs.step()
        late.step(cameras, step, rows_of)
        seen = gradients.features_dc.cpu().abs().sum(dim=1) > 0
        unseen = torch.where(seen, 0, unseen + 1)
        behind = max(behind, int(unseen[5:].max()))
        if number in (30, 31, 160):
            late.settle()
    late.settle()
    assert behind > 20 and late.lag is not None and not late.lag.past

    for name, expected in dense.parameters():
        # The same operations on the same numbers; only the compiler may contract them differently.
        torch.testing.assert_close(getattr(late.gaussians, name), expected, rtol=2e-6, atol=1e-6)
        for ours, theirs in zip(late.moments[name], dense.moments[name], strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7)
        # Each step rounds to half a unit of float32, 6e-8 of a value.
        truly = double[name].detach()
        torch.testing.assert_close(expected.cpu().double(), truly, rtol=STEPS * 6e-8, atol=STEPS * 6e-8 * 4)
    if backend.name != "reference":
        assert (dense.gaussians.features_dc - gaussians.features_dc.to(dense.gaussians.device)).abs().max() > 0.02


@pytest.mark.parametrize("backend", ["cuda"], indirect=True)
def test_what_is_left_out_has_no_effect(backend: Backend) -> None:
    """A thousand steps without a gradient, from states of all kinds, against each of them taken in float64."""
    generator = torch.Generator().manual_seed(6)
    gaussians = ball(200, 81, degree=1)
    optimization = Optimization(backend, gaussians, RenderSettings(), True)
    lag = deferred.lag_of(200, 1000, optimization.gaussians.device)
    sizes = 10.0 ** -torch.arange(200).remainder(18)
    for name in COLOURS:
        parameter, (first, second) = getattr(optimization.gaussians, name), optimization.moments[name]
        size = sizes.view(-1, *[1] * (parameter.ndim - 1))
        first[:] = size * torch.randn(first.shape, generator=generator)
        second[:] = (3 * size * torch.rand(first.shape, generator=generator)) ** 2  # down to 1e-35: eps counts
        first[::7], second[::14] = 0.0, 0.0  # no gradient so far, or none for long
        parameter[::5] = 0.0
        parameter[1::5] *= 1e-6
    expected = {
        name: [t.cpu().double() for t in (getattr(optimization.gaussians, name), *optimization.moments[name])]
        for name in COLOURS
    }
    steps = [AdamStep(dict.fromkeys(Gaussians.PARAMETERS, 0.01 if k < 500 else 0.1), (0.9, 0.999), 1e-15, 3 + k)
             for k in range(1000)]  # fmt: skip
    none = backend.module.project(_moved(ball(0, 82), backend.device), _moved(look((8, 8)), backend.device),
                                  RenderSettings())  # fmt: skip
    for step in steps:
        deferred.put_on_record(lag, optimizer.place(step, lag.caught_up.device), none)
        lag.past.append(step)
    lag.caught_up[:] = torch.arange(200).remainder(13) ** 2
    before = lag.caught_up.cpu().clone()
    deferred.catch_up(optimization.gaussians, optimization.moments, lag, None, RenderSettings())
    assert (lag.caught_up == 1000).all() and int(lag.recorded) == 1000

    for name in COLOURS:
        parameter, first, second = expected[name]
        for number, step in enumerate(steps):
            rows = (before <= number).nonzero().squeeze(1)
            reference.update_rows(parameter, 0.0, (first, second), step, name, rows)
        ours = [t.cpu().double() for t in (getattr(optimization.gaussians, name), *optimization.moments[name])]
        # At most some 150 steps move a value; each rounds it by 6e-8 of its size.
        torch.testing.assert_close(ours[0], parameter, rtol=1e-5, atol=1e-7)
        for value, truly in zip(ours[1:], (first, second), strict=True):
            large = truly.abs() > 1e-30  # below, float32 has fewer digits
            torch.testing.assert_close(value[large], truly[large], rtol=2e-4, atol=0)


@pytest.mark.parametrize("backend", ["cuda"], indirect=True)
def test_nobody_is_seen_as_he_was(backend: Backend) -> None:
    """Whom the projection finds visible has been caught up with, at the edge of the image and at the near plane too."""
    generator = torch.Generator().manual_seed(7)
    gaussians = ball(4000, 83, degree=0, spread=2.0, scale=0.05, logit=-5.0, logit_spread=0.7)
    settings = RenderSettings(sh_degree=0, near=2.5)
    optimization = Optimization(backend, gaussians, settings, True)
    assert optimization.lag is not None and optimization.lag.recorded is not None
    for _ in range(10):
        cameras = _moved(a_round(generator), backend.device)
        optimization.lag.recorded += 1
        optimization.catch_up(cameras)
        current = optimization.lag.caught_up == optimization.lag.recorded
        records = backend.module.project(optimization.gaussians, cameras, settings)
        assert len(records) > 50 and current[records.gaussian.long()].all()
        assert current.sum() < 2 * len(records) + 200
