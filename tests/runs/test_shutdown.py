"""A trainer that the program around it shuts down, on one of its ranks, ends on all after the same step."""

from __future__ import annotations

import numpy as np
import pytest
from viewer_client import ViewerClient, free_port

PATIENCE = 180  # seconds
STEPS = 30_000  # more than are done until then


def check_stopped(child, run, steps: int) -> None:
    assert child.end(PATIENCE) == 0, child.output
    (saved,) = run.steps()
    assert f"Stopped after {saved + 1:,} of {steps:,} steps" in child.output and "Traceback" not in child.output
    assert [line["step"] for line in run.metrics() if "loss" in line] == list(range(1, saved + 2))


@pytest.mark.parametrize(("ranks", "rank"), [(1, 0), (2, 0), (3, 2)])
def test_while_training(ranks, rank, server, run):
    child = server.start("shut_down", "", rank, *run.words("--machine.num-devices", ranks, steps=STEPS))
    check_stopped(child, run, STEPS // ranks)


@pytest.mark.parametrize("ranks", [1, 2])
def test_while_paused(ranks, server, run):
    port = free_port()
    viewer = "--vis", "viewer", "--viewer.websocket-host", "127.0.0.1", "--viewer.websocket-port", port
    child = server.start("shut_down", "paused", 0, *run.words("--machine.num-devices", ranks, *viewer, steps=STEPS))
    with ViewerClient(port, child) as client:
        client.look(np.eye(3, 4), fov=1.0, aspect=4 / 3)
        client.picture()  # it is known to the viewer
        client.click("Pause Training")
        check_stopped(child, run, STEPS // ranks)


def test_when_complete(server, run):
    """Without it the viewer would stay up."""
    port = free_port()
    viewer = "--vis", "viewer", "--viewer.websocket-host", "127.0.0.1", "--viewer.websocket-port", port
    child = server.start("shut_down", "completed", 0, *run.words("--machine.num-devices", 2, *viewer, steps=12))
    assert child.end(PATIENCE) == 0, child.output
    assert "Training Finished" in child.output and "Traceback" not in child.output and run.steps() == [5]
