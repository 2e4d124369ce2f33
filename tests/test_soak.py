"""Many mixed requests, one after the other: what is planned is what is filled, and nothing is left behind."""

from __future__ import annotations

import copy
import gc
import random
from typing import Any

import pytest
import torch
from tiny import SPLIT, TAIL, call, left_padded, prompt, random_maps, tiny_model
from transformers import DynamicCache

import ridgefill
from ridgefill import _core, rows

HEAD, MIN_BULK = 4, 16
SETTINGS: dict[str, Any] = {"tail": TAIL, "head": HEAD, "min_bulk": MIN_BULK}
# A request that leaves its tensors behind would add hundreds; threads' own caches come and go.
_SPARE_TENSORS = 8


def live_tensors() -> int:
    gc.collect()
    return sum(type(thing) is torch.Tensor for thing in gc.get_objects())


def planned(cached: int, count: int, pads: int) -> int:
    head = max(HEAD + pads, cached)
    decision = _core.decide(
        cached_tokens=cached, step_tokens=count, tail=TAIL, head=head, min_bulk=MIN_BULK, logits_to_keep=1
    )
    return decision.rows_filled if count >= TAIL + MIN_BULK else 0


def fails(*_: Any) -> None:
    raise ZeroDivisionError("a hook of the test")


@pytest.mark.parametrize("requests", [100, pytest.param(2000, marks=pytest.mark.slow)])
def test_mixed_requests(requests: int) -> None:
    draw = random.Random(0)
    models = {family: tiny_model(family) for family in ("llama", "gemma3", "mixtral")}
    filling = {
        family: ridgefill.attach(model, random_maps(model), tier="quality", share=0.2, **SETTINGS)
        for family, model in models.items()
    }
    twins = {family: copy.deepcopy(model) for family, model in models.items()}
    plumbs = [ridgefill.attach(twin, random_maps(twin), tier="plumb", share=0.2, **SETTINGS) for twin in twins.values()]
    filled = cancelled = compared = at_first = 0
    for number in range(requests):
        if number == 20:
            at_first = live_tensors()
        family = draw.choice(list(models))
        model, attachment = models[family], filling[family]
        first, count = draw.choice((0, 0, 25, 60)), draw.randint(30, 220)
        pads = draw.choice(((0,), (0,), (0, 6), (3, 0, 9)))
        ids, mask = left_padded(first + count, pads, seed=number) if pads != (0,) else (prompt(first + count), None)
        cache = DynamicCache(config=model.config) if draw.random() < 0.7 else DynamicCache()
        if first:
            with attachment.request(tier="exact"):
                call(model, ids[:, :first], None if mask is None else mask[:, :first], cache, 1)
        expected = planned(first, count, max(pads))
        if 4 * max(pads) > first + count:
            expected = 0
        tier = draw.choice(("quality", "quality", "speed", "exact"))
        spans = draw.choice(((), ((40, 50),)))
        handle = None
        if cancels := draw.random() < 0.1 and expected > 0 and tier != "exact":
            handle = model.model.layers[SPLIT + 1].self_attn.o_proj.register_forward_hook(fails)
        with attachment.request(tier=tier, exact_spans=spans):
            if handle is not None:
                with pytest.raises(ZeroDivisionError):
                    call(model, ids[:, first:], mask, cache, 1)
                handle.remove()
                assert cache.get_seq_length() == first
                cancelled += 1
            else:
                call(model, ids[:, first:], mask, cache, 1)
                assert cache.get_seq_length() == first + count
        status = attachment.status()
        found = status["rows_filled"] + status["rows_selected"]
        assert found == (0 if cancels or tier == "exact" else expected), (number, family, status["reason"])
        filled += found > 0
        assert rows.WAITING.selection is None
        if number % 10 == 0 and not first:
            twin = twins[family]
            with attachment.request(tier="exact"):
                stock = call(model, ids, mask, DynamicCache(config=model.config))
            plumb = call(twin, ids, mask, DynamicCache(config=twin.config))
            assert float((plumb - stock).abs().max()) <= 2e-5 * float(stock.abs().max()), (number, family)
            compared += 1
    assert filled >= requests / 2
    assert cancelled >= requests / 50
    assert compared >= requests / 40
    del ids, mask, cache
    assert live_tensors() <= at_first + _SPARE_TENSORS
    for attachment in (*filling.values(), *plumbs):
        attachment.detach()
    assert not any(m._forward_pre_hooks or m._forward_hooks for model in models.values() for m in model.modules())
