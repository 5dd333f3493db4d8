from __future__ import annotations

import math

import pytest
import torch
from tables import assert_same, by_id, on_ranks

from bytesplat_ns import ops
from bytesplat_ns.density.base import DensityReport
from bytesplat_ns.density.mcmc import MCMCOptions, MCMCStrategy, share
from bytesplat_ns.density.schedule import DensitySchedule
from bytesplat_ns.ops.layout import Cameras, Gaussians, RenderSettings
from bytesplat_ns.optim import GaussianAdam


@pytest.fixture
def make_mcmc():
    def make(store, gather=lambda rows: rows, **options):
        optimizer = GaussianAdam(store)
        optimizer.prepare({"means": 1.6e-4})
        schedule = DensitySchedule(stop=25_000, reset_every=None)
        return MCMCStrategy(store, optimizer, MCMCOptions(**options), schedule, seed=3, gather=gather)

    return make


def kill(store, ids):
    """Make these Gaussians as good as transparent."""
    with torch.no_grad():
        store.parameters["opacities"][torch.isin(store.ids, torch.as_tensor(ids))] = -9.0


def opacities(store):
    return store.parameters["opacities"].detach().squeeze(1).sigmoid()


# Sharing: n Gaussians that look like one -----------------------------------------------------------------------------


@pytest.mark.parametrize("opacity", [0.006, 0.1, 0.5, 0.9, 0.999])
@pytest.mark.parametrize("n", [1, 2, 3, 10, 51, 5_000])
def test_copies_together_have_the_profile_of_one(opacity, n):
    (shared,), (shrinkage,) = share(torch.tensor([opacity], dtype=torch.float64), torch.tensor([n]))
    assert 1 - (1 - shared) ** n == pytest.approx(opacity, rel=1e-9), "at the centre"
    x = torch.linspace(
        -12, 12, 24_001, dtype=torch.float64
    )  # standard deviations; the trapezoids err by less than 1e-9
    composed = -torch.expm1(n * torch.log1p(-shared * torch.exp(-0.5 * (x / shrinkage) ** 2)))
    assert torch.trapezoid(composed, x) == pytest.approx(opacity * math.sqrt(2 * math.pi), rel=1e-6), "along a line"
    assert (shrinkage == 1) if n == 1 else (0 < shrinkage < 1)


@pytest.mark.parametrize("n", [1, 2, 3, 7, 20])
def test_sharing_is_the_papers_equation(n):
    """Equation 9 as printed, a double sum; ours has its outer sum done."""
    opacity = torch.tensor([0.01, 0.3, 0.95], dtype=torch.float64)
    shared, shrinkage = share(opacity, torch.full((3,), n))
    total = sum(
        math.comb(i - 1, k) * (-1) ** k * shared ** (k + 1) / math.sqrt(k + 1)
        for i in range(1, n + 1)
        for k in range(i)
    )
    torch.testing.assert_close(shrinkage, opacity / total, rtol=1e-10, atol=0)


def render(store):
    """[64, 64] opacity of what a camera at distance 4 on the z axis sees."""
    view = torch.eye(4)
    view[2, 3] = 4.0
    cameras = Cameras(
        viewmats=view[None],
        intrinsics=torch.tensor([[64.0, 64.0, 32.0, 32.0]]),
        sizes=torch.tensor([[64, 64]], dtype=torch.int32),
        width=64,
        height=64,
    )
    image, _ = ops.render(store.gaussians(), cameras, RenderSettings())
    return 1 - image.transmittance[0].detach()


