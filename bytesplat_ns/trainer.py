"""The step loop: setup, resume, progress, evaluation, checkpoints, viewer."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from nerfstudio.engine.optimizers import AdamOptimizerConfig, Optimizers
from nerfstudio.engine.trainer import Trainer, TrainerConfig
from nerfstudio.utils import writer
from nerfstudio.utils.decorators import check_eval_enabled, check_main_thread
from nerfstudio.utils.misc import step_check
from nerfstudio.utils.rich_utils import CONSOLE
from nerfstudio.utils.writer import EventName, TimeWriter

from bytesplat_ns import checkpoint
from bytesplat_ns.checkpoint import CheckpointError
from bytesplat_ns.pipeline import EPSILON, ByteSplatPipeline, RoundReport
from bytesplat_ns.progress import Progress


@dataclass
class ByteSplatTrainerConfig(TrainerConfig):
    """Training regimen. ``max-num-iterations`` counts images: a step on a round of B views counts B."""

    _target: type = field(default_factory=lambda: ByteSplatTrainer)

    def save_config(self) -> None:
        """Writes ``config.yml``, without the step that a run resumes from: tools would look for it in this run."""
        TrainerConfig.save_config(replace(self, load_step=None))


class ByteSplatTrainer(Trainer):
    """Trains one model to its configured total, resuming exactly where a checkpoint left it."""

    config: ByteSplatTrainerConfig
    pipeline: ByteSplatPipeline

    def __init__(self, config: ByteSplatTrainerConfig, local_rank: int = 0, world_size: int = 1) -> None:
        _refuse_unsupported(config, world_size)
        super().__init__(config, local_rank, world_size)

    # Setup and resume --------------------------------------------------------------------------------------------

    def setup(self, test_mode: Literal["test", "val", "inference"] = "val") -> None:
        super().setup(test_mode)
        remaining = self.pipeline.rounds_until(self.config.max_num_iterations)
        self.total_steps = self._start_step + remaining
        for line in self.pipeline.describe_run():
            CONSOLE.log(line)

    def setup_optimizers(self) -> Optimizers:
        """The pipeline makes the optimizers, Gaussians' and shared parameters', from this configuration."""
        self.pipeline.start_training(self.config.max_num_iterations, self.config.optimizers)
        return self.pipeline.shared_optimizers

    def _load_checkpoint(self) -> None:
        if self.config.load_dir is not None:
            path = checkpoint.find(self.config.load_dir, self.config.load_step)
        elif self.config.load_checkpoint is not None:
            path = self.config.load_checkpoint
        else:
            return
        state = checkpoint.read(path)
        self.pipeline.load_training_state(state)
        self._start_step = state["step"] + 1
        seen, total = self.pipeline.model.images_seen, self.config.max_num_iterations
        if seen >= total:
            raise CheckpointError(f"{path} has seen {seen} of {total} images. To train on, raise --max-num-iterations.")
        CONSOLE.log(f"Resuming from {path}: {seen:,} images seen, {self.pipeline.model.num_points:,} Gaussians.")

    # The loop ----------------------------------------------------------------------------------------------------

    def train(self) -> None:
        """Runs the remaining steps, then saves, and leaves the viewer up if there is one."""
        self.base_dir.mkdir(parents=True, exist_ok=True)
        self.pipeline.datamanager.train_dataparser_outputs.save_dataparser_transform(
            self.base_dir / "dataparser_transforms.json"
        )
        self._init_viewer_state()
        self.stop_training = False
        path = self.base_dir / "metrics.jsonl"
        self.progress = Progress(path, self.total_steps, self._start_step)
        self.step = self._start_step
        try:
            with TimeWriter(writer, EventName.TOTAL_TRAIN_TIME):
                for step in range(self._start_step, self.total_steps):
                    if not self._wait_while_paused():
                        break
                    self.step = step
                    self._train_step(step)
        finally:
            self.progress.close()
        self._after_train()

    def _train_step(self, step: int) -> None:
        last = step + 1 == self.total_steps
        # The viewer's render thread takes the lock too.
        with self.train_lock, TimeWriter(writer, EventName.ITER_TRAIN_TIME, step=step) as timer:
            report = self.pipeline.train_round()
        self._update_viewer(step, timer.duration)
        if last or step_check(step, self.config.logging.steps_per_log, run_at_zero=True):
            self._log(step, report)
        if self.pipeline.datamanager.eval_dataset:
            with self.train_lock:
                self.eval_iteration(step)
        if not last and step_check(step, self.config.steps_per_save):
            self.save_checkpoint(step)
        writer.write_out_storage()

    def _wait_while_paused(self) -> bool:
        """False when training was stopped (the viewer's button, or the process is asked to end)."""
        while self.training_state == "paused" and not self.stop_training:
            time.sleep(0.01)
        return not self.stop_training

    def _update_viewer(self, step: int, duration: float) -> None:
        if step > 1:  # the first steps are slower and would spoil the viewer's estimate
            views = self.config.pipeline.datamanager.views_per_round
            rays = self.pipeline.datamanager.get_train_rays_per_batch() * views
            writer.put_time(EventName.TRAIN_RAYS_PER_SEC, rays / max(duration, 1e-3), step, avg_over_steps=True)
        self._update_viewer_state(step)

    def _log(self, step: int, report: RoundReport) -> None:
        values = report.read()
        gaussians = self.pipeline.model.num_points
        writer.put_scalar("Train Loss", values["loss"], step)
        writer.put_dict("Train Metrics Dict", values | {"gaussian_count": gaussians}, step)
        self.progress.report(step + 1, self.pipeline.model.images_seen, values["loss"], values["psnr"], gaussians)

    @check_eval_enabled
    def eval_iteration(self, step: int) -> None:
        """One held-out photo, or all of them, at their intervals; all of them after the last step too."""
        last = step + 1 == self.total_steps
        if step_check(step, self.config.steps_per_eval_image):
            metrics, images = self.pipeline.get_eval_image_metrics_and_images(step=step)
            writer.put_dict("Eval Images Metrics", metrics, step)
            for name, image in images.items():
                writer.put_image(f"Eval Images/{name}", image, step)
        if last or step_check(step, self.config.steps_per_eval_all_images):
            metrics = self.pipeline.get_average_eval_image_metrics(step=step)
            writer.put_dict("Eval Images Metrics Dict (all images)", metrics, step)
            quality = {f"eval_{k}": metrics[k] for k in ("psnr", "ssim", "lpips") if k in metrics}
            self.progress.write(step=step + 1, images=self.pipeline.model.images_seen, **quality)
            CONSOLE.print(f"step {step + 1:,}: held-out photos {_summary(metrics)}", highlight=False)

    # Checkpoints -------------------------------------------------------------------------------------------------

    @check_main_thread
    def save_checkpoint(self, step: int) -> None:
        """Writes ``step-<step>.ckpt`` (whole or not at all); then removes older ones if so configured."""
        path = checkpoint.path_for(self.checkpoint_dir, step)
        state = {
            "step": step,
            "pipeline": self.pipeline.state_dict(),
            "optimizers": {k: v.state_dict() for k, v in self.optimizers.optimizers.items()},
            "schedulers": {},
            "scalers": {},
            "bytesplat": {"version": checkpoint.VERSION, **self.pipeline.training_state()},
        }
        checkpoint.write(path, state)
        if self.config.save_only_latest_checkpoint:
            checkpoint.remove_others(path)


def _summary(metrics: Mapping[str, float]) -> str:
    parts = [f"PSNR {metrics['psnr']:.2f} dB"]
    parts += [f"{name.upper()} {metrics[name]:.3f}" for name in ("ssim", "lpips") if name in metrics]
    return "  ".join(parts)


def _refuse_unsupported(config: TrainerConfig, world_size: int) -> None:
    """Options of the stock trainer that would silently do nothing here are errors."""
    found: list[str] = []
    if world_size > 1:
        found.append("--machine.num-devices > 1 (training on several ranks is not there yet)")
    if config.mixed_precision or config.use_grad_scaler:
        found.append("--mixed-precision, --use-grad-scaler (gradients are computed in float32)")
    if config.gradient_accumulation_steps:
        found.append("--gradient-accumulation-steps (use --pipeline.datamanager.views-per-round)")
    if config.log_gradients:
        found.append("--log-gradients")
    for group, options in config.optimizers.items():
        fixed = vars(AdamOptimizerConfig(lr=options["optimizer"].lr, eps=EPSILON))
        found += [
            f"--optimizers.{group}.optimizer.{name.replace('_', '-')} {value} (it is always {fixed.get(name)})"
            for name, value in vars(options["optimizer"]).items()
            if value != fixed.get(name)
        ]
    if found:
        raise ValueError("bytesplat does not support: " + "; ".join(found) + ". Remove the option to go on.")

