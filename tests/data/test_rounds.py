import itertools

import pytest

from bytesplat_ns.rounds import epoch_order, round_indices, rounds_between


def rounds_until(seed: int, count: int, views_per_round: int, position: int, images: int) -> list[list[int]]:
    """The rounds from a position on, until `images` have been seen."""
    rounds = []
    while position < images:
        rounds.append(round_indices(seed, position, count, views_per_round))
        position += len(rounds[-1])
    return rounds


def test_order_is_frozen():
    """A run resumed with another release of numpy, torch or of this package must go on where it stopped."""
    assert epoch_order(seed=42, epoch=0, count=10) == (7, 1, 6, 4, 3, 5, 9, 0, 2, 8)
    assert epoch_order(seed=42, epoch=1, count=10) == (4, 9, 5, 3, 0, 2, 7, 1, 6, 8)


def test_seeds_and_epochs_differ():
    orders = [epoch_order(seed, epoch, 50) for seed in (-1, 0, 1, 2**63) for epoch in range(3)]
    assert len(set(orders)) == len(orders)
    assert all(sorted(order) == list(range(50)) for order in orders)


def test_order_is_uniform():
    """Each view comes first in a fifth of the epochs: 4000 draws have a standard deviation of 25 around 800."""
    first = [epoch_order(7, epoch, 5)[0] for epoch in range(4000)]
    assert all(abs(first.count(view) - 800) < 5 * 25 for view in range(5))


@pytest.mark.parametrize("count", [1, 2, 7, 12])
@pytest.mark.parametrize("views_per_round", [1, 2, 3, 8, 20])
def test_every_view_once_an_epoch(count, views_per_round):
    rounds = rounds_until(0, count, views_per_round, position=0, images=5 * count)
    seen = [view for indices in rounds for view in indices]
    for epoch in range(5):
        assert sorted(seen[epoch * count : (epoch + 1) * count]) == list(range(count))
    assert all(len(set(indices)) == len(indices) for indices in rounds)
    full, rest = divmod(count, views_per_round)
    assert [len(indices) for indices in rounds] == 5 * ([views_per_round] * full + [rest] * (rest > 0))


def test_position_alone_says_what_comes_next():
    rounds = rounds_until(3, count=11, views_per_round=4, position=0, images=44)
    starts = [0]
    for indices in rounds:
        starts.append(starts[-1] + len(indices))
    for skipped, start in enumerate(starts[:-1]):
        assert rounds_until(3, 11, 4, start, 44) == rounds[skipped:]


def test_round_size_may_change_within_an_epoch():
    before = rounds_until(5, count=10, views_per_round=3, position=0, images=6)
    after = rounds_until(5, count=10, views_per_round=2, position=6, images=10)
    assert sorted(view for indices in before + after for view in indices) == list(range(10))


@pytest.mark.parametrize("views_per_round", [1, 2, 3, 8, 30])
@pytest.mark.parametrize("count", [1, 5, 7, 22])
def test_the_number_of_rounds_ahead_is_what_walking_them_gives(count, views_per_round):
    for position, total in itertools.product(range(30), range(60)):
        walked, seen = 0, position
        while seen < total:
            seen += len(round_indices(0, seen, count, views_per_round))
            walked += 1
        assert rounds_between(position, total, count, views_per_round) == walked