def test_a_relocated_pair_renders_like_its_parent(make_store, make_mcmc):
    store = make_store(2)
    with torch.no_grad():
        store.parameters["means"][0] = 0.0
        store.parameters["scales"][0] = torch.tensor([0.8, 0.4, 0.3]).log()
        store.parameters["opacities"][0] = math.log(4.0)  # 0.8
    kill(store, [1])
    before, unshared = render(store), store.parameters["scales"].detach()[0].clone()
    assert make_mcmc(store, max_gaussians=2).refine(600) == DensityReport(2, relocated=1)
    assert store.ids.tolist() == [0, 2]
    for name in Gaussians.PARAMETERS:
        assert torch.equal(*store.parameters[name].detach()), name
    after = render(store)
    assert after.max() == pytest.approx(float(before.max()), abs=2e-3), "pixel centres are half a pixel off the middle"
    # Equal integrals along a line leave 0.0376 of the integral over the plane missing: the pair is 0.899 as wide, and
    # its integral 0.9528 where one Gaussian of this opacity has 0.8; 0.9528 * 0.899^2 = 0.771.
    assert after.sum() == pytest.approx(0.963 * float(before.sum()), rel=0.01)
    assert (after - before).abs().max() < 0.03
    with torch.no_grad():
        store.parameters["scales"][:] = unshared
    assert (render(store) - before).abs().max() > 0.05, "without shrinking the pair is too wide"


# What moves ---------------------------------------------------------------------------------------------------------


def test_the_dead_move_onto_the_living(make_store, make_mcmc):
    store = make_store(200)
    kill(store, range(60))
    dead = opacities(store) <= 0.005
    assert 60 <= dead.sum() < 80
    places = store.parameters["means"].detach()[~dead].clone()
    report = make_mcmc(store, max_gaussians=200).refine(600)
    assert report == DensityReport(200, relocated=int(dead.sum()))
    assert len(store) == 200 and not torch.isin(torch.arange(60), store.ids).any()
    assert (opacities(store) >= 0.005 * (1 - 1e-5)).all()
    born = store.parameters["means"].detach()[store.ids >= 200]
    assert len(born) == dead.sum() and (born[:, None] == places).all(dim=2).any(dim=1).all()


def test_draws_follow_opacity(make_store, make_mcmc):
    """Each Gaussian is drawn as often as its opacity says, give or take the parts of the line at its two ends."""
    store = make_store(50)
    strategy = make_mcmc(store)
    opacity, alive = opacities(store), torch.arange(50) % 5 != 0
    counts = strategy._draw(opacity, alive, 1_000, 600)
    expected = 1_000 * opacity * alive / opacity[alive].sum()
    assert counts.sum() == 1_000 and not counts[~alive].any()
    assert ((counts - expected).abs() < 2).all()
    assert not torch.equal(counts, strategy._draw(opacity, alive, 1_000, 700)), "chance differs from step to step"


def test_draws_are_fair(make_store, make_mcmc):
    """Over many steps a single draw meets each Gaussian in proportion to its opacity."""
    store = make_store(4)
    strategy = make_mcmc(store)
    opacity, alive = torch.tensor([0.1, 0.2, 0.3, 0.4]), torch.ones(4, dtype=torch.bool)
    counts = sum(strategy._draw(opacity, alive, 1, step) for step in range(2_000))
    # Five standard deviations of a binomial distribution.
    assert ((counts - 2_000 * opacity).abs() < 5 * (2_000 * opacity * (1 - opacity)).sqrt()).all()


def test_ids_follow_parents(make_store, make_mcmc):
    store = make_store(300, ids=torch.randperm(300, generator=torch.Generator().manual_seed(1)))
    kill(store, range(100))
    family = {tuple(f): i for f, i in zip(store.parameters["features_dc"].tolist(), store.ids.tolist(), strict=True)}
    make_mcmc(store).refine(600)
    born = store.ids >= 300
    assert store.ids[born].tolist() == list(range(300, store.next_id))
    lineage = [family[tuple(f)] for f in store.parameters["features_dc"][born].tolist()]
    assert lineage == sorted(lineage) and len(set(lineage)) < len(lineage), "some have several copies"


def test_parents_and_copies_start_without_momentum(make_store, make_mcmc):
    store = make_store(300)
    kill(store, range(20))
    strategy = make_mcmc(store)
    for name in Gaussians.PARAMETERS:
        for moment in strategy.optimizer.moments(name):
            moment.fill_(1.0)
    means = store.parameters["means"].detach().clone()
    strategy.refine(600)
    born = store.parameters["means"].detach()[store.ids >= 300]
    concerned = (store.parameters["means"].detach()[:, None] == born).all(dim=2).any(dim=1)
    assert len(born) < concerned.sum() < len(store)
    for name in Gaussians.PARAMETERS:
        for moment in strategy.optimizer.moments(name):
            assert not moment[concerned].any() and (moment[~concerned] == 1).all()
    old = store.ids[store.ids < 300]
    assert torch.equal(store.parameters["means"].detach()[: len(old)], means[old]), "the living stay where they are"


