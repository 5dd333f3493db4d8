"""A run that is killed again and again, or while it prunes, ends as if nothing had happened."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

from fork_server import Child, ForkServer
from ns_train import Run, wait_until

KILLS = 20

STEPS = 300
"""More than the killed lives get through: refinement ends after 150, opacities are reset every 30."""

EVERY_STEP = "--steps-per-save", "1"


def files(run: Run) -> set[str]:
    return set(os.listdir(run.models)) if run.models.exists() else set()


def wait_for_file(run: Run, suffix: str, others_than: set[str]) -> None:
    """Returns, as soon as can be, when there is another file with this suffix."""
    wait_until(lambda: any(name.endswith(suffix) for name in files(run) - others_than), f"new {suffix}")


def kill_sometime(how: int, run: Run, child: Child, chance: random.Random) -> None:
    """Kills at a random moment of training, of the start, just after a checkpoint was written, or while one is."""
    if how == 1:
        end, enough = time.monotonic() + chance.uniform(0, 1.5), len(run.metrics()) + 12
        while time.monotonic() < end and len(run.metrics()) < enough:  # a fast machine has begun to train by then
            time.sleep(0.001)
    else:
        run.wait_for_steps(chance.randint(1, 12))
    if how == 0:
        time.sleep(chance.uniform(0, 0.02))  # some two steps
    elif how >= 2:
        wait_for_file(run, ".ckpt", others_than=files(run))
    if how == 3:
        wait_for_file(run, ".part", others_than=set())
    child.signal(signal.SIGKILL)


def start(server: ForkServer, run: Run) -> Child:
    """Begins or resumes."""
    resume = ("--load-dir", run.models) if any(name.endswith(".ckpt") for name in files(run)) else ()
    return server.start("ns_train", *run.words(*EVERY_STEP, *resume, steps=STEPS))


def test_killed_at_random_moments_a_run_ends_as_if_uninterrupted(server, small_capture: Path, tmp_path: Path):
    run, chance = Run(small_capture, tmp_path / "killed"), random.Random(0)
    last, unfinished = -1, 0
    for life in range(KILLS):
        child = start(server, run)
        kill_sometime(life % 4, run, child, chance)
        assert child.end() == -signal.SIGKILL, child.output
        if last >= 0 and "images seen" in child.output:
            assert f": {last + 1:,} images seen" in " ".join(child.output.split()), "resumed from the latest"
        unfinished += any(name.endswith(".part") for name in files(run))
        steps = run.steps()
        assert max(steps, default=-1) >= last, "no checkpoint is lost; all that are there are whole"
        last = max(steps, default=-1)
    assert unfinished >= KILLS // 8, "some were killed while they wrote a checkpoint"
    assert 0 < last < STEPS - 1

    final = start(server, run)
    uninterrupted = Run(small_capture, tmp_path / "uninterrupted")
    assert final.end() == 0, final.output
    assert server.start("ns_train", *uninterrupted.words(steps=STEPS)).end() == 0
    assert files(run) == {f"step-{STEPS - 1:09d}.ckpt"} == files(uninterrupted)
    (ours, theirs) = (next(r.models.iterdir()).read_bytes() for r in (run, uninterrupted))
    assert ours == theirs


PRUNED = 60
"""Steps of runs that prune: every 6 (an epoch) from 30 on, as no list can be so short."""

PRUNES = {"share": 0.95, "budget": 2, "guard": 0.0, "start": 15_000}


def test_killed_while_it_prunes_and_while_the_model_recovers(server, small_capture: Path, tmp_path: Path):
    """Rounds so large that some are undone: Gaussians that a killed process had removed come back."""
    options = [word for name, value in PRUNES.items() for word in (f"--pipeline.model.prune-{name}", value)]
    run, uninterrupted = Run(small_capture, tmp_path / "killed"), Run(small_capture, tmp_path / "uninterrupted")

    def live(child: str, *arguments: object) -> Child:
        resume = ("--load-dir", run.models) if files(run) else ()
        words = run.words(*EVERY_STEP, *options, *resume, steps=PRUNED)
        return server.start(child, *arguments, *words)

    def pending() -> bool:
        (step,) = run.steps()
        return run.checkpoint(step)["bytesplat"]["pruning"]["round"] is not None

    for child, arguments, recovers in (("pruning_hangs", (), False), ("step_hangs", (4,), True)):
        life = live(child, *arguments)
        life.wait_for("hanging")
        life.signal(signal.SIGKILL)
        assert life.end() == -signal.SIGKILL, life.output
        assert pending() == recovers
    final = live("ns_train")
    assert final.end() == 0, final.output
    assert server.start("ns_train", *uninterrupted.words(*options, steps=PRUNED)).end() == 0
    (ours, theirs) = (next(r.models.iterdir()).read_bytes() for r in (run, uninterrupted))
    assert ours == theirs

    rounds = [line for line in uninterrupted.metrics() if "kept" in line]
    assert {line["kept"] for line in rounds} == {0, 1}, "some are undone"
    # How lists fit is told where density has changed, and at the end.
    told = {line["step"] for line in uninterrupted.metrics() if "lists_within" in line}
    assert {line["step"] for line in rounds} <= told and PRUNED in told and len(told) < PRUNED
