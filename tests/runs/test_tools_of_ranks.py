"""Nerfstudio's tools on several ranks: what one process writes, without the whole model in any."""

from __future__ import annotations

import gzip
import json
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from fork_server import ForkServer
from ns_train import Run
from viewer_client import free_port

from bytesplat_ns.parallel import checkpoint as shared_checkpoint
from bytesplat_ns.parallel import tools
from bytesplat_ns.parallel.launch import ENVIRONMENT
from bytesplat_ns.parallel.ranks import ALONE
from bytesplat_ns.run import checkpoint

PATIENCE = 180  # seconds


def use(server: ForkServer, ranks: int, run: Run, tool: str, *words: object) -> list[int]:
    """A tool in one process, or on several ranks; how many Gaussians each of these had."""
    kind = ("dataset",) if tool == "ns-render" else ()
    words = tool, *kind, "--load-config", run.folder / "config.yml", *words
    if ranks == 1:
        children = [server.start("tool", *words)]
    else:
        port = free_port()
        places = [("from_torchrun", rank, ranks, port, "counting_tool") for rank in range(ranks)]
        children = [server.start(*place, *words) for place in places]
    codes = [child.end(PATIENCE) for child in children]
    output = "".join(child.output for child in children)
    assert codes == [0] * ranks, output
    return [int(count) for count in re.findall(r"has (\d+) Gaussians", output)]


def metrics(server: ForkServer, ranks: int, run: Run, folder: Path) -> tuple[dict[str, float], list[int]]:
    """What ns-eval finds, but for its speed."""
    path = folder / f"{ranks}.json"
    counts = use(server, ranks, run, "ns-eval", "--output-path", path)
    results: dict[str, Any] = json.loads(path.read_text())["results"]
    return {name: value for name, value in results.items() if "fps" not in name and "rays" not in name}, counts


def pictures(server: ForkServer, ranks: int, run: Run, folder: Path) -> tuple[dict[Path, bytes], list[int]]:
    """What ns-render writes of the held-out photos."""
    path = folder / f"renders of {ranks}"
    outputs = "--rendered-output-names", "rgb", "raw-depth", "--image-format", "png"
    counts = use(server, ranks, run, "ns-render", "--output-path", path, *outputs)
    files = [file for file in path.rglob("*") if file.is_file()]
    read = {".png": Path.read_bytes, ".gz": lambda file: gzip.decompress(file.read_bytes())}
    return {file.relative_to(path): read[file.suffix](file) for file in files}, counts


def check_parts(parts: list[int], ranks: int, run: Run) -> None:
    assert len(parts) == ranks and sum(parts) == run.metrics()[-2]["gaussians"]
    assert max(parts) < 0.6 * sum(parts), "no rank has the whole model"


def test_a_checkpoint_of_three_ranks(server, small_capture, tmp_path):
    run = Run(small_capture, tmp_path / "run")
    options = "--machine.num-devices", 3, "--checkpoint-files", "shards"
    child = server.start("ns_train", *run.words(*options, steps=12))
    assert child.end(PATIENCE) == 0, child.output
    expected, _ = metrics(server, 1, run, tmp_path)
    assert {"psnr", "ssim", "psnr_std"} <= expected.keys()
    found, parts = metrics(server, 2, run, tmp_path)
    assert found == expected, "to the last bit"
    check_parts(parts, 2, run)
    drawn, _ = pictures(server, 1, run, tmp_path)
    found, parts = pictures(server, 2, run, tmp_path)
    assert len(drawn) == 2 * 2 and found == drawn
    check_parts(parts, 2, run)

    (index,) = run.models.glob("step-*.ckpt")  # the same in one file, as one process writes it
    shared_checkpoint.write(index, shared_checkpoint.read(index), ALONE, shards=False)
    assert "_model.gauss_params.means" in checkpoint.read(index)["pipeline"]
    found, parts = metrics(server, 3, run, tmp_path)
    assert found == expected
    check_parts(parts, 3, run)


@pytest.mark.parametrize("module", tools.IN_ONE_PROCESS)
def test_tools_that_need_the_whole_model_say_what_to_do(module, monkeypatch):
    for name in ENVIRONMENT:
        monkeypatch.setenv(name, "2")
    monkeypatch.setitem(sys.modules, module, ModuleType(module))
    with pytest.raises(ValueError, match="runs in one process"):
        tools.join()
