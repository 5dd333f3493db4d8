from __future__ import annotations

import torch

from bytesplat_ns.ops.layout import RECORD_WIDTH, ROW_WIDTH, Cameras, Gaussians, Records, RenderSettings
from bytesplat_ns.ops.reference import adam
from bytesplat_ns.optim import GaussianAdam
from bytesplat_ns.shared import step_on_round

RATES = {name: 10.0**-k for k, name in enumerate(Gaussians.PARAMETERS, start=1)}


def gradients(store, seed):
    generator = torch.Generator().manual_seed(seed)
    return {k: torch.randn(p.shape, generator=generator) for k, p in store.parameters.items()}


def step(optimizer, given, rates=RATES, views=1, **constants):
    """A step on these gradients alone, of each view: no Gaussian is visible, and regularizers come on top."""
    none = torch.zeros(0, dtype=torch.int32)
    records = Records(torch.zeros(0, RECORD_WIDTH), none, none, torch.zeros(0), none.long())
    sizes = torch.ones(views, 2, dtype=torch.int32)
    cameras = Cameras(torch.eye(4).repeat(views, 1, 1), torch.ones(views, 4), sizes, 1, 1)
    given = {name: views * gradient for name, gradient in given.items()}
    optimizer.prepare(rates, views, **constants)
    optimizer.step_from_rows(cameras, RenderSettings(), records, torch.zeros(0, ROW_WIDTH), given, poses=False)
    optimizer.count()


def test_equals_torch_adam_across_edits(make_store):
    """Rows that stay go on as under torch's Adam; a child moves as a Gaussian that had zero gradients so far."""
    store = make_store(40)
    optimizer = GaussianAdam(store)
    expected = [p.detach().clone().requires_grad_() for p in store.parameters.values()]
    groups = [{"params": [p], "lr": RATES[name]} for name, p in zip(store.parameters, expected, strict=True)]
    reference = torch.optim.Adam(groups, eps=1e-15)

    rows = torch.arange(40)
    for number in range(6):
        if number == 3:
            rows = torch.arange(0, 40, 2)
            store.edit(rows, torch.tensor([1, 2]), torch.tensor([40, 41]), {})
        given = gradients(store, number)
        step(optimizer, given)
        for name, parameter in zip(store.parameters, expected, strict=True):
            parameter.grad = torch.zeros_like(parameter)
            parameter.grad[rows] = given[name][: len(rows)]
        reference.step()
    assert optimizer.steps == 6
    for name, parameter in zip(store.parameters, expected, strict=True):
        # Six steps of float32 arithmetic that may be ordered differently.
        torch.testing.assert_close(store.parameters[name][: len(rows)], parameter[rows], rtol=1e-5, atol=1e-6)
        first, second = optimizer.moments(name)
        state = reference.state[parameter]
        torch.testing.assert_close(first[: len(rows)], state["exp_avg"][rows], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(second[: len(rows)], state["exp_avg_sq"][rows], rtol=1e-5, atol=1e-6)
        # After three steps of a constant-variance gradient, a child's second moment is that of three steps.
        child = torch.stack([gradients(store, number)[name][len(rows) :] for number in (3, 4, 5)])
        decay = 0.001 * 0.999 ** torch.tensor([2.0, 1.0, 0.0])
        torch.testing.assert_close(
            second[len(rows) :], torch.einsum("s,s...->...", decay, child**2), rtol=1e-5, atol=1e-9
        )


def test_forget_zeroes_one_parameter(make_store):
    store = make_store(4)
    optimizer = GaussianAdam(store)
    step(optimizer, gradients(store, 0))
    optimizer.forget("opacities")
    assert all(not moment.any() for moment in optimizer.moments("opacities"))
    assert all(moment.all() for moment in optimizer.moments("means"))


def test_resumes_where_it_stopped(make_store, tmp_path):
    store = make_store(4)
    optimizer = GaussianAdam(store)
    step(optimizer, gradients(store, 0))
    torch.save((store.state_dict(), optimizer.state_dict()), tmp_path / "state.pt")

    resumed = make_store(4)
    resumed.parameters.load_state_dict(store.parameters.state_dict())
    second = GaussianAdam(resumed)
    columns, state = torch.load(tmp_path / "state.pt", weights_only=True)
    resumed.load_state_dict(columns)
    second.load_state_dict(state)
    for each in (optimizer, second):
        step(each, gradients(store, 1), betas=(0.8, 0.99), eps=1e-8)
    for name in Gaussians.PARAMETERS:
        assert torch.equal(store.parameters[name], resumed.parameters[name])


def test_no_gaussians(make_store):
    store = make_store(0)
    step(GaussianAdam(store), gradients(store, 0))
    assert len(store) == 0


def test_bias_correction_follows_rounds_of_unequal_size(make_store):
    """Under a constant gradient, corrected moments are that gradient and its square: every step is the rate."""
    store = make_store(5)
    optimizer = GaussianAdam(store)
    for views in (4, 4, 1, 3, 8):
        before = store.parameters["means"].detach().clone()
        given = {k: torch.full_like(p, 0.3) for k, p in store.parameters.items()}
        step(optimizer, given, views=views, betas=(0.9**views, 0.999**views))
        moved = before - store.parameters["means"].detach()
        torch.testing.assert_close(moved, torch.full_like(moved, RATES["means"]), rtol=1e-4, atol=1e-6)
    assert (optimizer.steps, optimizer.age) == (5, 20)


def test_shared_parameters_follow_rounds_of_unequal_size(tmp_path):
    """Torch's Adam averages over views, through a checkpoint too; with one view a round it is left as it is."""
    parameter = torch.nn.Parameter(torch.zeros(24))  # one for each photo
    optimizer, moments = torch.optim.Adam([parameter]), [torch.zeros(24), torch.zeros(24)]
    expected, seen = torch.zeros(24), 0
    for number, views in enumerate((4, 4, 1, 3, 8)):
        if number == 3:
            torch.save(optimizer.state_dict(), tmp_path / "state.pt")
            optimizer = torch.optim.Adam([parameter])
            optimizer.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
        betas, shown = (0.9**views, 0.999**views), torch.arange(seen, seen + views)
        parameter.grad = torch.zeros(24).index_fill(0, shown, 0.3)
        step_on_round(optimizer, 0.01, betas, 1e-15, views, penalty=0.1 * parameter.sum())
        seen += views

        each = torch.full((views, 24), 0.1)
        each[torch.arange(views), shown] += 0.3
        average = {"square": each.square().mean(0), "beta1": betas[0], "beta2": betas[1]}
        adam(expected, each.mean(0), *moments, lr=0.01, step=seen / views, **average)
        torch.testing.assert_close(parameter.detach(), expected, rtol=1e-4, atol=1e-7)
    assert optimizer.state[parameter]["step"] == 20, "views"

    single, plain = (torch.nn.Parameter(torch.ones(5)) for _ in range(2))
    one_by_one, reference = torch.optim.Adam([single]), torch.optim.Adam([plain], lr=0.01, eps=1e-15)
    for number in range(4):
        single.grad = plain.grad = torch.full_like(plain, 0.1 * number - 0.2)
        step_on_round(one_by_one, 0.01, (0.9, 0.999), 1e-15, 1)
        reference.step()
        assert torch.equal(single, plain)
