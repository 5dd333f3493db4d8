"""The table of inputs: what is written, and the right outcome."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from scene import Scene

Words = tuple[str, ...]
"""The last words of ``ns-train``: options of the method, then the data's format and its options."""

Write = Callable[[Scene], Words]
"""Writes a data set, and says how to train on it."""

RANDOM = ("--pipeline.model.num-random", "200")
FULL_SIZE = ("--pipeline.model.num-downscales", "0")


@dataclass(frozen=True)
class Input:
    """A line of the table."""

    write: Write
    scene: dict[str, object]  # what the scene is made with
    says: str = ""  # regular expression for what ns-train prints, or for the message it stops with
    error: str | None = None  # name of the exception, or None if it trains
    evaluates: str | None = None  # regular expression for ns-eval's message, or None if it gives metrics
    gaussians: int | None = None  # that the run starts with


TABLE: dict[str, Input] = {}


def trains(
    says: str = "", evaluates: str | None = None, gaussians: int | None = None, **scene: object
) -> Callable[[Write], Write]:
    """The input trains, evaluates unless ``evaluates`` tells why not, and exports."""

    def add(write: Write) -> Write:
        TABLE[write.__name__] = Input(write, scene, says, None, evaluates, gaussians)
        return write

    return add


def stops(error: str, says: str, **scene: object) -> Callable[[Write], Write]:
    """``ns-train`` stops with an exception of this name and a message that helps."""

    def add(write: Write) -> Write:
        TABLE[write.__name__] = Input(write, scene, says, error)
        return write

    return add
