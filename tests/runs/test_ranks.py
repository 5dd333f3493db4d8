"""Several ranks are one run: started in every way, stopped together, and ended by what goes wrong on one of them."""

from __future__ import annotations

import atexit
import multiprocessing.util
import signal
import time

import numpy as np
import psutil
import pytest
import torch
from viewer_client import ViewerClient, free_port

from bytesplat_ns.parallel.launch import ENVIRONMENT, _leaving_at_once, launch

STEPS = 12
PHOTOS = 6  # of the small capture, to train on
PATIENCE = 180  # seconds; ranks of one machine share its processors


def ranks(count: int) -> tuple[object, ...]:
    return "--machine.num-devices", count


def end_together(children) -> list[int]:
    return [child.end(PATIENCE) for child in children]


def check_one_run(run, ranks: int, images: int) -> None:
    """One set of reports and one checkpoint, of all Gaussians, whoever wrote them."""
    done = [line["images"] for line in run.metrics() if "loss" in line]
    assert done == sorted(set(done)) and done[-1] >= images, "every step is reported once"
    assert all(line["views"] <= ranks for line in run.metrics() if "views" in line)
    (step,) = run.steps()
    state = run.checkpoint(step)
    ids = state["bytesplat"]["gaussians"]["ids"]
    assert (ids.diff() > 0).all() and len(ids) == len(state["pipeline"]["_model.gauss_params.means"])
    assert len(ids) == [line["gaussians"] for line in run.metrics() if "gaussians" in line][-1]
    names = [path.name.split(".")[0] for path in run.folder.iterdir() if not path.name.startswith("events")]
    assert sorted(names) == ["config", "dataparser_transforms", "metrics", "nerfstudio_models"]
    assert len(list(run.folder.glob("events*"))) <= 1


def test_three_ranks_are_one_run_that_one_rank_goes_on_with(server, run):
    child = server.start("ns_train", *run.words(*ranks(3), "--steps-per-save", 4, steps=2 * PHOTOS))
    assert child.end(PATIENCE) == 0, child.output
    check_one_run(run, ranks=3, images=2 * PHOTOS)
    told = " ".join(child.output.split())
    for words in ("3 ranks (gloo), 3 on this machine", "in rounds of 3", "Training Finished", "held-out photos PSNR"):
        assert told.count(words) == 1, child.output
    metrics = [line for line in run.metrics() if "loss" in line]
    assert len(metrics) == 4 and all(line["sent_records"] > 0 and 0 <= line["idle_share"] < 1 for line in metrics)
    words = run.words(steps=2 * PHOTOS + 2)
    alone = server.start("ns_train", words[0], "--load-dir", run.models, *words[1:])
    assert alone.end(PATIENCE) == 0 and run.steps() == [5], alone.output


def test_ranks_of_torchrun(server, run):
    port = free_port()
    children = [server.start("from_torchrun", rank, 2, port, "ns_train", *run.words(steps=STEPS)) for rank in range(2)]
    assert end_together(children) == [0, 0], children[0].output + children[1].output
    check_one_run(run, ranks=2, images=STEPS)
    assert children[1].output.count("Config") == 0 and "Training Finished" not in children[1].output


def test_two_machines(server, run):
    machines = "--machine.num-machines", 2, "--machine.dist-url", f"tcp://127.0.0.1:{free_port()}"
    children = [
        server.start("ns_train", *run.words(*ranks(2), *machines, "--machine.machine-rank", machine, steps=STEPS))
        for machine in range(2)
    ]
    assert end_together(children) == [0, 0], children[0].output + children[1].output
    check_one_run(run, ranks=4, images=STEPS)
    assert "4 ranks (gloo), 2 on this machine" in " ".join(children[0].output.split())
    assert "Training Finished" not in children[1].output


def test_ranks_make_the_pictures_of_the_viewer_together(server, run):
    port = free_port()
    address = "--viewer.websocket-host", "127.0.0.1", "--viewer.websocket-port", port
    child = server.start("ns_train", *run.words(*ranks(2), "--vis", "viewer", *address, steps=600))
    with ViewerClient(port, child) as client:
        ahead = np.eye(3, 4)
        ahead[:, 3] = 0, 0, 1.5
        client.look(ahead, fov=1.0, aspect=4 / 3)
        assert client.picture().std() > 10, "something is to be seen"
        client.click("Pause Training")
        client.listen(1.0)  # the step that was under way ends
        paused = len(run.metrics())
        client.look(ahead, fov=1.0, aspect=4 / 3)
        client.picture(width=512)
        client.listen(0.5)
        assert len(run.metrics()) == paused, "pictures come, but steps do not"
        client.click("Resume Training")
        while "Use ctrl+c to quit" not in child.output:
            assert child.running, child.output
            client.listen(0.5)
        client.look(ahead, fov=1.0, aspect=4 / 3)
        client.picture(width=512)
        child.signal(signal.SIGINT)
        assert child.end(PATIENCE) == 0, child.output
    check_one_run(run, ranks=2, images=600)


