"""Predictions and plans from Python: monotone, explained, and a million at a time."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ridgefill import _core
from ridgefill.errors import PlanError, RidgeFillError, ScheduleError

LLAMA_8B = _core.describe_model(
    json.dumps(
        {
            "model_type": "llama",
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "vocab_size": 128256,
        }
    )
)
H100 = json.loads(_core.device_rates("h100"))
MAPS = [
    {"split": 12, "gates": [{"tier": "speed", "dnll": 0.2}]},
    {"split": 16, "gates": [{"tier": "quality", "dnll": 0.01, "share": 0.1}, {"tier": "speed", "dnll": 0.04}]},
]
POLICY = {"rates": H100, "maps": MAPS, "loss_budget_nats": 0.05}


def planner(**changes: Any) -> _core.Planner:
    return _core.Planner(LLAMA_8B, json.dumps({**POLICY, **changes}))


def plan(prompt: int, *, policy: dict[str, Any] | None = None, **request: Any) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(planner(**(policy or {})).plan(json.dumps({"prompt_tokens": prompt, **request})))
    return found


def predict(**question: Any) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(_core.predict(LLAMA_8B, json.dumps({"split": 16, "tail": 512, **question})))
    return found


def test_the_prediction_is_prefill_cost_s_formula() -> None:
    layer = {
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "mlp_flops_per_row": 2 * 3 * 4096 * 14336,
        "window": None,
    }
    shape = json.dumps({"hidden_size": 4096, "vocab_size": 128256, "layers": [layer] * 32})
    cost = _core.prefill_cost(shape, prompt_tokens=32768, split=16, tail=512, head=4)
    report = predict(prompt_tokens=32768)
    assert report["flops_ratio"] == cost.ratio
    assert report["filled"]["flops"] == cost.filled_flops
    assert report["ttft_ratio"] is None  # no rates, no time


def test_a_prediction_says_how_much_is_early_attention() -> None:
    shares = [predict(prompt_tokens=n, rates=H100)["early_attention_share"] for n in (8192, 32768, 131072, 524288)]
    assert shares == sorted(shares)
    assert shares[-1] > 0.5
    report = predict(prompt_tokens=131072, rates=H100)
    assert 1 < report["ttft_ratio"] < report["ratio_limit"]
    assert sum(part["share"] for part in report["filled"]["parts"]) == pytest.approx(
        1 - report["filled"]["overhead_seconds"] / report["filled"]["seconds"]
    )
    # 16 bits of keys and values: 32 layers of 8 heads of 128.
    assert report["exact"]["cache_bytes"] == 131072 * 32 * 2 * 8 * 128 * 2
    assert report["map_bytes"] == 15 * (4096 * 4096 + 4096) * 2


def test_memory_selection_and_fusing_are_priced() -> None:
    base = predict(prompt_tokens=32768, rates=H100)
    chunked = predict(prompt_tokens=32768, rates=H100, chunk_tokens=2048)
    assert chunked["filled"]["activation_bytes"] < base["filled"]["activation_bytes"]
    assert chunked["filled"]["overhead_seconds"] > base["filled"]["overhead_seconds"]
    fused = predict(prompt_tokens=32768, rates=H100, fused_rank=128)
    assert fused["ttft_ratio"] > base["ttft_ratio"]
    assert fused["map_bytes"] < base["map_bytes"]
    quality = predict(prompt_tokens=32768, rates=H100, selected_share=0.1)
    assert 1 < quality["ttft_ratio"] < base["ttft_ratio"]
    assert {"scoring", "selected_matmul"} <= {part["name"] for part in quality["filled"]["parts"]}
    wide = predict(prompt_tokens=32768, rates=H100, features=2)
    assert wide["ttft_ratio"] < base["ttft_ratio"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"split": 32}, "split is 32; the model has layers 0 to 31"),
        ({"selected_share": 2}, "selected_share is 2"),
        ({"prompt_tokens": 0}, "prompt_tokens is 0"),
        ({"cached_tokens": 9000}, "of which 9000 are cached"),
        ({"tail": 0}, "tail is 0"),
        ({"colour": 1}, "unknown field `colour`"),
        ({"rates": {**H100, "memory_bytes_per_s": 0}}, "memory_bytes_per_s is 0"),
    ],
)
def test_questions_that_make_no_sense_are_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ScheduleError, match=words):
        predict(**{"prompt_tokens": 8192, **change})


def test_the_choice_follows_the_sensitivity() -> None:
    fast = plan(32768, sensitivity="latency")
    assert (fast["tier"], fast["split"], fast["loss_nats"]) == ("speed", 16, 0.04)
    assert fast["reasons"] == ["the fastest plan within the loss budget of 0.05 nats"]
    because = {(other["tier"], other["split"]): other["reason"] for other in fast["rejected"]}
    assert "its loss is unknown" in because["quality", 12]
    assert "over the budget" in because["speed", 12]
    assert because["exact", None].startswith("not faster: ")

    balanced = plan(32768)
    assert (balanced["tier"], balanced["selected_share"]) == ("quality", 0.1)
    assert balanced["ttft_s"] > fast["ttft_s"]
    accurate = plan(32768, sensitivity="accuracy", ttft_target_s=1e-3)
    assert (accurate["tier"], accurate["ratio"], accurate["meets_target"]) == ("exact", 1.0, False)
    relaxed = plan(32768, ttft_target_s=1e3)
    assert (relaxed["tier"], relaxed["meets_target"]) == ("exact", True)


def test_nothing_is_guessed() -> None:
    unmeasured = plan(32768, sensitivity="latency", policy={"maps": [{"split": 16}]})
    assert unmeasured["tier"] == "exact"
    assert all("its loss is unknown" in other["reason"] for other in unmeasured["rejected"])


def test_what_fits_no_memory_is_an_error() -> None:
    with pytest.raises(PlanError, match=r"no allowed plan fits: .* the memory budget is 1.0 MB"):
        plan(32768, policy={"memory_budget_bytes": 1e6})


@pytest.mark.parametrize(
    ("policy", "words"),
    [
        ({"loss_budget_nats": -1}, "loss_budget_nats is -1"),
        ({"maps": [{"split": 16, "gates": [{"tier": "exact", "dnll": 0}]}]}, "tier is exact"),
        ({"maps": [{"split": 16}, {"split": 16}]}, "split 16 is listed twice"),
        ({"maps": [{"split": 40}]}, "split is 40"),
        ({"colour": 1}, "policy: unknown field `colour`"),
    ],
)
def test_policies_that_make_no_sense_are_refused(policy: dict[str, Any], words: str) -> None:
    with pytest.raises(RidgeFillError, match=words):
        planner(**policy)


# Made once: a planner in a debug build is not free.
BUDGETS = [0.0, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.4]
BY_BUDGET = [planner(loss_budget_nats=budget) for budget in BUDGETS]
REQUESTS = {
    "prompt_tokens": st.integers(1, 3000) | st.integers(1, 400_000),
    "sensitivity": st.sampled_from(["latency", "balanced", "accuracy"]),
    "output_tokens": st.integers(0, 5000),
}


def ttft(one: _core.Planner, **request: Any) -> float:
    found: float = json.loads(one.plan(json.dumps(request)))["ttft_s"]
    return found


@settings(max_examples=200)
@given(request=st.fixed_dictionaries(REQUESTS), target=st.none() | st.floats(1e-3, 30))
def test_a_larger_loss_budget_never_slows_a_plan(request: dict[str, Any], target: float | None) -> None:
    times = [ttft(one, **request, ttft_target_s=target) for one in BY_BUDGET]
    assert times == sorted(times, reverse=True)


@settings(max_examples=200)
@given(request=st.fixed_dictionaries(REQUESTS), targets=st.lists(st.floats(1e-3, 30), min_size=2, max_size=6))
def test_a_smaller_target_never_gives_a_slower_plan(request: dict[str, Any], targets: list[float]) -> None:
    times = [ttft(BY_BUDGET[-1], **request, ttft_target_s=target) for target in sorted(targets)]
    assert times == sorted(times)


MEMORY_BYTES = [1e9, 2e9, 4e9, 6e9, 8e9, 12e9, 20e9, 40e9]
BY_MEMORY = [planner(memory_budget_bytes=budget, loss_budget_nats=0.4) for budget in MEMORY_BYTES]


@settings(max_examples=200)
@given(request=st.fixed_dictionaries({**REQUESTS, "sensitivity": st.just("latency")}))
def test_a_larger_memory_budget_never_slows_a_latency_sensitive_request(request: dict[str, Any]) -> None:
    times = []
    for one in BY_MEMORY:
        try:
            times.append(ttft(one, **request))
        except PlanError:
            times.append(math.inf)  # nothing fits
    assert times == sorted(times, reverse=True)


@settings(max_examples=200)
@given(prompt=st.integers(1, 1 << 24), target=st.none() | st.floats(1e-3, 30))
def test_no_length_turns_an_accuracy_sensitive_request_into_a_fill(prompt: int, target: float | None) -> None:
    request = {"prompt_tokens": prompt, "sensitivity": "accuracy", "ttft_target_s": target}
    assert json.loads(BY_BUDGET[-1].plan(json.dumps(request)))["tier"] == "exact"


@settings(max_examples=50)
@given(
    rows=st.lists(
        st.tuples(
            st.integers(1, 300_000),
            st.floats(0, 0.999),
            st.integers(0, 4000),
            st.integers(0, 2),
            st.just(math.nan) | st.floats(1e-3, 30),
        ),
        max_size=20,
    )
)
def test_a_trace_is_its_requests_one_by_one(rows: list[tuple[int, float, int, int, float]]) -> None:
    one = BY_BUDGET[4]
    requests = [
        {
            "prompt_tokens": prompt,
            "cached_tokens": int(prompt * cached),
            "output_tokens": output,
            "sensitivity": ("latency", "balanced", "accuracy")[code],
            "ttft_target_s": None if math.isnan(target) else target,
        }
        for prompt, cached, output, code, target in rows
    ]
    column = {
        name: np.array([r[name] for r in requests], dtype=np.int64) for name in list(REQUESTS) if "tokens" in name
    }
    chosen, seconds, exact = one.plan_trace(
        column["prompt_tokens"],
        cached_tokens=np.array([r["cached_tokens"] for r in requests], dtype=np.int64),
        output_tokens=column["output_tokens"],
        sensitivity=np.array([row[3] for row in rows], dtype=np.uint8),
        ttft_target_s=np.array([row[4] for row in rows], dtype=np.float64),
    )
    assert len(chosen) == len(seconds) == len(exact) == len(rows)
    for request, index, time, exact_time in zip(requests, chosen, seconds, exact, strict=True):
        single = json.loads(one.plan(json.dumps(request)))
        tier, split, tail, loss = one.candidates[index]
        assert (tier, split, tail, loss) == (single["tier"], single["split"], single["tail"], single["loss_nats"])
        assert (time, exact_time) == (single["ttft_s"], single["exact_ttft_s"])


def test_a_trace_names_what_is_wrong() -> None:
    one, prompts = planner(memory_budget_bytes=2e9), np.array([100, 10_000_000])
    chosen, seconds, _ = one.plan_trace(prompts)
    assert chosen.tolist() == [0, -1]
    assert math.isnan(seconds[1])
    with pytest.raises(PlanError, match="trace: request 1: cached_tokens is 10000000"):
        one.plan_trace(prompts, cached_tokens=prompts - np.array([1, 0]))
    with pytest.raises(PlanError, match="sensitivity has 1 entries; prompt_tokens has 2"):
        one.plan_trace(prompts, sensitivity=np.array([1], dtype=np.uint8))
    with pytest.raises(ValueError, match="not contiguous"):
        one.plan_trace(np.arange(10, dtype=np.int64)[::2])
