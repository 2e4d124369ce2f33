"""Splits side by side: how many operations each saves, and what held-out prompts lose by it."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from ridgefill import _core
from ridgefill.errors import FitError
from ridgefill.evaluate.paired import PairedPrompt, Variants
from ridgefill.evaluate.quality import Score
from ridgefill.evaluate.stats import Interval, mean_interval
from ridgefill.layout import model_shape

if TYPE_CHECKING:
    from torch import nn

    from ridgefill.capture import Window
    from ridgefill.maps import RidgeMaps

# Shares of the depth, from the fastest split to the closest.
_DEPTHS = (1 / 3, 1 / 2, 3 / 5, 2 / 3, 3 / 4)
# Operations are counted for a prompt of this length and for attach's own tail.
PROMPT_TOKENS, _ATTACHED_TAIL = 8192, 512
# The last 512 tokens are the second half of a tail of this length (`evaluate.quality.score_tail`).
_TAIL_ROWS = 1024
_MIN_ROWS = 64


@dataclass(frozen=True)
class Rung:
    """One split of a ladder.

    Attributes:
        split: the layer.
        features: what its maps read.
        ratio: operations of an exact prefill of `PROMPT_TOKENS` over those of a filled one, by the cost model.
        kl: KL to stock on held-out prompts' tails, nats a token, with its 95% interval over prompts.
        dnll: loss minus stock's over the whole tail, the same way.
        dnll_end: the same over the last ``end_tokens``.
        end_tokens: 512 where held-out prompts have 2,048 rows or more, else a quarter of a prompt's rows.
        tail: rows of the whole tail.
        prompts: how many prompts.
        pareto: whether no other rung both saves more and loses less (by KL).
    """

    split: int
    features: tuple[str, ...]
    ratio: float
    kl: Interval
    dnll: Interval
    dnll_end: Interval
    end_tokens: int
    tail: int
    prompts: int
    pareto: bool = False


def ladder_splits(num_layers: int) -> list[int]:
    """The splits of a ladder over a model of so many layers: 10, 15, 18, 20 and 22 of 30."""
    highest = max(1, num_layers - 2)  # a split at the last layer has no map
    return sorted({min(max(1, round(depth * num_layers)), highest) for depth in _DEPTHS})


def ladder(
    model: nn.Module,
    maps: RidgeMaps,
    windows: Sequence[Window],
    progress: Callable[[str, int, int | None], None] | None = None,
) -> list[Rung]:
    """Return every split of ``maps`` with what it saves and loses, on the held-out windows of its fit.

    Tier speed. The same few windows chose features and gains, so losses are a little flattered: they rank splits, and
    ``ridgefill gate`` judges one. Cost: a stock prefill of each window, and what each split's late layers write.

    Raises:
        FitError: there are fewer than two windows of 64 rows or more.
    """
    longest = max((len(window.ids) for window in windows), default=0)
    prompts = [
        torch.tensor([w.ids], device=model.device) for w in windows if len(w.ids) >= max(_MIN_ROWS, longest // 2)
    ]
    if len(prompts) < 2:
        raise FitError(
            f"a ladder needs at least 2 held-out prompts of {_MIN_ROWS} rows or more, found {len(prompts)}: add text"
        )
    tail, head = min(_TAIL_ROWS, min(prompt.shape[1] for prompt in prompts) // 2), int(maps.fit["head"])
    variants, scores = Variants(model, maps), dict[int, list[Score]]()
    for done, ids in enumerate(prompts):
        if progress is not None:
            progress("ladder", done, len(prompts))
        prompt = PairedPrompt(variants, ids, tail=tail, head=head, splits=sorted(maps.splits))
        for split in maps.splits:
            scores.setdefault(split, []).append(prompt.score(split, "fill"))
    if progress is not None:
        progress("ladder", len(prompts), len(prompts))
    shape = json.dumps(model_shape(model))
    rungs = []
    for split, of_split in sorted(scores.items()):
        terms: dict[str, Any] = variants.settings(split).cost_terms
        cost = _core.prefill_cost(
            shape, prompt_tokens=PROMPT_TOKENS, split=split, tail=_ATTACHED_TAIL, head=head, **terms
        )
        kl, dnll, dnll_end = (
            mean_interval([getattr(score, name) for score in of_split]) for name in ("kl", "dnll", "dnll_end")
        )
        features, end_tokens = maps.splits[split].features, of_split[0].end_tokens
        rungs.append(Rung(split, features, cost.ratio, kl, dnll, dnll_end, end_tokens, tail, len(prompts)))
    return [replace(rung, pareto=not any(_beats(other, rung) for other in rungs)) for rung in rungs]


def _beats(other: Rung, rung: Rung) -> bool:
    """Whether ``other`` saves no less and loses no more, and is not equal in both."""
    saves, loses = (other.ratio, rung.ratio), (other.kl.estimate, rung.kl.estimate)
    return saves[0] >= saves[1] and loses[0] <= loses[1] and (saves[0] > saves[1] or loses[0] < loses[1])
