"""What views show of the parts of a scene does not depend on who holds it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scenes import cameras, gaussians

from bytesplat_ns import ops
from bytesplat_ns.ops.layout import Gaussians, RenderSettings
from bytesplat_ns.parallel import parts, visibility
from bytesplat_ns.parallel.balance import loads
from bytesplat_ns.parallel.partition import divide
from bytesplat_ns.parallel.ranks import ALONE, Ranks

NUMBER, VIEWS = 900, 7
SETTINGS = RenderSettings(sh_degree=1)


def scene() -> Gaussians:
    found = gaussians(NUMBER, seed=4)
    found.scales[:] -= 2.0  # small ones, so that not every view shows every part
    return found


def footprints(ranks: Ranks, count: int, how: str, sample: int) -> np.ndarray:
    """Of a scene that is spread over ranks in some way."""
    whole, views = scene(), cameras(VIEWS, seed=1)
    owner = {"spread": whole.ids % ranks.size, "last": torch.full_like(whole.ids, ranks.size - 1)}[how]
    own = Gaussians(**{name: table[owner == ranks.rank] for name, table in vars(whole).items()})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parts, "SAMPLE", sample)
        patch.setattr(visibility, "BLOCK", 8)
        return parts.footprints(count, own, NUMBER, views, views, SETTINGS, ranks)


@pytest.mark.parametrize("sample", [1 << 20, 300])
@pytest.mark.parametrize("count", [1, 3, 4])
def test_any_number_of_ranks_finds_the_same(group, count, sample):
    expected = footprints(ALONE, count, "spread", sample)
    assert expected.shape == (VIEWS, count) and expected.any()
    assert (expected == 0).any() or count == 1, "some view does not show some part"
    for size, how in ((2, "spread"), (3, "last"), (4, "spread")):
        for found in group(size)(footprints, count, how, sample):
            assert np.array_equal(found, expected)


def test_all_that_is_visible_counts_where_it_is():
    """Without a sample, and in cells of equal load."""
    whole, views = scene(), cameras(VIEWS, seed=1)
    found = footprints(ALONE, 3, "spread", sample=NUMBER)
    load = loads(whole, views, SETTINGS)
    part = divide(3, whole.means, whole.ids, load, ALONE).owners(whole.means, whole.ids)
    records = ops.project(whole, views, SETTINGS)
    visible = torch.zeros(VIEWS, 3, dtype=torch.int64)
    visible.index_put_((records.view.long(), part[records.gaussian.long()]), torch.tensor(1), accumulate=True)
    assert (torch.from_numpy(found) >= visible).all()
    shares = torch.zeros(3, dtype=torch.int64).index_add_(0, part, load)
    assert shares.max() - shares.min() <= 2 * load.max()
