"""The decision rule as Python calls it: equal to a transcription of the design's section 3, and safe by itself."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ridgefill import _core
from ridgefill.errors import RidgeFillError, ScheduleError


def design_section_3(
    cached: int, step: int, n_ahead: int, tail: int, head: int, min_bulk: int, tile: int, logits_to_keep: int
) -> tuple[int, int]:
    """The text of the design, line by line: (start, rows filled)."""
    step_end = cached + step
    start = max(cached, head)
    end = step_end - max(0, tail - n_ahead, logits_to_keep if n_ahead == 0 else 0)
    b = start + (end - start) // tile * tile  # floor, also below zero
    b = max(start, min(b, step_end))
    rows = b - start
    return start, rows if rows >= max(1, min_bulk) else 0


counts = st.integers(0, 300) | st.integers(0, 10**6)


@settings(max_examples=1000)
@given(
    cached=counts,
    step=counts,
    n_ahead=st.just(0) | counts,
    tail=st.integers(1, 2000),
    head=st.integers(0, 40),
    min_bulk=st.integers(0, 500),
    tile=st.sampled_from([1, 2, 16, 64, 100]),
    logits=st.integers(0, 600),
)
def test_decide_is_the_design(
    cached: int, step: int, n_ahead: int, tail: int, head: int, min_bulk: int, tile: int, logits: int
) -> None:
    decision = _core.decide(
        cached_tokens=cached,
        step_tokens=step,
        n_ahead=n_ahead,
        tail=tail,
        head=head,
        min_bulk=min_bulk,
        tile=tile,
        logits_to_keep=logits,
    )
    start, rows = design_section_3(cached, step, n_ahead, tail, head, min_bulk, tile, logits)
    assert decision.rows_filled == rows == decision.fill_end - decision.fill_start
    assert decision.step_end == cached + step
    assert cached <= decision.fill_start <= decision.fill_end <= decision.step_end
    assert (decision.reason == "fill") == (rows > 0)
    if rows:
        assert decision.fill_start == start
        if n_ahead == 0:
            assert decision.fill_end < decision.step_end


@settings(max_examples=300)
@given(
    steps=st.lists(st.integers(1, 400), min_size=1, max_size=10),
    tail=st.integers(1, 900),
    head=st.integers(0, 8),
    min_bulk=st.integers(0, 64),
)
def test_no_chunking_fills_the_tail(steps: list[int], tail: int, head: int, min_bulk: int) -> None:
    prompt, cached = sum(steps), 0
    for step in steps:
        n_ahead = prompt - cached - step
        decision = _core.decide(
            cached_tokens=cached, step_tokens=step, n_ahead=n_ahead, tail=tail, head=head, min_bulk=min_bulk
        )
        if decision.rows_filled:
            assert head <= decision.fill_start
            assert decision.fill_end <= prompt - tail
        cached += step


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({}, "fill"),
        ({"step_tokens": 600}, "84 bulk rows are fewer than min_bulk=256"),
        ({"step_tokens": 400}, "no bulk rows: of the step's 396 rows after the head, 512 or more stay exact"),
        ({"step_tokens": 3}, "every row of the step is one of the 4 head rows"),
        ({"step_tokens": 0}, "the step has no rows"),
        ({"step_tokens": 520, "tile": 64, "min_bulk": 0}, "4 bulk rows are fewer than one tile of 64"),
    ],
)
def test_reason_says_why(arguments: dict[str, int], words: str) -> None:
    defaults = {"cached_tokens": 0, "step_tokens": 4096, "tail": 512, "head": 4, "min_bulk": 256}
    assert _core.decide(**{**defaults, **arguments}).reason == words


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tail", 0),
        ("tile", 0),
        ("tail", -1),
        ("cached_tokens", -1),
        ("step_tokens", -1),
        ("n_ahead", -1),
        ("head", -4),
        ("min_bulk", -1),
        ("logits_to_keep", -1),
    ],
)
def test_nonsense_is_refused_by_name(name: str, value: int) -> None:
    arguments = {"cached_tokens": 0, "step_tokens": 4096, "tail": 512, "head": 4, "min_bulk": 256}
    with pytest.raises(ScheduleError, match=name) as caught:
        _core.decide(**{**arguments, name: value})
    assert isinstance(caught.value, RidgeFillError)
    assert str(value) in str(caught.value)


@pytest.mark.parametrize(
    ("start", "end", "window", "first"),
    [(4, 3584, None, 4), (4, 3584, 512, 3072), (4, 100, 512, 4), (4, 3584, 0, 3584), (4, 4, 16, 4)],
)
def test_first_needed_row(start: int, end: int, window: int | None, first: int) -> None:
    assert _core.first_needed_row(start, end, window) == first
