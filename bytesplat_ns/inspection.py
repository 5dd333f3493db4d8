"""Training views, looked at without training on them: what pruning judges Gaussians by."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from bytesplat_ns.datamanager import ByteSplatDataManager
from bytesplat_ns.density.store import GaussianStore
from bytesplat_ns.density.survey import Survey, View, effective_lengths, survey
from bytesplat_ns.model import ByteSplatModel
from bytesplat_ns.ops.layout import Gaussians
from bytesplat_ns.parallel.ranks import Ranks
from bytesplat_ns.parallel.rendering import render_together
from bytesplat_ns.run.metrics import psnr
from bytesplat_ns.views import Collator

SURVEYED = 300
"""Views that are surveyed, evenly spaced over the training photos if there are more."""

JUDGING = 32
"""Views whose PSNR is measured. They are trained on like all others: small captures would lose by leaving them out."""


class Inspection:
    """Training views at the resolution of the moment, in the poses of the moment. Several ranks look together."""

    def __init__(
        self, model: ByteSplatModel, store: GaussianStore, data: ByteSplatDataManager, collate: Collator, ranks: Ranks
    ) -> None:
        self.model = model
        self.store = store
        self.data = data
        self.collate = collate
        self.ranks = ranks

    def survey(self, budget: int) -> Survey:
        """What the views say about this rank's Gaussians."""
        model, settings = self.model, self.model.settings(statistics=True)
        return survey(self._gaussians(), self._turns(), settings, budget, model.seed, self.ranks)

    def lengths(self) -> Tensor:
        """[T] int32, effective lengths of the lists of the tiles that this rank looked at."""
        return effective_lengths(self._gaussians(), self._turns(), self.model.settings(), self.ranks)

    @torch.no_grad()
    def psnr(self) -> Tensor:
        """[n] dB, of those judging views whose photos this rank has."""
        model, values = self.model, []
        gaussians, settings = self._gaussians(), model.settings()
        owners = self.data.owners
        judging = [[i for i in self._spread(JUDGING) if owners[i] == rank] for rank in range(self.ranks.size)]
        for turn in range(max(map(len, judging))):
            if turn >= len(judging[self.ranks.rank]):
                render_together(gaussians, None, settings, self.ranks)
                continue
            view = self.data.view(judging[self.ranks.rank][turn], model.downscale())
            cameras, _ = self.collate.cameras([view], self._poses())
            batch = self.collate.batch([view], cameras, slice(None))
            background = model.background_color.to(model.device)[None]
            rgb = render_together(gaussians, cameras, settings, self.ranks).composed(background)
            if model.config.use_bilateral_grid:
                rgb = model.apply_grids(rgb, batch.indices)
            values.append(psnr(rgb, batch.composed(background), batch.mask))
        return torch.stack(values) if values else torch.empty(0, device=model.device)

    def _gaussians(self) -> Gaussians:
        """Those that the store has now."""
        self.store.settle()
        self.model.ids = self.store.ids
        return self.model.gaussians()

    def _turns(self) -> Iterator[View]:
        """The surveyed views, divided among the ranks: what is this rank's to look at in each turn."""
        views, size = self._spread(SURVEYED), self.ranks.size
        for first in range(0, len(views), size):
            if first + self.ranks.rank >= len(views):
                yield None
                continue
            index = views[first + self.ranks.rank]
            cameras, _ = self.collate.cameras([self.data.view(index, self.model.downscale())], self._poses())
            yield index, cameras

    def _poses(self) -> Callable[[Tensor], Tensor] | None:
        return self.model.camera_optimizer if self.model.config.camera_optimizer.mode != "off" else None

    def _spread(self, at_most: int) -> list[int]:
        """Indices of so many training photos, evenly spaced."""
        photos = self.model.num_train_data
        count = min(at_most, photos)
        return [number * photos // count for number in range(count)]
