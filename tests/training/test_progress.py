"""The reports of a run: whole lines, whatever ended it before."""

import json
from pathlib import Path

import pytest

from bytesplat_ns.run.progress import Progress


@pytest.mark.parametrize(
    "left, kept", [("", 0), ('{"step": 1}\n', 1), ('{"step": 1}\n{"step": 2, "lo', 1), ('{"ste', 0)]
)
def test_a_resumed_run_drops_the_line_that_a_kill_left_unfinished(tmp_path: Path, left: str, kept: int):
    path = tmp_path / "metrics.jsonl"
    path.write_text(left)
    progress = Progress(path, total_steps=10, first_step=2)
    progress.report(3, images=3, loss=0.5, psnr=20.0, gaussians=7)
    progress.close()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["step"] for line in lines] == [1] * kept + [3]
