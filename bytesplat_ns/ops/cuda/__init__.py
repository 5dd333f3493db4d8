"""The stages on NVIDIA GPUs of compute capability 8.0 and up: kernels of ``csrc/cuda``, compiled by ``ops.nvrtc``.

Names, arguments and meaning are those of ``ops.reference``. Sums over pixels and views are formed in no fixed order, so
gradients differ in their last bits from run to run; ``TileLists.pair`` and ``pair_offsets``, which exist for sums in a
fixed order, stay empty.
"""

from .binning import bin
from .codec import decode_rows, encode_rows
from .loss import loss
from .observe import observe
from .optimizer import adam
from .projection import project, project_backward
from .raster import effective_lengths, rasterize, rasterize_backward
from .shake import shake

__all__ = [
    "adam",
    "bin",
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
]
