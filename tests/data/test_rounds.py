import itertools
import random

import numpy as np
import pytest

from bytesplat_ns.packing import assign_owners, lower_bound, pack
from bytesplat_ns.rounds import Plan, epoch_order


def rounds_until(plan: Plan, position: int, images: int) -> list[tuple[int, ...]]:
    """The rounds from a position on, until ``images`` have been seen."""
    rounds = []
    while position < images:
        rounds.append(plan.round_at(position))
        position += len(rounds[-1])
    return rounds


def street(views: int, ranks: int, chance: random.Random) -> list[int]:
    """What views along a street occupy whose cells follow each other, of unequal length for every other seed."""
    inner = sorted(chance.uniform(0, 1) for _ in range(ranks - 1))
    edges = [0, *(inner if chance.random() < 0.5 else [i / ranks for i in range(1, ranks)]), 1]
    masks = []
    for _ in range(views):
        here = chance.uniform(0, 1)
        there = here + chance.choice([-1, 1]) * chance.uniform(0.02, 0.2)
        low, high = min(here, there), max(here, there)
        masks.append(sum(1 << r for r in range(ranks) if high >= edges[r] and low < edges[r + 1]))
    return masks


def occupied(count: int, ranks: int, seed: int = 0) -> tuple[int, ...] | None:
    chance = random.Random(seed)
    return None if ranks == 1 else tuple(chance.randrange(1, 1 << ranks) for _ in range(count))


def test_order_is_frozen():
    """A run resumed with another release of numpy, torch or of this package must go on where it stopped."""
    assert epoch_order(seed=42, epoch=0, count=10) == (7, 1, 6, 4, 3, 5, 9, 0, 2, 8)
    assert epoch_order(seed=42, epoch=1, count=10) == (4, 9, 5, 3, 0, 2, 7, 1, 6, 8)
    plan = Plan(42, 10, views_per_round=3)
    assert rounds_until(plan, 0, 13) == [(7, 1, 6), (4, 3, 5), (9, 0, 2), (8,), (4, 9, 5)]
    assert plan.round_at(2) == (6, 4, 3), "a run of one rank may change the size of its rounds anywhere"


def test_seeds_and_epochs_differ():
    orders = [epoch_order(seed, epoch, 50) for seed in (-1, 0, 1, 2**63) for epoch in range(3)]
    assert len(set(orders)) == len(orders)
    assert all(sorted(order) == list(range(50)) for order in orders)


def test_order_is_uniform():
    """Each view comes first in a fifth of the epochs: 4000 draws have a standard deviation of 25 around 800."""
    first = [epoch_order(7, epoch, 5)[0] for epoch in range(4000)]
    assert all(abs(first.count(view) - 800) < 5 * 25 for view in range(5))


