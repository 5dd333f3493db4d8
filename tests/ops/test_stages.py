"""Every stage of every backend, on the whole table of scenes, against the reference in float64.

Tolerances are of float32, whose unit is 6e-8: a result of a few hundred rounded operations is right to a few 1e-6 of
its size. Scenes that amplify rounding say so themselves (``Scene.slack``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from backends import Backend, _moved
from cases import NOT_FINITE, SCENES, Scene, ball
from oracle import cast, truth
from torch import Tensor

from bytesplat_ns.ops import reference
from bytesplat_ns.ops.layout import (
    ABSGRAD,
    CONIC,
    DEPTH,
    IMPORTANCE,
    MAX_CONTRIBUTION,
    MEAN2D,
    OPACITY,
    RECORD_WIDTH,
    RGB,
    ROW_WIDTH,
    ROW_WIDTH_WITH_STATISTICS,
    TILE,
    Gaussians,
    Observations,
    Records,
    TileLists,
)
from bytesplat_ns.ops.reference.observe import along_x

scenes = pytest.mark.parametrize("scene", SCENES.values(), ids=SCENES)

ROUNDING = 5e-6
"""Relative error that a stage may make in float32."""


def relative_error(value: Tensor, expected: Tensor) -> float:
    """Norm of the difference over the norm of what was expected; an expected zero must be met exactly."""
    assert value.shape == expected.shape
    assert value.isfinite().all()
    norm = expected.double().norm()
    return float((value.double() - expected).norm() / norm) if norm > 0 else float(value.double().norm())


@scenes
def test_project(backend: Backend, scene: Scene) -> None:
    expected = truth(scene.name).projected
    records = backend.project(scene.gaussians, scene.cameras, scene.settings)

    assert records.table.dtype == torch.float32 and records.radius.dtype == torch.float32
    assert records.gaussian.dtype == records.view.dtype == torch.int32 and records.ids.dtype == torch.int64
    for name in ("view", "gaussian", "ids"):  # the same pairs in the same order
        assert torch.equal(getattr(records, name), getattr(expected, name)), name
    assert records.table.shape == (len(records), RECORD_WIDTH)
    table, truly = records.table.double(), expected.table
    tolerance = ROUNDING * scene.slack
    # A mean is a difference of terms as large as the image and as its own distance from the middle.
    size = scene.cameras.width + truly[:, MEAN2D].abs()
    assert ((table[:, MEAN2D] - truly[:, MEAN2D]).abs() <= tolerance * size).all()
    for columns in (CONIC, RGB, slice(OPACITY, OPACITY + 1), slice(DEPTH, DEPTH + 1)):
        error = (table[:, columns] - truly[:, columns]).norm(dim=-1)
        # Colours are sums of terms of size one that may cancel; the others are right relative to themselves.
        size = truly[:, columns].norm(dim=-1) + (1 if columns == RGB else 0)
        assert (error <= tolerance * size).all(), columns
    assert ((records.radius - expected.radius).abs() <= tolerance * expected.radius).all()


@scenes
def test_bin(backend: Backend, scene: Scene) -> None:
    records = truth(scene.name).records
    tiles = backend.bin(records, scene.cameras)

    count = len(scene.cameras) * scene.cameras.tiles_x * scene.cameras.tiles_y
    assert tiles.offsets.shape == (count + 1,) and tiles.offsets.dtype == torch.int64
    assert tiles.records.dtype == torch.int32 and tiles.pair.dtype == tiles.pair_offsets.dtype == torch.int64
    assert tiles.offsets[0] == 0 and tiles.offsets[-1] == len(tiles.records)

    # Exact up to rounding: between the lists of a slightly less and of a slightly more opaque scene.
    margin = 1e-4 * scene.slack
    assert listed(records, scene, 1 - margin) <= as_set(tiles) <= listed(records, scene, 1 + margin)
    assert len(as_set(tiles)) == len(tiles.records)

    # Near to far, equal depths by id.
    for start, end in zip(tiles.offsets, tiles.offsets[1:], strict=False):
        record = tiles.records[start:end].long()
        keys = list(zip(records.table[record, DEPTH].tolist(), records.ids[record].tolist(), strict=True))
        assert keys == sorted(keys)

    # The pairs are numbered record by record, where sums are formed in a fixed order.
    if backend.name == "cuda":
        assert len(tiles.pair) == len(tiles.pair_offsets) == 0
        return
    assert len(tiles.pair) == len(tiles.records)
    assert tiles.pair_offsets.shape == (len(records) + 1,)
    assert torch.equal(tiles.pair.sort().values, torch.arange(len(tiles.pair)))
    owner = torch.bucketize(tiles.pair, tiles.pair_offsets[1:], right=True)
    assert torch.equal(owner, tiles.records.long())


def as_set(tiles: TileLists) -> set[tuple[int, int]]:
    """The (tile, record) pairs of the lists."""
    tile = torch.arange(len(tiles.offsets) - 1).repeat_interleave(tiles.offsets.diff())
    return set(zip(tile.tolist(), tiles.records.tolist(), strict=True))


def listed(records: Records, scene: Scene, factor: float) -> set[tuple[int, int]]:
    """The pairs if all opacities were larger by a factor."""
    records = cast(records, torch.float64)
    table = records.table.clone()
    table[:, OPACITY] *= factor
    kept = table[:, OPACITY] >= 1 / 255  # the logarithm of the others has the wrong sign
    tiles = reference.bin(replace(records, table=table), scene.cameras)
    return {(tile, record) for tile, record in as_set(tiles) if kept[record]}


@scenes
def test_rasterize(backend: Backend, scene: Scene) -> None:
    expected = truth(scene.name)
    image = backend.rasterize(expected.records, expected.tiles, scene.cameras, scene.settings, interval=scene.interval)

    # Fragile pixels may differ; that they are few keeps this a test.
    assert expected.fragile.float().mean() < 0.05
    solid = ~expected.fragile
    tolerance = ROUNDING * scene.slack
    for name, size in (("rgb", 1.0), ("depth", 4.0), ("transmittance", 1.0)):
        value, truly = getattr(image, name), getattr(expected.image, name)
        assert value.shape == truly.shape and value.dtype == torch.float32
        assert ((value - truly).abs()[solid] <= tolerance * size).all(), name

    for view, (width, height) in enumerate(scene.cameras.sizes.tolist()):
        for outside in (slice(None), slice(width, None)), (slice(height, None), slice(None)):
            outside = (view, *outside)
            if outside[1] == slice(None) or outside[2] == slice(None):
                assert not image.rgb[outside].any() and not image.depth[outside].any()
                assert (image.transmittance[outside] == 1).all()


@scenes
def test_rasterize_backward(backend: Backend, scene: Scene) -> None:
    expected = truth(scene.name)
    image = cast(expected.image, torch.float32)
    rows = backend.rasterize_backward(
        expected.records,
        expected.tiles,
        scene.cameras,
        scene.settings,
        image,
        expected.d_image,
        interval=scene.interval,
    )

    width = ROW_WIDTH_WITH_STATISTICS if scene.settings.statistics else ROW_WIDTH
    assert rows.shape == (len(expected.records), width) and rows.dtype == torch.float32
    # Front to back, what is left of the differentiated scalar loses digits as T falls: eps / T of a contribution.
    tolerance = 10 * ROUNDING * scene.slack
    columns = [MEAN2D, CONIC, OPACITY, RGB, DEPTH]
    if scene.settings.statistics:
        columns.append(ABSGRAD)
        # Statistics count fragile pixels too: each may add or lose one contribution of at most one.
        for column in (IMPORTANCE, MAX_CONTRIBUTION):
            error = (rows[:, column] - expected.rows[:, column]).abs()
            allowed = tolerance * (1 + expected.rows[:, column]) + expected.fragile.sum()
            assert (error <= allowed).all(), column
    for column in columns:
        assert relative_error(rows[:, column], expected.rows[:, column]) <= tolerance, column


@scenes
def test_effective_lengths(backend: Backend, scene: Scene) -> None:
    expected = truth(scene.name)
    lengths = backend.effective_lengths(expected.records, expected.tiles, scene.cameras, scene.settings)

    truly = reference.effective_lengths(
        cast(expected.records, torch.float64), expected.tiles, scene.cameras, scene.settings
    )
    assert lengths.shape == truly.shape and lengths.dtype == torch.int32
    assert (lengths <= expected.tiles.offsets.diff()).all()
    # The end of a list may hang on a fragile pixel, where the last entry contributes or not.
    side = [-(-side // TILE) * TILE for side in expected.fragile.shape[1:]]
    padded = torch.zeros(len(scene.cameras), *side, dtype=torch.bool)
    padded[:, : scene.cameras.height, : scene.cameras.width] = expected.fragile
    blocks = padded.unflatten(2, (-1, TILE)).unflatten(1, (-1, TILE))  # [V, tiles_y, TILE, tiles_x, TILE]
    solid = ~blocks.any(dim=4).any(dim=2).flatten()
    assert torch.equal(lengths[solid], truly[solid])
    if scene.interval is None and scene.name.startswith("saturated"):
        assert (truly < expected.tiles.offsets.diff()).any(), "some lists go on behind what is seen"


@scenes
def test_project_backward(backend: Backend, scene: Scene) -> None:
    expected = truth(scene.name)
    arguments = scene.gaussians, scene.cameras, scene.settings, expected.records, expected.d_rows
    gradients = backend.project_backward(*arguments, squares=len(scene.cameras) > 1)

    for name in (*Gaussians.PARAMETERS, "viewmats"):
        error = relative_error(getattr(gradients, name), getattr(expected.gradients, name))
        assert error <= 10 * ROUNDING * scene.slack, name
    assert (gradients.squares is None) == (len(scene.cameras) == 1)
    for name, square in (gradients.squares or {}).items():
        # Errors of large terms count twice.
        assert relative_error(square, expected.gradients.squares[name]) <= 20 * ROUNDING * scene.slack, name
    assert not gradients.viewmats[:, 3].any()
    invisible = torch.ones(len(scene.gaussians), dtype=torch.bool)
    invisible[expected.records.gaussian.long()] = False
    for name, gradient in gradients.parameters().items():
        assert not gradient[invisible].any(), name


def test_levels_above_the_degree_get_no_gradient(backend: Backend) -> None:
    scene = SCENES["lower_degree_than_stored"]
    expected = truth(scene.name)
    gradients = backend.project_backward(
        scene.gaussians, scene.cameras, scene.settings, expected.records, expected.d_rows
    )
    assert gradients.features_rest[:, :3].any() and not gradients.features_rest[:, 3:].any()


def test_what_is_not_finite_is_culled(backend: Backend) -> None:
    scene = SCENES["not_finite"]
    records = backend.project(scene.gaussians, scene.cameras, scene.settings)
    assert len(records) > 0 and records.gaussian.min() >= NOT_FINITE


def test_shake(backend: Backend) -> None:
    """The noise of the reference, up to rounding; what is opaque does not move at all."""
    gaussians = ball(3000, 4)
    gaussians.opacities[:] = torch.linspace(-9, 3, 3000)[:, None]
    gaussians.scales[:] = torch.randn(3000, 3, generator=torch.Generator().manual_seed(5)) - 2
    expected, found = cast(gaussians, torch.float64), _moved(gaussians, backend.device)
    found = replace(found, means=found.means.clone())
    expected = replace(expected, means=expected.means.clone())
    arguments = {"strength": 50.0, "min_opacity": 0.05, "seed": 2**32 - 5, "step": 70_000}
    reference.shake(expected, **arguments)
    backend.module.shake(found, **arguments)
    moved, truly = found.means.cpu() - gaussians.means, expected.means - gaussians.means
    still = truly.norm(dim=1) == 0
    assert 500 < still.sum() < 2000 and not moved[still].any()
    assert (truly.norm(dim=1) > 1e-3).sum() > 1000
    torch.testing.assert_close(moved.double(), truly, rtol=1e-3, atol=2e-6)  # of means that are rounded to 2e-7


@pytest.mark.parametrize("absgrad", [True, False])
def test_observe(backend: Backend, absgrad: bool) -> None:
    """The same bits from every backend, also of what is not finite or beyond all bounds."""
    generator = torch.Generator().manual_seed(2)
    views = torch.arange(700, dtype=torch.int32) // 250
    records = Records(
        table=torch.rand(700, RECORD_WIDTH, generator=generator),
        gaussian=torch.cat([torch.randperm(300, generator=generator)[: len(v)] for v in views.split(250)]).int(),
        view=views,
        radius=torch.rand(700, generator=generator) * 10.0 ** torch.randint(-3, 3, (700,), generator=generator),
        ids=torch.arange(700),
    )
    size = 10.0 ** torch.randint(-9, 2, (700, 1), generator=generator)
    rows = torch.randn(700, ROW_WIDTH_WITH_STATISTICS, generator=generator) * size
    for row, value in enumerate((float("nan"), float("inf"), -float("inf"), 1e30, 0.0, -0.0)):
        rows[row] = value
    cameras = replace(SCENES["views_of_different_sizes"].cameras, width=97, height=101)
    cameras = replace(cameras, sizes=torch.tensor([[97, 101], [64, 33], [1, 7]], dtype=torch.int32))

    def observed(run: Callable[..., None], device: str, rows: Tensor = rows) -> Observations:
        past = torch.Generator().manual_seed(3)
        seen = Observations(
            gradient=torch.randint(2**40, (300,), generator=past),
            views=torch.randint(9, (300,), dtype=torch.int32, generator=past),
            radius=torch.rand(300, generator=past),
        )
        seen = _moved(seen, device)
        run(*_moved((records, rows, cameras), device), seen, absgrad)
        return _moved(seen, "cpu")

    expected = observed(reference.observe, "cpu")
    assert (expected.gradient >= 2**48).sum() == 3  # at the bound: 1e30 and both infinities
    columns = ABSGRAD if absgrad else MEAN2D
    sent = torch.zeros_like(rows)  # what another rank needs to know of it
    sent[:, columns.start] = along_x(rows[:, columns], cameras.sizes[views.long()])
    for given in (rows, sent):
        for name, column in vars(observed(backend.module.observe, backend.device, given)).items():
            assert torch.equal(column, getattr(expected, name)), name


def test_tile_costs() -> None:
    """Counted one by one, on lists of three tiles."""
    records = replace(truth("odd_size").records, table=torch.zeros(4, RECORD_WIDTH))
    lists = torch.tensor([2, 0, 1, 1, 2], dtype=torch.int32)
    tiles = TileLists(torch.tensor([0, 3, 3, 5]), lists, torch.empty(0), torch.empty(0))
    costs = reference.tile_costs(records, tiles, torch.tensor([3, 0, 1], dtype=torch.int32), budget=2)
    assert costs.tolist() == [[1, 0, 1], [2, 1, 1], [2, 0, 1], [0, 0, 0]]
    costs = reference.tile_costs(records, tiles, torch.tensor([2, 0, 1], dtype=torch.int32), budget=1)
    assert costs.tolist() == [[1, 1, 1], [2, 1, 1], [2, 1, 1], [0, 0, 0]]
