"""A whole trace in one call: the columns that go in, those that come out, and what is refused by name."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from test_plan import LLAMA_8B, POLICY

from ridgefill import _core
from ridgefill.errors import PlanError
from ridgefill.traces import plan_trace

PLANNER = _core.Planner(LLAMA_8B, json.dumps({**POLICY, "memory_budget_bytes": 20e9}))
COLUMNS: dict[str, Any] = {
    "prompt_tokens": [100, 32768, 32768, 32768, 50_000_000],
    "cached_tokens": [0, 0, 1000, 0, 0],
    "output_tokens": [1, 2, 3, 4, 5],
    "sensitivity": ["latency", "latency", "balanced", "accuracy", "balanced"],
    "ttft_target_s": [math.nan, math.nan, 100.0, math.nan, math.nan],
}
TYPES = [("prompt_tokens", "i8"), ("cached_tokens", "i4"), ("output_tokens", "u2"), ("sensitivity", "U8")]


def test_columns_in_columns_out() -> None:
    found = plan_trace(PLANNER, COLUMNS)
    assert {name: column.dtype.str[1:] for name, column in found.items()} == {
        "candidate": "i4",
        "split": "i4",
        "tail_tokens": "i8",
        "loss_nats": "f8",
        "ttft_s": "f8",
        "exact_ttft_s": "f8",
    }
    for index in range(4):
        target = COLUMNS["ttft_target_s"][index]
        request = {name: column[index] for name, column in COLUMNS.items()}
        request["ttft_target_s"] = None if math.isnan(target) else target
        single = json.loads(PLANNER.plan(json.dumps(request)))
        one = {name: column[index].item() for name, column in found.items()}
        assert PLANNER.candidates[one["candidate"]][0] == single["tier"]
        assert (one["split"], one["tail_tokens"]) == (
            -1 if single["split"] is None else single["split"],
            single["tail"],
        )
        assert (one["loss_nats"], one["ttft_s"]) == (single["loss_nats"], single["ttft_s"])
        assert one["exact_ttft_s"] == single["exact_ttft_s"]
    # The last one fits no memory.
    assert (found["candidate"][4], found["split"][4], found["tail_tokens"][4]) == (-1, -1, 0)
    assert all(np.isnan(found[name][4]) for name in ("loss_nats", "ttft_s", "exact_ttft_s"))
    assert found["candidate"][1] > 0
    assert found["candidate"][3] == 0


def test_structured_arrays_views_and_codes_are_the_same_trace() -> None:
    expected = plan_trace(PLANNER, COLUMNS)
    records = np.zeros(5, dtype=[*TYPES, ("ttft_target_s", "f4"), ("id", "U4")])
    for name, column in COLUMNS.items():
        records[name] = column
    codes = {**COLUMNS, "sensitivity": np.array([0, 0, 1, 2, 1])}
    strided = {name: np.repeat(np.asarray(column), 2)[::2] for name, column in COLUMNS.items()}
    for trace in (records, codes, strided):
        for name, column in plan_trace(PLANNER, trace).items():
            np.testing.assert_array_equal(column, expected[name])
    assert all(column.size == 0 for column in plan_trace(PLANNER, {"prompt_tokens": []}).values())
    nobody = {name: np.asarray(column)[:0] for name, column in COLUMNS.items()}
    assert all(column.size == 0 for column in plan_trace(PLANNER, nobody).values())
    # Without a column: nothing cached, no output, balanced, no target.
    plain = {"prompt_tokens": [32768], "sensitivity": ["balanced"], "cached_tokens": [0], "output_tokens": [0]}
    for name, column in plan_trace(PLANNER, {"prompt_tokens": [32768]}).items():
        np.testing.assert_array_equal(column, plan_trace(PLANNER, plain)[name])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"prompt_tokens": None}, "expected a column prompt_tokens, found cached_tokens, output_tokens"),
        ({"colour": [1] * 5}, "unknown column 'colour'; known: prompt_tokens"),
        ({"cached_tokens": [0]}, "cached_tokens has 1 entries; prompt_tokens has 5"),
        ({"cached_tokens": 0}, r"cached_tokens has shape \(\); expected one dimension"),
        ({"cached_tokens": [0.0] * 5}, "cached_tokens is float64; expected whole numbers"),
        ({"prompt_tokens": [True] * 5}, "prompt_tokens is bool; expected whole numbers"),
        ({"output_tokens": np.array([2**63] * 5, dtype=np.uint64)}, "output_tokens holds 9223372036854775808"),
        ({"prompt_tokens": [100, -1, 5, 5, 5]}, "request 1: prompt_tokens is -1; expected 0 or more"),
        (
            {"sensitivity": ["high"] * 5},
            "request 0: sensitivity is high; expected latency, balanced, accuracy or 0 to 2",
        ),
        ({"sensitivity": [0, 1, 2, 258, 0]}, "request 3: sensitivity is 258"),
        ({"sensitivity": [0, -1, 2, 1, 0]}, "request 1: sensitivity is -1"),
        ({"ttft_target_s": ["soon"] * 5}, "ttft_target_s is <U4; expected seconds"),
        ({"ttft_target_s": [1.0, 0.0, 1.0, 1.0, 1.0]}, "request 1: ttft_target_s is 0"),
    ],
)
def test_what_is_no_trace_is_refused_by_name(change: dict[str, Any], words: str) -> None:
    columns = {name: column for name, column in {**COLUMNS, **change}.items() if column is not None}
    with pytest.raises(PlanError, match=words):
        plan_trace(PLANNER, columns)


def test_planning_a_trace_loads_no_torch() -> None:
    code = "import sys, ridgefill.traces; print(sorted({'torch', 'transformers', 'cupy'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=900, check=True)
    assert done.stdout.strip() == "[]"
