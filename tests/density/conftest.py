from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from bytesplat_ns.density import philox
from bytesplat_ns.density.base import Gather
from bytesplat_ns.density.schedule import DensitySchedule
from bytesplat_ns.density.store import GaussianStore
from bytesplat_ns.density.strategy import GRADIENT_UNIT, DefaultStrategy, DensityOptions
from bytesplat_ns.optim import GaussianAdam


@pytest.fixture
def make_store() -> Callable[..., GaussianStore]:
    """Makes a store of n Gaussians: opacities and sizes on either side of splatfacto's thresholds."""

    def make(n: int, ids: torch.Tensor | None = None, seed: int = 0) -> GaussianStore:
        generator = torch.Generator().manual_seed(seed)

        def draw(*shape: int) -> torch.Tensor:
            return torch.randn(n, *shape, generator=generator)

        parameters = {
            "means": draw(3),
            "scales": draw(3) * 2.0 - 4.5,  # largest of three: a median of exp(-3), 5 % above cull_scale_thresh
            "quats": draw(4),
            "features_dc": draw(3),
            "features_rest": draw(15, 3),
            "opacities": draw(1) * 2.0,
        }
        return GaussianStore(torch.nn.ParameterDict({k: torch.nn.Parameter(v) for k, v in parameters.items()}), ids)

    return make


@pytest.fixture
def make_strategy() -> Callable[..., DefaultStrategy]:
    """Makes a strategy on a store, with statistics that depend on ids alone, around splatfacto's thresholds."""

    def make(store: GaussianStore, gather: Gather = lambda rows: rows, **options: float) -> DefaultStrategy:
        chosen = DensityOptions(**options)
        strategy = DefaultStrategy(store, GaussianAdam(store), chosen, DensitySchedule(), seed=3, gather=gather)
        draws = philox.uniform(store.ids, 2, seed=0, step=0)
        store.columns["density.gradient"][:] = (4 * draws[:, 0] * 0.0012 / GRADIENT_UNIT).long()
        store.columns["density.views"][:] = 4
        store.columns["density.radius"][:] = draws[:, 1] ** 4 * 0.2
        return strategy

    return make
