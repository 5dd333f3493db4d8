"""SIGINT and SIGTERM end a run with a checkpoint, whatever it is doing, and with a code that says what happened."""

from __future__ import annotations

import shlex
import signal
import threading
import time

import pytest
from ns_train import wait_until
from viewer_client import free_port

from bytesplat_ns.run.interrupt import Interrupt, Interrupted


def fragment(output: str) -> list[str]:
    """The words that the run told to give the next time."""
    (line,) = [line for line in output.splitlines() if line.startswith("--load-dir")]
    return shlex.split(line)


@pytest.mark.parametrize("number, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_while_training_saves_what_was_trained(number, code, server, run):
    steps = 3000
    child = server.start("ns_train", *run.words(steps=steps))
    run.wait_for_steps(1)
    child.signal(number)
    assert child.end() == code, child.output
    (saved,) = run.steps()
    assert 0 <= saved < steps - 1
    assert f"Stopped after {saved + 1:,} of {steps:,} steps" in child.output
    words = run.words(steps=saved + 3)
    again = server.start("ns_train", words[0], *fragment(child.output), *words[1:])
    assert again.end() == 0, again.output
    assert f"{saved + 1:,} images seen" in " ".join(again.output.split())
    assert run.steps() == [saved + 2]


def test_a_paused_run_ends_too(server, run):
    words = run.words("--vis", "viewer", "--viewer.websocket-port", free_port(), "--start-paused", "True", steps=50)
    child = server.start("ns_train", *words)
    wait_until((run.folder / "metrics.jsonl").exists, "readiness for the first step, when this file is made")
    child.signal(signal.SIGTERM)
    assert child.end() == 143, child.output
    assert "Stopped after 0 of 50 steps. There is no checkpoint to go on from" in child.output
    assert run.steps() == []


def test_the_viewer_of_a_finished_run_ends_with_success(server, run):
    child = server.start("ns_train", *run.words("--vis", "viewer", "--viewer.websocket-port", free_port(), steps=5))
    child.wait_for("Use ctrl+c to quit")
    child.signal(signal.SIGTERM)
    assert child.end() == 0, child.output
    assert run.steps() == [4]


def test_evaluation_is_abandoned(server, run):
    child = server.start("evaluation_hangs", *run.words("--steps-per-eval-all-images", 8, steps=50))
    child.wait_for("evaluating")
    child.signal(signal.SIGINT)
    assert child.end() == 130, child.output
    assert run.steps() == [8] and "Stopped after 9 of 50 steps" in child.output


def test_after_the_last_step_only_evaluation_is_left_to_do(server, run):
    child = server.start("evaluation_hangs", *run.words(steps=5))
    child.wait_for("evaluating")
    child.signal(signal.SIGTERM)
    assert child.end() == 143, child.output
    assert run.steps() == [4] and "Training is complete" in child.output and "ns-eval --load-config" in child.output


def test_the_second_signal_ends_at_once_but_an_echo_does_not(server, run):
    child = server.start("step_hangs", 3, *run.words(steps=50))
    child.wait_for("hanging")
    child.signal(signal.SIGTERM)
    child.wait_for("SIGTERM: ")
    child.signal(signal.SIGTERM)
    time.sleep(1)
    assert "going on" not in child.output
    child.signal(signal.SIGINT)
    assert child.end() == -signal.SIGINT
    assert run.steps() == []


def test_handlers_are_put_back_and_ignored_signals_stay_ignored():
    mine = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    before = signal.getsignal(signal.SIGINT)
    try:
        with Interrupt() as interrupt:
            assert signal.getsignal(signal.SIGINT) != before
            signal.raise_signal(signal.SIGTERM)
            assert interrupt.signal is None
            signal.raise_signal(signal.SIGINT)
            assert interrupt.signal == signal.SIGINT and interrupt.exit_code == 130
            with pytest.raises(Interrupted), interrupt.abandonable():
                raise AssertionError("nothing is begun any more")
        assert signal.getsignal(signal.SIGINT) == before
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, mine)


def test_a_thread_that_may_not_have_handlers_trains_without():
    def train() -> None:
        with Interrupt() as interrupt:
            seen.append((signal.getsignal(signal.SIGINT), interrupt.signal))

    seen: list[tuple] = []
    thread = threading.Thread(target=train)
    thread.start()
    thread.join()
    assert seen == [(signal.getsignal(signal.SIGINT), None)]


def test_interrupted_before_the_first_step(server, run):
    child = server.start("loading_hangs", *run.words(steps=5))
    child.wait_for("loading")
    child.signal(signal.SIGINT)
    assert child.end() == 130, child.output
    assert "Traceback" not in child.output
