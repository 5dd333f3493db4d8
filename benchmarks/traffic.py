"""Bytes that image, loss and gradients of a view move through device memory and through L2, counted by Nsight Compute.

    python benchmarks/traffic.py [--sizes 200000 1000000 3000000] [--out results.json]
    python benchmarks/traffic.py --sizes --trained RUN --data ../shared/data/seneca [--views 0 80]

Three sides on each scene (rooms of ``--sizes`` Gaussians, trained models through training views): gsplat's
rasterization with a separate loss of L1 and SSIM, our three kernels, and the one that replaces them; each from records
and tile lists to gradients of the records, with the statistics of densification. What is counted:

- device memory (``dram__bytes``);
- L2 (``lts__t_bytes``), which on GPUs whose L2 has two halves includes what one half asks of the other;
- of that, what the multiprocessors ask for (``lts__t_sectors_srcunit_tex``), beside what ``counting.py`` predicts.

Each side is one range, run anew for each pass of counters (``--replay-mode app-range``), with clocks and caches left
alone: a cache that is emptied between kernels would flatter whoever has fewer of them. Needs ``ncu`` on the PATH and
the right to read the GPU's counters.
"""

from __future__ import annotations

import argparse
import csv
import json
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from counting import one_kernel, three_kernels
from floors import walk
from provenance import provenance
from raster_scenes import Scene, add_options, check_options, scenes

from bytesplat_ns.ops.cuda import binning, fused_raster, projection, raster
from bytesplat_ns.ops.photometric import PhotometricLoss

SECTOR = 32
COUNTERS = {  # what a unit of it is worth, bytes
    "dram__bytes.sum": ("device memory", 1),
    "lts__t_bytes.sum": ("L2", 1),
    "lts__t_sectors_srcunit_tex.sum": ("asked of L2", SECTOR),
    "lts__t_sectors_srcunit_tex_op_read.sum": ("to read", SECTOR),
}
GSPLAT, THREE, ONE = "gsplat", "three kernels", "one kernel"


def sides(scene: Scene) -> tuple[dict[str, Callable[[], Any]], dict[str, Any]]:
    """What is compared on a scene, and what is known of its lists without counters."""
    settings, cameras = scene.settings, scene.cameras
    records = projection.project(scene.gaussians, cameras, settings)
    tiles = binning.bin(records, cameras)
    loss = PhotometricLoss(scene.target, scene.background, cameras)

    def three() -> None:
        image = raster.rasterize(records, tiles, cameras, settings)
        _, gradients = loss(image)
        raster.rasterize_backward(records, tiles, cameras, settings, image, gradients, exact=False)

    def one() -> None:
        fused_raster.rasterize_photometric(records, tiles, cameras, settings, loss)

    found: dict[str, Callable[[], Any]] = {THREE: three, ONE: one}
    residency, reads = fused_raster.residency(records, tiles, cameras, settings, loss)
    walked = walk(records, tiles, cameras)
    used = fused_raster.by_tile(reads, cameras)[..., 2]
    notes: dict[str, Any] = {
        "records": len(records),
        "pairs": len(tiles.records),
        "residency": asdict(residency),
        "lists": str(residency),
        "counted": {
            THREE: three_kernels(walked, tiles, used, len(records), cameras).as_dict(),
            ONE: one_kernel(walked, tiles, fused_raster.by_tile(reads, cameras), len(records), cameras).as_dict(),
        },
    }
    try:
        found[GSPLAT] = gsplats(scene)
    except Exception as error:  # whatever keeps it from being built or loaded: our sides can be measured without
        notes["gsplat left out"] = f"{type(error).__name__}: {error}"
    return found, notes


def gsplats(scene: Scene) -> Callable[[], Any]:
    """gsplat's side."""
    from gsplat import rasterization
    from gsplat.cuda._wrapper import rasterize_to_pixels
    from raster import ssim

    gaussians, cameras, settings = scene.gaussians, scene.cameras, scene.settings
    fx, fy, cx, cy = cameras.intrinsics[0].tolist()
    intrinsics = torch.tensor([[[fx, 0, cx], [0, fy, cy], [0, 0, 1.0]]], device="cuda")
    size = (cameras.width, cameras.height)
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
            sh_degree=settings.sh_degree,
            packed=True,
            rasterize_mode="antialiased" if settings.antialiased else "classic",
        )
    means, conics, opacities = (meta[name].detach().requires_grad_() for name in ("means2d", "conics", "opacities"))
    colours = torch.rand(len(means), 3, device="cuda", requires_grad=True)
    similarity, _ = ssim()
    photo = scene.target.float() / 255

    def run() -> None:
        lists = meta["isect_offsets"], meta["flatten_ids"]
        rgb, alpha = rasterize_to_pixels(
            means, conics, colours, opacities, *size, 16, *lists, packed=True, absgrad=True
        )
        composed = (rgb + (1 - alpha) * scene.background[:, None, None]).clamp(0, 1)
        value = 0.8 * (composed - photo).abs().mean() + 0.2 * (1 - similarity(composed, photo))
        torch.autograd.grad(value, [means, conics, colours, opacities])

    run()  # so that what cannot run is known before anything is counted
    return run


