from __future__ import annotations

import numpy as np
import pytest

from bytesplat_ns.parallel.sharing import Footprints, Sharing, rounds_of_epoch, share
from bytesplat_ns.rounds import Plan

VIEWS = 24


def apart(count: int) -> np.ndarray:
    """Each view shows one part."""
    return 5 * (np.arange(VIEWS)[:, None] * count // VIEWS == np.arange(count))


def together(count: int) -> np.ndarray:
    """Each view shows all."""
    return np.full((VIEWS, count), 5)


def rounds_of(sharing: Sharing) -> list[tuple[int, ...]]:
    return rounds_of_epoch(sharing.plan)


def test_views_are_consolidated_where_that_costs_few_rounds():
    plan = Plan(0, VIEWS, 4)
    for consolidate in ("on", "auto"):
        shared = share(plan, 0, apart, 4, consolidate)
        assert [shared.planned_owners.count(rank) for rank in range(4)] == [6] * 4
        assert shared.rank_sets == tuple(1 << owner for owner in shared.planned_owners)
        assert [len(views) for views in rounds_of(shared)] == [4] * 6
        assert "Rounds of 4.00 views, of different parts" in shared.describe()
    assert {len(views) for views in rounds_of(share(plan, 0, together, 4, "on"))} == {1}
    for consolidate in ("off", "auto"):
        shared = share(plan, 0, together, 4, consolidate)
        assert shared.rank_sets == (15,) * VIEWS and "of different owners (parts: at most 1.00" in shared.describe()
        for views in rounds_of(shared):
            assert sorted(shared.planned_owners[view] for view in views) == [0, 1, 2, 3]


def test_rounds_of_one_view_are_in_the_order_of_the_seed():
    plan = Plan(7, VIEWS, 1)
    shared = share(plan, 0, pytest.fail, 1, "auto")  # whatever they show
    assert [shared.plan.round_at(p) for p in range(60)] == [plan.round_at(p) for p in range(60)]
    assert len(set(shared.owners_among(4, together))) == 4


@pytest.mark.parametrize("views_per_round", [1, 2, 3, 4, 7, 30])
@pytest.mark.parametrize("footprints", [apart, together])
def test_any_number_of_ranks_shares_the_same_rounds(views_per_round: int, footprints: Footprints):
    shared = share(Plan(3, VIEWS, 1), 0, footprints, views_per_round, "auto")
    for ranks in (1, 2, 3, 4, 6, 11):
        owners = shared.owners_among(ranks, footprints)
        counts = np.bincount(owners, minlength=ranks)
        assert len(owners) == VIEWS and len(counts) == ranks
        planned = shared.plan.ranks
        if planned % ranks == 0 or ranks % planned == 0:
            assert counts.max() - counts.min() <= max(planned // ranks, 1)
        for views in rounds_of(shared):
            assert len({shared.planned_owners[view] for view in views}) == len(views), "no two of one planned owner"
            order = sorted(views, key=shared.planned_owners.__getitem__)
            assert [owners[view] for view in order] == sorted(owners[view] for view in views), "one order for all"
            part = -(-views_per_round // ranks)
            assert max(np.bincount([owners[view] for view in views])) <= part


def test_ranks_that_share_a_planned_one_own_what_they_show():
    shared = share(Plan(0, VIEWS, 2), 0, apart, 2, "off")
    assert shared.owners_among(4, apart) == tuple(view * 4 // VIEWS for view in range(VIEWS))


def test_a_view_that_shows_no_part_has_an_owner():
    def nothing_in_one(count: int) -> np.ndarray:
        footprints = apart(count)
        footprints[3] = 0
        return footprints

    shared = share(Plan(0, VIEWS, 4), 0, nothing_in_one, 4, "on")
    assert shared.rank_sets[3] == 1 << shared.planned_owners[3]
    assert sorted(view for views in rounds_of(shared) for view in views) == list(range(VIEWS))


def test_owners_stay_and_what_an_epoch_has_left_is_shown_in_other_rounds():
    first = share(Plan(3, VIEWS, 3), 0, apart, 3, "off")
    shown = [view for p in (0, 3, 6) for view in first.plan.round_at(p)]
    again = share(first.plan, 9, together, 3, "off", first.planned_owners)
    assert again.planned_owners == first.planned_owners and again.rank_sets == (7,) * VIEWS
    for other in (again, share(first.plan, 9, together, 4, "on"), share(first.plan, 9, together, 1, "off")):
        position, rest = 9, []
        while position < VIEWS:
            rest += other.plan.round_at(position)
            position = 9 + len(rest)
        assert sorted(shown + rest) == list(range(VIEWS))
    assert Sharing.from_state(again.state_dict()) == again
