"""A process that has imported nerfstudio and forks children that train: their start takes no time.

Importing nerfstudio takes many seconds, and these tests start dozens of runs and kill them. Threads do not survive a
fork, and libraries that had started some hang without them: so it is this process that forks, which computes nothing.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NoReturn


class Child:
    """A child of the server, in which a function of ``children.py`` runs."""

    def __init__(self, server: ForkServer, pid: int, log: Path) -> None:
        self._server, self.pid, self._log = server, pid, log

    @property
    def output(self) -> str:
        return self._log.read_text(errors="replace")

    @property
    def running(self) -> bool:
        """Whether it has not ended yet."""
        return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"

    def wait_for(self, text: str, seconds: float = 60) -> None:
        """Returns once the child has printed ``text``."""
        deadline = time.monotonic() + seconds
        while text not in self.output:
            assert time.monotonic() < deadline, f"no {text!r} within {seconds} s:\n{self.output}"
            time.sleep(0.01)

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)  # the server has not waited for it, so the number is not given to another

    def end(self, seconds: float = 60) -> int:
        """Waits for its end; its exit code, or minus the number of the signal that ended it."""
        return self._server.ask({"wait": self.pid, "seconds": seconds, "log": str(self._log)})


class ForkServer:
    """The other end of the pipe; stops the process at the end of its ``with`` block."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._started = folder, 0
        environment = os.environ | {
            "CUDA_VISIBLE_DEVICES": "",
            "OPENBLAS_NUM_THREADS": "1",  # would start threads when numpy is imported
            "OMP_NUM_THREADS": "2",
            "OMP_WAIT_POLICY": "passive",
            "PYTHONUNBUFFERED": "1",
        }
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> ForkServer:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait(30)

    def start(self, function: str, *arguments: Any) -> Child:
        """Calls a function of ``children.py`` in a new process."""
        self._started += 1
        log = self._folder / f"{self._started}.log"
        log.touch()
        return Child(self, self.ask({"call": function, "arguments": arguments, "log": str(log)}), log)

    def ask(self, request: dict[str, Any]) -> int:
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(json.dumps(request, default=str) + "\n")
        self._process.stdin.flush()
        answer = json.loads(self._process.stdout.readline())
        assert answer is not None, f"the child did not end:\n{Path(request['log']).read_text(errors='replace')}"
        return answer


def serve() -> None:
    """Forks and waits as asked for; kills what is left when the pipe is closed."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # imports print
    import children

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of the terminal, meant for pytest
    alive: set[int] = set()
    for line in sys.stdin:
        request = json.loads(line)
        if "call" in request:
            pid = os.fork()
            if pid == 0:
                _run(getattr(children, request["call"]), request["arguments"], request["log"])
            alive.add(pid)
            answer: int | None = pid
        else:
            answer = _wait(request["wait"], request["seconds"])
            alive.discard(request["wait"])
        print(json.dumps(answer), file=answers, flush=True)
    for pid in alive:
        os.kill(pid, signal.SIGKILL)


def _run(function: Any, arguments: list[Any], log: str) -> NoReturn:
    """Ends as a process of its own does: with the exit of the interpreter, which waits for threads."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    file = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(file, 1)
    os.dup2(file, 2)
    function(*arguments)
    sys.exit()


def _wait(pid: int, seconds: float) -> int | None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    return None


if __name__ == "__main__":
    serve()
