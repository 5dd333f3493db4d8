"""Stages fused on the GPU do what the separate ones do."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from backends import Backend, _moved
from cases import SCENES
from oracle import cast, truth

from bytesplat_ns.ops import wire
from bytesplat_ns.ops.cuda import ahead, buffers, optimizer, projection
from bytesplat_ns.ops.layout import (
    DEPTH,
    IMPORTANCE,
    RECORD_WIDTH,
    AdamStep,
    GaussianGradients,
    Gaussians,
    Image,
    ImageGradients,
)

pytestmark = pytest.mark.parametrize("backend", ["cuda"], indirect=True)


@pytest.mark.parametrize("name", ["odd_size", "views_of_different_sizes", "lower_degree_than_stored", "no_gaussians"])
def test_projection_backward_with_adam(backend: Backend, name: str) -> None:
    scene, expected = SCENES[name], truth(name)
    generator = torch.Generator().manual_seed(1)

    def place(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(backend.device, copy=True)

    names = Gaussians.PARAMETERS
    separate, fused = ({n: place(getattr(scene.gaussians, n)) for n in names} for _ in range(2))
    start = {n: [0.1 * torch.randn(separate[n].shape, generator=generator).abs() for _ in range(2)] for n in names}
    moments_separate = {n: tuple(map(place, pair)) for n, pair in start.items()}
    moments_fused = {n: tuple(map(place, pair)) for n, pair in start.items()}
    rates = {n: 0.01 * (i + 1) for i, n in enumerate(names)}
    regularizers = {n: 0.1 * torch.randn(separate[n].shape, generator=generator) for n in ("opacities", "scales")}
    ids = place(scene.gaussians.ids)
    cameras = replace(
        scene.cameras, **{n: place(getattr(scene.cameras, n)) for n in ("viewmats", "intrinsics", "sizes")}
    )
    records = expected.records
    records = replace(records, **{n: place(t) for n, t in vars(records).items()})
    rows = place(expected.d_rows)

    views = len(cameras)
    gradients: GaussianGradients = projection.project_backward(
        Gaussians(**separate, ids=ids), cameras, scene.settings, records, rows, squares=True
    )
    for n, gradient in gradients.parameters().items():
        mean, square = gradient / views, gradients.squares[n] / views
        if n in regularizers:
            part = place(regularizers[n]) / views
            square += part * (2 * mean + part)
            mean += part
        backend.module.adam(separate[n], mean, *moments_separate[n], lr=rates[n], step=3, square=square)
    step = optimizer.place(AdamStep(rates, (0.9, 0.999), 1e-15, 3), ids.device)
    poses = projection.project_backward_adam(
        Gaussians(**fused, ids=ids),
        cameras,
        scene.settings,
        records,
        rows,
        moments_fused,
        step,
        {n: place(regularizer) for n, regularizer in regularizers.items()},
        poses=True,
    )

    # The same operations on the same numbers; only the compiler may contract them differently.
    torch.testing.assert_close(fused, separate, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(moments_fused, moments_separate, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(poses, gradients.viewmats, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["odd_size", "views_of_different_sizes", "behind", "equal_depths"])
def test_stages_ahead_of_their_counts(backend: Backend, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Buffers that are too short are noticed, and what comes out is what the separate stages give."""
    scene = SCENES[name]
    gaussians, cameras = (_moved(value, backend.device) for value in (scene.gaussians, scene.cameras))
    calls = []

    def loss(image: Image) -> tuple[torch.Tensor, ImageGradients]:
        calls.append(image)
        return image.depth.sum((1, 2)), ImageGradients(image.rgb + 1, None, image.transmittance)

    for capacity in (ahead.record_capacity, ahead.pair_capacity):
        monkeypatch.setattr(capacity, "_needed", {})
        monkeypatch.setattr(capacity, "SMALLEST", 7)
    result = ahead.differentiate(gaussians, cameras, scene.settings, loss, exact=True)
    assert len(calls) == (1 if name == "behind" else 3)  # records did not fit, then pairs did not

    records = backend.module.project(gaussians, cameras, scene.settings)
    tiles = backend.module.bin(records, cameras)
    image = backend.module.rasterize(records, tiles, cameras, scene.settings)
    losses, gradients = loss(image)
    rows = backend.module.rasterize_backward(records, tiles, cameras, scene.settings, image, gradients)
    assert torch.equal(result.records.table, records.table) and torch.equal(result.tiles.records, tiles.records)
    assert torch.equal(result.tiles.offsets, tiles.offsets) and torch.equal(result.image.rgb, image.rgb)
    assert torch.equal(result.losses, losses)
    # The rows' sums are formed in another order.
    torch.testing.assert_close(result.rows, rows, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["views_of_different_sizes", "equal_depths", "no_gaussians"])
