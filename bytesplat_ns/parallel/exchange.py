"""What ranks tell each other in a step, so that each renders its views with everybody's Gaussians.

Every Gaussian and every view has one owner. A rank projects its Gaussians for all views of the round and sends each
view's owner the records that reach its pixels. The owner rasterizes them, which gives it the loss and one gradient row
for each record, and sends the rows back. So the owner of the Gaussians has the rows of its records as if it had
rendered all views itself (the scheme of Grendel-GS, Zhao et al. 2024).

Rows of records that lie behind an opaque surface are zero. They stay at home, and a bit for each row says which
(``ops.encode_rows``; ByteSplat calls it gradient compaction). To leave such records out of the next visit of the view
would save records, but no gradients. Of the statistics that density control observes, one number travels: the norm of
absgrad, and only in rounds that it observes.

No bit of any sum changes by all this. Tile lists are in the order of depth and global id whatever order the records
come in, a row belongs to one view and so comes from one rank, and what rows are summed into is summed where the
Gaussians are, view by view as on one rank.

If so chosen, rows travel in half the bytes, rounded to bfloat16. Then all rows are rounded, those too that stay on
their rank, so that it still does not matter how many ranks there are, if there are several.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from bytesplat_ns import ops
from bytesplat_ns.ops import fused, wire
from bytesplat_ns.ops.layout import (
    ABSGRAD,
    DEPTH,
    ROW_WIDTH,
    ROW_WIDTH_WITH_STATISTICS,
    Cameras,
    Differentiated,
    EncodedRows,
    Gaussians,
    Image,
    ImageGradients,
    Records,
    RenderSettings,
    TileLists,
    mask_words,
)
from bytesplat_ns.ops.photometric import PhotometricLoss
from bytesplat_ns.ops.reference.observe import along_x
from bytesplat_ns.parallel.ranks import Ranks

Encoding = Literal["compact", "dense"]
"""How gradient rows travel: those that are not zero and a bit for each, or all of them."""

Precision = Literal["float32", "bfloat16"]
"""Of the numbers in gradient rows, as they travel."""

PHOTOMETRIC = tuple(range(DEPTH))
"""Columns of a gradient row that a loss of colours fills."""

WITH_ABSGRAD = (*PHOTOMETRIC, ABSGRAD.start)
"""The same with the norm of absgrad, as the first of its components."""


class Exchange:
    """The stages up to ``rasterize_backward``, run by several ranks together.

    ``ranks.sent`` counts the bytes, as ``records``, ``masks`` and ``rows``, and ``ranks.zero_rows`` what stays at home.
    """

    def __init__(self, ranks: Ranks, encoding: Encoding = "compact", precision: Precision = "float32") -> None:
        assert encoding == "compact" or precision == "float32", "only what is encoded is rounded"
        self.ranks = ranks
        self.encoding = encoding
        self.precision = {"float32": torch.float32, "bfloat16": torch.bfloat16}[precision]

    def differentiate(
        self,
        gaussians: Gaussians,
        cameras: Cameras,
        owners: Sequence[int],
        own: Cameras,
        settings: RenderSettings,
        loss: fused.Loss,
        absgrad: bool,
    ) -> Differentiated:
        """``fused.differentiate`` for a round of V views. All ranks must call it for the same round.

        Args:
            gaussians: those of this rank.
            cameras: all views of the round, on every rank alike, in the order of their owners.
            owners: [V] rank of each view.
            own: those that this rank owns, perhaps none.
            loss: of the images of these views; without gradient of depth.
            absgrad: whether absgrad is wanted, if the rows come with statistics. Its norm is what arrives, along x, and
                zero in all other columns of statistics.

        Returns:
            Records and rows of this rank's Gaussians in all views; tiles, image and losses of its own views.
        """
        if self.ranks.size == 1:
            return fused.differentiate(gaussians, cameras, settings, loss)
        assert list(owners) == sorted(owners), "views come in the order of their owners, and so do their records"
        ranks = self.ranks
        firsts = [sum(owner < rank for owner in owners) for rank in range(ranks.size + 1)]

        # 1. Records to the owners of the views.
        records, outgoing, incoming = fused.project_for_owners(
            gaussians, cameras, settings, firsts, lambda counts: ranks.announce_rows(counts, "records")
        )
        received = ranks.exchange_rows(wire.pack(records), outgoing, incoming, "records")

        # 2. There: tiles, image, loss and rows, in the order in which the records came.
        there = _differentiate_own(wire.unpack(received, firsts[ranks.rank]), own, settings, loss)

        # 3. Rows to the owners of the Gaussians, where they are in the order of the records again.
        columns = PHOTOMETRIC
        if settings.statistics and absgrad:
            columns = WITH_ABSGRAD
            there.rows[:, ABSGRAD.start] = along_x(there.rows[:, ABSGRAD], own.sizes[there.records.view.long()])
        send = self._send_compact if self.encoding == "compact" else self._send_dense
        there.rows = send(there.rows, incoming, outgoing, columns)
        there.records = records
        return there

    def _send_compact(self, rows: Tensor, outgoing: list[int], incoming: list[int], columns: tuple[int, ...]) -> Tensor:
        """Rows [m, W] of records that came from each rank, to those of the records that were sent to each [n, W]."""
        ranks = self.ranks
        encoded = ops.encode_rows(rows, outgoing, columns, self.precision)
        left, coming = ranks.announce_rows(encoded.counts, "rows")
        ranks.rows += sum(outgoing) - outgoing[ranks.rank]
        ranks.zero_rows += sum(outgoing) - outgoing[ranks.rank] - sum(left) + left[ranks.rank]
        mask = ranks.exchange_rows(encoded.mask, mask_words(outgoing), mask_words(incoming), "masks")
        arrived = ranks.exchange_rows(encoded.rows[: sum(left)], left, coming, "rows")
        counts = torch.tensor(coming)
        return ops.decode_rows(EncodedRows(mask, arrived, counts), incoming, columns, rows.shape[1])

    def _send_dense(self, rows: Tensor, outgoing: list[int], incoming: list[int], columns: tuple[int, ...]) -> Tensor:
        """The same, with all rows."""
        ranks = self.ranks
        ranks.announce_rows(torch.tensor(outgoing, device=ranks.device), "rows")
        ranks.rows += sum(outgoing) - outgoing[ranks.rank]
        index = torch.tensor(columns, device=rows.device)
        arrived = ranks.exchange_rows(rows[:, index], outgoing, incoming, "rows")
        complete = rows.new_zeros(len(arrived), rows.shape[1])
        complete[:, index] = arrived
        return complete


def _differentiate_own(
    records: Records, cameras: Cameras, settings: RenderSettings, loss: fused.Loss
) -> Differentiated:
    """``fused.differentiate_records``, also for a rank without a view in this round."""
    if len(cameras):
        return fused.differentiate_records(records, cameras, settings, _without_depth(loss))
    assert len(records) == 0, "records are sent to owners of views"
    zeros = records.table.new_zeros
    none = records.ids
    width = ROW_WIDTH_WITH_STATISTICS if settings.statistics else ROW_WIDTH
    image = Image(zeros(0, 0, 0, 3), zeros(0, 0, 0), zeros(0, 0, 0))
    return Differentiated(records, TileLists(none, none.int(), none, none), image, zeros(0), zeros(0, width))


def _without_depth(loss: fused.Loss) -> fused.Loss:
    if isinstance(loss, PhotometricLoss):  # which knows nothing of depth
        return loss

    def checked(image: Image) -> tuple[Tensor, ImageGradients]:
        losses, gradients = loss(image)
        assert gradients.depth is None, "gradients of depth do not travel"
        return losses, gradients

    return checked
