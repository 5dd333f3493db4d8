from __future__ import annotations

import torch
from scenes import cameras, gaussians

from bytesplat_ns import ops
from bytesplat_ns.density.survey import Survey, effective_lengths, survey
from bytesplat_ns.ops.layout import Gaussians, RenderSettings
from bytesplat_ns.parallel.ranks import Ranks
from bytesplat_ns.parallel.rendering import render_together

SETTINGS = RenderSettings(sh_degree=1, statistics=False)
WITH_STATISTICS = RenderSettings(sh_degree=1)


def part_of(ranks: Ranks) -> Gaussians:
    """Those of a rank: all have equally many, but for rank 0, which has none."""
    scene = gaussians(400, seed=2)
    part = scene.ids.argsort()[torch.arange(400) % (ranks.size - 1) + 1 == ranks.rank]
    return Gaussians(**{name: value[part] for name, value in vars(scene).items()})


def look(ranks: Ranks, wants: list[int | None]) -> dict | None:
    """Each rank wants to see a view of its own, or none."""
    views, wanted = cameras(4, seed=3), wants[ranks.rank]
    image = render_together(part_of(ranks), None if wanted is None else views.view(wanted), SETTINGS, ranks)
    return None if image is None else {name: value.numpy() for name, value in vars(image).items()}


def test_ranks_see_what_one_process_sees(group):
    scene, views = gaussians(400, seed=2), cameras(4, seed=3)
    for wants in ([0, 1, 2, 3], [3, None, 1, None], [None, None, None, 2], [1, 1, 1, 1]):
        for wanted, found in zip(wants, group(4)(look, wants), strict=True):
            if wanted is None:
                assert found is None
                continue
            image, _ = ops.render(scene, views.view(wanted), SETTINGS)
            for name, value in vars(image).items():
                assert torch.equal(torch.from_numpy(found[name]), value), name


def ask(ranks: Ranks, views: int) -> tuple[torch.Tensor, Survey, torch.Tensor]:
    """Ids of this rank's Gaussians, and what the first so many views say of them; lengths of the lists it looked at."""
    own, turns = part_of(ranks), []
    for first in range(0, views, ranks.size):
        number = first + ranks.rank
        turns.append((7 * number, cameras(4, seed=3).view(number)) if number < views else None)
    found = survey(own, turns, WITH_STATISTICS, 5, 11, ranks)
    return own.ids, found, effective_lengths(own, turns, SETTINGS, ranks)


def test_ranks_find_what_one_process_finds(group):
    scene = gaussians(400, seed=2)
    for views in (1, 4):
        all_views = [(7 * number, cameras(4, seed=3).view(number)) for number in range(views)]
        alone = survey(scene, all_views, WITH_STATISTICS, 5, 11)
        assert all(getattr(alone, name).any() for name in vars(alone))
        parts = group(3)(ask, views)
        assert len(parts[0][0]) == 0, "one rank has no Gaussians"
        order = torch.cat([ids for ids, _, _ in parts]).argsort()
        for name, value in vars(alone).items():
            found = torch.cat([getattr(part, name) for _, part, _ in parts])[order]
            assert torch.equal(found, value[scene.ids.argsort()]), name
        lengths = torch.cat([found for _, _, found in parts]).sort().values
        assert torch.equal(lengths, effective_lengths(scene, all_views, SETTINGS).sort().values)
