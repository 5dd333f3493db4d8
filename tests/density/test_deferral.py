"""When colours are put off, and that nobody reads any that are behind. What a step does is tested in tests/ops."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch

from bytesplat_ns import deferral, ops
from bytesplat_ns.ops.layout import ROW_WIDTH, Cameras, Gaussians, RenderSettings
from bytesplat_ns.optim import GaussianAdam

RATES = {name: 0.01 / k for k, name in enumerate(Gaussians.PARAMETERS, start=1)}
SETTINGS = RenderSettings(statistics=False)
COUNT = 30


@pytest.fixture
def pair(make_store, monkeypatch):
    """The same Gaussians under Adam that is dense and that defers, with a short record."""
    monkeypatch.setattr(deferral, "MOST_STEPS", 6)

    def make():
        optimizers = [GaussianAdam(make_store(COUNT)) for _ in range(2)]
        optimizers[1].deferral.turn(True)
        return optimizers

    return make


def view(angle: float) -> Cameras:
    """From the middle, in some direction."""
    viewmats = torch.eye(4)[None].clone()
    c, s = torch.tensor(angle).cos(), torch.tensor(angle).sin()
    viewmats[0, 0, 0], viewmats[0, 0, 2], viewmats[0, 2, 0], viewmats[0, 2, 2] = c, s, -s, c
    size = torch.tensor([[32, 32]], dtype=torch.int32)
    return Cameras(viewmats, torch.tensor([[40.0, 40.0, 16.0, 16.0]]), size, 32, 32)


def step(optimizer: GaussianAdam, number: int) -> None:
    """A step on rows that depend on ids and on the number alone."""
    cameras = view(1.3 * number)
    optimizer.prepare(RATES)
    gaussians = optimizer.gaussians(cameras, SETTINGS)
    records = ops.project(gaussians, cameras, SETTINGS)
    generator = torch.Generator().manual_seed(number)
    rows = torch.randn(1000, ROW_WIDTH, generator=generator)[records.ids]
    optimizer.step_from_rows(cameras, SETTINGS, records, rows, {"opacities": 0.1 * gaussians.opacities}, poses=False)
    optimizer.count()


def assert_alike(dense: GaussianAdam, late: GaussianAdam) -> None:
    for name in Gaussians.PARAMETERS:
        torch.testing.assert_close(late.store.parameters[name], dense.store.parameters[name], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(late.moments(name), dense.moments(name), rtol=1e-5, atol=1e-7)


def behind(optimizer: GaussianAdam) -> int:
    """How many Gaussians' colours are."""
    lag = optimizer.deferral.lag
    return int((lag.caught_up < len(lag.past)).sum())


def test_a_full_record_is_settled_and_a_new_one_begun(pair):
    dense, late = pair()
    most = 0
    for number in range(20):
        step(dense, number)
        step(late, number)
        assert len(late.deferral.lag.past) <= 6
        most = max(most, behind(late))
    assert most > COUNT // 3
    late.deferral.settle()
    assert behind(late) == 0
    assert_alike(dense, late)


def edit(optimizer: GaussianAdam) -> None:
    """Children of Gaussians that are behind, and of others, in place of some."""
    kept = torch.arange(5, COUNT)
    optimizer.store.edit(kept, torch.arange(0, COUNT, 3), torch.arange(100, 110), {})


def forget(optimizer: GaussianAdam) -> None:
    for name in Gaussians.PARAMETERS:
        optimizer.forget(name, torch.arange(0, COUNT, 2))


def turn_off_and_on(optimizer: GaussianAdam) -> None:
    if optimizer.deferral.lag is not None:
        optimizer.deferral.turn(False)
        step(optimizer, 50)
        optimizer.deferral.turn(True)
    else:
        step(optimizer, 50)


def replace_rows(optimizer: GaussianAdam) -> None:
    optimizer.store.settle()
    tables = optimizer.store.tables()
    optimizer.store.replace(tables | {"ids": tables["ids"].flip(0)})


@pytest.mark.parametrize("change", [edit, forget, turn_off_and_on, replace_rows])
def test_nobody_reads_what_is_behind(pair, change):
    dense, late = pair()
    for number in range(4):
        step(dense, number)
        step(late, number)
    assert behind(late) > 5
    change(dense)
    change(late)
    for number in range(4, 9):
        step(dense, number)
        step(late, number)
    assert_alike(dense, late)


def test_a_saved_state_is_up_to_date_and_says_nothing_of_it(pair):
    dense, late = pair()
    for number in range(4):
        step(dense, number)
        step(late, number)
    expected, saved = dense.store.state_dict(), late.store.state_dict()
    assert expected["columns"].keys() == saved["columns"].keys()
    assert behind(late) == 0
    assert_alike(dense, late)

    # A run that defers goes on from the file of one that does not, and the other way round.
    for source, target in ((dense, late), (late, dense)):
        target.store.load_state_dict(deepcopy(source.store.state_dict()))
        for name, parameter in source.store.parameters.items():
            target.store.parameters[name].data[:] = parameter
        target.load_state_dict(source.state_dict())
        step(source, 4)
        step(target, 4)
        assert_alike(dense, late)


def test_what_decides(make_store, monkeypatch):
    """A GPU, many Gaussians, and views that show few of them; or the user."""
    monkeypatch.setattr(deferral, "FEWEST_GAUSSIANS", 20)
    store = make_store(COUNT)
    own = GaussianAdam(store).deferral

    def consider(choice: deferral.Choice, views: int = 1, anew: bool = True) -> str | None:
        own._decided_for *= not anew
        return own.consider(choice, views, lambda: view(0.0), SETTINGS)

    assert consider("auto") is None and own.lag is None, "a CPU"
    assert "30 Gaussians" in consider("on") and own.lag is not None
    assert consider("off", anew=False) is None and own.lag is not None, "as many Gaussians as before"
    assert "each step again" in consider("off") and own.lag is None

    share = deferral.shown(store.gaussians(), view(0.0), SETTINGS, 1)
    assert 0.05 < share < 0.6
    assert deferral.shown(store.gaussians(), view(0.0), SETTINGS, 2) == pytest.approx(1 - (1 - share) ** 2)
    monkeypatch.setattr(type(store), "device", property(lambda store: torch.device("cuda")))
    monkeypatch.setattr(deferral.fused, "lag_of", lambda *arguments: object())
    monkeypatch.setattr(own, "settle", lambda: None)
    monkeypatch.setattr(deferral, "LARGEST_SHARE", share + 0.01)
    assert consider("auto", views=20) is None and own.lag is None, "rounds that show nearly all"
    assert f"a round shows {share:.0%}" in consider("auto") and own.lag is not None
    monkeypatch.setattr(deferral, "FEWEST_GAUSSIANS", COUNT + 1)
    assert "again" in consider("auto") and own.lag is None