# How many -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n, grown", [(1, 1), (3, 1), (20, 1), (21, 2), (200, 10)])
def test_growth_by_a_twentieth(make_store, make_mcmc, n, grown):
    store = make_store(n)
    with torch.no_grad():
        store.parameters["opacities"].clamp_(min=-3)
    assert make_mcmc(store).refine(600) == DensityReport(n + grown, duplicated=grown)
    assert len(store) == n + grown


@pytest.mark.parametrize("cap", [1, 37, 100, 150, 199, 200, 201, 205, 230])
def test_never_above_the_cap(make_store, make_mcmc, cap):
    store = make_store(200)
    kill(store, range(60))
    strategy = make_mcmc(store, max_gaussians=cap)
    for seen in (600, 700, 800):
        report = strategy.refine(seen)
        assert report.gaussians == len(store) <= cap
    assert len(store) == min(cap, 230 if cap > 230 else cap)
    assert strategy.limit() == 0


def test_a_start_above_the_cap(make_store, make_mcmc):
    store = make_store(500)
    strategy = make_mcmc(store, max_gaussians=120)
    threshold = opacities(store).sort(descending=True).values[119]
    assert strategy.limit() == 380
    assert len(store) == 120 and (opacities(store) >= threshold).all()


# Noise and penalties ------------------------------------------------------------------------------------------------


def test_noise_follows_covariance_opacity_and_learning_rate(make_store, make_mcmc):
    n = 20_000
    store = make_store(n)
    parameters = store.parameters
    with torch.no_grad():
        parameters["means"][:] = 0.0
        parameters["scales"][:] = torch.tensor([0.3, 0.1, 0.02]).log()
        parameters["quats"][:] = 2 * torch.tensor([math.cos(0.3), 0.0, 0.0, math.sin(0.3)])  # 0.6 rad about z
        parameters["opacities"][:] = torch.logit(torch.tensor(0.005))  # the gate is half open
        parameters["opacities"][::2] = 0.0  # and here closed
    make_mcmc(store, noise_lr=1e5).add_noise(600)
    means = parameters["means"].detach().double()
    assert not means[::2].any(), "an opaque Gaussian stays"
    cos, sin = math.cos(0.6), math.sin(0.6)
    turn = torch.tensor([[cos, -sin, 0], [sin, cos, 0], [0, 0, 1]]).double()
    covariance = turn @ torch.diag(torch.tensor([0.09, 0.01, 0.0004]).double()) @ turn.T
    expected = (0.5 * 1e5 * 1.6e-4) ** 2 * covariance @ covariance
    # Five standard errors of a covariance of 10,000 samples.
    assert ((torch.cov(means[1::2].T) - expected).abs() < 5 * expected.max() * (2 / (n / 2)) ** 0.5).all()


def test_noise_is_new_each_round_and_fades_with_the_learning_rate(make_store, make_mcmc):
    def moved(seen, rate):
        store = make_store(100)
        kill(store, range(100))
        strategy = make_mcmc(store)
        strategy.optimizer.prepare({"means": rate})
        start = store.parameters["means"].detach().clone()
        strategy.add_noise(seen)
        return store.parameters["means"].detach() - start

    assert torch.equal(moved(600, 1e-4), moved(600, 1e-4))
    assert not torch.equal(moved(600, 1e-4), moved(601, 1e-4))
    assert not moved(600, 0.0).any()


@pytest.mark.parametrize("views", [1, 3])
def test_penalties_are_the_gradient_of_the_papers(make_store, make_mcmc, views):
    store = make_store(50)
    gradients = make_mcmc(store, mcmc_opacity_reg=0.3, mcmc_scale_reg=0.7).regularizers(views)
    means = store.parameters["opacities"].sigmoid().mean(), store.parameters["scales"].exp().mean()
    (views * (0.3 * means[0] + 0.7 * means[1])).backward()
    assert gradients.keys() == {"opacities", "scales"}
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, store.parameters[name].grad)


