"""Calling a backend's stages from tests that live on the host."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from types import ModuleType
from typing import Any

import torch


class Backend:
    """The stages of one backend, called with tensors on the host and returning tensors on the host."""

    def __init__(self, name: str, module: ModuleType, device: str) -> None:
        self.name, self.module, self.device = name, module, device

    def __getattr__(self, stage: str) -> Callable[..., Any]:
        function = getattr(self.module, stage)

        def run(*args: Any, **kwargs: Any) -> Any:
            args, kwargs = _moved(args, self.device), _moved(kwargs, self.device)
            return _moved(function(*args, **kwargs), "cpu")

        return run


def _moved(value: Any, device: str) -> Any:
    """The value with every tensor in it on the device."""
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, (tuple, list)):
        return type(value)(_moved(item, device) for item in value)
    if isinstance(value, dict):
        return {key: _moved(item, device) for key, item in value.items()}
    if is_dataclass(value):
        return replace(value, **{f.name: _moved(getattr(value, f.name), device) for f in fields(value)})
    return value
