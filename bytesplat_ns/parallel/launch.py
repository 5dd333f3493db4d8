"""Starting the ranks of a run: ``ns-train ... --machine.num-devices N``, several machines, torchrun.

Nerfstudio's own launcher refuses ranks on CPUs, and reports a failure and a signal as the same. ``take_over`` puts
ours in its place. Every rank comes to ``run_rank``, however it was started.

Ranks on GPUs are spawned, as CUDA demands. Ranks on CPUs are forked: spawned ones would import nerfstudio anew, which
takes longer than many a run. The process that forks has computed nothing, so it has no threads that would be missed.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess

import torch
import torch.distributed as dist
from nerfstudio.engine.trainer import TrainerConfig
from nerfstudio.utils.rich_utils import CONSOLE

from bytesplat_ns.parallel import ranks
from bytesplat_ns.parallel.ranks import RankLost
from bytesplat_ns.parallel.watch import GRACE, Watch
from bytesplat_ns.run.interrupt import Interrupt

TIMEOUT = timedelta(days=7)
"""Of collectives. ``Watch`` notices who is gone; who is there may wait long, for a pause in the viewer to end, say."""

ENVIRONMENT = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""What torchrun tells each process that it starts."""

TrainLoop = Callable[..., None]
"""nerfstudio's ``train_loop(local_rank, world_size, config, global_rank)``."""


@dataclass(frozen=True)
class Place:
    """Which rank a process is, and where."""

    rank: int
    size: int
    local_rank: int  # on its machine
    local_size: int
    url: str  # where the ranks find each other

    @property
    def machine(self) -> int:
        return self.rank // self.local_size

    @staticmethod
    def of_torchrun() -> Place | None:
        """That of a process which torchrun has started; None for others."""
        if not all(name in os.environ for name in ENVIRONMENT):
            return None
        return Place(*(int(os.environ[name]) for name in ENVIRONMENT[:4]), "env://")


def writes(machine_rank: int) -> bool:
    """Whether this process, or a rank that it will start, is the first rank, which writes what a run leaves."""
    place = Place.of_torchrun()
    return machine_rank == 0 if place is None else place.rank == 0


def take_over() -> None:
    """Replaces the launcher of ``nerfstudio.scripts.train``, which is about to be called.

    Raises:
        RuntimeError: this version of nerfstudio has no such launcher.
    """
    for name in ("nerfstudio.scripts.train", "__main__"):  # the latter: python -m nerfstudio.scripts.train
        module = sys.modules.get(name)
        if hasattr(module, "train_loop"):
            if not hasattr(module, "launch"):
                raise RuntimeError(
                    "This nerfstudio has no nerfstudio.scripts.train.launch, in whose place ranks are started. "
                    "Install nerfstudio 1.1.5."
                )
            module.launch = launch


def launch(
    main_func: TrainLoop,
    num_devices_per_machine: int,
    num_machines: int = 1,
    machine_rank: int = 0,
    dist_url: str = "auto",
    config: TrainerConfig | None = None,
    timeout: timedelta = TIMEOUT,
    device_type: str = "cuda",
) -> None:
    """Trains in this process, or in ranks that it starts and waits for. Arguments as nerfstudio's launcher has them.

    Raises:
        ValueError: options of the machine that do not fit each other or this machine.
        SystemExit: ranks have failed or were stopped.
    """
    del timeout
    assert config is not None
    here, size = Place.of_torchrun(), num_machines * num_devices_per_machine
    if here is not None:
        if size != 1:
            raise ValueError("torchrun starts the ranks: leave out --machine.num-devices and --machine.num-machines.")
        _check_devices(here.local_size, device_type)
        run_rank(here, main_func, config, device_type, _threads_of(1))
        return
    if size == 1:
        main_func(local_rank=0, world_size=1, config=config)
        return
    if size < 1 or not 0 <= machine_rank < num_machines:
        raise ValueError(
            f"--machine.num-machines {num_machines} of --machine.num-devices {num_devices_per_machine} with "
            f"--machine.machine-rank {machine_rank}: machines have at least one device, and ranks from 0."
        )
    if dist_url == "auto":
        if num_machines > 1:
            raise ValueError(
                "Machines must know where to find each other: --machine.dist-url tcp://HOST:PORT, with the address of "
                "the machine of rank 0 and a free port there, the same on all machines."
            )
        dist_url = f"tcp://127.0.0.1:{_free_port()}"
    _check_devices(num_devices_per_machine, device_type)
    first, threads = machine_rank * num_devices_per_machine, _threads_of(num_devices_per_machine)
    context = multiprocessing.get_context("fork" if device_type == "cpu" else "spawn")
    processes = []
    for local_rank in range(num_devices_per_machine):
        place = Place(first + local_rank, size, local_rank, num_devices_per_machine, dist_url)
        arguments = place, main_func, config, device_type, threads
        processes.append(context.Process(target=run_rank, args=arguments, name=f"rank {place.rank}"))
    for process in processes:
        process.start()
    if code := _wait_for(processes):
        raise SystemExit(code)


