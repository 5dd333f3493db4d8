"""The stages in plain torch, written to be read: the specification that every backend is tested against.

Stages run in float32 or float64 on any device, after the dtype of the Gaussians, and return tensors without a
graph. Backward stages differentiate the forward formulas with torch.autograd, so they owe nothing to the
derivatives that the compiled backends write out by hand. Tiles and views are looped over, Gaussians and
pixels never.

One file per stage: projection (with harmonics), tiles, raster, loss, adam, observe, shake; lists,
what pruning asks about tile lists; and the codec between ranks.
"""

from .adam import adam, catch_up, update_rows
from .codec import decode_rows, encode_rows
from .lists import effective_lengths, tile_costs
from .loss import loss
from .observe import observe
from .projection import project, project_backward
from .raster import rasterize, rasterize_backward
from .shake import shake
from .tiles import bin

__all__ = [
    "adam",
    "bin",
    "catch_up",
    "decode_rows",
    "effective_lengths",
    "encode_rows",
    "loss",
    "observe",
    "project",
    "project_backward",
    "rasterize",
    "rasterize_backward",
    "shake",
    "tile_costs",
    "update_rows",
]
