"""Which bulk rows deserve to be exact: rankings from the tail's own queries, from names, or at random (design 2.6)."""

from __future__ import annotations

import copy
import functools
import math
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ridgefill.errors import RidgeFillError, UnsupportedModelError

if TYPE_CHECKING:
    import torch
    from torch import nn

    from ridgefill.layout import DecoderLayout
    from ridgefill.prefill import Step
    from ridgefill.synth import ResidentMap

# Full-attention layers up to a gate whose queries are read: the nearest say most about those above (design 2.6).
EXACT_LAYERS = 4
# Attention scores held at once, in bytes of float32; about three times as much is live for a moment.
_SCORE_BYTES = 32 << 20
# The attention implementation under which a copied layer hands over its queries instead of attending.
_QUERIES_ONLY = "ridgefill_queries"


@dataclass(frozen=True)
class Ranking:
    """Scores of the bulk's rows, ``[batch, bulk]``: higher is chosen first, -inf never by this ranking.

    ``part`` is the share of the budget that it spends. ``log_attention``, where scores are that no more: the log of
    the largest probability that a query gives a row or a neighbour; share ``auto`` counts by it.
    """

    scores: torch.Tensor
    part: float = 1.0
    log_attention: torch.Tensor | None = None

    def among(self, rows: torch.Tensor) -> Ranking:
        """The same of some rows only, by their positions in the bulk ``[batch, count]``."""
        return self._each(lambda values: values.gather(1, rows))

    def within(self, rows: slice) -> Ranking:
        """The same of a run of rows."""
        return self._each(lambda values: values[:, rows])

    def _each(self, cut: Callable[[torch.Tensor], torch.Tensor]) -> Ranking:
        log_attention = None if self.log_attention is None else cut(self.log_attention)
        return replace(self, scores=cut(self.scores), log_attention=log_attention)


RowScorer = Callable[["TailView"], Sequence[Ranking]]


def choose_rows(rankings: Sequence[Ranking], count: int) -> torch.Tensor:
    """The ``count`` best rows, ascending: ``[batch, count]`` int64, as positions in the bulk.

    Rankings spend their parts of the budget in turn, each on rows that none before it took; the last spends what is
    left, and takes any row when it has ranked too few.
    """
    import torch

    taken = torch.zeros_like(rankings[0].scores, dtype=torch.bool)
    for sequence, chosen in enumerate(taken):
        left = count
        for number, ranking in enumerate(rankings, start=1):
            scores = ranking.scores[sequence].masked_fill(chosen, -torch.inf)
            part = min(math.ceil(ranking.part * count), left, int((scores > -torch.inf).sum()))
            if number == len(rankings):
                part = left
                scores = ranking.scores[sequence].clamp_min(torch.finfo(scores.dtype).min)
                scores = scores.masked_fill(chosen, -torch.inf)
            chosen[scores.topk(part).indices] = True
            left -= part
    return taken.nonzero()[:, 1].view(len(taken), count)


# --- scorers -------------------------------------------------------------------------------------------------------


class TailView:
    """What a scorer may look at when the tail reaches a gate: its queries, the bulk's keys, and the maps.

    Attributes:
        batch: sequences.
        first_bulk_row: the absolute position of the bulk's first row.
        bulk_rows: rows that are scored.
        exact_layers: the nearest full-attention layers up to the gate, whose queries and keys are exact; lowest first.
        predicted_layers: full-attention layers above it, whose queries and keys the maps predict.
    """

    def __init__(
        self,
        step: Step,
        stream: torch.Tensor,
        features: torch.Tensor,
        seen: Mapping[int, tuple[torch.Tensor, dict[str, Any]]],
        readers: Mapping[int, QueryReader],
        maps: Mapping[int, ResidentMap],
    ) -> None:
        self._step, self._features, self._seen, self._readers, self._maps = step, features, seen, readers, maps
        self.batch: int = stream.shape[0]
        self.first_bulk_row = step.fill_start
        self.bulk_rows = step.fill_end - step.fill_start
        self.device = stream.device
        self.exact_layers = sorted(seen)[-EXACT_LAYERS:]
        self.predicted_layers = sorted(set(maps) & set(readers) - set(seen))

    def attention(self, layer_idx: int, *, last_queries: int = 1) -> RowAttention:
        """What a layer's queries give each bulk row, those of the last ``last_queries`` rows by themselves too."""
        queries, step = self._queries(layer_idx), self._step
        found = row_attention(queries, step.fill_start, step.fill_end, step.padding, last_queries)
        return found.to(self.device)  # layers may lie on several devices

    def _queries(self, layer_idx: int) -> Queries:
        if layer_idx in self._seen:
            block_input, layer_kwargs = self._seen[layer_idx]
        else:
            block_input = self._maps[layer_idx].predict(self._features)
            # Full-attention layers share one rotary table, so the nearest one's below the gate serves those above.
            layer_kwargs = self._seen[max(self._seen)][1]
        cached = self._step.cache.layers[layer_idx]
        fill_end = self._step.fill_end
        before = (cached.keys[..., :fill_end, :], cached.values[..., :fill_end, :])
        return self._readers[layer_idx].read(block_input, layer_kwargs, before)


