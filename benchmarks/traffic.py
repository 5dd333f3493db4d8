"""Bytes that image, loss and gradients of a view move through device memory and through L2, counted by Nsight Compute.

    python benchmarks/traffic.py [--sizes 200000 1000000 3000000] [--out results.json]

Three sides on the scene of ``room.py``: gsplat's rasterization with a loss of L1 and SSIM made of torch's operations
(where gsplat is installed), our three kernels, and the one that replaces them; each from records and tile lists to
gradients of the records, with the statistics of densification. The whole of it is one range, run anew for each pass of
counters (``--replay-mode app-range``), with clocks and caches left alone: a cache that is emptied between kernels would
flatter whoever has fewer of them. Needs ``ncu`` on the PATH and the right to read the GPU's counters.
"""

from __future__ import annotations

import argparse
import csv
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from provenance import provenance
from room import room

from bytesplat_ns.ops.cuda import binning, fused_raster, projection, raster
from bytesplat_ns.ops.layout import RenderSettings
from bytesplat_ns.ops.photometric import PhotometricLoss

WIDTH, HEIGHT = 1600, 1064
COUNTERS = {"dram__bytes.sum": "device memory", "lts__t_bytes.sum": "L2"}
SETTINGS = RenderSettings()


def sides(count: int) -> tuple[dict[str, Callable[[], Any]], str]:
    """What is compared on a room of ``count`` Gaussians, and what the fused kernel says of its lists."""
    gaussians, cameras = room(count, WIDTH, HEIGHT)
    generator = torch.Generator(device="cuda").manual_seed(0)
    shape = (1, HEIGHT, WIDTH, 3)
    target = torch.randint(0, 256, shape, dtype=torch.uint8, device="cuda", generator=generator)
    background = torch.rand(1, 3, device="cuda", generator=generator)
    records = projection.project(gaussians, cameras, SETTINGS)
    tiles = binning.bin(records, cameras)
    loss = PhotometricLoss(target, background, cameras)

    def three() -> None:
        image = raster.rasterize(records, tiles, cameras, SETTINGS)
        _, gradients = loss(image)
        raster.rasterize_backward(records, tiles, cameras, SETTINGS, image, gradients, exact=False)

    found: dict[str, Callable[[], Any]] = {
        "three kernels": three,
        "one kernel": lambda: fused_raster.rasterize_photometric(records, tiles, cameras, SETTINGS, loss),
    }
    with suppress(ImportError):
        found["gsplat"] = gsplats(gaussians, cameras, target, background)
    return found, str(fused_raster.residency(records, tiles, cameras, SETTINGS, loss))


def gsplats(gaussians: Any, cameras: Any, target: torch.Tensor, background: torch.Tensor) -> Callable[[], Any]:
    """gsplat's side."""
    from gsplat import rasterization
    from gsplat.cuda._wrapper import rasterize_to_pixels
    from raster import ssim

    fx, fy, cx, cy = cameras.intrinsics[0].tolist()
    intrinsics = torch.tensor([[[fx, 0, cx], [0, fy, cy], [0, 0, 1.0]]], device="cuda")
    size = (WIDTH, HEIGHT)
    with torch.no_grad():
        _, _, meta = rasterization(
            gaussians.means,
            gaussians.quats,
            gaussians.scales.exp(),
            gaussians.opacities[:, 0].sigmoid(),
            torch.cat([gaussians.features_dc[:, None], gaussians.features_rest], 1),
            cameras.viewmats,
            intrinsics,
            *size,
            sh_degree=3,
            packed=True,
        )
    means, conics, opacities = (meta[name].detach().requires_grad_() for name in ("means2d", "conics", "opacities"))
    colours = torch.rand(len(means), 3, device="cuda", requires_grad=True)
    similarity, _ = ssim()
    photo = target.float() / 255

    def run() -> None:
        lists = meta["isect_offsets"], meta["flatten_ids"]
        rgb, alpha = rasterize_to_pixels(
            means, conics, colours, opacities, *size, 16, *lists, packed=True, absgrad=True
        )
        composed = (rgb + (1 - alpha) * background[:, None, None]).clamp(0, 1)
        value = 0.8 * (composed - photo).abs().mean() + 0.2 * (1 - similarity(composed, photo))
        torch.autograd.grad(value, [means, conics, colours, opacities])

    return run


def inside(sizes: list[int], report: Path) -> None:
    """What ncu runs: each side of each size once more in a range of its own, after warming up."""
    ranges, notes = [], {}
    for count in sizes:
        found, notes[count] = sides(count)
        for name, run in found.items():
            run(), run()
            torch.cuda.synchronize()
            torch.cuda.profiler.start()
            run()
            torch.cuda.synchronize()
            torch.cuda.profiler.stop()
            ranges.append((count, name))
    report.write_text(json.dumps({"ranges": ranges, "notes": notes}))


def measure(sizes: list[int]) -> list[dict[str, Any]]:
    """Bytes by counter of each side and size."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "ranges.json"
        command = ["ncu", "--replay-mode", "app-range", "--clock-control", "none", "--cache-control", "none"]
        command += ["--metrics", ",".join(COUNTERS), "--csv", "--print-units", "base", "--log-file", f"{folder}/log"]
        command += [sys.executable, __file__, "--inside", str(report), "--sizes", *map(str, sizes)]
        done = subprocess.run(command, capture_output=True, text=True)
        log = Path(folder, "log").read_text() if Path(folder, "log").exists() else ""
        if done.returncode or not report.exists():
            raise SystemExit(f"{' '.join(command)} failed:\n{log}\n{done.stdout}\n{done.stderr}")
        made = json.loads(report.read_text())
    lines = log.splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith('"ID"'))
    values: dict[str, dict[str, float]] = {}
    for row in csv.DictReader(lines[start:]):
        if row["Metric Name"] in COUNTERS:
            values.setdefault(row["ID"], {})[row["Metric Name"]] = float(row["Metric Value"].replace(",", ""))
    measured = [values[number] for number in sorted(values, key=int)]
    results = []
    for (count, name), bytes_ in zip(made["ranges"], measured, strict=True):
        results.append({"gaussians": count, "side": name, **bytes_, "lists": made["notes"][str(count)]})
    return results


def table(results: list[dict[str, Any]]) -> str:
    """Megabytes, and what the fused kernel says of its lists."""
    lines = [f"{'Gaussians':>10}  {'side':16}" + "".join(f"{name + ', MB':>20}" for name in COUNTERS.values())]
    for result in results:
        numbers = "".join(f"{result[counter] / 1e6:20.1f}" for counter in COUNTERS)
        lines.append(f"{result['gaussians']:>10,}  {result['side']:16}{numbers}")
    lines += sorted({f"{result['gaussians']:,}: {result['lists']}" for result in results})
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[200_000, 1_000_000, 3_000_000])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside:
        return inside(options.sizes, options.inside)
    origin = provenance()
    results = measure(options.sizes)
    print(table(results))
    if options.out:
        options.out.write_text(json.dumps({**origin, "image": [WIDTH, HEIGHT], "bytes": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
