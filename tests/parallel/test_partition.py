from __future__ import annotations

import pytest
import torch
from scenes import gaussians

from bytesplat_ns.density.store import GaussianStore
from bytesplat_ns.ops.layout import Gaussians
from bytesplat_ns.optim import GaussianAdam
from bytesplat_ns.parallel import partition
from bytesplat_ns.parallel.ranks import ALONE, Ranks


def model(n: int, seed: int = 0) -> tuple[Gaussians, torch.Tensor]:
    """Gaussians in the order of their ids, and loads: most of them light, some heavy."""
    scene = gaussians(n, seed)
    scene.ids = scene.ids.sort().values
    loads = (torch.rand(n, generator=torch.Generator().manual_seed(seed)) ** 6 * 1000).long()
    return scene, loads


def store_of(scene: Gaussians, rows: torch.Tensor) -> GaussianStore:
    parameters = {name: torch.nn.Parameter(getattr(scene, name)[rows]) for name in Gaussians.PARAMETERS}
    store = GaussianStore(torch.nn.ParameterDict(parameters), scene.ids[rows], next_id=9_999)
    GaussianAdam(store)
    store.register("statistic", (2,), torch.int64)
    for place, (name, column) in enumerate(store.columns.items()):  # what belongs to a Gaussian follows from its id
        flat = store.ids[:, None] * 7 + torch.arange(column[:1].numel()) + place
        store.columns[name] = flat.reshape(column.shape).to(column.dtype)
    return store


@pytest.mark.parametrize("count", [1, 2, 3, 5, 8, 13])
def test_loads_are_in_proportion_and_every_place_in_space_has_one_owner(count):
    scene, loads = model(4000)
    cells = partition.divide(count, scene.means, scene.ids, loads, ALONE)
    owners = cells.owners(scene.means, scene.ids)
    assert len(cells.splits) == count - 1 and set(owners.tolist()) == set(range(count))
    shares = torch.zeros(count, dtype=torch.int64).index_add_(0, owners, loads)
    # Every split is exact up to one Gaussian.
    assert (shares.double() - loads.sum() / count).abs().max() <= (count - 1).bit_length() * (loads.max() + count)
    anywhere = torch.tensor([[torch.nan] * 3, [torch.inf] * 3, [-torch.inf] * 3, [3e38, -3e38, 0.0]])
    anywhere = torch.cat([anywhere, torch.randn(500, 3) * 1e6])
    assert set(cells.owners(anywhere, torch.arange(len(anywhere))).tolist()) <= set(range(count))


def test_equal_coordinates_are_told_apart_by_id():
    """As for a model that starts at one point, or on a grid."""
    ids = torch.randperm(10_000)[:999]
    for means in (torch.ones(999, 3), torch.randint(0, 2, (999, 3)).float(), torch.zeros(999, 3) * -1.0):
        cells = partition.divide(5, means, ids, torch.ones_like(ids), ALONE)
        counts = cells.owners(means, ids).bincount(minlength=5)
        assert counts.max() - counts.min() <= 3, counts


def test_no_load_or_no_gaussians_make_cells_too():
    for n in (0, 1, 2):
        scene, _ = model(n)
        for loads in (torch.zeros(n, dtype=torch.int64), torch.ones(n, dtype=torch.int64)):
            cells = partition.divide(4, scene.means, scene.ids, loads, ALONE)
            assert cells.owners(scene.means, scene.ids).shape == (n,)


def test_cells_are_compact_in_spite_of_far_gaussians():
    means = torch.rand(3000, 3, generator=torch.Generator().manual_seed(0)) * torch.tensor([10.0, 1.0, 1.0])
    means[:30, 1] = 1e4
    (split,) = partition.divide(2, means, torch.arange(3000), torch.ones(3000, dtype=torch.int64), ALONE).splits
    assert split.axis == 0 and abs(split.value - 5) < 0.3


def scatter(ranks: Ranks, count: int, how: int) -> tuple:
    """Divides a model that is spread over ranks in some way, then moves it to its owners."""
    scene, loads = model(500)
    scene.features_rest = scene.features_rest[:, : 3 * (how != 2)]  # without harmonics there is an empty table
    at = [scene.ids % ranks.size, torch.zeros_like(scene.ids), (scene.ids > 400).long()][how] == ranks.rank
    store = store_of(scene, at)
    cells = partition.divide(count, scene.means[at], scene.ids[at], loads[at], ranks)
    owners = cells.owners(store.parameters["means"].detach(), store.ids)
    if count == ranks.size:
        partition.move(store, owners, ranks)
    return cells, {name: table.numpy() for name, table in store.tables().items()}, store.next_id


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_divide_and_move_as_one_process_would(group, size):
    scene, loads = model(500)
    for how, count in ((0, size), (1, size), (2, size), (0, 7)):
        expected = partition.divide(count, scene.means, scene.ids, loads, ALONE)
        owners = expected.owners(scene.means, scene.ids)
        scene.features_rest = gaussians(500, 0).features_rest[:, : 3 * (how != 2)]
        for rank, (cells, tables, next_id) in enumerate(group(size)(scatter, count, how)):
            assert cells == expected and next_id == 9_999
            if count == size:
                whole = store_of(scene, owners == rank).tables()
                assert tables.keys() == whole.keys()
                for name, table in whole.items():
                    assert torch.equal(torch.from_numpy(tables[name]), table), name