def rank(scorer: RowScorer, tail: TailView) -> list[Ranking]:
    """What a scorer says of the bulk's rows, checked.

    Raises:
        RidgeFillError: it gave no ranking, or scores of another shape, or NaN.
    """
    rankings = list(scorer(tail))
    expected = (tail.batch, tail.bulk_rows)
    found = [tuple(r.scores.shape) for r in rankings if tuple(r.scores.shape) != expected or r.scores.isnan().any()]
    if found or not rankings:
        what = f"scores {found[0]}, or NaN among them" if found else "no ranking"
        raise RidgeFillError(f"the scorer {scorer!r} gave {what}; expected scores [batch, bulk] = {list(expected)}")
    return rankings


@dataclass(frozen=True)
class AttentionScorer:
    """Ranks rows by the attention probabilities that heads and tail queries give them, in three ways.

    First by the mean over all: rows that everything looks at a little, as at a second head, are few and no query's
    largest, and where one of them is missing most of what the others bring is lost. Then by the mean over the last
    queries alone: a maximum over hundreds of tail queries crowds out what only the question asks for. The rest goes by
    that maximum. Rows share scores with their neighbours, because a fact is a run of rows: with the last queries as
    they are, so that an answer comes whole, with the maximum less by distance, so that a row which is hardly looked at
    brings no crowd of rows that nothing looks at.

    Attributes:
        predicted: look at the late layers too, with predicted queries and keys.
        mean_part: what the mean over all queries spends, as a part of the budget.
        last_queries: the tail's last rows that have a part of their own.
        last_part: that part.
        pool_rows: neighbours that share a score, an odd number, the row itself in the middle.
        fall: what a largest score loses for each row between neighbours, in nats.
    """

    predicted: bool = False
    mean_part: float = 0.1
    last_queries: int = 32
    last_part: float = 0.25
    pool_rows: int = 15
    fall: float = 0.5

    def __call__(self, tail: TailView) -> Sequence[Ranking]:
        """Three rankings, all of logarithms: by the mean, by the last queries, by the largest."""
        import torch

        layers = tail.exact_layers + (tail.predicted_layers if self.predicted else [])
        found = [tail.attention(layer_idx, last_queries=self.last_queries) for layer_idx in layers]
        mean = torch.stack([of_layer.mean for of_layer in found]).mean(0).log()
        at_the_end = torch.stack([of_layer.mean_at_the_end for of_layer in found]).mean(0).log()
        largest = torch.stack([of_layer.log_largest for of_layer in found]).amax(0)
        return (
            Ranking(mean, self.mean_part),
            Ranking(shared(at_the_end, self.pool_rows), self.last_part),
            Ranking(
                shared(largest, self.pool_rows, self.fall),
                1 - self.mean_part - self.last_part,
                shared(largest, self.pool_rows),
            ),
        )


@dataclass(frozen=True)
class RandomScorer:
    """The control: rows drawn at random, the same ones for the same seed."""

    seed: int = 0

    def __call__(self, tail: TailView) -> Sequence[Ranking]:
        """One ranking without meaning."""
        import torch

        generator = torch.Generator().manual_seed(self.seed)
        return (Ranking(torch.rand(tail.batch, tail.bulk_rows, generator=generator).to(tail.device)),)


