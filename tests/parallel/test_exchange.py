"""Several ranks compute what one computes, to the last bit, and say less where rows are zero."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from group import Group
from rounds_of_ranks import Case, collect, run_round

from bytesplat_ns.ops import wire
from bytesplat_ns.parallel.ranks import ALONE, HEADER_BYTES

CASES = [
    Case("two_ranks", views=(3, 2)),
    Case("three_ranks", views=(1, 2, 1)),
    Case("four_ranks", views=(1, 1, 2, 1)),
    Case("ranks_without_views", views=(0, 2, 0, 3)),
    Case("one_owner", views=(0, 0, 1)),
    Case("empty_shards", views=(1, 1, 1), shards="last"),
    Case("all_on_the_first", views=(0, 2, 1), shards="first"),
    Case("unseen_view", views=(2, 1), looking="first_away"),
    Case("no_records", views=(1, 2), looking="away"),
    Case("no_gaussians", views=(1, 2), gaussians=0),
    Case("fewer_gaussians_than_ranks", views=(1, 1, 1, 1), gaussians=2),
    Case("all_rows_zero", views=(2, 1, 1), masked=True),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_round_of_several_ranks_is_that_of_one(group: Callable[[int], Group], case: Case) -> None:
    together = group(len(case.views))
    for statistics in (False, True):
        expected = run_round(ALONE, case, "compact", statistics)
        results = {e: together(run_round, case, e, statistics) for e in ("compact", "dense")}
        again = together(run_round, case, "compact", statistics)
        alone = collect([expected])
        for ranks in (*results.values(), again):
            for name, value in collect(ranks).items():
                assert torch.equal(value, alone[name]), name
            # Sums over Gaussians: another order of additions, the same on every rank and in every run.
            for result in ranks:
                assert torch.equal(result["poses"], again[0]["poses"])
                torch.testing.assert_close(result["poses"], expected["poses"], rtol=1e-5, atol=1e-7)
        owners = torch.tensor([rank for rank, views in enumerate(case.views) for _ in range(views)])
        check_traffic(results, owners, 10 if statistics else 9)  # with the norm of absgrad

    assert case.gaussians == 0 or case.looking == "away" or len(alone["rows"])
    for name in ("rows", "gradient"):  # the latter is what density control observes
        assert alone[name].any() == bool(len(alone["rows"]) and not case.masked), name


@pytest.mark.parametrize("case", CASES[:4], ids=lambda case: case.name)
def test_rounded_rows_are_the_same_on_any_ranks(group: Callable[[int], Group], case: Case) -> None:
    for statistics in (False, True):
        arguments = case, "compact", statistics, "bfloat16"
        alone, together = run_round(ALONE, *arguments), group(len(case.views))(run_round, *arguments)
        expected = collect([alone])
        for name, value in collect(together).items():
            assert torch.equal(value, expected[name]), name
        exact = collect([run_round(ALONE, case, "compact", statistics)])["rows"]
        assert not torch.equal(expected["rows"], exact)
        torch.testing.assert_close(expected["rows"], exact, rtol=2**-8, atol=0)
        owners = torch.tensor([rank for rank, views in enumerate(case.views) for _ in range(views)])
        check_traffic({"compact": together}, owners, 10 if statistics else 9, number=2)


def check_traffic(results: dict, owners: torch.Tensor, columns: int, number: int = 4) -> None:
    """Bytes and rows are what was counted on the way; ``number``: bytes of one."""
    size = len(results["compact"])
    for encoding, ranks in results.items():
        foreign = [owners[result["rows"][0].long()] != rank for rank, result in enumerate(ranks)]
        rows = sum(int(there.sum()) for there in foreign)
        zero = sum(int((~r["rows"][2].any(1))[there].sum()) for there, r in zip(foreign, ranks, strict=True))
        zero = zero if encoding == "compact" else 0
        counted = torch.tensor([result["zero"] for result in ranks]).sum(0).tolist()
        assert counted == [rows, zero]
        headers = HEADER_BYTES * size * (size - 1)
        sent = {kind: sum(result["sent"].get(kind, 0) for result in ranks) for kind in ("records", "rows", "masks")}
        assert sent["records"] == headers + 4 * wire.WIDTH * rows
        assert sent["rows"] == headers + number * columns * (rows - zero)
        masks = rows / 8 if encoding == "compact" else 0
        assert masks <= sent["masks"] <= masks + 4 * size * (size - 1)
