from __future__ import annotations

import io
from dataclasses import replace

import pytest
import torch
from tables import assert_same, by_id, on_ranks

from bytesplat_ns import ops
from bytesplat_ns.density import philox, survey
from bytesplat_ns.density.mcmc import MCMCOptions, MCMCStrategy
from bytesplat_ns.density.pruning import Lists, Pruning, PruningOptions, PruningSchedule
from bytesplat_ns.density.schedule import DensitySchedule
from bytesplat_ns.density.survey import HARM_UNIT, Survey
from bytesplat_ns.ops.layout import IMPORTANCE, MAX_CONTRIBUTION, Cameras, Gaussians, ImageGradients, RenderSettings
from bytesplat_ns.optim import GaussianAdam

SCHEDULE = PruningSchedule(start=100, stop=800, every=100, density=DensitySchedule(stop=0, total=1_000))
BUDGET = 10


# What views say -----------------------------------------------------------------------------------------------------


def scene() -> tuple[Gaussians, list[tuple[int, Cameras]], RenderSettings]:
    """Overlapping Gaussians, none of which saturates a pixel, and two views."""
    generator = torch.Generator().manual_seed(1)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(14, *shape, generator=generator)

    gaussians = Gaussians(
        means=normal(3) * 0.5 + torch.tensor([0.0, 0.0, 4.0]),
        quats=normal(4),
        scales=normal(3) * 0.3 - 1.0,
        opacities=normal(1) - 1.0,
        features_dc=normal(3),
        features_rest=normal(0, 3),
        ids=torch.arange(14) * 3,
    )
    views = []
    for number, shift in ((5, 0.0), (9, 0.4)):
        viewmat = torch.eye(4)
        viewmat[0, 3] = shift
        intrinsics, size = torch.tensor([[40.0, 40.0, 20.0, 16.0]]), torch.tensor([[40, 32]], dtype=torch.int32)
        views.append((number, Cameras(viewmat[None], intrinsics, size, 40, 32)))
    return gaussians, views, RenderSettings(sh_degree=0)


def test_harm_is_the_squared_change_of_the_images(monkeypatch):
    """Measured by leaving Gaussians out, one by one."""
    gaussians, views, settings = scene()

    def images(kept: torch.Tensor) -> torch.Tensor:
        part = Gaussians(**{name: table[kept] for name, table in vars(gaussians).items()})
        return torch.stack([ops.render(part, cameras, settings)[0].rgb for _, cameras in views])

    everyone = torch.arange(14)
    whole = images(everyone)
    truly = torch.stack([(images(everyone[everyone != k]) - whole).square().sum() for k in range(14)])

    monkeypatch.setattr(survey, "PROBES", 600)
    found = survey.survey(gaussians, views, settings, BUDGET, seed=2)
    harm = found.harm.double() * HARM_UNIT
    # A square of a normal number has a variance of twice its mean's square: 600 of them, 6 % each.
    assert truly.min() > 0 and truly.max() > 100 * truly.min()
    assert ((harm / truly - 1).abs() < 5 * (2 / 600) ** 0.5).all()

    monkeypatch.undo()
    quick = survey.survey(gaussians, views, settings, BUDGET, seed=2)
    assert torch.equal(quick.contribution, found.contribution)
    assert 0.3 < (quick.harm.double() * HARM_UNIT).sum() / truly.sum() < 3


def test_a_survey_sums_its_views():
    gaussians, views, settings = scene()
    whole, first, second = (survey.survey(gaussians, p, settings, 2, seed=2) for p in (views, views[:1], views[1:]))
    for name in ("harm", "tiles", "beyond", "crowded"):
        assert torch.equal(getattr(whole, name), getattr(first, name) + getattr(second, name)), name
        assert getattr(whole, name).any(), name
    assert torch.equal(whole.contribution, torch.maximum(first.contribution, second.contribution))
    lengths = [survey.effective_lengths(gaussians, part, settings) for part in (views, views[:1], views[1:])]
    assert torch.equal(lengths[0], torch.cat(lengths[1:])) and lengths[0].max() > 2

    # The largest weight at a pixel.
    _, cameras = views[0]
    records = ops.project(gaussians, cameras, settings)
    lists = ops.bin(records, cameras)
    image = ops.rasterize(records, lists, cameras, settings)
    rows = ops.rasterize_backward(records, lists, cameras, settings, image, ImageGradients(torch.ones_like(image.rgb)))
    assert torch.equal(first.contribution[records.gaussian.long()], rows[:, MAX_CONTRIBUTION])
    assert (first.contribution[records.gaussian.long()] <= rows[:, IMPORTANCE]).all()

    nothing = Gaussians(**{name: table[:0] for name, table in vars(gaussians).items()})
    assert len(survey.survey(nothing, views, settings, 2, seed=2).harm) == 0
    assert not survey.effective_lengths(nothing, views, settings).any()