@dataclass(frozen=True)
class SpanScorer:
    """Ranks the rows that the caller names and no other: a system prompt, function signatures.

    Attributes:
        spans: absolute positions ``[from, to)`` in the sequence, pads counted.
    """

    spans: Sequence[tuple[int, int]]

    def __call__(self, tail: TailView) -> Sequence[Ranking]:
        """One ranking of equals."""
        import torch

        scores = torch.full((tail.batch, tail.bulk_rows), -torch.inf, device=tail.device)
        for start, end in self.spans:
            scores[:, max(0, start - tail.first_bulk_row) : max(0, end - tail.first_bulk_row)] = 0.0
        return (Ranking(scores),)


@dataclass(frozen=True)
class EveryScorer:
    """Ranks every ``stride``-th row of the sequence and no other."""

    stride: int

    def __call__(self, tail: TailView) -> Sequence[Ranking]:
        """One ranking of equals."""
        import torch

        positions = torch.arange(tail.bulk_rows, device=tail.device) + tail.first_bulk_row
        scores = torch.zeros(tail.batch, tail.bulk_rows, device=tail.device)
        return (Ranking(scores.masked_fill(positions % self.stride != 0, -torch.inf)),)


@dataclass(frozen=True)
class UnionScorer:
    """Several scorers within one budget, each with its part of it; they choose in their order."""

    scorers: Sequence[tuple[RowScorer, float]]

    def __call__(self, tail: TailView) -> Sequence[Ranking]:
        """All their rankings."""
        return [replace(r, part=part * r.part) for scorer, part in self.scorers for r in scorer(tail)]


