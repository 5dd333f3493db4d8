"""The step loop: setup, resume, progress, evaluation, checkpoints, viewer."""

from __future__ import annotations

import os
import shlex
import signal
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from nerfstudio.engine.optimizers import Optimizers
from nerfstudio.engine.trainer import Trainer, TrainerConfig
from nerfstudio.utils import writer
from nerfstudio.utils.misc import step_check
from nerfstudio.utils.rich_utils import CONSOLE
from nerfstudio.utils.writer import EventName, TimeWriter

from bytesplat_ns.density.pruning import PruningReport
from bytesplat_ns.options import refuse_idle_options, refuse_unsupported
from bytesplat_ns.parallel import checkpoint as shared_checkpoint
from bytesplat_ns.parallel import launch, ranks
from bytesplat_ns.parallel.ranks import RankLeft
from bytesplat_ns.parallel.traffic import Traffic, summary
from bytesplat_ns.parallel.viewer import ViewerLock
from bytesplat_ns.pipeline import ByteSplatPipeline, RoundReport
from bytesplat_ns.run import checkpoint, memory, residency
from bytesplat_ns.run.checkpoint import CheckpointError
from bytesplat_ns.run.description import describe
from bytesplat_ns.run.interrupt import Interrupt, Interrupted
from bytesplat_ns.run.memory import OutOfMemory
from bytesplat_ns.run.progress import Progress, tell


@dataclass
class ByteSplatTrainerConfig(TrainerConfig):
    """Training regimen. ``max-num-iterations`` counts images: a step on a round of B views counts B."""

    _target: type = field(default_factory=lambda: ByteSplatTrainer)
    checkpoint_files: Literal["auto", "one", "shards"] = "auto"
    """One file a checkpoint, as nerfstudio has it, or one with the Gaussians of each rank besides: for models too large
    for one device, or for the first rank's memory ("auto": if so)."""

    def get_checkpoint_dir(self) -> Path:
        """The folder of checkpoints. Tools ask for it before they make the pipeline, which looks there for shards."""
        self.pipeline.checkpoints = super().get_checkpoint_dir()
        return self.pipeline.checkpoints

    def print_to_terminal(self) -> None:
        """Prints the configuration, once a run."""
        if launch.writes(self.machine.machine_rank):
            super().print_to_terminal()

    def save_config(self) -> None:
        """Writes ``config.yml``, without the step that a run resumes from: tools would look for it in this run.

        This is the last that nerfstudio calls before it launches the run, which is done in our own way.
        """
        if launch.writes(self.machine.machine_rank):
            TrainerConfig.save_config(replace(self, load_step=None))
        launch.take_over()


