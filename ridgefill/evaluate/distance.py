"""Loss on the tokens that need what is far away: most of a text does not, and hides what a fill loses (design 6)."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import cross_entropy

from ridgefill.capture import special_prefix
from ridgefill.errors import RidgeFillError
from ridgefill.evaluate.paired import PairedPrompt, Variants
from ridgefill.evaluate.quality import token_scores
from ridgefill.evaluate.stats import Interval, ratio_interval
from ridgefill.evaluate.windows import Window
from ridgefill.options import DEFAULT_SHARE

if TYPE_CHECKING:
    from torch import nn

# Rows right after the bulk lose about 2.5 times as much as the last ones (published): both ends are reported.
_END_TOKENS = 512
GROUPS = ("far-dependent", "rare repeats", "last", "after the bulk", "whole tail")
# Tokens whose short context is computed in one pass: the last of them sees so many tokens more than the first.
_STRIDE = 32
# A name or a number told more often than this is no longer a detail.
_MOST_OCCURRENCES = 4
_NAMES_AND_NUMBERS = re.compile(r"\b(?:[A-Z]\w+|\d+)\b")


@dataclass(frozen=True)
class FarSettings:
    """What counts as far.

    Attributes:
        window: the short context, in tokens.
        threshold: a token is far-dependent if the short context costs it more than so many nats.
    """

    window: int = 128
    threshold: float = 1.0


@torch.no_grad()
def short_context_losses(
    model: nn.Module, ids: torch.Tensor, tail: int, window: int, prefix: Sequence[int] = ()
) -> torch.Tensor:
    """Return the losses of a tail's next tokens, nats ``[tail - 1]``, with little more than ``window`` tokens seen.

    The first of each block of 32 sees ``window`` tokens, the last 31 more; ``prefix`` (what the tokenizer puts before
    every text) stands before them. ``ids`` is ``[1, rows]``. Cost: ``(window + 32) / 32`` rows for each token.
    """
    rows, losses = ids.shape[1], []
    before = torch.tensor([list(prefix)], dtype=ids.dtype, device=ids.device)
    for first in range(rows - tail + 1, rows, _STRIDE):  # positions of the tokens that are predicted
        end = min(first + _STRIDE, rows)
        start = max(0, first - window)
        context = ids[:, start : end - 1]
        if start and len(prefix):
            context = torch.cat([before, context], dim=1)
        logits = model(context, use_cache=False, logits_to_keep=end - first).logits[0]  # [end - first, vocab]
        losses.append(cross_entropy(logits.float(), ids[0, first:end], reduction="none").double().cpu())
    return torch.cat(losses)


def next_token_losses(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Return the losses ``[tail - 1]``, nats, float64 on the CPU, of tail logits ``[tail, vocab]`` of ``ids``."""
    labels = ids[0, ids.shape[1] - logits.shape[0] + 1 :].to(logits.device)
    return cross_entropy(logits[:-1].float(), labels, reduction="none").double().cpu()


def rare_repeats(tokenizer: Any, ids: torch.Tensor, tail: int, window: int, first_row: int = 0) -> torch.Tensor:
    """Return which next tokens of a tail, bool ``[tail - 1]``, belong to a name or number told in the bulk only.

    A name is a capitalised word. It is rare if the prompt ``[1, rows]`` has it at most four times, and told in the bulk
    if it begins in rows ``[first_row, rows - tail)`` and not again in the ``window`` tokens before its repetition.
    """
    pieces = [_spelled(piece) for piece in tokenizer.convert_ids_to_tokens(ids[0].tolist())]
    token_of = [number for number, piece in enumerate(pieces) for _ in piece]  # by character
    told: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for match in _NAMES_AND_NUMBERS.finditer("".join(pieces)):
        told[match[0]].append((token_of[match.start()], token_of[match.end() - 1]))
    fill_end = ids.shape[1] - tail
    found = torch.zeros(tail - 1, dtype=torch.bool)
    for places in told.values():
        if len(places) > _MOST_OCCURRENCES:
            continue
        for number, (first, last) in enumerate(places):
            before = [start for start, _ in places[:number]]
            in_bulk = any(first_row <= start < fill_end for start in before)
            if first > fill_end and in_bulk and all(start < first - window for start in before):
                found[first - fill_end - 1 : last - fill_end] = True
    return found


