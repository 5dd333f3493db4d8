"""Times the CUDA stages, and gsplat on the same scene in the same run where it is installed.

    python benchmarks/raster.py [--sizes 200000 1000000 3000000] [--out results.json]
    python benchmarks/raster.py --sizes --trained RUN --data ../shared/data/seneca [--views 0 80]

Scenes are rooms of ``--sizes`` Gaussians, and trained models through training views (``raster_scenes.py``).

Medians of CUDA events. A stage of ours is captured in a CUDA graph first, so that what is timed is the GPU and not
Python; everything that says "eager" is not. gsplat's numbers are eager: its kernels are long enough to hide Python.
"step replayed" is how training runs a step: recorded once, replayed with new inputs (``ops/cuda/replay.py``).
Both sides get the statistics of densification ("absgrad") unless a name says otherwise. A step is projection to
optimizer, with L1 and SSIM (gsplat: with fused_ssim or else pytorch_msssim, and torch's fused Adam). Floors are what
the scene's own counts and the device's ceilings allow at best, see ``floors.py``.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from floors import Ceilings, Work, count_evaluations, floors
from provenance import provenance
from raster_scenes import Scene, add_options, check_options, scenes
from torch import Tensor

from bytesplat_ns.ops.cuda import ahead, binning, fused_raster, optimizer, projection, raster
from bytesplat_ns.ops.cuda.loss import loss
from bytesplat_ns.ops.cuda.replay import Replay
from bytesplat_ns.ops.layout import AdamStep, Gaussians, ImageGradients, RenderSettings
from bytesplat_ns.ops.photometric import PhotometricLoss

RATES = dict.fromkeys(Gaussians.PARAMETERS, 1e-9)  # so that the scene stays what it is


def milliseconds(function: Callable[[], Any], repeats: int = 20) -> float:
    """Median time of a call on the GPU."""
    for _ in range(3):
        function()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        function()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


def captured(function: Callable[[], Any]) -> float:
    """Median time of a call's kernels alone."""
    for _ in range(3):
        function()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    return milliseconds(graph.replay)


def back_to_back(function: Callable[[], Any], calls: int = 20) -> float:
    """Median time of a call among others of its kind, as in training."""

    def run() -> None:
        for _ in range(calls):
            function()

    return milliseconds(run, repeats=5) / calls


