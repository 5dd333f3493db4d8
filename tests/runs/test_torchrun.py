"""Runs of two ranks that the real ``torchrun`` starts, as README says it."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import sysconfig
from pathlib import Path

import torch
from ns_train import Run
from viewer_client import free_port

IMAGES = 12

ROOT = Path(__file__).parents[2]


def words_of_readme() -> list[str]:
    """The first command of README that begins with torchrun, without what follows the options of ``ns-train``."""
    lines = (line for line in (ROOT / "README.md").read_text().splitlines() if line.startswith("torchrun"))
    command = next(line for line in lines if "ns-train" in line)
    return shlex.split(command.partition(" --data ")[0])


def start(words: list[str]) -> subprocess.Popen[str]:
    """A command with the scripts of this Python within reach, and one thread as machines of tests are small."""
    path = os.pathsep.join([sysconfig.get_path("scripts"), os.environ["PATH"]])
    environment = os.environ | {"PATH": path, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return subprocess.Popen(words, env=environment, text=True, **streams)


def finish(*processes: subprocess.Popen[str]) -> str:
    outputs = [process.communicate(timeout=300)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * len(processes), "\n".join(outputs)
    return " ".join("\n".join(outputs).split())


def check(run: Run, told: str, images: int) -> None:
    """One run of two ranks has left what a run leaves."""
    assert told.count("2 ranks (gloo)") == 1 and told.count("Training Finished") == 1, "the first rank speaks for all"
    reports = [line for line in run.metrics() if "loss" in line]
    assert reports[-1]["images"] == images and all(line["sent_records"] > 0 for line in reports)
    (path,) = run.models.iterdir()
    ids = torch.load(path, weights_only=True)["bytesplat"]["gaussians"]["ids"]
    assert len(ids) == reports[-1]["gaussians"] and (ids.diff() > 0).all()


def test_as_in_readme_then_on_two_machines(small_capture: Path, tmp_path: Path):
    """The second command goes on with the first one's run, as two machines with a rank each would."""
    command = words_of_readme()
    assert command[-2:] == ["ns-train", "bytesplat"]
    command[command.index("--nproc-per-node") + 1] = "2"
    run = Run(small_capture, tmp_path / "one machine")
    told = finish(start([*command, *run.words(steps=IMAGES)[1:]]))
    check(run, told, IMAGES)

    again = Run(small_capture, tmp_path / "two machines")
    port = str(free_port())
    machines = []
    for machine in ("0", "1"):
        where = "--nnodes", "2", "--node-rank", machine, "--master-addr", "127.0.0.1", "--master-port", port
        module = "--nproc-per-node", "1", "-m", "nerfstudio.scripts.train"
        words = again.words("--load-dir", run.models, steps=IMAGES + 4)
        machines.append(start([sys.executable, "-m", "torch.distributed.run", *where, *module, *words]))
    told = finish(*machines)
    assert f"{IMAGES} images seen" in told
    check(again, told, IMAGES + 4)
