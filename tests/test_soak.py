"""Many mixed requests, one after the other: what is planned is what is filled, and nothing is left behind.

`make test` runs a hundred; `pytest -m slow -s tests/test_soak.py` two thousand, with a line of figures at their end.
"""

from __future__ import annotations

import copy
import gc
import os
import random
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import SPLIT, TAIL, call, left_padded, prompt, random_maps, tiny_model
from transformers import DynamicCache, StaticCache

import ridgefill
from ridgefill import _core, rows

HEAD, MIN_BULK = 4, 16
SETTINGS: dict[str, Any] = {"tail": TAIL, "head": HEAD, "min_bulk": MIN_BULK}
# A request that leaves its tensors behind would add hundreds; threads' own caches come and go.
_SPARE_TENSORS = 8
# Requests of the same sizes again: what the process then takes more is left behind, or the allocator's.
_SPARE_BYTES = 64 << 20
_MOST_ROWS = 400


def live_tensors() -> int:
    gc.collect()
    return sum(type(thing) is torch.Tensor for thing in gc.get_objects())


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def planned(cached: int, count: int, pads: int) -> int:
    """What the rule alone says that a call on a cache fills."""
    if count < TAIL + MIN_BULK or 4 * pads > cached + count:
        return 0
    head = max(HEAD + pads, cached)
    decision = _core.decide(
        cached_tokens=cached, step_tokens=count, tail=TAIL, head=head, min_bulk=MIN_BULK, logits_to_keep=1
    )
    return decision.rows_filled


def fails(*_: Any) -> None:
    raise ZeroDivisionError("a hook of the test")


class Soak:
    """Three models with maps, each beside a twin in tier plumb, and a stream of requests."""

    def __init__(self) -> None:
        self.draw = random.Random(0)
        self.models = {family: tiny_model(family) for family in ("llama", "gemma3", "mixtral")}
        self.filling = {
            family: ridgefill.attach(model, random_maps(model), tier="quality", share=0.2, **SETTINGS)
            for family, model in self.models.items()
        }
        self.twins = {family: copy.deepcopy(model) for family, model in self.models.items()}
        self.plumbs = [
            ridgefill.attach(twin, random_maps(twin), tier="plumb", share=0.2, **SETTINGS)
            for twin in self.twins.values()
        ]
        self.counts: Counter[str] = Counter()

    def cache(self, model: Any) -> Any:
        kind = self.draw.random()
        if kind < 0.2:
            return StaticCache(config=model.config, max_cache_len=_MOST_ROWS)
        return DynamicCache(config=model.config) if kind < 0.75 else DynamicCache()

    def request(self, number: int) -> None:
        """One conversation: an exact beginning or none, a call that may fill or be cancelled, a later turn or none."""
        draw, family = self.draw, self.draw.choice(list(self.models))
        model = self.models[family]
        first, count = draw.choice((0, 0, 25, 60)), draw.randint(30, 220)
        pads = draw.choice(((0,), (0,), (0, 6), (3, 0, 9)))
        ids, mask = left_padded(first + count, pads, seed=number) if pads != (0,) else (prompt(first + count), None)
        cache = self.cache(model)
        if first:
            with self.filling[family].request(tier="exact"):
                call(model, ids[:, :first], None if mask is None else mask[:, :first], cache, 1)
        cancels = draw.random() < 0.1
        if not self.turn(number, family, ids[:, first:], mask, cache, first, max(pads), cancels):
            return
        if number % 10 == 0 and not first:
            self.compare(number, family, ids, mask)
        if draw.random() < 0.3:
            more, done = draw.randint(17, 120), first + count
            ids = prompt(more, batch=len(pads), seed=number + 1)
            mask = None if mask is None else torch.cat([mask, torch.ones_like(ids)], dim=1)
            self.turn(number, family, ids, mask, cache, done, max(pads), False)
            self.counts["later turns"] += 1

    def turn(
        self,
        number: int,
        family: str,
        ids: torch.Tensor,
        mask: torch.Tensor | None,
        cache: Any,
        cached: int,
        pads: int,
        cancels: bool,
    ) -> bool:
        """One call in a tier of its own; False where a hook has ended it."""
        model, attachment, count = self.models[family], self.filling[family], ids.shape[1]
        tier = self.draw.choice(("quality", "quality", "speed", "exact"))
        spans = self.draw.choice(((), ((40, 50),)))
        expected = 0 if tier == "exact" else planned(cached, count, pads)
        cancels = cancels and expected > 0
        with attachment.request(tier=tier, exact_spans=spans):
            if cancels:
                handle = model.model.layers[SPLIT + 1].self_attn.o_proj.register_forward_hook(fails)
                with pytest.raises(ZeroDivisionError):
                    call(model, ids, mask, cache, 1)
                handle.remove()
            else:
                call(model, ids, mask, cache, 1)
        assert int(cache.get_seq_length()) == cached + (0 if cancels else count), (number, family)
        assert rows.WAITING.selection is None
        status = attachment.status()
        found = status["rows_filled"] + status["rows_selected"]
        assert found == (0 if cancels else expected), (number, family, status["reason"])
        self.counts["rows planned"] += 0 if cancels else expected
        self.counts["rows filled"] += found
        self.counts["rows selected again"] += status["rows_selected_again"]
        self.counts["calls"] += 1
        self.counts["filled"] += found > 0
        self.counts["cancelled"] += cancels
        return not cancels

    def compare(self, number: int, family: str, ids: torch.Tensor, mask: torch.Tensor | None) -> None:
        """The fill fed with the true inputs is stock."""
        model, twin = self.models[family], self.twins[family]
        with self.filling[family].request(tier="exact"):
            stock = call(model, ids, mask, DynamicCache(config=model.config))
        plumb = call(twin, ids, mask, DynamicCache(config=twin.config))
        assert float((plumb - stock).abs().max()) <= 2e-5 * float(stock.abs().max()), (number, family)
        self.counts["plumb compared"] += 1

    def close(self) -> None:
        for attachment in (*self.filling.values(), *self.plumbs):
            attachment.detach()
        for model in self.models.values():
            assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())


@pytest.mark.parametrize("requests", [100, pytest.param(2000, marks=pytest.mark.slow)])
def test_mixed_requests(requests: int) -> None:
    soak, started = Soak(), time.perf_counter()
    warm = requests // 5
    for number in range(requests):
        if number == warm:
            tensors, bytes_then = live_tensors(), resident_bytes()
        soak.request(number)
    more_tensors, more_bytes = live_tensors() - tensors, resident_bytes() - bytes_then
    counts = soak.counts
    print(
        f"{requests} requests in {time.perf_counter() - started:.0f} s: {dict(counts)}; since request {warm} "
        f"{more_tensors:+d} tensors, {more_bytes / 2**20:+.1f} MiB resident"
    )
    assert counts["filled"] >= requests / 2
    assert counts["rows filled"] == counts["rows planned"]
    assert counts["cancelled"] >= requests / 50
    assert counts["plumb compared"] >= requests / 50
    assert counts["later turns"] >= requests / 8
    assert counts["rows selected again"] > 0
    assert more_tensors <= _SPARE_TENSORS
    assert more_bytes <= _SPARE_BYTES
    for attachment in soak.filling.values():
        kinds = attachment.status()["counters"]
        assert len(kinds) <= 24, f"reasons that differ by a number alone are one kind: {sorted(kinds)}"
    soak.close()
