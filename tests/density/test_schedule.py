from __future__ import annotations

import pytest

from bytesplat_ns.density.schedule import DensitySchedule


def events(due, total: int, views: int = 1) -> list[int]:
    return [seen for seen in range(views, total + 1, views) if due(seen - views, seen)]


def test_defaults_are_splatfactos_for_30000_images():
    schedule = DensitySchedule(pause_after_reset=150)
    assert events(schedule.resets_at, 30_000) == [3_000, 6_000, 9_000, 12_000]
    refinements = [
        m for m in range(0, 30_000, 100) if 500 < m < 15_000 and m % 3_000 >= 150
    ]  # the condition that gsplat's strategy states in steps
    assert events(schedule.refines_at, 30_000) == refinements
    assert schedule.uses_screen_size(3_999) and not schedule.uses_screen_size(4_000)
    assert schedule.prunes_size(3_001) and not schedule.prunes_size(3_000)
    assert schedule.observes(14_999) and not schedule.observes(15_000)


def test_rounds_of_several_views_miss_nothing():
    schedule = DensitySchedule(pause_after_reset=150)
    assert events(schedule.resets_at, 30_000, views=7) == [3_003, 6_006, 9_002, 12_005]
    assert len(events(schedule.refines_at, 30_000, views=7)) == len(events(schedule.refines_at, 30_000))
    assert schedule.refines_at(0, 30_000) and schedule.resets_at(0, 30_000)


@pytest.mark.parametrize("total", [1, 2_999, 7_000, 12_500, 15_149, 15_150, 30_000])
def test_no_reset_too_late_to_recover(total):
    schedule = DensitySchedule(pause_after_reset=150, total=total)
    resets = events(schedule.resets_at, total)
    assert all(total - reset >= 150 + 3_000 for reset in resets)
    assert resets == [m for m in (3_000, 6_000, 9_000, 12_000) if total - m >= 3_150], "and none is lost needlessly"


def test_a_withheld_reset_does_not_pause_refinement():
    schedule = DensitySchedule(pause_after_reset=500, total=8_000)
    assert events(schedule.resets_at, 8_000) == [3_000]
    refinements = events(schedule.refines_at, 8_000)
    assert not any(3_000 <= m < 3_500 for m in refinements)
    assert {6_000, 6_100, 6_200} <= set(refinements)


def test_contradictions_are_refused():
    with pytest.raises(ValueError, match="never happen"):
        DensitySchedule(reset_every=3_000, pause_after_reset=3_000)
    with pytest.raises(ValueError, match="positive"):
        DensitySchedule(every=0)