# What is decided ----------------------------------------------------------------------------------------------------


class Looks:
    """Views that say what they are told, by id; quality is that of the moment."""

    def __init__(self, store, lengths=(3, 30, 40), psnr=(20.0,)) -> None:
        self.store, self.long, self.values = store, torch.tensor(lengths, dtype=torch.int32), list(psnr)

    def survey(self, budget: int) -> Survey:
        draws = philox.uniform(self.store.ids, 5, seed=1, step=0)
        tiles, beyond = (1 + draws[:, 1] * 50).long(), (draws[:, 2] * 10).long()
        crowded = (draws[:, 3] > 0.3).long()
        return Survey((draws[:, 0] * 1e6).long(), draws[:, 4], tiles, beyond, crowded)

    def lengths(self) -> torch.Tensor:
        return self.long

    def psnr(self) -> torch.Tensor:
        return torch.tensor([self.values[0] if len(self.values) == 1 else self.values.pop(0)])


@pytest.fixture
def make_pruning(make_store):
    """Makes pruning on a store whose moments are not zero."""

    def make(store=None, gather=lambda rows: rows, looks=None, **options) -> Pruning:
        store = make_store(200) if store is None else store
        if not store.columns:
            GaussianAdam(store)
        for column in store.columns.values():
            column.copy_(philox.normal(store.ids, column[0].numel(), seed=4, step=0).view_as(column))
        chosen = PruningOptions(**{"prune_share": 0.1} | options)
        views = Looks(store) if looks is None else looks
        return Pruning(store, chosen, SCHEDULE, BUDGET, views, lambda: 0, gather)

    return make


@pytest.mark.parametrize("cost, power", [("root", 0.5), ("tiles", 1.0), ("uniform", 0.0)])
def test_what_does_least_harm_for_its_cost_goes(make_pruning, cost, power):
    pruning = make_pruning(prune_cost=cost, prune_veto=0.7)
    found, ids = pruning.views.survey(BUDGET), pruning.store.ids.tolist()
    worth = (found.harm + 1) / (found.tiles + found.beyond).double() ** power
    may_go = found.contribution < 0.7
    if cost == "tiles":
        may_go &= found.crowded > 0
    expected = sorted((w, i) for w, i, may in zip(worth.tolist(), ids, may_go, strict=True) if may)[:20]
    assert pruning.update(99, 100) == []
    assert set(ids) - set(pruning.store.ids.tolist()) == {i for _, i in expected}


def test_within_budget_nothing_goes(make_pruning, make_store):
    store = make_store(200)
    pruning = make_pruning(store, looks=Looks(store, lengths=[1] * 96 + [99] * 4))
    (report,) = pruning.update(99, 100)
    assert report.pruned == 0 and report.kept and report.before == Lists(0.96, 1, 1, 99) and len(store) == 200
    assert "96.0% of tiles within budget" in str(report)
    assert pruning.update(100, 199) == []
    store = make_store(200)
    pruning = make_pruning(store, looks=Looks(store, lengths=[1] * 94 + [99] * 6))
    assert pruning.update(99, 100) == [] and len(store) == 180


def test_a_round_that_costs_too_much_is_undone(make_pruning, make_store):
    store = make_store(200, ids=torch.randperm(300, generator=torch.Generator().manual_seed(1))[:200])
    pruning = make_pruning(store, looks=Looks(store, psnr=[20.0, 19.94, 21.0, 20.96, 20.96]))
    before = by_id(store)
    pruning.update(99, 100)
    assert len(store) == 180
    survivors = store.ids.clone()
    store.parameters["means"].data += 1.0  # recovery
    store.columns["means.exp_avg"] += 1.0
    assert pruning.update(100, 199) == []

    (undone,) = pruning.update(199, 204)  # a round of several views
    assert not undone.kept and undone.pruned == 20 and "UNDONE" in str(undone)
    (kept,) = pruning.update(204, 300)
    assert kept.kept and kept.pruned == 10, "half as many, one time in two"
    # The round at 200 took ten of those that were back, the one at 300 another nine of 190.
    assert len(store) == 181
    back = torch.isin(store.ids, survivors, invert=True)
    now, rows = by_id(store), torch.searchsorted(before["ids"], by_id(store)["ids"])
    returned = torch.isin(now["ids"], survivors, invert=True)
    assert back.sum() == returned.sum() > 0
    for name, table in now.items():
        moved = name in ("means", "means.exp_avg")
        assert torch.equal(table[returned], before[name][rows][returned]), f"{name} of those that are back"
        assert torch.equal(table[~returned], before[name][rows][~returned] + (1.0 if moved else 0)), name


