"""A million requests planned from Python in one call: seconds, plans a second, and that they are the plans one by one.

    python benches/traces.py                 exits with 1 when the bar of issue 6 is missed (a release build meets it)
    python benches/traces.py --requests 1000 --checked 100

The trace: prompts of 64 to 262,144 tokens (uniform in their logarithm), half of them with a cached prefix, every
sensitivity, half of the requests with a TTFT target; seven candidates for a Llama of 8 billion parameters. Columns in,
columns out.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from typing import Any

import numpy as np

from ridgefill import _core
from ridgefill.traces import SENSITIVITIES, plan_trace

# Issue 6: seconds for a million requests.
BAR_S = 2.0
LLAMA_8B = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
}


def make_planner() -> _core.Planner:
    """Three splits, each measured in both tiers."""
    maps = [
        {
            "split": split,
            "fused_rank": 128,
            "gates": [{"tier": "quality", "dnll": loss / 4, "share": 0.1}, {"tier": "speed", "dnll": loss}],
        }
        for split, loss in ((12, 0.2), (16, 0.04), (20, 0.02))
    ]
    policy = {
        "rates": json.loads(_core.device_rates("h100")),
        "maps": maps,
        "loss_budget_nats": 0.25,
        "memory_budget_bytes": 200e9,  # every request has a plan
    }
    return _core.Planner(_core.describe_model(json.dumps(LLAMA_8B)), json.dumps(policy))


def make_trace(count: int) -> dict[str, Any]:
    """The same trace on every machine."""
    random = np.random.default_rng(0)
    prompts = np.exp2(random.uniform(6, 18, count)).astype(np.int64)
    cached = np.where(random.random(count) < 0.5, 0, prompts * random.uniform(0, 0.9, count)).astype(np.int64)
    targets = np.where(random.random(count) < 0.5, np.nan, random.uniform(1e-3, 4, count))
    return {
        "prompt_tokens": prompts,
        "cached_tokens": cached,
        "output_tokens": random.integers(0, 2048, count),
        "sensitivity": random.integers(0, 3, count),
        "ttft_target_s": targets,
    }


def check(planner: _core.Planner, trace: dict[str, Any], found: dict[str, Any], count: int) -> None:
    """Stop when the first requests are not what `Planner.plan` says one by one."""
    for index in range(count):
        request = {name: column[index].item() for name, column in trace.items()}
        request["sensitivity"] = SENSITIVITIES[request["sensitivity"]]
        target = request["ttft_target_s"]
        request["ttft_target_s"] = None if math.isnan(target) else target
        single = json.loads(planner.plan(json.dumps(request)))
        tier, split, _, _ = planner.candidates[found["candidate"][index]]
        if (tier, split, found["ttft_s"][index]) != (single["tier"], single["split"], single["ttft_s"]):
            raise SystemExit(f"request {index}: planned {tier} {split}, by itself {single['tier']} {single['split']}")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=1_000_000)
    parser.add_argument("--checked", type=int, default=1000, help="so many requests are also planned one by one")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    planner, trace = make_planner(), make_trace(options.requests)
    found = plan_trace(planner, trace)
    check(planner, trace, found, min(options.checked, options.requests))
    seconds = []
    for _ in range(options.rounds):
        started = time.perf_counter()
        plan_trace(planner, trace)
        seconds.append(time.perf_counter() - started)
    median = statistics.median(seconds)
    bar = BAR_S * options.requests / 1e6
    print(
        f"{options.requests:,} requests, {len(planner.candidates)} candidates, "
        f"{int((found['candidate'] > 0).sum()):,} fills, {options.checked:,} checked: {median:.3f} s "
        f"(least {min(seconds):.3f}), {1e9 * median / options.requests:.0f} ns each, bar {bar:g} s"
    )
    if median > bar:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
