"""Training views, looked at without training on them: what pruning judges Gaussians by."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from bytesplat_ns import ops
from bytesplat_ns.datamanager import ByteSplatDataManager
from bytesplat_ns.density.store import GaussianStore
from bytesplat_ns.density.survey import Survey, effective_lengths, survey
from bytesplat_ns.model import ByteSplatModel
from bytesplat_ns.ops.layout import Cameras
from bytesplat_ns.parallel.ranks import Ranks
from bytesplat_ns.parallel.whole import shown
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
        model = self.model
        with self._whole():
            found = survey(model.gaussians(), self._cameras(), model.settings(statistics=True), budget, model.seed)
            own = torch.searchsorted(model.ids, self.store.ids)
        if self.ranks.size == 1:
            return found
        counts = torch.stack([found.harm, found.tiles, found.beyond, found.crowded])
        harm, tiles, beyond, crowded = self.ranks.sum(counts, "pruning")[:, own]
        contribution = self.ranks.gather(found.contribution[None], "pruning").amax(dim=0)[own]
        return Survey(harm, contribution, tiles, beyond, crowded)

    def lengths(self) -> Tensor:
        """[T] int32, effective lengths of the lists of the tiles that this rank looked at."""
        with self._whole():
            return effective_lengths(self.model.gaussians(), self._cameras(), self.model.settings())

    @torch.no_grad()
    def psnr(self) -> Tensor:
        """[n] dB, of those judging views whose photos this rank has."""
        model, values = self.model, []
        with self._whole():
            gaussians, settings = model.gaussians(), model.settings()
            for index in self._spread(JUDGING):
                view = self.data.view(index, model.downscale())
                if view.image is None:
                    continue
                cameras, _ = self.collate.cameras([view], self._poses())
                batch = self.collate.batch([view], cameras, slice(None))
                background = model.background_color.to(model.device)[None]
                records = ops.project(gaussians, cameras, settings)
                image = ops.rasterize(records, ops.bin(records, cameras), cameras, settings)
                rgb = image.composed(background)
                if model.config.use_bilateral_grid:
                    rgb = model.apply_grids(rgb, batch.indices)
                values.append(psnr(rgb, batch.composed(background), batch.mask))
        return torch.stack(values) if values else torch.empty(0, device=model.device)

    @contextmanager
    def _whole(self) -> Iterator[None]:
        """Within its block, the model has the Gaussians that the stores of all ranks have now."""
        self.store.settle()
        self.model.ids = self.store.ids
        with shown(self.model, self.ranks):
            yield

    def _cameras(self) -> Iterator[tuple[int, Cameras]]:
        """The surveyed views that are this rank's to look at, with their numbers."""
        for index in self._spread(SURVEYED)[self.ranks.rank :: self.ranks.size]:
            cameras, _ = self.collate.cameras([self.data.view(index, self.model.downscale())], self._poses())
            yield index, cameras

    def _poses(self) -> Callable[[Tensor], Tensor] | None:
        return self.model.camera_optimizer if self.model.config.camera_optimizer.mode != "off" else None

    def _spread(self, at_most: int) -> list[int]:
        """Indices of so many training photos, evenly spaced."""
        photos = self.model.num_train_data
        count = min(at_most, photos)
        return [number * photos // count for number in range(count)]