def peak_memory(function: Callable[[], Any]) -> int:
    """Bytes that a call needs beyond what is allocated before it."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    function()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def ours(scene: Scene, upstream: ImageGradients) -> dict[str, float]:
    """Every stage, runs of stages, and the whole step."""
    gaussians, cameras, target, background = scene.gaussians, scene.cameras, scene.target, scene.background
    full, plain = scene.settings, replace(scene.settings, statistics=False)
    records = projection.project(gaussians, cameras, full)
    tiles = binning.bin(records, cameras)
    room_for = int(1.25 * len(records)), int(1.25 * len(tiles.records))
    result: dict[str, float] = {"records": len(records), "pairs": len(tiles.records)}
    result["evaluations"] = count_evaluations(records, tiles, cameras)
    image = raster.rasterize(records, tiles, cameras, full)
    rows = raster.rasterize_backward(records, tiles, cameras, full, image, upstream)
    records = projection.project_ahead(gaussians, cameras, full, room_for[0])
    tiles = binning.bin_ahead(records, cameras, room_for[1])
    own = replace(gaussians, **{name: getattr(gaussians, name).clone() for name in Gaussians.PARAMETERS})
    moments = {n: (torch.zeros_like(getattr(own, n)), torch.zeros_like(getattr(own, n))) for n in Gaussians.PARAMETERS}
    step_of_adam = optimizer.place(AdamStep(RATES, (0.9, 0.999), 1e-15, 5), gaussians.device)

    def backward(settings: RenderSettings, exact: bool = False) -> Tensor:
        return raster.rasterize_backward(records, tiles, cameras, settings, image, upstream, exact=exact)

    photometric = PhotometricLoss(target, background, cameras)

    def three_kernels(settings: RenderSettings) -> None:
        image = raster.rasterize(records, tiles, cameras, settings)
        _, gradients = photometric(image)
        raster.rasterize_backward(records, tiles, cameras, settings, image, gradients, exact=False)

    def one_kernel(settings: RenderSettings) -> None:
        fused_raster.rasterize_photometric(records, tiles, cameras, settings, photometric)

    def optimize(rows: Tensor = rows, records: Any = records) -> None:
        projection.project_backward_adam(own, cameras, full, records, rows, moments, step_of_adam, {}, False)

    def to_gradients(settings: RenderSettings) -> None:
        records = projection.project_ahead(gaussians, cameras, settings, room_for[0])
        tiles = binning.bin_ahead(records, cameras, room_for[1])
        image = raster.rasterize(records, tiles, cameras, settings)
        rows = raster.rasterize_backward(records, tiles, cameras, settings, image, upstream, exact=False)
        projection.project_backward(gaussians, cameras, settings, records, rows)

    def stages(target: Tensor, background: Tensor) -> Tensor:
        done = ahead.differentiate(own, cameras, full, lambda image: loss(image, target, background, cameras))
        optimize(done.rows, done.records)
        return done.losses

    def step() -> None:
        stages(target, background)

    replay = Replay(gaussians.device)
    tables = [table for name in Gaussians.PARAMETERS for table in (getattr(own, name), *moments[name])]

    def replayed() -> None:
        replay(stages, (target, background), tables, "step")

    result["project"] = captured(lambda: projection.project_ahead(gaussians, cameras, full, room_for[0]))
    result["bin"] = captured(lambda: binning.bin_ahead(records, cameras, room_for[1]))
    result["rasterize"] = captured(lambda: raster.rasterize(records, tiles, cameras, full))
    result["loss"] = captured(lambda: loss(image, target, background, cameras))
    result["rasterize_backward"] = captured(lambda: backward(full))
    result["rasterize_backward exact"] = captured(lambda: backward(full, exact=True))
    result["rasterize_backward without absgrad"] = captured(lambda: backward(plain))
    result["rasterize_backward exact without absgrad"] = captured(lambda: backward(plain, exact=True))
    for name, settings in (("", full), (" without absgrad", plain)):
        result["image, loss and rows, three kernels" + name] = captured(lambda s=settings: three_kernels(s))
        result["image, loss and rows, one kernel" + name] = captured(lambda s=settings: one_kernel(s))
    result["project_backward"] = captured(lambda: projection.project_backward(gaussians, cameras, full, records, rows))
    result["project_backward_adam"] = captured(optimize)
    result["projection to gradients eager"] = back_to_back(lambda: to_gradients(full))
    result["projection to gradients eager without absgrad"] = back_to_back(lambda: to_gradients(plain))
    result["step eager"] = back_to_back(step)
    result["step memory"] = peak_memory(step)
    result["step replayed"] = back_to_back(replayed)
    torch.cuda.synchronize()
    return result


def gsplats(scene: Scene, upstream: ImageGradients) -> dict[str, float]:
    """The same of gsplat, packed. Empty where it is not installed."""
    gaussians, cameras, target, background = scene.gaussians, scene.cameras, scene.target, scene.background
    try:
        from gsplat import rasterization
        from gsplat.cuda._wrapper import rasterize_to_pixels
    except ImportError:
        return {}
    parameters = [
        gaussians.means,
        gaussians.quats,
        gaussians.scales.exp(),
        gaussians.opacities[:, 0].sigmoid(),
        torch.cat([gaussians.features_dc[:, None], gaussians.features_rest], 1),
    ]
    leaves = [parameter.clone().requires_grad_() for parameter in parameters]
    fx, fy, cx, cy = cameras.intrinsics[0].tolist()
    intrinsics = torch.tensor([[[fx, 0, cx], [0, fy, cy], [0, 0, 1.0]]], device=cameras.viewmats.device)
    adam = torch.optim.Adam([{"params": [leaf]} for leaf in leaves], lr=1e-9, fused=True)
    gradients = [upstream.rgb, -upstream.transmittance[..., None]]
    similarity, source = ssim()

    def render(absgrad: bool) -> tuple[Tensor, Tensor, dict[str, Any]]:
        adam.zero_grad(set_to_none=True)
        size, degree = (cameras.width, cameras.height), scene.settings.sh_degree
        mode = "antialiased" if scene.settings.antialiased else "classic"
        options = {"sh_degree": degree, "packed": True, "absgrad": absgrad, "rasterize_mode": mode}
        return rasterization(*leaves, cameras.viewmats, intrinsics, *size, **options)

    def to_gradients(absgrad: bool) -> None:
        rgb, alpha, _ = render(absgrad)
        torch.autograd.backward([rgb, alpha], gradients)

    def step() -> None:
        rgb, alpha, _ = render(absgrad=True)
        composed = (rgb + (1 - alpha) * background[:, None, None]).clamp(0, 1)
        photo = target.float() / 255
        value = 0.8 * (composed - photo).abs().mean() + 0.2 * (1 - similarity(composed, photo))
        value.backward()
        adam.step()

    meta = render(absgrad=False)[2]
    names = ("means2d", "conics", "opacities")
    means, conics, opacities = (meta[name].detach().clone().requires_grad_() for name in names)
    colours = torch.rand(len(means), 3, device=means.device, requires_grad=True)
    result: dict[str, float] = {"ssim": source, "pairs": meta["flatten_ids"].numel()}
    for absgrad in (True, False):
        name = "" if absgrad else " without absgrad"

        def forward(absgrad: bool = absgrad) -> list[Tensor]:
            lists = meta["isect_offsets"], meta["flatten_ids"]
            size = (cameras.width, cameras.height, 16)
            inputs = (means, conics, colours, opacities, *size, *lists)
            return list(rasterize_to_pixels(*inputs, packed=True, absgrad=absgrad))

        outputs = forward()
        result["rasterize" + name] = milliseconds(forward)
        result["rasterize_backward" + name] = milliseconds(
            lambda outputs=outputs: torch.autograd.backward(outputs, gradients, retain_graph=True)
        )
        result["projection to gradients eager" + name] = back_to_back(lambda absgrad=absgrad: to_gradients(absgrad), 10)
    result["adam"] = milliseconds(adam.step)
    result["step eager"] = back_to_back(step, 10)
    result["step memory"] = peak_memory(step)
    return result


def ssim() -> tuple[Callable[[Tensor, Tensor], Tensor], str]:
    """The fastest SSIM that is installed, of images [V, H, W, 3], and its name."""
    try:
        from fused_ssim import fused_ssim

        return lambda a, b: fused_ssim(a.permute(0, 3, 1, 2), b.permute(0, 3, 1, 2), padding="valid"), "fused_ssim"
    except ImportError:
        from pytorch_msssim import SSIM

        module = SSIM(data_range=1.0, size_average=True, channel=3).to("cuda")
        return lambda a, b: module(a.permute(0, 3, 1, 2), b.permute(0, 3, 1, 2)), "pytorch_msssim"


def compare(scene: Scene, ceilings: Ceilings) -> dict[str, Any]:
    """Both sides on a scene, and the floors of ours."""
    gaussians, cameras = scene.gaussians, scene.cameras
    generator = torch.Generator(device="cuda").manual_seed(0)
    shape = (1, cameras.height, cameras.width)
    random = [torch.randn(*shape, *tail, device="cuda", generator=generator) for tail in ((3,), ())]
    upstream = ImageGradients(random[0], None, random[1])
    mine, theirs = ours(scene, upstream), gsplats(scene, upstream)
    for side in (mine, theirs):
        for name in ("", " without absgrad") if side else ():
            forward = side.get("rasterize" + name, side["rasterize"])
            side["forward + backward" + name] = forward + side["rasterize_backward" + name]
    counts = {name: mine[name] for name in ("records", "pairs", "evaluations")}
    tiles, pixels = cameras.tiles_x * cameras.tiles_y, cameras.width * cameras.height
    harmonics = 1 + gaussians.features_rest.shape[1]
    work = Work(len(gaussians), tiles=tiles, pixels=pixels, harmonics=harmonics, **counts)
    found = {"scene": scene.name, "gaussians": len(gaussians), "image": [cameras.width, cameras.height]}
    return found | {"ours": mine, "gsplat": theirs, "floors": floors(work, ceilings)}


def table(result: dict[str, Any]) -> str:
    """Names, our milliseconds, how many times the floor that is, gsplat's, and how many times faster we are."""
    mine, theirs, least = result["ours"], result["gsplat"], result["floors"]
    lines = [
        f"{result['scene']}: {result['gaussians']:,} Gaussians, {mine['records']:,} visible, {mine['pairs']:,} pairs, "
        f"{mine['evaluations']:,} evaluations; SSIM of the other side: {theirs.get('ssim', 'not installed')}",
        f"  {'':46}{'ms':>8}{'x floor':>9}{'gsplat':>9}{'faster':>8}",
    ]
    for name, value in mine.items():
        if not isinstance(value, float):
            continue
        floor, other = least.get(name), theirs.get("step eager" if name == "step replayed" else name)
        lines.append(
            f"  {name:46}{value:8.3f}"
            + (f"{value / floor:9.2f}" if floor else f"{'':9}")
            + (f"{other:9.3f}{other / value:7.2f}x" if other else "")
        )
    lines.append(f"  step memory, MiB: {mine['step memory'] >> 20}, gsplat {theirs.get('step memory', 0) >> 20}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    check_options(parser, options)
    origin = provenance()
    began = time.perf_counter()
    ceilings = Ceilings.measure()
    results = []
    for make in scenes(options):
        results.append(compare(make(), ceilings))
        print(table(results[-1]), flush=True)
    gsplat = sys.modules.get("gsplat")
    report = {
        **origin,
        "gsplat": gsplat and gsplat.__version__,
        "seconds": round(time.perf_counter() - began, 1),
        "ceilings": asdict(ceilings),
        "milliseconds": results,
    }
    if options.out:
        options.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
