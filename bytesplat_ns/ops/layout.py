"""The data that passes between the stages of a step, described once for every backend and every exchange.

A step is a chain of stages over the V views of a round:

    project -> records -> bin -> tile lists -> rasterize -> image -> loss -> image gradients
            -> rasterize_backward -> gradient rows -> project_backward -> parameter gradients -> adam
                                                   -> observe -> statistics of density control

Reference (torch), CPU (C++) and CUDA implement the same stages with the same names and signatures. Column numbers here
are mirrored in ``csrc/common/layout.h``; ``tests/ops/test_layout.py`` compares the two.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Literal

import torch
from torch import Tensor

TILE = 16
"""Side of a square tile in pixels."""

ALPHA_MIN = 1.0 / 255.0
"""Contributions below this opacity are skipped (they would not change an 8-bit image)."""

ALPHA_MAX = 0.999
"""Opacity of one Gaussian at one pixel is clamped here, so that transmittance never reaches zero in one step."""

TRANSMITTANCE_MIN = 1e-4
"""A pixel is saturated once its transmittance would fall to this value or below."""

# Columns of a record: what a Gaussian looks like in one view. float32.
MEAN2D = slice(0, 2)  # pixels, x right, y down, centre of the first pixel at (0.5, 0.5)
CONIC = slice(2, 5)  # a, b, c of the inverse 2D covariance [[a, b], [b, c]], 1 / pixel^2
OPACITY = 5  # after sigmoid and, in antialiased mode, after compensation
RGB = slice(6, 9)  # linear combination of spherical harmonics + 0.5, clamped at zero from below
DEPTH = 9  # camera z, world units
RECORD_WIDTH = 10

# Columns of a gradient row: dL/d(record) in the record's own columns, then the statistics of densification and pruning.
ABSGRAD = slice(10, 12)  # sum over pixels of |dL/d mean2d| of that pixel, x and y
IMPORTANCE = 12  # sum over pixels of alpha * T
MAX_CONTRIBUTION = 13  # max over pixels of alpha * T
ROW_WIDTH = RECORD_WIDTH
ROW_WIDTH_WITH_STATISTICS = 14

# Units of the statistics that density control keeps (``Observations``).
GRADIENT_UNIT = 2.0**-32
"""Unit of the summed screen gradient. Thresholds are around 1e-3, so one view's rounding is 1e-7 of them."""

GRADIENT_MAX = 2.0**16
"""Largest screen gradient of one view that counts: leaves room for 2^15 views in an int64."""

StopRule = Literal["drop", "add"]
"""What happens to the Gaussian that saturates a pixel: left out (as 3DGS and gsplat do), or added before stopping."""


@dataclass
class Gaussians:
    """Trained parameters of N Gaussians, as the optimizer holds them (before activation)."""

    means: Tensor  # [N, 3] world units
    quats: Tensor  # [N, 4] w, x, y, z; any non-zero norm
    scales: Tensor  # [N, 3] natural logarithm of the standard deviations, world units
    opacities: Tensor  # [N, 1] logit
    features_dc: Tensor  # [N, 3] spherical harmonics, degree 0
    features_rest: Tensor  # [N, (D + 1)^2 - 1, 3] spherical harmonics, degrees 1 to D
    ids: Tensor  # [N] int64 global ids, unique, kept for life

    PARAMETERS = ("means", "quats", "scales", "opacities", "features_dc", "features_rest")

    def __len__(self) -> int:
        return self.means.shape[0]

    @property
    def device(self) -> torch.device:
        return self.means.device


