"""A browser's side of the viewer: viser's protocol, msgpack messages over a websocket."""

from __future__ import annotations

import io
import re
import socket
import time
from collections.abc import Callable
from typing import Any, Protocol

import msgspec
import numpy as np
import viser.transforms as vtf
from PIL import Image
from websockets.sync.client import connect

SCALE = 10.0
"""The viewer's units in a world unit."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Process(Protocol):
    """What shows the viewer."""

    @property
    def output(self) -> str: ...

    @property
    def running(self) -> bool: ...


class ViewerClient:
    """Connects as soon as ``process`` listens, and keeps what the page would show."""

    def __init__(self, port: int, process: Process, seconds: float = 120) -> None:
        self._process = process
        deadline = time.monotonic() + seconds
        while True:
            try:
                self._socket = connect(f"ws://127.0.0.1:{port}", max_size=None, compression=None)
                break
            except ConnectionRefusedError:
                assert process.running and time.monotonic() < deadline, process.output
                time.sleep(0.1)
        self._buttons: dict[str, str] = {}  # label: id
        self._step = 0
        self._picture: np.ndarray | None = None

    def __enter__(self) -> ViewerClient:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def look(self, camera_to_world: np.ndarray, fov: float, aspect: float) -> None:
        """Moves the viewport's camera.

        Args:
            camera_to_world: [3, 4] OpenGL axes, world units.
            fov: vertical, radians.
            aspect: width over height.
        """
        rotation = vtf.SO3.from_matrix(camera_to_world[:, :3]) @ vtf.SO3.from_x_radians(np.pi)  # OpenCV axes
        position = SCALE * camera_to_world[:, 3]
        self._send(
            "ViewerCameraMessage",
            wxyz=rotation.wxyz.tolist(),
            position=position.tolist(),
            fov=fov,
            aspect=aspect,
            look_at=(position + rotation.as_matrix()[:, 2]).tolist(),
            up_direction=(-rotation.as_matrix()[:, 1]).tolist(),
        )

    def click(self, label: str) -> None:
        """Presses a button of the control panel."""
        self._until(lambda: label in self._buttons, f"a button {label!r}")
        self._send("GuiUpdateMessage", id=self._buttons[label], updates={"value": True})

    def picture(self, width: int = 0) -> np.ndarray:
        """The next rendered background, uint8 [H, W, 3], at least ``width`` pixels wide."""
        self._picture = None
        wanted = lambda: self._picture is not None and self._picture.shape[1] >= width  # noqa: E731
        self._until(wanted, f"a picture of {width} pixels")
        assert self._picture is not None
        return self._picture

    def step(self, at_least: int = 0) -> int:
        """The step that the control panel shows, once it is ``at_least`` that."""
        self._until(lambda: self._step >= at_least, f"step {at_least}")
        return self._step

    def listen(self, seconds: float) -> None:
        """Takes in messages for a while."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            self._receive(deadline - time.monotonic())

    def _send(self, kind: str, **content: Any) -> None:
        self._socket.send(msgspec.msgpack.encode({"type": kind, **content}))

    def _until(self, condition: Callable[[], bool], what: str, seconds: float = 60) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, f"no {what} within {seconds} s:\n{self._process.output}"
            self._receive(0.5)

    def _receive(self, seconds: float) -> None:
        try:
            window = self._socket.recv(timeout=max(seconds, 0))
        except TimeoutError:
            return
        for message in msgspec.msgpack.decode(window):
            if message["type"] == "GuiAddButtonMessage":
                self._buttons[message["label"]] = message["id"]
            elif message["type"] == "BackgroundImageMessage":
                self._picture = np.asarray(Image.open(io.BytesIO(message["rgb_bytes"])).convert("RGB"))
            elif message["type"] == "GuiUpdateMessage":
                step = re.search(r"Step: (\d+)", str(message["updates"].get("markdown", "")))
                self._step = int(step[1]) if step else self._step