def test_stages_of_several_ranks(backend: Backend, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shards are projected apart, for the owners of the views; these make of the records what one device makes."""
    scene = SCENES[name]
    gaussians, cameras = (_moved(value, backend.device) for value in (scene.gaussians, scene.cameras))
    firsts = [0, 1, len(cameras)]
    owned = [replace(cameras, **{n: getattr(cameras, n)[a:b] for n in ("viewmats", "intrinsics", "sizes")})
             for a, b in pairwise(firsts)]  # fmt: skip

    def loss(image: Image) -> tuple[torch.Tensor, ImageGradients]:
        return image.depth.sum((1, 2)), ImageGradients(image.rgb + 1, None, image.transmittance)

    asked = []

    def announce(counts: torch.Tensor) -> tuple[list[int], list[int]]:
        asked.append(counts.tolist())
        # Another rank's buffers were too short in the first attempt, if this one's were not.
        return asked[-1], [-1, 0] if len(asked) == 1 else [0, 0]

    for capacity in (ahead.record_capacity, ahead.pair_capacity):
        monkeypatch.setattr(capacity, "_needed", {})
        monkeypatch.setattr(capacity, "SMALLEST", 7)
    inboxes: list[list[torch.Tensor]] = [[] for _ in owned]
    for rank in range(3):
        shard = replace(gaussians, **{n: t[rank::3].contiguous() for n, t in vars(gaussians).items()})
        asked.clear()
        records, outgoing, _ = ahead.project_for_owners(shard, cameras, scene.settings, firsts, announce)
        assert len(asked) == 2 and len(records) == sum(outgoing)
        assert asked[0] == asked[1] or asked[0][0] == -len(records)
        for inbox, part in zip(inboxes, wire.pack(records).split(outgoing), strict=True):
            inbox.append(part)

    expected = ahead.differentiate(gaussians, cameras, scene.settings, loss, exact=True)
    for first, views, inbox in zip(firsts, owned, inboxes, strict=False):
        rows = torch.cat(inbox)
        unpacked = wire.unpack(rows, first)
        records = buffers.received(rows[:, :RECORD_WIDTH], unpacked.view, unpacked.ids)
        there = ahead.differentiate_records(records, views, scene.settings, loss, exact=True)
        here = slice(first, first + len(views))
        assert torch.equal(there.image.rgb, expected.image.rgb[here])
        assert torch.equal(there.losses, expected.losses[here])
        for view in range(len(views)):
            mine, theirs = records.view == view, expected.records.view == first + view
            by_id, in_one = records.ids[mine].argsort(), expected.records.ids[theirs].argsort()
            assert torch.equal(records.table[mine][by_id], expected.records.table[theirs][in_one])
            torch.testing.assert_close(there.rows[mine][by_id], expected.rows[theirs][in_one], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["odd_size", "saturated_drop", "depth_interval"])
def test_faster_sums_over_pixels(backend: Backend, name: str) -> None:
    """Products of 11 bits, without bias: each column of the rows is right to 1e-3, norm-wise."""
    scene, expected = SCENES[name], truth(name)
    image = cast(expected.image, torch.float32)
    upstream = ImageGradients(3e-8 * expected.d_image.rgb, None, 3e-8 * expected.d_image.transmittance)  # of a mean
    inputs = (expected.records, expected.tiles, scene.cameras, scene.settings, image, upstream, scene.interval)
    exact, fast = (backend.rasterize_backward(*inputs, exact=exact) for exact in (True, False))
    error = (fast - exact).norm(dim=0) / exact.norm(dim=0)
    assert (error[:DEPTH] < 1e-3).all() and (error[:DEPTH] > 1e-6).all()
    assert (error[RECORD_WIDTH:] < 1e-3).all()
    # Weights alpha T are positive: a bias would show in their sums, of which there are many.
    assert abs(fast[:, IMPORTANCE].sum() / exact[:, IMPORTANCE].sum() - 1) < 1e-4


def test_a_thread_that_has_not_used_the_gpu_yet(backend: Backend) -> None:
    """The viewer renders in a thread of its own."""
    parameter, gradient = torch.zeros(5, device=backend.device), torch.ones(5, device=backend.device)
    moments = torch.zeros_like(parameter), torch.zeros_like(parameter)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(backend.module.adam, parameter, gradient, *moments, lr=0.5, step=1).result()
    torch.testing.assert_close(parameter.cpu(), torch.full((5,), -0.5))
