"""The optimizer's step against torch's."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from backends import Backend, _moved
from cases import SCENES
from oracle import truth

from bytesplat_ns import ops
from bytesplat_ns.ops import fused, reference
from bytesplat_ns.ops.cuda import optimizer, projection
from bytesplat_ns.ops.layout import AdamStep, Gaussians


def test_adam_is_torchs(backend: Backend) -> None:
    generator = torch.Generator().manual_seed(0)
    parameter = torch.randn(1001, 3, generator=generator)
    expected = parameter.clone().double().requires_grad_()
    optimizer = torch.optim.Adam([expected], lr=0.01, eps=1e-15)
    ours = parameter.to(backend.device)
    exp_avg, exp_avg_sq = torch.zeros_like(ours), torch.zeros_like(ours)
    for step in range(1, 21):
        # Sparse, of all sizes, and zero from some step on: momentum goes on moving what gets no gradient.
        gradient = torch.randn(1001, 3, generator=generator) * 10.0 ** (-3 * (step % 4))
        gradient[torch.rand(1001, generator=generator) < 0.5] = 0
        gradient[:100] = 0
        if step > 10:
            gradient[500:] = 0
        expected.grad = gradient.double()
        optimizer.step()
        backend.module.adam(ours, gradient.to(backend.device), exp_avg, exp_avg_sq, lr=0.01, step=step)

    # Each step moves an element by about lr and rounds it to half a unit of float32, 6e-8 of its size (up to 4).
    torch.testing.assert_close(ours.cpu().double(), expected.detach(), rtol=0, atol=20 * 6e-8 * 4)
    assert torch.equal(ours.cpu()[:100], parameter[:100])  # 0 / (0 + eps), not NaN
    moments = optimizer.state[expected]
    torch.testing.assert_close(exp_avg.cpu().double(), moments["exp_avg"], rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(exp_avg_sq.cpu().double(), moments["exp_avg_sq"], rtol=1e-5, atol=1e-9)


def test_adam_takes_its_options(backend: Backend) -> None:
    parameter = torch.linspace(-1, 1, 50)
    expected = parameter.clone().double().requires_grad_()
    optimizer = torch.optim.Adam([expected], lr=0.1, betas=(0.8, 0.95), eps=0.3)
    ours = parameter.to(backend.device)
    exp_avg, exp_avg_sq = torch.zeros_like(ours), torch.zeros_like(ours)
    for step in (1, 2, 3):
        expected.grad = expected.detach() ** 2
        gradient = ours**2
        optimizer.step()
        backend.module.adam(ours, gradient, exp_avg, exp_avg_sq, lr=0.1, beta1=0.8, beta2=0.95, eps=0.3, step=step)
    torch.testing.assert_close(ours.cpu().double(), expected.detach(), rtol=0, atol=1e-6)


def test_adam_averages_other_squares(backend: Backend) -> None:
    """The second moment is that of what is given in place of the gradient's square."""
    generator = torch.Generator().manual_seed(1)
    ours, square = torch.randn(2, 1001, 3, generator=generator)
    square = square**2
    expected = ours.double()
    gradient, ours = ours / 2, ours.to(backend.device, copy=True)
    exp_avg, exp_avg_sq = torch.zeros_like(ours), torch.zeros_like(ours)
    for step in (1, 2):
        given = gradient.to(backend.device), exp_avg, exp_avg_sq
        backend.module.adam(ours, *given, lr=0.1, step=step, square=square.to(backend.device))
        # Both moments average a constant, and bias correction makes them that constant.
        expected -= 0.1 * gradient.double() / square.double().sqrt()
    torch.testing.assert_close(ours.cpu().double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(exp_avg_sq.cpu(), (1 - 0.999**2) * square, rtol=1e-4, atol=1e-9)


@pytest.mark.parametrize("name", ["two_views", "views_of_different_sizes", "odd_size"])
def test_a_round_averages_over_its_views(backend: Backend, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Moments take in the mean of the views' gradients and of their squares, penalties in equal parts included."""
    scene, expected = SCENES[name], truth(name)
    generator = torch.Generator().manual_seed(2)
    gaussians, cameras, records, rows = (
        _moved(value, backend.device) for value in (scene.gaussians, scene.cameras, expected.records, expected.d_rows)
    )
    gaussians = replace(gaussians, **{n: getattr(gaussians, n).clone() for n in Gaussians.PARAMETERS})
    before = {n: getattr(gaussians, n).cpu().double() for n in Gaussians.PARAMETERS}
    penalties = {n: torch.randn(before[n].shape, generator=generator) for n in ("opacities", "scales", "features_rest")}
    start = {n: [torch.rand(p.shape, generator=generator) for _ in range(2)] for n, p in before.items()}
    moments = {n: tuple(_moved(moment.clone(), backend.device) for moment in pair) for n, pair in start.items()}
    step = AdamStep({n: 0.01 * (i + 1) for i, n in enumerate(before)}, (0.9, 0.99), 1e-15, number=3.5)

    arguments = gaussians, cameras, scene.settings, records, rows, moments
    given = {n: _moved(penalty, backend.device) for n, penalty in penalties.items()}
    if backend.name == "cuda":
        projection.project_backward_adam(*arguments, optimizer.place(step, gaussians.device), given, False)
    else:
        monkeypatch.setattr(ops, "backend", lambda device_type: backend.module)
        fused.project_backward_adam(*arguments, step, given, False)

    views = len(scene.cameras)
    truly = expected.gradients
    for n, parameter in before.items():
        part = penalties.get(n, torch.zeros(())).double() / views
        mean, square = getattr(truly, n) / views + part, truly.squares[n] / views
        square = square + 2 * part * getattr(truly, n) / views + part**2
        first, second = (moment.double() for moment in start[n])
        reference.adam(parameter, mean, first, second, lr=step.rates[n], beta1=0.9, beta2=0.99, step=3.5, square=square)
        torch.testing.assert_close(getattr(gaussians, n).cpu().double(), parameter, rtol=1e-5, atol=1e-6)
        for ours, moment in zip(moments[n], (first, second), strict=True):
            torch.testing.assert_close(ours.cpu().double(), moment, rtol=2e-5, atol=1e-6)
    assert views == 1 or not torch.allclose(truly.squares["means"], truly.means**2), "views overlap"


def test_adam_of_nothing(backend: Backend) -> None:
    nothing = [torch.zeros(0, 3, device=backend.device) for _ in range(4)]
    backend.module.adam(*nothing, lr=0.1, step=1)