def run_rank(place: Place, train: TrainLoop, config: TrainerConfig, device_type: str, threads: int) -> None:
    """What a process does that is one of several ranks.

    Raises:
        SystemExit: this rank or another has failed, or the run was stopped.
    """
    store = _meet(place, device_type, threads)
    code: int | str | None = 0
    with _leaving_at_once(device_type), Watch(store, place.rank, place.size, place.machine) as watch:
        config.timestamp = ranks.of_process().broadcast(config.timestamp)
        try:
            # One seed for all: what is drawn is keyed by ids and images seen, so ranks agree without talking.
            train(place.local_rank, place.size, config, global_rank=0)
        except SystemExit as end:
            code = end.code
        except RankLost as error:
            watch.report_loss(str(error))
            code = 1
        except BaseException:
            code = traceback.format_exc()
        if isinstance(code, str):
            watch.report(code)
            code = 1
        if code:
            raise SystemExit(code)
        dist.destroy_process_group()  # while the first rank still has the store, in which NCCL's threads look


@contextmanager
def _leaving_at_once(device_type: str) -> Iterator[None]:
    """A rank on a GPU that has failed or was stopped ends without tidying up: the other end of what NCCL would finish
    or close may be gone, and then that takes for ever."""
    try:
        yield
    except BaseException as error:
        code = error.code if isinstance(error, SystemExit) else 1
        if device_type == "cuda" and code:
            if not isinstance(error, SystemExit):
                traceback.print_exc()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code if isinstance(code, int) else 1)
        raise


def join_torchrun(place: Place, device_type: str) -> None:
    """Makes this process, which does not train, the rank that torchrun wants it to be. torchrun watches over it.

    Raises:
        ValueError: there are fewer GPUs than ranks on this machine.
    """
    _check_devices(place.local_size, device_type)
    _meet(place, device_type, _threads_of(1))


def _meet(place: Place, device_type: str, threads: int) -> dist.Store:
    """Makes this process one of the group of all ranks, once they are there; their store."""
    _settle(place, device_type, threads)
    store, _, _ = next(iter(dist.rendezvous(place.url, place.rank, place.size, timeout=timedelta(minutes=10))))
    backend, device = ("nccl", torch.device("cuda", place.local_rank)) if device_type == "cuda" else ("gloo", None)
    dist.init_process_group(
        backend, store=store, rank=place.rank, world_size=place.size, timeout=TIMEOUT, device_id=device
    )
    CONSOLE.log(
        f"{place.size} ranks ({backend}), {place.local_size} on this machine with {threads} CPU threads each, "
        f"found each other at {place.url}."
    )
    return store


def _settle(place: Place, device_type: str, threads: int) -> None:
    """Makes this process a rank: its share of the machine, and silence but for the first."""
    if place.rank != 0:
        sys.stdout.flush()
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # failures are told on standard error
    torch.set_num_threads(threads)
    os.environ["NCCL_NVLS_ENABLE"] = "0"
    if device_type == "cuda":
        torch.cuda.set_device(place.local_rank)


def _wait_for(processes: Sequence[BaseProcess]) -> int:
    """Waits until all ranks of this machine have ended, and passes signals on; what to exit with.

    Once a rank has failed the others have a while to end by themselves.
    """
    code, forwarded, deadline = 0, False, math.inf
    alive = list(processes)
    with Interrupt() as interrupt:
        while alive:
            wait([process.sentinel for process in alive], timeout=0.1)
            ended = [process for process in alive if process.exitcode is not None]
            alive = [process for process in alive if process not in ended]
            for process in ended:
                if code == 0 and (code := _judge(process, interrupt)):
                    deadline = time.monotonic() + 6 * GRACE
            for process in alive:
                if time.monotonic() > deadline:
                    process.kill()
                elif interrupt.signal and not forwarded:
                    os.kill(process.pid, interrupt.signal)
            forwarded = interrupt.signal is not None
    return code


def _judge(process: BaseProcess, interrupt: Interrupt) -> int:
    """The exit code that the end of a rank means for the run; says so if the rank could not."""
    assert process.exitcode is not None
    if process.exitcode >= 0:
        return process.exitcode
    number = signal.Signals(-process.exitcode)
    if interrupt.signal is None:
        hint = " (the kernel does so when memory runs out)" if number == signal.SIGKILL else ""
        print(f"\n{process.name.capitalize()} was ended by {number.name}{hint}.", file=sys.stderr, flush=True)
        return 1
    return 128 + number


def _threads_of(local_size: int) -> int:
    """CPU threads of each of so many ranks of this machine, which share what this process has."""
    return max(1, torch.get_num_threads() // local_size)


def _check_devices(local_size: int, device_type: str) -> None:
    if device_type not in ("cpu", "cuda"):
        raise ValueError(f"Several ranks train on cpu or cuda, not on --machine.device-type {device_type}.")
    if device_type == "cuda" and local_size > (found := torch.cuda.device_count()):
        raise ValueError(
            f"{local_size} ranks on this machine need as many GPUs, but torch sees {found}. Lower "
            "--machine.num-devices, or train on CPU ranks with --machine.device-type cpu."
        )


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
