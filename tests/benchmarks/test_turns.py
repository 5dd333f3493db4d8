"""Processes that take turns: while one is alone, no other works."""

from __future__ import annotations

import subprocess
import sys
from itertools import pairwise
from pathlib import Path

WORK = """
import sys, time
sys.path.append(sys.argv[2])
import turns
turns.PERIOD = 0.01
own = turns.Turns(turns.Path(sys.argv[1]))
print("ready", 0, flush=True)
sys.stdin.readline()
with own.working():
    for turn in range(3):
        end = time.monotonic() + 0.1
        while time.monotonic() < end:
            print("working", time.monotonic_ns(), flush=True)
            time.sleep(0.002)
            own.offer()
        with own.alone():
            print("begin", time.monotonic_ns(), flush=True)
            time.sleep(0.05)
            print("end", time.monotonic_ns(), flush=True)
"""


def test_nobody_works_while_one_is_alone(tmp_path):
    benchmarks = str(Path(__file__).parents[2] / "benchmarks")
    command = [sys.executable, "-c", WORK, str(tmp_path / "turns"), benchmarks]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    processes = [subprocess.Popen(command, text=True, **pipes) for _ in range(3)]
    for process in processes:
        assert process.stdout.readline() == "ready 0\n"
    for process in processes:
        process.stdin.write("go\n")
        process.stdin.flush()
    said = [[line.split() for line in process.communicate(timeout=120)[0].splitlines()] for process in processes]
    assert all(process.returncode == 0 for process in processes)
    work = [[int(at) for what, at in lines if what == "working"] for lines in said]
    assert max(own[0] for own in work) < min(own[-1] for own in work), "they work at the same time"
    spans = []
    for own, lines in enumerate(said):
        begins, ends = ([int(at) for what, at in lines if what == kind] for kind in ("begin", "end"))
        assert len(begins) == len(ends) == 3
        for span in zip(begins, ends, strict=True):
            others = [at for other, times in enumerate(work) if other != own for at in times]
            assert not [at for at in others if span[0] < at < span[1]]
            spans.append(span)
    spans.sort()
    assert all(before[1] < after[0] for before, after in pairwise(spans))
