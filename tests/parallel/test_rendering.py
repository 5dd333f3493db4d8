from __future__ import annotations

import torch
from scenes import cameras, gaussians

from bytesplat_ns import ops
from bytesplat_ns.ops.layout import Gaussians, RenderSettings
from bytesplat_ns.parallel.ranks import Ranks
from bytesplat_ns.parallel.rendering import render_together

SETTINGS = RenderSettings(sh_degree=1)


def look(ranks: Ranks, wants: list[int | None]) -> dict | None:
    """Each rank has a third of the Gaussians, rank 0 none, and wants to see a view of its own, or none."""
    scene, views = gaussians(400, seed=2), cameras(4, seed=3)
    order = scene.ids.argsort()
    part = order[torch.arange(400) % (ranks.size - 1) + 1 == ranks.rank]
    own = Gaussians(**{name: value[part] for name, value in vars(scene).items()})
    wanted = wants[ranks.rank]
    image = render_together(own, None if wanted is None else views.view(wanted), SETTINGS, ranks)
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