def test_a_signal_to_the_run_stops_all_ranks_after_the_same_step(server, run):
    child = server.start("ns_train", *run.words(*ranks(2), steps=3000))
    run.wait_for_steps(1)
    child.signal(signal.SIGINT)
    assert child.end(PATIENCE) == 130, child.output
    (saved,) = run.steps()
    assert f"Stopped after {saved + 1:,} of" in child.output and child.output.count("SIGINT: ending") == 1
    assert "Traceback" not in child.output and "Rank" not in child.output
    assert not psutil.pid_exists(child.pid) or not psutil.Process(child.pid).children()


def test_a_signal_to_one_rank_stops_all_of_them(server, run):
    child = server.start("on_one_rank", 1, 3, "SIGTERM", *run.words(*ranks(2), steps=3000))
    assert child.end(PATIENCE) == 143, child.output
    assert run.steps() == [3] and "Stopped after 4 of" in child.output


def test_an_error_on_one_rank_is_shown_and_ends_all(server, run):
    child = server.start("on_one_rank", 1, 6, "error", *run.words(*ranks(3), "--steps-per-save", 4, steps=3000))
    child.wait_for("a photo fell off the wall", PATIENCE)
    assert child.end(60) == 1, child.output
    assert child.output.count("Traceback") == 1 and "ValueError: a photo fell off the wall" in child.output
    assert "Rank 1 of 3" in child.output
    assert run.steps() == [4], "the last checkpoint is there"


@pytest.mark.parametrize("rank, trouble", [(1, "kill"), (0, "kill"), (1, "stop")])
def test_a_rank_that_dies_ends_all(rank, trouble, server, run):
    child = server.start("on_one_rank", rank, 6, trouble, *run.words(*ranks(2), "--steps-per-save", 4, steps=3000))
    assert child.end(PATIENCE) == 1, child.output
    reason = {"kill": f"Rank {rank} was ended by SIGKILL", "stop": "rank 1 has not been heard of for 5 s"}[trouble]
    assert reason in child.output and "Traceback" not in child.output
    if (rank, trouble) != (1, "kill"):
        return
    words = run.words(*ranks(2), steps=3 * PHOTOS)
    resumed = server.start("ns_train", words[0], "--load-dir", run.models, *words[1:])
    assert resumed.end(PATIENCE) == 0 and f"{2 * 5} images seen" in " ".join(resumed.output.split()), resumed.output


def test_no_memory_on_one_rank_saves_what_all_ranks_have_done(server, run):
    child = server.start("on_one_rank", 1, 6, "memory", *run.words(*ranks(2), steps=3000))
    assert child.end(PATIENCE) == 1, child.output
    assert run.steps() == [5] and "Traceback" not in child.output
    for words in ("Out of memory with", "on rank 1", "can't allocate memory", "--load-dir"):
        assert child.output.count(words) == 1, child.output
    assert torch.equal(run.checkpoint(5)["bytesplat"]["gaussians"]["ids"].sort().values, torch.arange(700))


@pytest.mark.parametrize(("files", "full"), [("one", 0), ("shards", 1)])
def test_a_full_disk_on_a_rank_that_writes_is_known_to_all(files, full, server, run):
    """Too full for the checkpoint of step 4, but not for the last one."""
    words = run.words(*ranks(2), "--checkpoint-files", files, "--steps-per-save", 4, steps=2 * PHOTOS)
    child = server.start("files_limited_on", full, 3, 5, 100_000, *words)
    assert child.end(PATIENCE) == 0, child.output
    assert run.steps() == [5] and child.output.count("WARNING") == 1
    assert len(list(run.models.iterdir())) == (1 if files == "one" else 3)


@pytest.mark.parametrize(
    "machine, message",
    [
        ({"num_machines": 2}, "--machine.dist-url tcp://HOST:PORT"),
        ({"num_machines": 2, "machine_rank": 2}, "--machine.machine-rank 2"),
        ({"num_devices_per_machine": torch.cuda.device_count() + 2}, f"torch sees {torch.cuda.device_count()}"),
        ({"num_devices_per_machine": 2, "device_type": "mps"}, "--machine.device-type mps"),
    ],
)
def test_what_does_not_fit_is_told_before_ranks_start(machine, message):
    with pytest.raises(ValueError, match=message):
        launch(pytest.fail, **{"num_devices_per_machine": 1, "config": object(), **machine})


def test_a_rank_on_a_gpu_that_fails_ends_without_tidying_up():
    def fail(device_type: str) -> None:
        atexit.register(time.sleep, 600)
        multiprocessing.util.Finalize(None, time.sleep, args=(600,), exitpriority=0)
        with _leaving_at_once(device_type):
            raise SystemExit(3)

    process = multiprocessing.get_context("fork").Process(target=fail, args=("cuda",))
    process.start()
    process.join(PATIENCE)
    assert process.exitcode == 3
    with pytest.raises(SystemExit), _leaving_at_once("cpu"):
        raise SystemExit(3)


def test_torchrun_starts_the_ranks_or_the_option_does(monkeypatch):
    for name in ENVIRONMENT:
        monkeypatch.setenv(name, "1")
    with pytest.raises(ValueError, match="leave out --machine"):
        launch(pytest.fail, num_devices_per_machine=2, config=object())
