"""The three commands on one data set, in this process: importing nerfstudio takes longer than all of them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

pytest.importorskip("nerfstudio")


@pytest.fixture(scope="module", autouse=True)
def no_gpu() -> Iterator[None]:
    """Nerfstudio's tools take a GPU where there is one; these tests are of the inputs, not of the kernels."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: False)
        yield