def shared(scores: torch.Tensor, rows: int, fall: float = 0.0) -> torch.Tensor:
    """The largest ``scores[j] - fall * |i - j|`` within ``rows`` neighbours of each row i: ``[batch, bulk]``."""
    import torch

    best = scores.clone()
    for distance in range(1, min(rows // 2, scores.shape[1] - 1) + 1):
        lowered = scores - fall * distance
        best[:, distance:] = torch.maximum(best[:, distance:], lowered[:, :-distance])
        best[:, :-distance] = torch.maximum(best[:, :-distance], lowered[:, distance:])
    return best


# --- the tail's queries --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Queries:
    """What a layer would attend with: query ``[batch, heads, tail, d]``, key ``[batch, kv_heads, columns, d]``."""

    query: torch.Tensor
    key: torch.Tensor
    scaling: float


@dataclass(frozen=True)
class RowAttention:
    """What a layer's heads and queries give each bulk row; all ``[batch, bulk]``, float32.

    Attributes:
        log_largest: the log of the largest probability.
        mean: the mean probability.
        mean_at_the_end: the mean over the last queries alone.
    """

    log_largest: torch.Tensor
    mean: torch.Tensor
    mean_at_the_end: torch.Tensor

    def to(self, device: torch.device) -> RowAttention:
        """The same on another device."""
        return RowAttention(*(of.to(device) for of in (self.log_largest, self.mean, self.mean_at_the_end)))


def row_attention(
    queries: Queries, fill_start: int, fill_end: int, padding: torch.Tensor | None, last_queries: int
) -> RowAttention:
    """Return what the queries give bulk rows, those of the last ``last_queries`` of the tail by themselves too.

    ``p_ij = exp(s q_i k_j) / sum_{m <= i} exp(s q_i k_m)``. Logit caps and sinks are left out: they change a query's
    scale, hardly the order of its rows. Computed for a few queries at a time; never heads x tail x prompt at once.
    """
    import torch

    heads, tail = queries.query.shape[1:3]
    first_last = tail - min(last_queries, tail)
    largest = torch.full((len(queries.query), fill_end - fill_start), -torch.inf, device=queries.key.device)
    sums = []
    for part in (range(first_last), range(first_last, tail)):
        total = torch.zeros_like(largest)
        for log_p in _log_attention(queries, fill_start, fill_end, padding, part):
            largest = torch.maximum(largest, log_p.amax((1, 2, 3)))
            total += log_p.exp_().sum((1, 2, 3))
        sums.append(total)
    return RowAttention(largest, (sums[0] + sums[1]) / (heads * tail), sums[1] / (heads * (tail - first_last)))


def _log_attention(
    queries: Queries, fill_start: int, fill_end: int, padding: torch.Tensor | None, part: range
) -> Iterator[torch.Tensor]:
    """What some of the queries give bulk rows, a few at a time: ``[batch, kv_heads, group, queries, bulk]``."""
    import torch

    batch, heads, tail, width = queries.query.shape
    kv_heads, columns = queries.key.shape[1:3]
    group = heads // kv_heads
    grouped = (queries.query * queries.scaling).reshape(batch, kv_heads, group, tail, width)
    keys = queries.key.transpose(-1, -2)  # [batch, kv, d, columns]
    later = torch.ones(tail, columns - fill_end, dtype=torch.bool, device=keys.device).triu(1)  # a tail row's future
    pads = None if padding is None else ~padding[:, None, None, None, :columns].bool().to(keys.device)
    step = max(1, _SCORE_BYTES // (4 * batch * heads * columns))
    for start in range(part.start, part.stop, step):
        rows = slice(start, min(start + step, part.stop))
        logits = (grouped[..., rows, :].flatten(2, 3) @ keys).float()  # [batch, kv, group * rows, columns]
        logits = logits.view(batch, kv_heads, group, -1, columns)
        logits[..., fill_end:].masked_fill_(later[rows], -torch.inf)
        if pads is not None:
            logits.masked_fill_(pads, -torch.inf)
        yield logits[..., fill_start:fill_end] - logits.logsumexp(-1, keepdim=True)


class _QueriesTaken(Exception):
    """Carries queries and keys out of a layer's forward."""

    def __init__(self, queries: Queries) -> None:
        super().__init__("the queries were taken")
        self.queries = queries


def _take_queries(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, *_: Any, scaling: float | None = None, **__: Any
) -> Any:
    raise _QueriesTaken(Queries(query, key, query.shape[-1] ** -0.5 if scaling is None else float(scaling)))


class _JoinedCache:
    """Returns cached rows and new ones together, and keeps neither."""

    def __init__(self, before: tuple[torch.Tensor, torch.Tensor]) -> None:
        self._before = before

    def update(self, keys: torch.Tensor, values: torch.Tensor, *_: Any, **__: Any) -> Any:
        import torch

        before_keys, before_values = self._before
        return torch.cat([before_keys, keys], dim=-2), torch.cat([before_values, values], dim=-2)


def _own_copy(module: nn.Module) -> Any:
    """A shallow copy that runs itself: accelerate hangs a forward on a module that is bound to that very one."""
    other: Any = copy.copy(module)
    if isinstance(forward := vars(module).get("forward"), functools.partial) and "_old_forward" in vars(module):
        other._old_forward = types.MethodType(type(module).forward, other)
        other.forward = functools.partial(forward.func, other)  # it still moves what it is given
    return other


class QueryReader:
    """Reads a decoder layer's queries and keys with the layer's own norms, projections and rotary embedding.

    The layer and its attention are copied without their weights; the copy's attention implementation is one that
    hands over what it receives. The model itself is not touched, so other threads may run it.
    """

    def __init__(self, layout: DecoderLayout, layer_idx: int) -> None:
        from transformers import AttentionInterface

        AttentionInterface.register(_QUERIES_ONLY, _take_queries)
        layer = layout.layers[layer_idx]
        names = [name for name, child in layer.named_children() if hasattr(child, "layer_idx")]
        if len(names) != 1 or not hasattr(layer.get_submodule(names[0]), "config"):
            raise UnsupportedModelError(
                f"layer {layer_idx}: cannot find the attention of a {type(layer).__name__} to read its queries"
            )
        attention = _own_copy(layer.get_submodule(names[0]))
        attention.config = copy.copy(attention.config)
        attention.config._attn_implementation = _QUERIES_ONLY
        self._layer = _own_copy(layer)
        self._layer._modules = {**layer._modules, names[0]: attention}
        self._cache_argument = layout.cache_argument
        self._name = f"{type(layer).__name__} {layer_idx}"

    def read(
        self, block_input: torch.Tensor, layer_kwargs: dict[str, Any], before: tuple[torch.Tensor, torch.Tensor]
    ) -> Queries:
        """The queries of ``block_input`` ``[batch, tail, d]`` and the keys they may see, ``before`` included.

        Raises:
            UnsupportedModelError: the layer never called its attention function.
        """
        kwargs = {**layer_kwargs, "attention_mask": None, self._cache_argument: _JoinedCache(before)}
        try:
            self._layer.forward(block_input, **kwargs)
        except _QueriesTaken as taken:
            return taken.queries
        raise UnsupportedModelError(f"{self._name} does not attend through transformers' attention functions")