@dataclass
class Cameras:
    """V pinhole views of one round. Views may differ in size; images are stored at the largest one."""

    viewmats: Tensor  # [V, 4, 4] float32, world to camera, OpenCV axes (x right, y down, z forward)
    intrinsics: Tensor  # [V, 4] float32: fx, fy, cx, cy in pixels
    sizes: Tensor  # [V, 2] int32: width, height in pixels
    width: int  # largest width of the round, pixels (known on the host: no synchronisation)
    height: int  # largest height of the round, pixels

    def __len__(self) -> int:
        return self.viewmats.shape[0]

    def view(self, number: int) -> Cameras:
        """One view alone, stored at the size of the largest as before."""
        one = slice(number, number + 1)
        return Cameras(self.viewmats[one], self.intrinsics[one], self.sizes[one], self.width, self.height)

    @property
    def tiles_x(self) -> int:
        return -(-self.width // TILE)

    @property
    def tiles_y(self) -> int:
        return -(-self.height // TILE)


@dataclass(frozen=True)
class RenderSettings:
    """What changes the meaning of a projection or of a rasterization."""

    sh_degree: int = 3  # degrees above it are ignored
    antialiased: bool = False  # compensate opacity for the 0.3 px dilation (Mip-Splatting)
    stop: StopRule = "drop"
    statistics: bool = True  # the raster backward also fills the statistics columns
    near: float = 0.01  # world units
    far: float = 1e10  # world units
    dilation: float = 0.3  # added to the diagonal of the 2D covariance, pixel^2


@dataclass
class Records:
    """The M visible (view, Gaussian) pairs of a round, ordered by view, then by Gaussian index."""

    table: Tensor  # [M, RECORD_WIDTH] float32
    # Records that came from other ranks leave ``gaussian`` and ``radius`` empty, and only the records of one rank are
    # in order: what is done with them (``bin``, ``rasterize``) does not ask.
    gaussian: Tensor  # [M] int32, index into the local Gaussians
    view: Tensor  # [M] int32, index into the round's views
    radius: Tensor  # [M] float32 pixels, three standard deviations along the major axis
    ids: Tensor  # [M] int64 global Gaussian ids: the order of equal depths

    def __len__(self) -> int:
        return self.table.shape[0]

    @property
    def number(self) -> int | Tensor:
        """M, where the host knows it; in the middle of a step on a GPU only the device does: [] int64."""
        return len(self)

    def first(self, count: int) -> Records:
        """The first so many of them."""
        return replace(self, **{field.name: getattr(self, field.name)[:count] for field in fields(Records)})


@dataclass
class TileLists:
    """For each tile of each view the records that reach it, near to far (equal depths by global id).

    Tile t of view v at column x, row y has index ``(v * tiles_y + y) * tiles_x + x``; its list is
    ``records[offsets[t]:offsets[t + 1]]``.
    """

    offsets: Tensor  # [V * tiles_y * tiles_x + 1] int64
    records: Tensor  # [P] int32, indices into Records
    # The same pairs numbered record by record, for sums over a record's tiles in a fixed order. Backends whose sums
    # have no fixed order leave both empty.
    pair: Tensor  # [P] int64
    pair_offsets: Tensor  # [M + 1] int64, the pairs of record m are numbered pair_offsets[m] to pair_offsets[m + 1]


@dataclass
class Image:
    """A rasterized round, before background, clamping and composition. Outside a view's own size: 0, 0, 1."""

    rgb: Tensor  # [V, H, W, 3] float32, unclamped
    depth: Tensor | None  # [V, H, W] float32, sum of alpha T z (not normalised), world units; None if left out
    transmittance: Tensor  # [V, H, W] float32, what is left of the light behind all Gaussians

    def composed(self, background: Tensor) -> Tensor:
        """Colours [V, H, W, 3] in 0..1 in front of a background [V, 3]."""
        return (self.rgb + self.transmittance[..., None] * background[:, None, None]).clamp(0, 1)


@dataclass
class ImageGradients:
    """dL/d(Image); a missing part is zero."""

    rgb: Tensor  # [V, H, W, 3]
    depth: Tensor | None = None  # [V, H, W]
    transmittance: Tensor | None = None  # [V, H, W]


@dataclass
class Differentiated:
    """A round after its stages up to ``rasterize_backward``."""

    records: Records
    tiles: TileLists
    image: Image
    losses: Tensor  # [V]
    rows: Tensor  # [M, ROW_WIDTH or ROW_WIDTH_WITH_STATISTICS]


@dataclass(frozen=True)
class AdamStep:
    """One step of Adam over all trained parameters (Kingma and Ba, 2015, algorithm 1).

    Moments average over views: on a round of several, exp_avg takes in the mean of their gradients, and exp_avg_sq the
    mean of the squares of each view's gradient (``schedules.RoundScale`` says why).
    """

    rates: Mapping[str, float]  # learning rate by parameter name
    betas: tuple[float, float]
    eps: float
    number: float  # of the step, from 1; a fraction where earlier steps had other betas (``GaussianAdam.age``)
    # [10] the same where CUDA kernels read it (``AdamTable`` in csrc/common/adam.h), so that a recorded step can be
    # replayed with other rates; None elsewhere.
    table: Tensor | None = None


COLOURS = ("features_dc", "features_rest")
"""What influences nothing while no view shows a Gaussian: 81 % of the parameters at degree 3."""


@dataclass
class Lag:
    """How far the colours of N Gaussians are behind an Adam that moves them only when a view shows them."""

    caught_up: Tensor  # [N] int32, how many of the steps on record a Gaussian's colours have had
    past: list[AdamStep]  # the steps on record
    # The same where CUDA kernels read it, None elsewhere.
    record: Tensor | None = None  # [most steps, 10] float32, AdamStep.table of each
    fastest: Tensor | None = None  # [6] float32, largest step size of each parameter, in terms of csrc/common/adam.h
    recorded: Tensor | None = None  # [1] int32

    def clear(self) -> None:
        """Begins a new record, once all colours have had all steps of the old one."""
        self.past.clear()
        for table in (self.caught_up, self.fastest, self.recorded):
            if table is not None:
                table.zero_()


@dataclass
class Observations:
    """What the rounds since the last refinement said about N Gaussians. Sums that do not depend on their order."""

    gradient: Tensor  # [N] int64, sum over views of |dL/d mean2d|, in GRADIENT_UNIT per half image side
    views: Tensor  # [N] int32, how many saw the Gaussian
    radius: Tensor  # [N] float32, largest one, as a part of the larger image side


@dataclass
class EncodedRows:
    """Gradient rows on their way to the ranks that own the Gaussians, without the rows that are bitwise zero.

    Rows come in parts, one for each rank. A part of n rows has ceil(n / 32) words of the mask: one bit for each row,
    lowest first, set where the row is left.
    """

    mask: Tensor  # [sum of mask_words(parts)] int32
    rows: Tensor  # [rows left, or more; C] float32 or bfloat16, those of all parts one after another, C of the columns
    counts: Tensor  # [parts] int64, rows left of each part


def mask_words(parts: Sequence[int]) -> list[int]:
    """Words of the mask of each part of ``EncodedRows``, from the number of its rows."""
    return [-(-rows // 32) for rows in parts]


@dataclass
class GaussianGradients:
    """dL/d(parameter) of every Gaussian (zero where invisible) and of the cameras' poses."""

    means: Tensor  # [N, 3]
    quats: Tensor  # [N, 4]
    scales: Tensor  # [N, 3]
    opacities: Tensor  # [N, 1]
    features_dc: Tensor  # [N, 3]
    features_rest: Tensor  # [N, K, 3]
    viewmats: Tensor  # [V, 4, 4], last row zero
    # By parameter name, shaped like it: sums over views of the squares of each view's gradient; None unless asked for.
    squares: dict[str, Tensor] | None = None

    def parameters(self) -> dict[str, Tensor]:
        """The gradients by parameter name, poses left out."""
        return {name: getattr(self, name) for name in Gaussians.PARAMETERS}
