"""The auto tier: exact or speed at each call, by the planner, and status says which and why."""

from __future__ import annotations

import dataclasses
import inspect
import json
from typing import Any

import pytest
import torch
from tiny import SPLIT, prompt, random_maps, tiny_model
from torch import nn
from transformers import DynamicCache

import ridgefill
from ridgefill.errors import PlanError
from ridgefill.layout import cache_argument_name
from ridgefill.maps import RidgeMaps

ROWS, TAIL, HEAD, MIN_BULK = 160, 32, 4, 16
SETTINGS: dict[str, Any] = {"tier": "auto", "tail": TAIL, "head": HEAD, "min_bulk": MIN_BULK}


@pytest.fixture(scope="module")
def llama() -> nn.Module:
    return tiny_model("llama")


def maps(model: nn.Module, dnll: float | None, **gate: Any) -> RidgeMaps:
    results = [] if dnll is None else [{"split": SPLIT, "tier": "speed", "dnll": dnll, **gate}]
    return dataclasses.replace(random_maps(model), gate={"results": results})


def run(model: nn.Module, rows: int = ROWS, **kwargs: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(prompt(rows), use_cache=True, logits_to_keep=1, **kwargs).logits


def test_auto_is_speed_where_the_gate_allows_it(llama: nn.Module) -> None:
    with ridgefill.attach(llama, maps(llama, 0.03), **{**SETTINGS, "tier": "speed"}):
        speed = run(llama)
    with ridgefill.attach(llama, maps(llama, 0.03), **SETTINGS) as attachment:
        assert torch.equal(run(llama), speed)
        status = attachment.status()
        assert (status["tier"], status["ran"]) == ("auto", "speed")
        assert status["reason"] == "fill; the fastest plan within the loss budget of 0.05 nats"
        run(llama, TAIL + HEAD + 2)
        status = attachment.status()
        assert (status["ran"], status["rows_filled"]) == ("exact", 0)
        assert "are fewer than" in status["reason"]


@pytest.mark.parametrize(
    ("dnll", "gate", "words"),
    [
        (None, {}, f"the policy holds no gate result for split {SPLIT}, tier speed"),
        (0.06, {}, "its measured loss of 0.06 nats is over the budget of 0.05"),
        (0.01, {"tail": TAIL + 1}, "the policy holds no gate result"),  # measured with a longer tail than this one
    ],
)
def test_auto_is_exact_where_nothing_allows_a_fill(
    llama: nn.Module, dnll: float | None, gate: dict[str, Any], words: str
) -> None:
    stock = run(llama)
    with ridgefill.attach(llama, maps(llama, dnll, **gate), **SETTINGS) as attachment:
        assert torch.equal(run(llama), stock)
        status = attachment.status()
    assert status["ran"] == "exact"
    assert words in status["reason"]


def test_a_larger_budget_allows_more_and_nonsense_is_refused(llama: nn.Module) -> None:
    with ridgefill.attach(llama, maps(llama, 0.06), loss_budget=0.1, **SETTINGS) as attachment:
        run(llama)
        assert attachment.status()["ran"] == "speed"
    with pytest.raises(PlanError, match="loss_budget_nats is -1"):
        ridgefill.attach(llama, maps(llama, 0.06), loss_budget=-1, **SETTINGS)
    with ridgefill.attach(llama, maps(llama, 0.06), **SETTINGS):  # the refused attach left nothing behind
        pass


@pytest.mark.parametrize("by_position", [False, True])
def test_cached_rows_count(llama: nn.Module, by_position: bool) -> None:
    cache, argument = DynamicCache(config=llama.config), cache_argument_name(llama.forward)
    assert argument is not None
    asked: list[int] = []
    with ridgefill.attach(llama, maps(llama, 0.01), **SETTINGS) as attachment, torch.no_grad():
        planner = attachment.planner
        assert planner is not None

        class Listening:
            def plan(self, request: str) -> str:
                asked.append(json.loads(request)["cached_tokens"])
                return planner.plan(request)

        attachment.planner = Listening()  # type: ignore[assignment]
        for _ in range(2):
            if by_position:
                between = [None] * (list(inspect.signature(llama.forward).parameters).index(argument) - 1)
                llama(prompt(ROWS), *between, cache, use_cache=True, logits_to_keep=1)
            else:
                run(llama, **{argument: cache})
        status = attachment.status()
        assert (status["ran"], status["spans"]["fill"]) == ("speed", [ROWS, 2 * ROWS - TAIL])
    assert asked == [0, ROWS]


def test_a_prompt_in_pieces_is_planned_as_a_whole(llama: nn.Module) -> None:
    with ridgefill.attach(llama, maps(llama, 0.03), **SETTINGS) as attachment:
        attachment.prefill(prompt(60), n_ahead=100)
        status = attachment.status()
        assert (status["ran"], status["spans"]["fill"]) == ("speed", [HEAD, 60])
        assert status["reason"].startswith("fill; the fastest plan")
    with ridgefill.attach(llama, maps(llama, None), **SETTINGS) as attachment:
        attachment.prefill(prompt(60), n_ahead=100)
        assert attachment.status()["ran"] == "exact"
        assert "holds no gate result" in attachment.status()["reason"]
