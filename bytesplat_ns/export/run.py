"""What a run left, read without its data and without nerfstudio: Gaussians, frame, how they are to be drawn."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from bytesplat_ns import checkpoint
from bytesplat_ns.splats import Splats, read_checkpoint


class RunError(ValueError):
    """A folder does not hold a run of Gaussians."""


@dataclass
class Run:
    """A run of this method or of splatfacto."""

    checkpoint: Path
    splats: Splats
    antialiased: bool

    @property
    def transforms(self) -> Path:
        """The file that says how training moved and scaled the capture."""
        return self.checkpoint.parent.parent / "dataparser_transforms.json"


class _PlainLoader(yaml.SafeLoader):
    """Reads a ``config.yml`` as dicts, lists and strings, where nerfstudio's would make objects of any class."""


def _plain(loader: yaml.SafeLoader, _: str, node: yaml.Node) -> Any:
    if isinstance(node, yaml.MappingNode):
        return loader.construct_mapping(node, deep=True)
    if isinstance(node, yaml.SequenceNode):
        return loader.construct_sequence(node, deep=True)
    return loader.construct_scalar(node)  # type: ignore[arg-type]


_PlainLoader.add_multi_constructor("tag:yaml.org,2002:python/", _plain)


def read_run(config: Path, step: int | None = None) -> Run:
    """Reads a run by its ``config.yml``, at its latest checkpoint or at another step.

    Raises:
        RunError: there is no such run.
        CheckpointError, SplatError: it has no such checkpoint, or one without Gaussians.
    """
    if config.is_dir():
        raise RunError(f"--load-config {config} is a folder; name the config.yml in it.")
    if not config.is_file():
        raise RunError(f"--load-config {config}: there is no such file.")
    try:
        options = yaml.load(config.read_text(), Loader=_PlainLoader)
        models = Path(*options["relative_model_dir"])
        model = options["pipeline"]["model"]
    except (yaml.YAMLError, UnicodeDecodeError, KeyError, TypeError) as error:
        raise RunError(f"--load-config {config} is not the config.yml of a nerfstudio run.") from error
    if not (config.parent / models).is_dir():
        raise RunError(f"{config.parent / models} is missing: the checkpoints must lie beside the config.yml.")
    path = checkpoint.find(config.parent / models, step)
    return Run(path, read_checkpoint(path), antialiased=model.get("rasterize_mode") == "antialiased")