# What it does not depend on -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("cap", [10_000, 1_010, 700])
def test_order_of_rows_does_not_matter(make_store, make_mcmc, cap):
    order = torch.randperm(1_000, generator=torch.Generator().manual_seed(1))
    results, reports = [], []
    for shuffled in (False, True):
        store = make_store(1_000)
        kill(store, range(300))
        if shuffled:
            store.keep(order)
        reports.append(make_mcmc(store, max_gaussians=cap).update(599, 600))
        results.append(by_id(store))
    assert reports[0] == reports[1]
    assert_same(*results)


@pytest.mark.parametrize("cap", [10_000, 1_010, 700])
@pytest.mark.parametrize("ranks", [2, 3])
def test_spreading_over_ranks_does_not_matter(make_store, make_mcmc, ranks, cap):
    whole = make_store(1_000)
    kill(whole, range(300))
    expected = make_mcmc(whole, max_gaussians=cap).update(599, 600)

    rank_of = torch.randint(ranks, (1_000,), generator=torch.Generator().manual_seed(2))
    rank_of[:350] = 0  # the dead are not where their copies will be
    stores = [make_store(1_000) for _ in range(ranks)]
    for rank, store in enumerate(stores):
        kill(store, range(300))
        store.keep(rank_of == rank)
    reports = on_ranks(stores, lambda store, gather: make_mcmc(store, gather, max_gaussians=cap).update(599, 600))
    assert reports == [expected] * ranks
    assert {store.next_id for store in stores} == {whole.next_id}
    assert_same(by_id(whole), by_id(*stores))


# What must not happen -----------------------------------------------------------------------------------------------


def test_without_anything_alive_nothing_moves(make_store, make_mcmc):
    store = make_store(50)
    kill(store, range(50))
    with torch.no_grad():
        store.parameters["means"][7, 1] = float("nan")
    assert make_mcmc(store).refine(600) == DensityReport(49, non_finite=1)
    assert 7 not in store.ids.tolist()


@pytest.mark.parametrize("name", Gaussians.PARAMETERS)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_non_finite_gaussians_are_replaced(make_store, make_mcmc, name, value):
    store = make_store(200)
    with torch.no_grad():
        store.parameters[name].flatten(1)[[3, 70, 110], -1] = value
    report = make_mcmc(store).update(599, 600)
    assert report.non_finite == 3 and report.gaussians == 210
    assert all(parameter.isfinite().all() for parameter in store.parameters.values())
    assert not {3, 70, 110} & set(store.ids.tolist())


def test_divergence_is_an_error(make_store, make_mcmc):
    store = make_store(5)
    with torch.no_grad():
        store.parameters["quats"][:] = float("nan")
    with pytest.raises(FloatingPointError, match="all 5 Gaussians"):
        make_mcmc(store).refine(600)


def test_no_gaussians(make_store, make_mcmc):
    store = make_store(0)
    strategy = make_mcmc(store)
    assert strategy.update(599, 600) == DensityReport(0)
    assert strategy.limit() == 0
    assert not any(len(gradient) for gradient in strategy.regularizers(1).values())


def test_update_follows_the_schedule(make_store, make_mcmc):
    store = make_store(100)
    kill(store, [0])
    strategy = make_mcmc(store)
    assert not strategy.observes(0), "statistics cost time"
    means = store.parameters["means"].detach().clone()
    assert strategy.update(500, 599) is None and not torch.equal(store.parameters["means"], means), "noise all the same"
    assert strategy.update(599, 600).gaussians == 105
    assert strategy.update(2_999, 3_000).reset is False, "opacities are never reset"
    assert strategy.update(24_999, 25_000) is None


@pytest.mark.parametrize(
    "options",
    [
        {"min_opacity": 0.0},
        {"noise_lr": -1.0},
        {"mcmc_opacity_reg": math.inf},
        {"mcmc_scale_reg": -1e-9},
        {"max_gaussians": 0},
    ],
)
def test_impossible_options_are_refused(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        MCMCOptions(**options)