def _spelled(piece: str) -> str:
    """A token's own spelling, with the spaces and line ends that byte-level and SentencePiece vocabularies mark."""
    return piece.replace("\u0120", " ").replace("\u2581", " ").replace("\u010a", "\n")


@dataclass(frozen=True)
class GroupScore:
    """One document, split and variant on one group of tokens: sums over ``tokens`` tokens, nats; ready for JSON."""

    document: str
    split: int
    variant: str
    group: str
    tokens: int
    kl: float
    dnll: float
    agree: float


def score_document(
    variants: Variants,
    tokenizer: Any,
    document: Window,
    settings: Sequence[tuple[int, str]],
    *,
    tail: int,
    head: int = 4,
    share: float = DEFAULT_SHARE,
    far: FarSettings = FarSettings(),
) -> list[GroupScore]:
    """Return every group of `GROUPS`, and of distances ``distance [from, to)`` from the bulk's end, for each setting.

    Settings are (split, variant) pairs of `PairedPrompt.variant`. Cost: one stock prefill, the short contexts, and
    for each setting its tail and what it writes of its late layers (`PairedPrompt.filled`).

    Raises:
        RidgeFillError: a variant that fills predicted no row.
    """
    ids = document.ids.to(variants.layout.embeddings.device)
    prompt = PairedPrompt(variants, ids, tail=tail, head=head, splits=sorted({split for split, _ in settings}))
    short = short_context_losses(variants.model, ids, tail, far.window, special_prefix(tokenizer))
    groups = token_groups(short - next_token_losses(prompt.stock, ids), far.threshold)
    groups["rare repeats"] = rare_repeats(tokenizer, ids, tail, far.window, head)
    found = []
    for split, variant in settings:
        with prompt.variant(split, variant, share=share) as filled:
            if not filled.rows_filled and variant not in ("stock", "no bulk", "drop"):
                raise RidgeFillError(f"{document.name}, split {split}, {variant}: no row was filled")
            scores = token_scores(prompt.stock, filled.logits, ids)
        name = f"{document.kind}/{document.name}"
        for group, mask in groups.items():
            sums = (float(of[: tail - 1][mask].sum()) for of in (scores.kl, scores.dnll, scores.agree))
            found.append(GroupScore(name, split, variant, group, int(mask.sum()), *sums))
    return found


def token_groups(gain: torch.Tensor, threshold: float) -> dict[str, torch.Tensor]:
    """Return masks ``[tail - 1]`` by name; ``gain`` is what far context saves each token, nats ``[tail - 1]``."""
    count = len(gain)
    position = torch.arange(count)
    end = min(_END_TOKENS, (count + 1) // 2)
    groups = {
        "far-dependent": gain > threshold,
        "last": position >= count - end,
        "after the bulk": position < end,
        "whole tail": position >= 0,
    }
    low, high = 0, 32
    while low < count:
        groups[f"distance [{low}, {high})"] = (position >= low) & (position < high)
        low, high = high, 2 * high
    return groups


@dataclass(frozen=True)
class GroupSummary:
    """A group over all documents: means per token with their 95% intervals, paired by document; nats and a share."""

    tokens: int
    documents: int
    kl: Interval
    dnll: Interval
    agree: Interval


def summarise(scores: Sequence[GroupScore], split: int, variant: str, group: str) -> GroupSummary | None:
    """Return one group of one setting over the documents that have such tokens, or None where fewer than two have.

    A document without any would leave resamples in which there is nothing to divide by.

    Raises:
        RidgeFillError: there are fewer than two documents.
    """
    of_setting = [s for s in scores if (s.split, s.variant, s.group) == (split, variant, group)]
    own = [s for s in of_setting if s.tokens]
    if len(own) < 2 <= len(of_setting):
        return None
    counts = [float(s.tokens) for s in own]
    figures = (ratio_interval([getattr(s, name) for s in own], counts) for name in ("kl", "dnll", "agree"))
    return GroupSummary(int(sum(counts)), len(own), *figures)


def differences(
    scores: Sequence[GroupScore], split: int, variant: str, other: str, group: str, figure: str = "kl"
) -> list[float]:
    """Return variant minus other, mean per token, for each document that has tokens of this group."""

    def means(name: str) -> dict[str, float]:
        own = (s for s in scores if (s.split, s.variant, s.group) == (split, name, group) and s.tokens)
        return {s.document: getattr(s, figure) / s.tokens for s in own}

    first, second = means(variant), means(other)
    return [first[document] - second[document] for document in first if document in second]
