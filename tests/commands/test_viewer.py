"""The viewer in front of a trained model, and during training, as a browser meets it."""

from __future__ import annotations

import signal

import numpy as np
import pytest
from commands import Run, arguments
from pictures import decibels, read
from PIL import Image
from viewer_client import ViewerClient, free_port

FULL = 512
"""Width of the pictures that the viewer shows when nothing moves, pixels."""


def address(port: int) -> tuple[str, ...]:
    return "--viewer.websocket-host", "127.0.0.1", "--viewer.websocket-port", str(port)


@pytest.fixture
def photo(pipeline, capture):
    """Pose, vertical field of view and aspect of the first training photo, and its pixels."""
    camera = pipeline.datamanager.train_dataset.cameras[0]
    fov = float(2 * np.arctan(camera.height / 2 / camera.fy))
    view = camera.camera_to_worlds.numpy(), fov, float(camera.width / camera.height)
    return view, read(capture / "images/frame_00002.png")


def reduced(picture: np.ndarray) -> np.ndarray:
    """A picture of the viewer at the size of the photos."""
    return np.asarray(Image.fromarray(picture).resize((96, 72), Image.BOX))


def test_viewer_shows_a_trained_model(terminal, trained, pipeline, photo):
    port = free_port()
    view, _ = photo
    with (
        terminal.start("ns-viewer", "--load-config", trained.config, *address(port)) as process,
        ViewerClient(port, process) as client,
    ):
        client.look(*view)
        picture = client.picture(width=FULL)
    seen = pipeline.model.get_outputs_for_camera(pipeline.datamanager.train_dataset.cameras[0:1])["rgb"]
    # Five times the resolution shows thinner Gaussians, and JPEG costs some; a wrong pose is at 12 dB.
    assert decibels(reduced(picture), (255 * seen.numpy()).astype(np.uint8)) > 20


def test_viewer_during_training(terminal, capture, tmp_path, photo):
    port, total = free_port(), 600
    view, pixels = photo
    run = Run(tmp_path / "scene/bytesplat/run")
    words = arguments(capture, tmp_path, "--vis", "viewer", *address(port), steps=total)
    with terminal.start("ns-train", *words) as process, ViewerClient(port, process) as client:
        client.look(*view)
        assert client.picture().std() > 10, "something is to be seen"
        client.step(at_least=1)

        client.click("Pause Training")
        client.listen(1.0)  # the step that was under way ends
        paused = len(run.metrics())
        client.look(*view)
        client.picture(width=FULL)
        client.listen(1.0)
        assert len(run.metrics()) == paused < total, "pictures come, but steps do not"

        client.click("Resume Training")
        while "Use ctrl+c to quit" not in process.output:
            client.listen(0.5)
        client.look(*view)
        assert decibels(reduced(client.picture(width=FULL)), pixels) > 18
        process.signal(signal.SIGINT)
        process.finish(seconds=30)
    *steps, judged = run.metrics()
    assert len(steps) == total and "eval_psnr" in judged, "held-out photos are judged after the last step"
    assert (run.models / f"step-{total - 1:09d}.ckpt").is_file()
