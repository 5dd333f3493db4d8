"""``python -m bytesplat_ns.demo [run]`` shows the whole way; ``... capture FOLDER`` only makes the photos."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import tyro

from bytesplat_ns.demo.capture import Capture, write_capture
from bytesplat_ns.demo.run import Run, StepFailed, run


@dataclass(frozen=True)
class Photographs:
    """Photograph the demo's scene into a folder that nerfstudio reads."""

    output: tyro.conf.Positional[Path]
    """The folder."""
    capture: Annotated[Capture, tyro.conf.arg(name="")] = field(default_factory=Capture)


Command = Annotated[Run, tyro.conf.subcommand("run")] | Annotated[Photographs, tyro.conf.subcommand("capture")]


def main() -> int:
    command = tyro.cli(Command, prog="python -m bytesplat_ns.demo", default=Run(), description=__doc__)
    if isinstance(command, Photographs):
        start = time.monotonic()
        write_capture(command.output, command.capture)
        print(f"{command.capture.views} photos in {command.output} ({time.monotonic() - start:.0f} s)")
        return 0
    try:
        run(command)
    except StepFailed as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