def inside(options: argparse.Namespace) -> None:
    """What ncu runs: each side of each scene once more in a range of its own, after warming up."""
    ranges, notes = [], {}
    for make in scenes(options):
        scene = make()
        found, notes[scene.name] = sides(scene)
        print(f"{scene.name}: {notes[scene.name]['lists']}", file=sys.stderr, flush=True)
        for name, run in found.items():
            run(), run()
            torch.cuda.synchronize()
            torch.cuda.profiler.start()
            run()
            torch.cuda.synchronize()
            torch.cuda.profiler.stop()
            ranges.append((scene.name, name))
    options.inside.write_text(json.dumps({"ranges": ranges, "notes": notes}))


def measure(arguments: Sequence[str]) -> list[dict[str, Any]]:
    """Bytes by counter of each side and scene that the arguments of this program ask for.

    Raises:
        SystemExit: Nsight Compute, or what it ran, failed; says all that either said.
    """
    if shutil.which("ncu") is None:
        raise SystemExit("There is no ncu on the PATH: it comes with CUDA's toolkit, or as Nsight Compute.")
    with tempfile.TemporaryDirectory() as folder:
        report, log = Path(folder) / "ranges.json", Path(folder) / "log"
        command = ["ncu", "--replay-mode", "app-range", "--clock-control", "none", "--cache-control", "none"]
        command += ["--metrics", ",".join(COUNTERS), "--csv", "--print-units", "base", "--log-file", str(log)]
        command += [sys.executable, __file__, "--inside", str(report), *arguments]
        done = subprocess.run(command)  # both say on the terminal how far they are
        said = log.read_text() if log.exists() else "(ncu wrote no log)"
        if done.returncode or not report.exists():
            raise SystemExit(f"{shlex.join(command)}\nfailed with {done.returncode}; ncu's log:\n{said}")
        made = json.loads(report.read_text())
    measured = read_counters(said)
    if len(measured) != len(made["ranges"]):
        raise SystemExit(f"{len(made['ranges'])} ranges ran, ncu counted in {len(measured)}; its log:\n{said}")
    return [
        {"scene": scene, "side": side, **counters, **made["notes"][scene]}
        for (scene, side), counters in zip(made["ranges"], measured, strict=True)
    ]


def read_counters(said: str) -> list[dict[str, float]]:
    """Bytes by counter of each range, in their order, from the log of ``ncu --csv``.

    Raises:
        SystemExit: there is no table in it, or a counter has no number.
    """
    lines = said.splitlines()
    start = next((number for number, line in enumerate(lines) if line.startswith('"ID"')), None)
    if start is None:
        raise SystemExit(f"ncu counted nothing; its log:\n{said}")
    values: dict[str, dict[str, float]] = {}
    for row in csv.DictReader(line for line in lines[start:] if line.startswith('"')):
        if (name := row["Metric Name"]) not in COUNTERS:
            continue
        try:
            number = float(row["Metric Value"].replace(",", ""))
        except ValueError:
            raise SystemExit(f"ncu has '{row['Metric Value']}' for {name}; its log:\n{said}") from None
        values.setdefault(row["ID"], {})[name] = number * COUNTERS[name][1]
    for identity, counters in values.items():
        if missing := COUNTERS.keys() - counters.keys():
            raise SystemExit(f"Range {identity} has no {', '.join(sorted(missing))}; ncu's log:\n{said}")
    return [values[identity] for identity in sorted(values, key=int)]


def table(results: list[dict[str, Any]]) -> str:
    """Megabytes of each side; how much less the one kernel moves; what it says of its lists."""
    heads = "".join(f"{name + ', MB':>19}" for name, _ in COUNTERS.values())
    lines = [f"{'scene':34}{'side':14}{heads}{'counted, MB':>13}{'of it asked':>13}"]
    for name in dict.fromkeys(result["scene"] for result in results):
        here = {result["side"]: result for result in results if result["scene"] == name}
        for side, result in here.items():
            numbers = "".join(f"{result[counter] / 1e6:19.1f}" for counter in COUNTERS)
            if counted := result["counted"].get(side):
                asked = result["lts__t_sectors_srcunit_tex.sum"]
                numbers += f"{counted['total'] / 1e6:13.1f}{asked / counted['total']:13.1%}"
            lines.append(f"{name:34}{side:14}{numbers}")
        for ours, other in ((ONE, THREE), (ONE, GSPLAT), (THREE, GSPLAT)):
            if other in here:
                shares = (f"{label} {less(here, ours, other, counter)}" for counter, (label, _) in COUNTERS.items())
                lines.append(f"  {ours} against {other}: {', '.join(shares)}")
        said = here[ONE]
        lines.append(f"  {said['records']:,} records, {said['pairs']:,} pairs; {said['lists']}")
        if "gsplat left out" in said:
            lines.append(f"  gsplat left out: {said['gsplat left out']}")
    return "\n".join(lines)


def less(here: dict[str, dict[str, Any]], ours: str, other: str, counter: str) -> str:
    """Change of a counter from another side to ours."""
    return f"{here[ours][counter] / here[other][counter] - 1:+.1%}" if here[other][counter] else "none"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    check_options(parser, options)
    if options.inside:
        return inside(options)
    origin = provenance()
    results = measure(sys.argv[1:])
    print(table(results))
    if options.out:
        options.out.write_text(json.dumps({**origin, "bytes": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
