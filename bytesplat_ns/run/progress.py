"""What a run tells while it trains: one line at a time on the terminal, one JSON object a line in ``metrics.jsonl``.

A full disk must not end a run: what cannot be told is left out, with one warning.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from nerfstudio.utils.rich_utils import CONSOLE


def tell(message: str, style: str | None = None) -> None:
    """Prints a line as it is, paths in one piece. Where standard output is a file, its disk may be full."""
    with suppress(OSError):
        CONSOLE.print(message, style=style, markup=False, highlight=False, soft_wrap=True)


class Progress:
    """Prints at most one line every ``seconds`` and at the end; writes every report to a file.

    Args:
        path: of the JSON-lines file; a resumed run appends to it.
        total_steps: steps (rounds) of the whole run.
        first_step: steps that were done before (resume).
    """

    def __init__(self, path: Path, total_steps: int, first_step: int, seconds: float = 10.0) -> None:
        self._path = path
        self._file = path.open("a+b", buffering=0)
        self._drop_unfinished_line()
        self.total_steps, self._seconds = total_steps, seconds
        self._start = self._printed = time.monotonic()
        self._printed_step = first_step
        self._warned = False

    def elapsed(self) -> float:
        """Seconds since this process began to train."""
        return time.monotonic() - self._start

    def report(
        self, done: int, images: int, loss: float, psnr: float, gaussians: int, notes: Sequence[str] = (), **more: float
    ) -> None:
        """Called at log intervals, after ``done`` steps of the run, which have seen ``images`` images.

        Args:
            notes: further lines to print.
            more: to be written besides.
        """
        self.write(step=done, images=images, loss=loss, psnr=psnr, gaussians=gaussians, **more)
        now = time.monotonic()
        if now - self._printed < self._seconds and done < self.total_steps:
            return
        rate = (done - self._printed_step) / max(now - self._printed, 1e-9)
        self._printed, self._printed_step = now, done
        remaining = (self.total_steps - done) / rate if rate > 0 else float("inf")
        tell(
            f"step {done:,}/{self.total_steps:,}  {rate:.1f} steps/s  {gaussians:,} Gaussians  "
            f"loss {loss:.4f}  PSNR {psnr:.2f} dB  ETA {_duration(remaining)}"
        )
        for note in notes:
            tell(note)

    def write(self, **values: float | int | str) -> None:
        """Appends one object to the file, all of it or nothing; ``seconds`` since the start is added."""
        rounded = {k: round(v, 6) if isinstance(v, float) else v for k, v in values.items()}
        line = (json.dumps(rounded | {"seconds": round(self.elapsed(), 3)}) + "\n").encode()
        end = os.fstat(self._file.fileno()).st_size
        try:
            written = self._file.write(line)
            if written < len(line):
                os.ftruncate(self._file.fileno(), end)
                raise OSError("only a part of a line could be written")
        except OSError as error:
            self.warn(str(self._path), error)

    def _drop_unfinished_line(self) -> None:
        """A process that is killed may leave a part of its last line."""
        size = os.fstat(self._file.fileno()).st_size
        start = max(size - 4096, 0)  # a line is far shorter
        end = os.pread(self._file.fileno(), size - start, start)
        if end and not end.endswith(b"\n"):
            os.ftruncate(self._file.fileno(), start + end.rfind(b"\n") + 1)

    def close(self) -> None:
        self._file.close()

    def warn(self, what: str, error: OSError) -> None:
        """Says, once a run, that something could not be written."""
        if not self._warned:
            self._warned = True
            tell(f"WARNING: could not write to {what} ({error}). Training goes on without such lines.", "bold red")


def _duration(seconds: float) -> str:
    if seconds == float("inf"):
        return "unknown"
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {seconds:02d} s"
