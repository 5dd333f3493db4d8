"""Tables, plots and merged files of ``pruning.py`` from whatever rows there are."""

from __future__ import annotations

import json

import pruning
import pytest


def row(seed: int, branch: str, psnr: float, step_ms: float, strength: float = 0.0) -> dict:
    same = {"data": "a", "gaussians": 10, "ssim": 0.5, "psnr_train": 20.0, "within": 0.5}
    lists = {"p50": 1, "p95": 2, "longest": 3, "log": ["Nothing to prune"]}
    return same | lists | {"seed": seed, "branch": branch, "strength": strength, "psnr": psnr, "step_ms": step_ms}


def head(**other: object) -> dict:
    return {"commit": "abc1234", "device": "a GPU", "images": 300, "cap": 10, "rows": []} | other


def test_changes_are_those_of_the_same_seed():
    rows = [row(0, "none", 20.0, 4.0), row(1, "none", 22.0, 2.0), row(2, "root", 5.0, 1.0, 0.4)]
    rows += [row(0, "root", 19.5, 2.0, 0.4), row(1, "root", 22.1, 0.5, 0.4)]
    changed = pruning.compared(rows)
    assert "faster" not in changed[2], "its unpruned run is missing"
    assert [r["faster"] for r in changed[3:]] == [2.0, 4.0]
    lines = pruning.table(rows[:2] + rows[3:]).splitlines()
    assert "-0.200" in lines[2] and "3.00x" in lines[2] and "+0.000" in lines[1]
    assert "x" not in pruning.table(rows).splitlines()[2].split("step")[-1], "no mean over some of the seeds"


def test_results_are_merged_if_they_belong_together(tmp_path):
    files = [tmp_path / f"{seed}.json" for seed in range(3)]
    for seed, file in enumerate(files):
        file.write_text(json.dumps(head(rows=[row(seed, "none", 20.0, 4.0)])))
    result = pruning.merged(files)
    assert [r["seed"] for r in result["rows"]] == [0, 1, 2] and result["commit"] == "abc1234"
    pruning.plot(result, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 1000
    files[1].write_text(json.dumps(head(device="another")))
    with pytest.raises(SystemExit, match=r"1\.json has device another"):
        pruning.merged(files)
    with pytest.raises(SystemExit, match="no rows"):
        pruning.merged([])