@pytest.mark.parametrize("ranks", [1, 2, 3, 8, 70])
@pytest.mark.parametrize("count", [1, 2, 7, 22])
def test_every_view_once_an_epoch_and_no_rank_beyond_its_part(count, ranks):
    for views_per_round in (1, 2, 3, 8, 30):
        plan = Plan(0, count, views_per_round, ranks, occupied(count, ranks))
        rounds = rounds_until(plan, position=0, images=4 * count)
        seen = [view for indices in rounds for view in indices]
        for epoch in range(4):
            assert sorted(seen[epoch * count : (epoch + 1) * count]) == list(range(count))
        assert all(0 < len(set(indices)) == len(indices) <= views_per_round for indices in rounds)
        if ranks == 1:
            full, rest = divmod(count, views_per_round)
            assert [len(indices) for indices in rounds] == 4 * ([views_per_round] * full + [rest] * (rest > 0))
        else:
            part = -(-views_per_round // ranks)
            for indices, rank in itertools.product(rounds, range(ranks)):
                assert sum(plan.occupied[view] >> rank & 1 for view in indices) <= part


def test_position_alone_says_what_comes_next():
    for ranks, views_per_round in ((1, 4), (3, 3), (4, 9)):
        plan = Plan(3, 11, views_per_round, ranks, occupied(11, ranks))
        rounds = rounds_until(plan, 0, 44)
        starts = [0, *itertools.accumulate(map(len, rounds))]
        for skipped, start in enumerate(starts[:-1]):
            again = Plan(3, 11, views_per_round, ranks, occupied(11, ranks))
            assert rounds_until(again, start, 44) == rounds[skipped:]


def test_epochs_differ_in_who_meets_whom():
    plan = Plan(0, 40, 4, 4, tuple(1 << view % 4 for view in range(40)))
    epochs = [{frozenset(r) for r in rounds_until(plan, 40 * e, 40 * e + 40)} for e in range(3)]
    assert all(len(epoch) == 10 for epoch in epochs) and len(set.union(*epochs)) > 25


def test_a_plan_takes_over_anywhere_with_the_views_that_are_left():
    chance = random.Random(1)
    for _ in range(200):
        count, position, plan, seen = chance.randint(1, 20), 0, None, []
        while position < 4 * count:
            ranks = chance.randint(1, 4)
            changes = {"views_per_round": chance.randint(1, 5), "ranks": ranks}
            changes["occupied"] = occupied(count, ranks, seed=chance.random())
            plan = plan.followed(position, **changes) if plan else Plan(5, count, **changes)
            state = {"left": plan.left, "begin": plan.begin, **changes}
            assert plan == Plan(5, count, **state), "a checkpoint can hold it"
            for _ in range(chance.randint(0, 6)):
                seen += plan.round_at(position)
                position = len(seen)
        for epoch in range(4):
            assert sorted(seen[epoch * count : (epoch + 1) * count]) == list(range(count))


@pytest.mark.parametrize("ranks", [1, 2, 8])
@pytest.mark.parametrize("count", [1, 5, 7, 22])
def test_the_number_of_rounds_ahead_is_what_walking_them_gives(count, ranks):
    for views_per_round in (1, 2, 3, 8, 30):
        plan = Plan(0, count, views_per_round, ranks, occupied(count, ranks))
        if ranks > 1 and count > 2:
            plan = plan.followed(len(plan.round_at(0)), occupied=occupied(count, ranks, seed=1))
        for total in range(0, 60, 1 if ranks == 1 else 7):
            walked = [plan.begin]
            while walked[-1] < total:
                walked.append(walked[-1] + len(plan.round_at(walked[-1])))
            for done, position in enumerate(walked):
                assert plan.rounds_between(position, total) == len(walked) - 1 - done
        if ranks == 1:  # from anywhere
            for position, total in itertools.product(range(0, 30, 3), range(0, 60, 7)):
                walked, seen = 0, position
                while seen < total:
                    seen += len(plan.round_at(seen))
                    walked += 1
                assert plan.rounds_between(position, total) == walked


def test_street_captures_need_few_rounds_more_than_the_bound():
    for seed in range(12):
        masks = street(views=200 + 100 * seed, ranks=8, chance=random.Random(seed))
        rounds = pack(masks, ranks=8, views_per_round=8, seed=seed)
        assert sorted(position for members in rounds for position in members) == list(range(len(masks)))
        for members in rounds:
            assert all(masks[a] & masks[b] == 0 for a, b in itertools.combinations(members, 2))
        assert len(rounds) <= 1.15 * lower_bound(masks, ranks=8, views_per_round=8)


def test_the_lower_bound_is_one():
    """No packing of a few views, found by trying all, has fewer rounds."""
    chance = random.Random(2)
    for _ in range(60):
        ranks, views_per_round = chance.randint(2, 4), chance.randint(1, 5)
        masks = [chance.randrange(1, 1 << ranks) for _ in range(chance.randint(1, 5))]
        part, fewest = -(-views_per_round // ranks), len(masks)
        for choice in itertools.product(range(len(masks)), repeat=len(masks)):
            rounds = [[mask for mask, at in zip(masks, choice, strict=True) if at == r] for r in set(choice)]
            fits = all(
                len(r) <= views_per_round and max(sum(m >> k & 1 for m in r) for k in range(ranks)) <= part
                for r in rounds
            )
            fewest = min(fewest, len(rounds)) if fits else fewest
        assert lower_bound(masks, ranks, views_per_round) <= fewest
        assert fewest <= len(pack(masks, ranks, views_per_round, seed=0))
    three = [0b011, 0b101, 0b110]  # no rank is in all of them, yet no two may meet
    assert lower_bound(three * 5, 3, 3) == 15


def test_owners_see_most_of_their_views_and_have_equal_shares():
    footprints = np.array([[9, 1, 0], [8, 2, 0], [5, 4, 0], [0, 0, 7], [0, 0, 0], [1, 0, 1]])
    assert assign_owners(footprints) == [0, 0, 1, 2, 1, 2]
    random_ones = np.random.default_rng(0).integers(0, 100, (41, 4))
    owners = assign_owners(random_ones)
    assert sorted(owners.count(rank) for rank in range(4)) == [10, 10, 10, 11]
    assert owners == assign_owners(random_ones)
    best = random_ones.argmax(axis=1)
    assert np.mean(best == owners) > 0.8
    assert assign_owners(np.zeros((5, 4))) == assign_owners(np.ones((5, 4))), "views that no rank sees have owners too"
    assert assign_owners(np.zeros((0, 4))) == []
