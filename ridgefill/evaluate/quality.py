"""How far a prefill is from stock: KL, loss and top-1 on the exact tail."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import log_softmax

from ridgefill.attachment import attach
from ridgefill.errors import RidgeFillError
from ridgefill.layout import cache_argument_name

if TYPE_CHECKING:
    from torch import nn

    from ridgefill.maps import RidgeMaps

# Logits that are compared at once: 4 MiB in float32. Allocators keep blocks of this size; larger ones (128 rows of
# 262,144 words) go back to the system after every operation, and three quarters of the time went into their pages.
_SCORED_LOGITS = 1 << 20


@dataclass(frozen=True)
class Score:
    """One variant against stock on one window's tail; losses and KL are means in nats per token.

    Attributes:
        kl: KL(stock || variant) over all tail positions.
        dnll: loss minus stock's over the whole tail (its last position has no next token and is left out).
        dnll_end: the same over the last ``end_tokens`` positions.
        top1: share of tail positions where both name the same most likely token.
        rows_filled: rows of each late layer that were predicted; 0 for the control that fills nothing.
    """

    kl: float
    dnll: float
    dnll_end: float
    end_tokens: int
    top1: float
    rows_filled: int


@torch.no_grad()
def last_logits(model: nn.Module, ids: torch.Tensor, count: int, cache: Any = None) -> torch.Tensor:
    """Return the logits of the last ``count`` positions, ``[batch, count, vocab]``, of one pass over ``ids``.

    ``ids`` is ``[batch, rows]``; ``cache`` holds the rows before them, if there are any, and grows by them.
    """
    arguments = {} if cache is None else {str(cache_argument_name(model.forward)): cache}
    logits: torch.Tensor = model(ids, use_cache=True, logits_to_keep=count, **arguments).logits
    return logits


def prefill_logits(model: nn.Module, ids: torch.Tensor, tail: int, cache: Any = None) -> torch.Tensor:
    """Return the logits of the last ``tail`` positions, ``[tail, vocab]``, of one prefill of ``ids`` ``[1, rows]``."""
    return last_logits(model, ids, tail, cache)[0]


@dataclass(frozen=True)
class TokenScores:
    """Two sides of one tail, token by token, float64 on the CPU; the tail's last position has no next token.

    Attributes:
        kl: KL(stock || other) at each position, nats, ``[tail]``.
        dnll: loss minus stock's of each next token, nats, ``[tail - 1]``.
        agree: 1 where both name the same most likely token, ``[tail]``.
    """

    kl: torch.Tensor
    dnll: torch.Tensor
    agree: torch.Tensor


def token_scores(stock: torch.Tensor, other: torch.Tensor, ids: torch.Tensor) -> TokenScores:
    """Compare two sets of tail logits, ``[tail, vocab]`` in any float dtype, computed in float32.

    ``ids`` is the whole prompt ``[1, rows]``; its last ``tail`` positions belong to the logits.

    Raises:
        RidgeFillError: the shapes do not match, or a logit is not finite.
    """
    tail = stock.shape[0]
    if stock.shape != other.shape or ids.shape[1] < tail or tail < 2:
        raise RidgeFillError(
            f"tail logits {tuple(stock.shape)} and {tuple(other.shape)} of a prompt {tuple(ids.shape)} do not match"
        )
    labels = ids[0, -tail:].roll(-1)  # the last one wraps round; its loss is left out below
    kl, loss_difference, agree = [], [], []
    block = max(1, _SCORED_LOGITS // stock.shape[1])
    for start in range(0, tail, block):
        rows = slice(start, start + block)
        p, q = log_softmax(stock[rows].float(), -1), log_softmax(other[rows].float(), -1)  # [rows, vocab]
        kl.append((p.exp() * (p - q)).sum(-1))
        label = labels[rows].to(p.device).unsqueeze(1)
        loss_difference.append((p.gather(1, label) - q.gather(1, label)).squeeze(1))
        agree.append(p.argmax(-1) == q.argmax(-1))
    kl_rows, dnll_rows = torch.cat(kl).double().cpu(), torch.cat(loss_difference).double()[:-1].cpu()
    if not (bool(torch.isfinite(kl_rows).all()) and bool(torch.isfinite(dnll_rows).all())):
        raise RidgeFillError("a logit is not finite; use float32 or bfloat16 and check the model's weights")
    return TokenScores(kl_rows, dnll_rows, torch.cat(agree).double().cpu())


def score_tail(stock: torch.Tensor, other: torch.Tensor, ids: torch.Tensor, *, rows_filled: int) -> Score:
    """Return the means of `token_scores`.

    The end window is the last 512 tokens of a tail of 1,024 or more, else the last half of the tail.

    Raises:
        RidgeFillError: the shapes do not match, or a logit is not finite.
    """
    found, end_tokens = token_scores(stock, other, ids), min(512, stock.shape[0] // 2)
    return Score(
        kl=float(found.kl.mean()),
        dnll=float(found.dnll.mean()),
        dnll_end=float(found.dnll[-end_tokens:].mean()),
        end_tokens=end_tokens,
        top1=float(found.agree.mean()),
        rows_filled=rows_filled,
    )


def score_fill(
    model: nn.Module,
    maps: RidgeMaps,
    ids: torch.Tensor,
    stock: torch.Tensor,
    *,
    split: int,
    tail: int,
    head: int = 4,
    min_bulk: int = 256,
) -> Score:
    """Attach ``maps``, prefill ``ids`` ``[1, rows]`` and compare with ``stock`` logits ``[tail, vocab]``.

    Raises:
        RidgeFillError: no row was filled. A run that filled nothing is an error, never a pass.
    """
    with attach(model, maps, split=split, tier="speed", tail=tail, head=head, min_bulk=min_bulk) as attachment:
        logits = prefill_logits(model, ids, tail)
        status = attachment.status()
    if not status["rows_filled"]:
        raise RidgeFillError(f"nothing was filled, so there is nothing to score: {status['reason']}")
    return score_tail(stock, logits, ids, rows_filled=int(status["rows_filled"]))
