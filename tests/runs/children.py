"""What the children of the fork server do: ``ns-train`` with this or that going wrong. Imported by it alone."""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import sklearn.utils  # noqa: F401  half of the import of open3d, which starts threads and is left to the children
import torch
from nerfstudio.scripts import train

from bytesplat_ns.density.pruning import Pruning
from bytesplat_ns.density.store import GaussianStore
from bytesplat_ns.density.strategy import DefaultStrategy
from bytesplat_ns.parallel import launch, ranks, tools, watch
from bytesplat_ns.pipeline import ByteSplatPipeline
from bytesplat_ns.run import checkpoint
from bytesplat_ns.splats import initialization
from bytesplat_ns.trainer import ByteSplatTrainer

SCRIPTS = {"ns-eval": "eval", "ns-render": "render", "ns-export": "exporter"}


def ns_train(*words: str) -> None:
    """The command as it is."""
    sys.argv = ["ns-train", *words]
    train.entrypoint()


def loading_hangs(*words: str) -> None:
    """Making the model takes an hour."""
    initialization.neighbour_distance = lambda points: (print("loading"), time.sleep(3600))
    ns_train(*words)


def evaluation_hangs(*words: str) -> None:
    """Evaluating all held-out photos takes an hour."""

    def hang(self, step):
        print("evaluating")
        time.sleep(3600)

    ByteSplatPipeline.get_average_eval_image_metrics = hang
    ns_train(*words)


def step_hangs(at: int, *words: str) -> None:
    """The round after ``at`` rounds takes an hour, but signals are handled."""
    _before_each_round(lambda done: (print("hanging"), time.sleep(3600), print("going on")) if done == at else None)
    ns_train(*words)


def pruning_hangs(*words: str) -> None:
    """The first round of pruning takes an hour: Gaussians are gone, and no checkpoint says so."""
    stock = Pruning._prune

    def prune(self, due):
        stock(self, due)
        print("hanging")
        time.sleep(3600)

    Pruning._prune = prune
    ns_train(*words)


def files_limited(first: int, last: int, size: int, *words: str, rank: int | None = None) -> None:
    """No file can grow beyond ``size`` bytes between the rounds ``first`` and ``last``, on one rank or on all."""
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    def limit(done: int) -> None:
        soft = size if first <= done < last and rank in (None, ranks.of_process().rank) else hard
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    _before_each_round(limit)
    ns_train(*words)


def files_limited_on(rank: int, first: int, last: int, size: int, *words: str) -> None:
    """The same on one rank."""
    files_limited(first, last, size, *words, rank=rank)


def allocation_fails(stage: str, at: int, *words: str) -> None:
    """There is no memory for more in one stage of the round after ``at`` rounds."""
    where = {
        "neighbours": (initialization, "neighbour_distance"),
        "loss": (ByteSplatPipeline, "loss_of"),
        "observe": (DefaultStrategy, "observe"),
        "edit": (GaussianStore, "edit"),
    }[stage]
    stock, done = getattr(*where), [0]
    _before_each_round(lambda n: done.__setitem__(0, n))

    def failing(*arguments, **options):
        if done[0] >= at:
            torch.empty(1 << 55)
        return stock(*arguments, **options)

    setattr(*where, failing)
    ns_train(*words)


def on_one_rank(rank: int, at: int, trouble: str, *words: str) -> None:
    """After ``at`` rounds, one of several ranks has trouble."""
    acts = {
        "error": lambda: (_ for _ in ()).throw(ValueError("a photo fell off the wall")),
        "memory": lambda: torch.empty(1 << 55),
        "kill": lambda: signal.raise_signal(signal.SIGKILL),
        "stop": lambda: signal.raise_signal(signal.SIGSTOP),
        "SIGTERM": lambda: signal.raise_signal(signal.SIGTERM),
    }

    def act(done: int) -> None:
        if done != at:
            return
        if trouble == "stop":  # loading holds a busy machine's ranks up for longer than this
            watch.SILENCE, watch.GRACE = 5.0, 1.0  # seconds
        if ranks.of_process().rank == rank:
            acts[trouble]()

    launch.GRACE = 1.0 if trouble == "stop" else launch.GRACE
    _before_each_round(act)
    ns_train(*words)


def tool(name: str, *words: str) -> None:
    """Another of nerfstudio's commands: ns-eval, ns-render or ns-export."""
    script = import_module(f"nerfstudio.scripts.{SCRIPTS[name]}")
    sys.argv = [name, *words]
    script.entrypoint()


def counting_tool(name: str, *words: str) -> None:
    """The same, which says how many Gaussians it has loaded."""
    stock = tools.lend

    def lend(model, ranks):
        print(f"rank {ranks.rank} has {model.num_points} Gaussians", file=sys.stderr)
        return stock(model, ranks)

    tools.lend = lend
    tool(name, *words)


def shut_down(moment: str, rank: int, *words: str) -> None:
    """Another thread of one rank shuts the trainer down, after three steps, or once it is paused or complete."""
    stock = ByteSplatTrainer._begin

    def end(trainer: ByteSplatTrainer) -> None:
        while trainer.training_state != moment if moment else trainer._steps_done < 3:
            time.sleep(0.01)
        trainer.shutdown()

    def begin(trainer: ByteSplatTrainer) -> None:
        stock(trainer)
        if ranks.of_process().rank == rank:
            threading.Thread(target=end, args=[trainer], daemon=True).start()

    ByteSplatTrainer._begin = begin
    ns_train(*words)


def killed_while_saving(moment: str, culprits: list[int], *words: str) -> None:
    """Some of several ranks are killed while the second checkpoint is written, in shards and an index."""
    stock, begun = {name: getattr(checkpoint, name) for name in ("save", "write", "remove_others")}, [0]
    watch.GRACE = 0.5  # seconds; who is killed cannot say why

    def strike(here: str) -> None:
        if here == moment and begun[0] == 2 and ranks.of_process().rank in culprits:
            signal.raise_signal(signal.SIGKILL)

    def save(path, value):
        file = "index" if path.suffix == ".part" else "shard"
        begun[0] += file == "shard"  # comes first, and on every rank
        stock["save"](path, value)
        content = path.read_bytes()
        os.truncate(path, len(content) // 2)
        strike(f"in the {file}")
        path.write_bytes(content)

    def write(path, state):
        stock["write"](path, state)
        strike("once the index has its name")

    def remove_others(path):
        delete = Path.unlink
        Path.unlink = lambda self: (delete(self), strike("while the former one is removed"))
        stock["remove_others"](path)
        Path.unlink = delete

    for function in (save, write, remove_others):
        setattr(checkpoint, function.__name__, function)
    ns_train(*words)


def from_torchrun(rank: int, size: int, port: int, child: str, *words: str) -> None:
    """One of the processes that ``torchrun`` starts, which does what another child does: this is what it is told."""
    environment = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": size}
    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in environment.items()})
    globals()[child](*words)


def measured(report: str, *words: str) -> None:
    """Writes the resident memory before the first round, and the peak from there to the end, bytes."""
    before = []

    def reset(done: int) -> None:
        if done == 0:
            Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
            before.append(_status("VmRSS"))

    _before_each_round(reset)
    ns_train(*words)
    Path(report).write_text(json.dumps({"before": before[0], "peak": _status("VmHWM")}))


def _before_each_round(act: Callable[[int], None]) -> None:
    stock, done = ByteSplatPipeline.train_round, [0]

    def train_round(self):
        act(done[0])
        done[0] += 1
        return stock(self)

    ByteSplatPipeline.train_round = train_round


def _status(name: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024
