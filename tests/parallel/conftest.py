from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from group import Group


@pytest.fixture(scope="session")
def group() -> Iterator[Callable[[int], Group]]:
    """Groups of ranks by their size, each started when first asked for."""
    groups: dict[int, Group] = {}

    def of(size: int) -> Group:
        if size not in groups:
            groups[size] = Group(size)
        return groups[size]

    yield of
    for made in groups.values():
        made.close()
