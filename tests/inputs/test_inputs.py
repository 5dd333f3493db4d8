"""The inputs people really have: each trains, evaluates and exports, or stops with a message that helps.

The modules imported below fill the table; a line is a function that writes a data set, and its decorator the outcome.
"""

from __future__ import annotations

import math
import re

import inputs_cameras  # noqa: F401
import inputs_descriptions  # noqa: F401
import inputs_photos  # noqa: F401
import inputs_points  # noqa: F401
import pytest
from entry import STEPS, Run, evaluate, export, train
from input_table import TABLE, Input
from scene import Scene


def test_the_table_is_long_enough():
    assert len(TABLE) >= 40


@pytest.fixture
def scene(request, tmp_path) -> Scene:
    return Scene(tmp_path / "data", **TABLE[request.param].scene)


@pytest.mark.parametrize("name, scene", [(name, name) for name in TABLE], ids=list(TABLE), indirect=["scene"])
def test_input(name, scene, tmp_path, capsys):
    line = TABLE[name]
    last = line.write(scene)
    if line.error is not None:
        with pytest.raises(ValueError) as stopped:
            train(scene.folder, tmp_path, *last)
        assert type(stopped.value).__name__ == line.error
        assert re.search(line.says, str(stopped.value), re.DOTALL), stopped.value
        return
    run = train(scene.folder, tmp_path, *last)
    printed = " ".join(capsys.readouterr().out.split())
    assert re.search(line.says, printed), printed
    assert_trained(run, line)
    if line.evaluates is not None:
        with pytest.raises(ValueError, match=line.evaluates):
            evaluate(run)
    else:
        assert math.isfinite(evaluate(run)["psnr"])
    assert export(run) == len(run.means())


def assert_trained(run: Run, line: Input) -> None:
    steps = run.steps()
    assert steps[-1]["images"] >= STEPS
    assert all(math.isfinite(step["loss"]) and step["loss"] > 0 for step in steps)
    assert run.means().isfinite().all()
    if line.gaussians is not None:
        assert steps[0]["gaussians"] == line.gaussians
