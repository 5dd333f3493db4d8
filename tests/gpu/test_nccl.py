"""Two GPUs are one run: what they tell each other arrives, they learn what one GPU learns, and they end together.

Whole runs have rounds of one view, so that they show the same views in the same order. Sums on a GPU have no fixed
order, so that they drift apart all the same.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from commands import Process, Run, arguments, train
from group import Group
from reports import gaussians, losses, quality
from rounds_of_ranks import Case, collect, run_round

from bytesplat_ns.parallel.ranks import RankLeft, Ranks

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")

DEVICE = "cuda"
STEPS = 300
COMPARED = 30
"""Rounds whose losses are compared one by one; no refinement has taken place by then."""

MODEL = "--pipeline.model."
ONE_VIEW = (
    *("--pipeline.datamanager.views-per-round", "1"),
    *(f"{MODEL}warmup-length", "4000", f"{MODEL}schedule-length", str(STEPS)),
)

CASES = [
    Case("both_have_views", views=(3, 2)),
    Case("one_has_none", views=(0, 3)),
    Case("one_has_no_gaussians", views=(1, 2), shards="last"),
    Case("unseen_view", views=(1, 1), looking="first_away"),
    Case("no_records", views=(1, 2), looking="away"),
    Case("all_rows_zero", views=(2, 1), masked=True),
]

# What ranks tell each other ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def group() -> Iterator[Group]:
    group = Group(2, DEVICE)
    yield group
    group.close()


def talk(ranks: Ranks) -> None:
    """Every collective, with rows of every type that a table has, and with none."""
    me, device = ranks.rank, ranks.device
    for dtype in (torch.float32, torch.float64, torch.int32, torch.int64, torch.uint8):
        rows = torch.full((3 * me, 2), me + 1, dtype=dtype, device=device)  # none on the first rank
        gathered = ranks.gather(rows)
        assert gathered.dtype == dtype and gathered.tolist() == [[2, 2]] * 3
        assert [len(part) for part in ranks.gather_parts(rows[:0])] == [0, 0]
        came = ranks.exchange([rows[:me], rows], "rows")  # to the first rank one of the second's, to that all
        assert [len(part) for part in came] == ([0, 1] if me == 0 else [0, 3])
        assert all((part == 2).all() for part in came)
    assert int(ranks.sum(torch.tensor(me + 1, device=device))) == 3
    assert ranks.sum(torch.full((2, 3), 0.5, device=device)).tolist() == [[1.0] * 3] * 2
    assert ranks.share({"rank": me}) == [{"rank": 0}, {"rank": 1}]
    assert ranks.broadcast("said" if me == 1 else None, source=1) == "said"
    assert ranks.agree("trouble" if me == 1 else None) == "trouble"
    ranks.announce(15 * me)
    ranks.wait()
    assert ranks.heard == 15
    with ranks.timed():
        ranks.gather(torch.zeros(1000, device=device))
    assert ranks.waited > 0 and ranks.transferred > 0
    if me == 1:
        assert ranks.leave()
        return
    with pytest.raises(RankLeft):
        ranks.wait()


def test_all_that_ranks_say_arrives(group):
    group(talk)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_round_of_two_gpus_is_that_of_one(case, group):
    for statistics in (False, True):
        alone = collect([run_round(Ranks(device=DEVICE), case, "compact", statistics)])
        for encoding in ("compact", "dense"):
            together = collect(group(run_round, case, encoding, statistics))
            for name, value in together.items():
                if name in ("view", "ids"):
                    assert torch.equal(value, alone[name])
                else:
                    error = (value - alone[name]).norm() / alone[name].norm().clamp(min=1e-12)
                    assert error < 1e-3, f"{name} of {encoding} rows: {float(error)}"
        assert case.masked == (len(alone["rows"]) > 0 and not alone["rows"].any())


# Whole runs ----------------------------------------------------------------------------------------------------------


def start(capture: Path, output: Path, *options: str, steps: int) -> Process:
    """``ns-train`` on two GPUs, in processes of its own."""
    words = arguments(capture, output, "--machine.num-devices", "2", *options, steps=steps, device=DEVICE)
    output.mkdir(parents=True, exist_ok=True)
    log = output / "log"
    with open(log, "w") as file:
        command = [sys.executable, "-m", "nerfstudio.scripts.train", *words]
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT)
    return Process(process, log, output / "network")


def left_by(output: Path) -> Run:
    return Run(output / "scene/bytesplat/run")


@pytest.fixture(scope="module")
def two(capture, tmp_path_factory) -> Run:
    output = tmp_path_factory.mktemp("two")
    keep = *("--steps-per-save", "100", "--save-only-latest-checkpoint", "False"), "--checkpoint-files", "shards"
    with start(capture, output, *ONE_VIEW, *keep, steps=STEPS) as process:
        printed = process.finish(180)
    assert "2 ranks" in printed
    return left_by(output)


@pytest.fixture(scope="module")
def endless(two, capture, tmp_path_factory) -> Iterator[tuple[Process, Run]]:
    """Another run, which sends all rows. It starts while others of these tests run, to save their time."""
    output = tmp_path_factory.mktemp("endless")
    options = *ONE_VIEW, f"{MODEL}gradient-exchange", "dense", "--steps-per-save", "50"
    with start(capture, output, *options, steps=10_000_000) as process:
        yield process, left_by(output)


@pytest.mark.usefixtures("endless")
def test_two_gpus_learn_what_one_learns(two, capture, tmp_path):
    one = train(capture, tmp_path, *ONE_VIEW, steps=STEPS, device=DEVICE)
    assert len(losses(two)) == STEPS
    np.testing.assert_allclose(losses(two)[:COMPARED], losses(one)[:COMPARED], rtol=0.02)
    assert quality(two) == pytest.approx(quality(one), abs=0.3)
    assert gaussians(two) == pytest.approx(gaussians(one), rel=0.1)
    assert all(line["sent_records"] > 0 and line["sent_rows"] > 0 for line in two.metrics() if "loss" in line)


@pytest.mark.usefixtures("endless")
@pytest.mark.parametrize("device", [DEVICE, "cpu"])
def test_one_device_goes_on_from_the_shards_of_two(device, two, capture, tmp_path):
    assert len(list(two.models.glob("shard-*step-000000100*"))) == 2
    options = *ONE_VIEW, "--load-dir", str(two.models), "--load-step", "100"
    run = train(capture, tmp_path, *options, steps=STEPS, device=device)
    assert len(losses(run)) == STEPS - 101
    np.testing.assert_allclose(losses(run)[:10], losses(two)[101:111], rtol=0.02)
    assert quality(run) == pytest.approx(quality(two), abs=1.0)


def test_a_rank_that_is_killed_ends_the_other(endless, two, capture, tmp_path):
    process, run = endless
    deadline = time.monotonic() + 120
    while not (run.folder / "metrics.jsonl").exists() or len(losses(run)) < 120:
        assert process.running and time.monotonic() < deadline, process.output
        time.sleep(0.1)
    np.testing.assert_allclose(losses(run)[:COMPARED], losses(two)[:COMPARED], rtol=0.02, err_msg="compact and dense")

    ranks = [p for p in psutil.Process(process.pid).children() if "resource_tracker" not in " ".join(p.cmdline())]
    first, second = sorted(ranks, key=lambda rank: (rank.create_time(), rank.pid))
    second.kill()
    assert process.end(60) == 1, process.output
    assert "Rank 1 was ended by SIGKILL" in process.output
    assert not first.is_running()

    step = max(int(path.stem.removeprefix("step-")) for path in run.models.glob("step-*.ckpt"))
    options = *ONE_VIEW, "--load-dir", str(run.models), "--load-step", str(step)
    again = train(capture, tmp_path, *options, steps=step + 13, device=DEVICE)
    assert len(losses(again)) == 12
