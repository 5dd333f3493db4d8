"""The optimizer's step against torch's."""

from __future__ import annotations

import torch
from backends import Backend


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


def test_adam_of_nothing(backend: Backend) -> None:
    nothing = [torch.zeros(0, 3, device=backend.device) for _ in range(4)]
    backend.module.adam(*nothing, lr=0.1, step=1)
