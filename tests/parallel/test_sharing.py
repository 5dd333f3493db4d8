from __future__ import annotations

import numpy as np

from bytesplat_ns.parallel.sharing import Sharing, rounds_of_epoch, share
from bytesplat_ns.rounds import Plan

APART = np.kron(np.eye(4, dtype=np.int64), np.full((6, 1), 5))  # 24 views, each seen by one of four ranks
TOGETHER = np.full((24, 4), 5)


def test_views_are_consolidated_where_that_costs_few_rounds():
    plan = Plan(0, 24, 4)
    for consolidate in ("on", "auto"):
        shared = share(plan, 0, APART, 4, consolidate)
        assert [shared.owners.count(rank) for rank in range(4)] == [6] * 4
        assert shared.rank_sets == tuple(1 << owner for owner in shared.owners)
        assert [len(views) for views in rounds_of_epoch(shared.plan)] == [4] * 6
        assert "Rounds of 4.00 views" in shared.describe()
    assert {len(v) for v in rounds_of_epoch(share(plan, 0, TOGETHER, 4, "on").plan)} == {1}
    for consolidate in ("off", "auto"):
        shared = share(plan, 0, TOGETHER, 4, consolidate)
        assert shared.rank_sets == (15,) * 24
        for views in rounds_of_epoch(shared.plan):
            assert sorted(shared.owners[view] for view in views) == [0, 1, 2, 3]


def test_rounds_of_one_view_are_those_of_one_rank():
    plan = Plan(7, 24, 1)
    shared = share(plan, 0, TOGETHER, 1, "auto")
    assert [shared.plan.round_at(p) for p in range(60)] == [plan.round_at(p) for p in range(60)]
    assert len(set(shared.owners)) == 4


def test_a_view_that_no_rank_sees_has_an_owner_which_sees_it():
    footprints = APART.copy()
    footprints[3] = 0
    shared = share(Plan(0, 24, 4), 0, footprints, 4, "on")
    assert shared.rank_sets[3] == 1 << shared.owners[3]


def test_owners_stay_and_what_an_epoch_has_left_is_shown_by_other_ranks():
    first = share(Plan(3, 24, 3), 0, APART[:, :3] + 1, 3, "off")
    shown = [view for p in (0, 3, 6) for view in first.plan.round_at(p)]
    again = share(first.plan, 9, TOGETHER[:, :3], 3, "off", first.owners)
    assert again.owners == first.owners and again.rank_sets == (7,) * 24
    for other in (again, share(first.plan, 9, TOGETHER, 4, "on"), share(first.plan, 9, TOGETHER[:, :1], 1, "off")):
        position, rest = 9, []
        while position < 24:
            rest += other.plan.round_at(position)
            position = 9 + len(rest)
        assert sorted(shown + rest) == list(range(24))
    assert Sharing.alone(Plan(0, 3, 1)).rank_sets == (1, 1, 1)
