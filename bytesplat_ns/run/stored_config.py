"""The ``config.yml`` of a run, read without nerfstudio and without making objects of what it names."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml


class RunConfigError(ValueError):
    """A file is not the ``config.yml`` of a run."""


@dataclass(frozen=True)
class RunConfig:
    """What matters for using a run's Gaussians elsewhere."""

    models: Path  # folder of the checkpoints
    antialiased: bool  # whether the Gaussians are to be drawn with opacities compensated for dilation


class _PlainLoader(yaml.SafeLoader):
    """Reads dicts, lists and strings where nerfstudio's loader makes objects of any class."""


def _plain(loader: yaml.SafeLoader, _: str, node: yaml.Node) -> Any:
    if isinstance(node, yaml.MappingNode):
        return loader.construct_mapping(node, deep=True)
    if isinstance(node, yaml.SequenceNode):
        return loader.construct_sequence(node, deep=True)
    return loader.construct_scalar(node)  # type: ignore[arg-type]


_PlainLoader.add_multi_constructor("tag:yaml.org,2002:python/", _plain)


def read_run_config(path: Path) -> RunConfig:
    """Reads a ``config.yml`` of this method or of splatfacto.

    Raises:
        RunConfigError: it is something else.
    """
    if path.is_dir():
        raise RunConfigError(f"{path} is a folder; name the config.yml in it.")
    if not path.is_file():
        raise RunConfigError(f"{path}: there is no such file.")
    try:
        options = yaml.load(path.read_text(), Loader=_PlainLoader)
        models, model = Path(*options["relative_model_dir"]), options["pipeline"]["model"]
        return RunConfig(path.parent / models, model.get("rasterize_mode") == "antialiased")
    except (yaml.YAMLError, UnicodeDecodeError, KeyError, TypeError, AttributeError) as error:
        raise RunConfigError(f"{path} is not the config.yml of a nerfstudio run.") from error
