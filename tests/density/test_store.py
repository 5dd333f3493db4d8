from __future__ import annotations

import pytest
import torch

from bytesplat_ns.density.store import GaussianStore
from bytesplat_ns.ops.layout import Gaussians


def test_rows_stay_aligned(make_store):
    store = make_store(6)
    store.register("row")
    store.register("pair", (2,), torch.int64)
    store.columns["row"][:] = torch.arange(6)
    store.columns["pair"][:] = torch.arange(6)[:, None]
    before = {name: parameter.detach().clone() for name, parameter in store.parameters.items()}

    moved = torch.full((2, 3), 9.0)
    kept, parents = torch.tensor([0, 3, 5]), torch.tensor([3, 1])
    store.edit(kept, parents, torch.tensor([10, 11]), {"means": moved})

    assert len(store) == 5
    assert store.ids.tolist() == [0, 3, 5, 10, 11]
    assert store.columns["row"].tolist() == [0, 3, 5, 0, 0]
    assert store.columns["pair"].tolist() == [[0, 0], [3, 3], [5, 5], [0, 0], [0, 0]]
    for name in Gaussians.PARAMETERS:
        parameter = store.parameters[name]
        assert isinstance(parameter, torch.nn.Parameter) and parameter.requires_grad and parameter.is_leaf
        assert torch.equal(parameter[:3], before[name][kept])
        assert torch.equal(parameter[3:], moved if name == "means" else before[name][parents])


def test_an_edit_leaves_rows_in_the_order_of_ids(make_store):
    store = make_store(4, ids=torch.tensor([7, 2, 9, 4]))
    store.register("row")
    store.columns["row"][:] = torch.arange(4)
    means = store.parameters["means"].detach().clone()
    child = torch.full((1, 3), 9.0)
    store.edit(torch.tensor([2, 0, 3]), torch.tensor([1]), torch.tensor([5]), {"means": child})
    assert store.ids.tolist() == [4, 5, 7, 9]
    assert store.columns["row"].tolist() == [3, 0, 0, 2]
    assert torch.equal(store.parameters["means"], torch.stack([means[3], child[0], means[0], means[2]]))


def test_keep_takes_a_mask_or_indices(make_store):
    store = make_store(4)
    store.keep(torch.tensor([True, False, True, True]))
    assert store.ids.tolist() == [0, 2, 3]
    store.keep(torch.tensor([2, 0]))
    assert store.ids.tolist() == [0, 3]
    store.keep(torch.zeros(2, dtype=torch.bool))
    assert len(store) == 0 and store.parameters["features_rest"].shape == (0, 15, 3)


def test_gaussians_are_the_live_parameters(make_store):
    store = make_store(3)
    gaussians = store.gaussians()
    assert all(getattr(gaussians, name) is store.parameters[name] for name in Gaussians.PARAMETERS)
    assert gaussians.ids is store.ids


def test_next_id_exceeds_all_ids(make_store):
    assert make_store(4).next_id == 4
    assert make_store(0).next_id == 0
    assert make_store(2, ids=torch.tensor([40, 3])).next_id == 41
    assert GaussianStore(make_store(2).parameters, torch.tensor([1, 2]), next_id=9).next_id == 9


def test_state_survives_a_safe_load(make_store, tmp_path):
    store = make_store(5, ids=torch.tensor([8, 1, 5, 0, 3]))
    store.register("statistic")
    store.columns["statistic"][:] = torch.arange(5.0)
    torch.save(store.state_dict(), tmp_path / "state.pt")
    state = torch.load(tmp_path / "state.pt", weights_only=True)

    other = make_store(5)
    other.register("statistic")
    other.load_state_dict(state)
    assert other.ids.tolist() == [0, 1, 3, 5, 8] and other.next_id == 9
    assert other.columns["statistic"].tolist() == [3, 1, 4, 2, 0]


def test_foreign_state_is_refused(make_store):
    state = make_store(5).state_dict()
    store = make_store(5)
    store.register("statistic")
    with pytest.raises(ValueError, match="statistic"):
        store.load_state_dict(state)
    with pytest.raises(ValueError, match=r"3 Gaussians.*'ids': 5"):
        make_store(3).load_state_dict(state)