class ByteSplatTrainer(Trainer):
    """Trains one model to its configured total, resuming exactly where a checkpoint left it."""

    config: ByteSplatTrainerConfig
    pipeline: ByteSplatPipeline

    def __init__(self, config: ByteSplatTrainerConfig, local_rank: int = 0, world_size: int = 1) -> None:
        self.ranks = ranks.of_process()
        refuse_unsupported(config, self.ranks.size)
        refuse_idle_options(config, self.ranks.size)
        super().__init__(config, local_rank, world_size)
        self.local_rank = self.ranks.rank  # nerfstudio starts a viewer where it is 0
        self.together = self.ranks.size > 1 and config.is_viewer_enabled()  # ranks render for the viewer
        if self.together:
            self.train_lock = ViewerLock(self.ranks, lambda *view: self.pipeline.render_together(*view))
        self.traffic = Traffic(self.ranks)
        self.interrupt = Interrupt(self.ranks)

    # Setup and resume --------------------------------------------------------------------------------------------

    def setup(self, test_mode: Literal["test", "val", "inference"] = "val") -> None:
        model = self.config.pipeline.model
        if model.init_from is not None and (self.config.load_dir or self.config.load_checkpoint):
            CONSOLE.log(f"Going on from a checkpoint: --pipeline.model.init-from {model.init_from} is not read.")
            model.forget_start()
        try:
            super().setup(test_mode)
        except KeyboardInterrupt:  # nerfstudio would print a stack trace and report success
            raise SystemExit(128 + signal.SIGINT) from None
        except (MemoryError, RuntimeError) as error:
            if not memory.exhausted(error):
                raise
            raise OutOfMemory.explain(error, "while data and model were loaded", "Nothing was trained.") from None
        self.pipeline.share_views()
        remaining = self.pipeline.rounds_until(self.config.max_num_iterations)
        self.total_steps = self._start_step + remaining
        for line in describe(self.pipeline):
            CONSOLE.log(line)
        line, bad = memory.preflight(self.pipeline)
        tell(line, "bold yellow" if bad else None)

    def setup_optimizers(self) -> Optimizers:
        """The pipeline makes the optimizers, Gaussians' and shared parameters', from this configuration."""
        self.pipeline.start_training(self.config.max_num_iterations, self.config.optimizers)
        return self.pipeline.shared.optimizers

    def _load_checkpoint(self) -> None:
        if self.config.load_dir is not None:
            path = checkpoint.find(self.config.load_dir, self.config.load_step)
        elif self.config.load_checkpoint is not None:
            path = self.config.load_checkpoint
        else:
            return
        state = shared_checkpoint.read(path, self.ranks)
        self.pipeline.load_training_state(state)
        seen, total = self.pipeline.model.images_seen, self.config.max_num_iterations
        self._start_step = state["step"] + 1 if seen else 0  # it may be of a run of no steps
        if seen >= total:
            raise CheckpointError(f"{path} has seen {seen} of {total} images. To train on, raise --max-num-iterations.")
        CONSOLE.log(f"Resuming from {path}: {seen:,} images seen, {self.pipeline.strategy.total:,} Gaussians.")

    # The loop ----------------------------------------------------------------------------------------------------

    def train(self) -> None:
        """Runs the remaining steps, then saves, and leaves the viewer up if there is one.

        Raises:
            SystemExit: stopped early by SIGINT or SIGTERM (``interrupt.py`` says with which code), or out of memory.
            CheckpointError: the last checkpoint cannot be written.
        """
        with Interrupt(self.ranks) as self.interrupt:
            self._begin()
            try:
                self._run_steps()
                self._after_train()
            except Interrupted:
                self._stop_early()
            except RankLeft:
                self._save_if_whole()
                raise SystemExit(1) from None  # the rank that left says why
            except (MemoryError, RuntimeError) as error:
                if not memory.exhausted(error):
                    raise
                raise self._out_of_memory(error) from None
            finally:
                self.progress.close()

    def _begin(self) -> None:
        """What the first step needs; signals are waited for already."""
        reports = Path(os.devnull)
        if self.ranks.rank == 0:
            self.base_dir.mkdir(parents=True, exist_ok=True)
            self.pipeline.datamanager.train_dataparser_outputs.save_dataparser_transform(
                self.base_dir / "dataparser_transforms.json"
            )
            reports = self.base_dir / "metrics.jsonl"
        self._init_viewer_state()
        if self.together:
            self.pipeline.model.render_for_viewer = self.train_lock.ask
        self._steps_done = self._steps_saved = self._start_step
        self._adam_steps = self.pipeline.optimizer.steps  # its count when they were done
        self._logged = time.monotonic(), self._start_step
        self._lists_changed = False  # since the last report of how they fit
        self.progress = Progress(reports, self.total_steps, self._start_step)
        self.traffic.start(self._start_step, self.pipeline.model.images_seen)

    def _run_steps(self) -> None:
        with TimeWriter(writer, EventName.TOTAL_TRAIN_TIME):
            while self._steps_done < self.total_steps:
                self._wait_while_paused()
                self.step = self._steps_done
                self._train_step(self.step)

    def _train_step(self, step: int) -> None:
        last = step + 1 == self.total_steps
        logged = last or step_check(step, self.config.logging.steps_per_log, run_at_zero=True)
        # The viewer's render thread takes the lock too.
        with self.train_lock:
            if self.ranks.heard:
                raise Interrupted
            with self.traffic.measured() if logged else nullcontext():
                report = self.pipeline.train_round()
        for pruned in report.pruning:
            self._log_pruning(step, pruned)
        self._lists_changed |= last or report.density is not None or bool(report.pruning)
        self._steps_done, self._adam_steps = step + 1, self.pipeline.optimizer.steps
        self._count_steps(step + 1)
        self._update_viewer_state(step)
        if logged:
            self._log(step, report)
        if self.pipeline.datamanager.eval_dataset and self._evaluates(step):
            with self.interrupt.abandonable(), self.train_lock:
                self.eval_iteration(step)
        if not last and step_check(step, self.config.steps_per_save):
            self._save_if_possible(step)
        self._write_events()

    def _count_steps(self, done: int) -> None:
        """The next rounds may have been planned anew, and be more or fewer."""
        self.total_steps = done + self.pipeline.rounds_until(self.config.max_num_iterations)
        self.progress.total_steps = self.total_steps

    def _write_events(self) -> None:
        """Lets nerfstudio's writers (TensorBoard, ...) write what was put since the last time."""
        try:
            writer.write_out_storage()
        except OSError as error:  # a full disk
            writer.EVENT_STORAGE.clear()
            self.progress.warn("the event log", error)

    def _wait_while_paused(self) -> None:
        self._serve_viewer(until=lambda: self.training_state != "paused" or self.interrupt.asked)

    def _serve_viewer(self, until: Callable[[], bool]) -> None:
        """Waits on the first rank, for which the others wait when they want the lock."""
        if self.ranks.rank > 0:
            return
        if self.together:
            self.train_lock.serve(until)
        while not until():
            time.sleep(0.01)

    def _log(self, step: int, report: RoundReport) -> None:
        values, images = report.read(self.ranks), self.pipeline.model.images_seen
        traffic = self.traffic.read(step + 1, images, self.pipeline.model.num_points, int(report.records))
        lists = residency.measure(self.pipeline, report) if self._lists_changed else {}
        self._lists_changed = False
        writer.put_scalar("Train Loss", values["loss"], step)
        writer.put_dict("Train Metrics Dict", values | traffic | lists, step)
        self._log_speed(step)
        notes = [summary(traffic)] if traffic else []
        notes += [residency.summary(lists)] if lists else []
        self.progress.report(step + 1, images, **values, notes=notes, **traffic, **lists)

    def _log_pruning(self, step: int, report: PruningReport) -> None:
        if self.ranks.rank == 0:
            tell(f"step {step + 1:,}: {report}")
        self.progress.write(step=step + 1, images=self.pipeline.model.images_seen, **report.values())

    def _log_speed(self, step: int) -> None:
        """Times since the last log, for event logs and the viewer; single steps are not timed, as they overlap."""
        now, (then, logged) = time.monotonic(), self._logged
        self._logged = now, step
        if logged > self._start_step:  # the first steps are slower and would spoil estimates
            seconds = (now - then) / (step - logged)
            pixels = self.pipeline.datamanager.get_train_rays_per_batch()
            pixels *= self.pipeline.datamanager.views_per_round
            writer.put_time(EventName.ITER_TRAIN_TIME, seconds, step, update_eta=True)
            writer.put_time(EventName.TRAIN_RAYS_PER_SEC, pixels / seconds, step)

    def eval_iteration(self, step: int) -> None:
        """One held-out photo, or all of them, at their intervals (without an event log, never); all after the last."""
        if self._evaluates_one(step):
            metrics, images = self.pipeline.get_eval_image_metrics_and_images(step=step)
            writer.put_dict("Eval Images Metrics", metrics, step)
            for name, image in images.items():
                writer.put_image(f"Eval Images/{name}", image, step)
        if self._evaluates_all(step):
            metrics = self.pipeline.get_average_eval_image_metrics(step=step)
            writer.put_dict("Eval Images Metrics Dict (all images)", metrics, step)
            quality = {f"eval_{k}": metrics[k] for k in ("psnr", "ssim", "lpips") if k in metrics}
            self.progress.write(step=step + 1, images=self.pipeline.model.images_seen, **quality)
            CONSOLE.print(f"step {step + 1:,}: held-out photos {_summary(metrics)}", highlight=False)

    def _evaluates(self, step: int) -> bool:
        return self._evaluates_one(step) or self._evaluates_all(step)

    def _evaluates_one(self, step: int) -> bool:
        return self._has_event_log and step_check(step, self.config.steps_per_eval_image)

    def _evaluates_all(self, step: int) -> bool:
        regularly = self._has_event_log and step_check(step, self.config.steps_per_eval_all_images)
        return regularly or step + 1 == self.total_steps

    @property
    def _has_event_log(self) -> bool:
        config = self.config
        return config.is_tensorboard_enabled() or config.is_wandb_enabled() or config.is_comet_enabled()

    # The end -----------------------------------------------------------------------------------------------------

    def _after_train(self) -> None:
        self.training_state = "completed"  # used to update the viewer
        self._save_last()
        self._write_events()
        tell(f"Training Finished. Checkpoints: {self.checkpoint_dir}\nNext: ns-viewer {self._load_config()}")
        if not self.config.viewer.quit_on_train_completion:
            self._train_complete_viewer()

    def _train_complete_viewer(self) -> None:
        """Leaves the viewer up until a signal comes: the usual way to end it."""
        if self.viewer_state is not None:
            self.viewer_state.training_complete()
            tell("Use ctrl+c to quit")
            self._serve_viewer(until=lambda: self.interrupt.asked)
        if self.together:
            with self.train_lock:  # where the other ranks have been waiting
                pass

    def shutdown(self) -> None:
        """Ends training after this step, on all ranks, saves, and stops the viewer; from any thread of any rank."""
        self.interrupt.stop()
        super().shutdown()

    def _stop_early(self) -> None:
        self._save_last()
        self._write_events()
        if self._steps_done == self.total_steps:
            tell(f"Training is complete, but held-out photos were not evaluated: ns-eval {self._load_config()}")
        else:
            tell(f"Stopped after {self._steps_done:,} of {self.total_steps:,} steps. {self._how_to_resume()}")
        if code := self.interrupt.exit_code:
            raise SystemExit(code)

    def _out_of_memory(self, error: BaseException) -> OutOfMemory:
        """Saves the last whole state if that is possible, together with the other ranks."""
        traceback.clear_frames(error.__traceback__)  # lets go of what that step had allocated
        model, outcome = self.pipeline.model, None
        if self.ranks.leave():
            outcome = self._save_if_whole()
        here = f" on rank {self.ranks.rank}" if self.ranks.size > 1 else ""
        moment = f"with {model.num_points:,} Gaussians{here} (at most {model.config.max_gaussians:,})"
        return OutOfMemory.explain(error, moment, outcome or self._how_to_resume())

    def _save_if_whole(self) -> str | None:
        """Saves what has been trained, if the step that failed had not begun to change it on any rank.

        Returns what went wrong, if something did.
        """
        whole = self.pipeline.optimizer.begun == self._adam_steps
        done = self.ranks.share(self._steps_done if whole else None)
        if None in done or len(set(done)) > 1:
            return None
        try:
            self._save_last()
        except CheckpointError as failure:
            return str(failure)
        return None

    def _load_config(self) -> str:
        return f"--load-config {shlex.quote(str(self.base_dir / 'config.yml'))}"

    def _how_to_resume(self) -> str:
        loads = {"--load-dir": "load_dir", "--load-step": "load_step", "--load-checkpoint": "load_checkpoint"}
        given = [option for option, name in loads.items() if getattr(self.config, name) is not None]
        return checkpoint.how_to_resume(self.checkpoint_dir, f"ns-train {self.config.method_name}", given)

    # Checkpoints -------------------------------------------------------------------------------------------------

    def save_checkpoint(self, step: int) -> None:
        """Writes ``step-<step>.ckpt`` (whole or not at all); then removes older ones if so configured.

        All ranks take part, and all raise the same CheckpointError if one cannot write.
        """
        path = checkpoint.path_for(self.checkpoint_dir, step)
        state = {
            "step": step,
            "pipeline": self.pipeline.state_dict(),
            "optimizers": {k: v.state_dict() for k, v in self.optimizers.optimizers.items()},
            "schedulers": {},
            "scalers": {},
            "bytesplat": {"version": checkpoint.VERSION, **self.pipeline.training_state()},
        }
        shards = self.config.checkpoint_files == "shards"
        if self.config.checkpoint_files == "auto":
            shards = not shared_checkpoint.fit_one_file(self.pipeline.store.tables(), self.ranks)
        shared_checkpoint.write(path, state, self.ranks, shards)
        self._steps_saved = step + 1
        if self.config.save_only_latest_checkpoint:
            shared_checkpoint.remove_others(path, self.ranks)

    def _save_if_possible(self, step: int) -> None:
        """A full disk in the middle of a long run is worth a warning; the next time there may be room again."""
        try:
            self.save_checkpoint(step)
        except CheckpointError as error:
            tell(f"WARNING: {error} Training goes on; the next attempt follows in due course.", "bold red")

    def _save_last(self) -> None:
        """Saves what has been trained, unless that is saved already."""
        if self._steps_done == self._steps_saved and self.total_steps > 0:
            return
        try:
            self.save_checkpoint(max(self._steps_done - 1, 0))  # a run of no steps leaves what it starts from
        except CheckpointError as error:
            raise CheckpointError(f"{error} {self._how_to_resume()}") from error


def _summary(metrics: Mapping[str, float]) -> str:
    parts = [f"PSNR {metrics['psnr']:.2f} dB"]
    parts += [f"{name.upper()} {metrics[name]:.3f}" for name in ("ssim", "lpips") if name in metrics]
    return "  ".join(parts)
