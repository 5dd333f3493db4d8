"""What results say of themselves: origin, and the runs of ``train.py``."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import provenance
import pytest
import train

ROOT = Path(provenance.__file__).parents[1]


def test_a_named_commit_is_kept(monkeypatch, tmp_path):
    monkeypatch.setenv("BYTESPLAT_COMMIT", "abc1234")
    assert provenance.commit(tmp_path) == "abc1234"
    assert provenance.provenance(["x.py"])["commit"] == "abc1234"


def test_no_result_without_a_commit(monkeypatch, tmp_path):
    """A copy of the sources inside another checkout is not of that checkout's commit."""
    monkeypatch.delenv("BYTESPLAT_COMMIT", raising=False)
    with pytest.raises(SystemExit, match="set BYTESPLAT_COMMIT"):
        provenance.commit(tmp_path)
    if shutil.which("git") is None:
        pytest.skip("git is not installed")

    def git(*words: str) -> None:
        identity = "-c", "user.name=test", "-c", "user.email=test"
        subprocess.run(["git", "-C", tmp_path, *identity, *words], check=True, capture_output=True)

    git("init")
    copy = tmp_path / "copy"
    copy.mkdir()
    (tmp_path / "file").write_text("1")
    git("add", "file")
    git("commit", "-m", "one")
    with pytest.raises(SystemExit, match="set BYTESPLAT_COMMIT"):
        provenance.commit(copy)
    clean = provenance.commit(tmp_path)
    assert len(clean) >= 7 and set(clean) <= set("0123456789abcdef")
    (tmp_path / "file").write_text("2")
    assert provenance.commit(tmp_path) == f"{clean} with changes"


@pytest.mark.parametrize(
    "argv, command",
    [
        (["/a/b/benchmarks/city.py", "--out", "/tmp/x/r.json"], "python benchmarks/city.py --out r.json"),
        (["raster.py", "--out=/tmp/x/r.json", "--sizes", "7"], "python benchmarks/raster.py --out=r.json --sizes 7"),
        (["train.py", "--data", "../data/fox", "--", "-x", "a b"], "python benchmarks/train.py --data fox -- -x 'a b'"),
    ],
)
def test_commands_name_no_place_of_the_machine(argv, command):
    assert provenance.command(argv) == command


def test_results_name_no_place_of_a_machine():
    for path in (ROOT / "benchmarks" / "results").glob("*.json"):
        result = json.loads(path.read_text())
        assert result["commit"] and result["date"], path.name
        words = result["command"].replace("=", " ").split()
        assert not [word for word in words if word.startswith(("/", "~"))], path.name


# Runs of training ---------------------------------------------------------------------------------------------------


@pytest.fixture
def data(tmp_path) -> Path:
    (tmp_path / "transforms.json").write_text("{}")
    return tmp_path


def test_options_of_ours_do_not_reach_the_other_side(data, tmp_path):
    asked = train.options(["--data", str(data), "--seeds", "1", "2", "--steps", "9", "--", "--a", "b"])
    assert (asked.seeds, asked.steps, asked.extra) == ([1, 2], 9, ["--a", "b"])
    ours, theirs = (
        train.train_arguments(method, asked.data, asked.steps, 2, asked.extra, tmp_path)
        for method in ("bytesplat-mcmc", "splatfacto")
    )
    assert ours[0] == "bytesplat-mcmc" and [word for word in ours[1:] if word not in ("--a", "b")] == theirs[1:]
    assert theirs[theirs.index("--machine.seed") + 1] == "2" and theirs[-6:] == train.SPLIT[1:]


def test_a_folder_that_is_no_data_is_refused(tmp_path, capsys):
    with pytest.raises(SystemExit):
        train.options(["--data", str(tmp_path / "none")])
    assert "has no transforms.json" in capsys.readouterr().err


def test_rows_and_their_summary():
    def row(method: str, seed: int, psnr: float, peak: int | None = 4000) -> dict:
        trained = {"seconds": 12.34, "steps_per_second": 100.04, "peak_gpu_bytes": peak, "pixels": 50}
        return train.row(method, seed, trained, {"psnr": psnr, "ssim": 0.5, "lpips": float("nan")}, 40)

    rows = [row("a", 1, 20.0), row("a", 2, 22.0), row("b", 1, 21.0, None)]
    assert rows[0]["peak_bytes_per_gaussian"] == 100 and rows[0]["peak_bytes_per_pixel"] == 80
    found = train.summary(rows)
    assert found["a"]["psnr"] == {"mean": 21.0, "deviation": pytest.approx(2**0.5)}
    assert "peak_gpu_bytes" not in found["b"] and found["b"]["gaussians"] == {"mean": 40, "deviation": 0.0}
    assert "NaN" not in json.dumps([rows, found])