def test_a_checkpoint_in_between_changes_nothing(make_pruning, make_store):
    def run(interrupted: bool, psnr: float):
        store = make_store(200)
        pruning = make_pruning(store, looks=Looks(store, psnr=[20.0, psnr]))
        pruning.update(99, 100)
        if interrupted:
            file = io.BytesIO()
            torch.save(pruning.state_dict(), file)
            file.seek(0)
            pruning = Pruning(store, pruning.options, SCHEDULE, BUDGET, pruning.views, lambda: 0)
            pruning.load_state_dict(torch.load(file, weights_only=True))
        reports = pruning.update(100, 200)
        return by_id(store), reports, pruning.state_dict()["undone"]

    for psnr in (19.0, 20.0):
        (tables, reports, undone), (others, same, as_many) = run(False, psnr), run(True, psnr)
        assert_same(tables, others)
        assert reports == same and undone == as_many == (psnr < 20.0)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_the_same_go_and_come_back_on_any_number_of_ranks(make_pruning, make_store, ranks):
    def act(store, gather):
        pruning = make_pruning(store, gather, looks=Looks(store, psnr=[20.0, 19.0, 20.0, 20.0]))
        pruning.update(99, 100)
        removed = by_id(store)
        state = pruning.state_dict()
        rank = next(k for k in range(ranks) if store is stores[k])
        pruning.load_state_dict(state, rank, ranks)  # whose rows come back where, may change
        pruning.update(100, 200)
        return removed, len(store)

    whole = make_store(200)
    owner = torch.randint(ranks, (200,), generator=torch.Generator().manual_seed(2))
    stores = [make_store(200) for _ in range(ranks)]
    for rank, store in enumerate(stores):
        store.keep(owner == rank)
    results = on_ranks(stores, act)
    alone = make_pruning(whole, looks=Looks(whole, psnr=[20.0, 19.0, 20.0, 20.0]))
    alone.update(99, 100)
    kept = torch.cat([tables["ids"] for tables, _ in results]).sort().values
    assert torch.equal(kept, whole.ids)
    alone.update(100, 200)
    assert_same(by_id(*stores), by_id(whole))


def test_sampling_goes_on_with_the_numbers_of_the_moment(make_store):
    """Regularizers are means over all Gaussians: the strategy learns that some are gone, and keeps to its cap."""
    store = make_store(200)
    strategy = MCMCStrategy(store, GaussianAdam(store), MCMCOptions(max_gaussians=195), DensitySchedule(), seed=1)
    strategy.limit()
    looks = Looks(store, psnr=[20.0, 19.0, 20.0])
    pruning = Pruning(store, PruningOptions(prune_share=0.1), SCHEDULE, BUDGET, looks, strategy.limit)
    pruning.update(99, 100)
    assert len(store) == 176
    opacity = store.parameters["opacities"].detach().sigmoid()
    expected = 0.01 * (opacity * (1 - opacity)).sum()
    torch.testing.assert_close(strategy.regularizers(1)["opacities"].sum() * 176, expected)
    store.edit(torch.arange(176), torch.arange(19), store.next_id + torch.arange(19), {})  # grown to the cap
    pruning.update(100, 199)
    pruning._judge(pruning._pending)
    assert len(store) == 195


# When ---------------------------------------------------------------------------------------------------------------


def test_rounds_keep_away_from_resets():
    density = DensitySchedule(pause_after_reset=150)
    schedule = PruningSchedule(7_500, 25_500, 1_500, density)

    def moments(schedule: PruningSchedule, views: int = 1) -> list[int]:
        due = (schedule.round_at(seen - views, seen) for seen in range(views, schedule.density.total + 1, views))
        return [moment for moment in due if moment is not None]

    expected = [7_500, 10_500, 13_500, *range(15_000, 25_501, 1_500)]
    assert moments(schedule) == moments(schedule, views=7) == expected
    sampling = replace(density, reset_every=None, pause_after_reset=0)
    assert moments(replace(schedule, density=sampling)) == list(range(7_500, 25_501, 1_500))
    short = replace(density, total=16_000)
    assert moments(replace(schedule, density=short)) == [7_500, 10_500, 13_500], "each is judged before the end"


@pytest.mark.parametrize(
    "options", [{"prune_share": 1.0}, {"prune_budget": 0}, {"prune_guard": -0.1}, {"prune_veto": 0.0}]
)
def test_options_out_of_range_are_named(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        PruningOptions(**options)
