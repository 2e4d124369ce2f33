"""Fit ridge maps: one pass over texts, one Cholesky per split, held-out figures for every late layer."""

from __future__ import annotations

import itertools
import json
import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import cosine_similarity

from ridgefill.capture import BlockInputs, Text, TextRecord, Window, text_windows
from ridgefill.errors import FitError
from ridgefill.layout import DecoderLayout, decoder_layout, fingerprint, input_norm
from ridgefill.maps import FEATURES, LayerMap, RidgeMaps, SplitMaps
from ridgefill.moments import CentredMoments, Moments

if TYPE_CHECKING:
    from torch import nn

# phase ("capture", "solve", "held-out"), done, total: tokens, splits, windows; total is None while unknown
Progress = Callable[[str, int, int | None], None]

LAMBDA_GRID = (1e-6, 1e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 1.0)
KEY_COSINE_PERCENTS = (1, 5, 25, 50, 75, 95, 99)
# Held-out figures are read on at most this many windows: 8,160 rows at the defaults.
_METRIC_WINDOWS = 8
# About 100 rows per input column are enough (design section 2); below 20 the map fits its rows more than the model.
_FEW_ROWS_PER_COLUMN = 20
# A file names each text until the list takes this many bytes, half of what metadata may take; the rest share an entry.
_LISTED_TEXTS_BYTES = 512 * 1024


def fit(
    model: nn.Module,
    tokenizer: Any,
    texts: Iterable[Text],
    splits: Sequence[int] = (15, 20),
    *,
    default_split: int | None = None,
    max_tokens: int | None = None,
    window_tokens: int = 1024,
    head: int = 4,
    ridge_lambda: float | str = 1e-3,
    held_out: float = 1 / 16,
    dtype: torch.dtype = torch.bfloat16,
    progress: Progress | None = None,
) -> RidgeMaps:
    """Return maps that predict each late layer's block input from the stream of each split layer.

    ``W_l = (Sxx + lambda mean(diag Sxx) I)^-1 Sxy_l`` and ``b_l = my_l - mx W_l`` over all rows but the first ``head``
    of every window (design section 2). Several splits share one forward pass; layers above the last block input and
    the language-model head do not run. Equal inputs give equal maps, byte for byte, on one machine and thread count.

    Args:
        model: a causal language model in eval mode; it runs in its own dtype, on its own device.
        tokenizer: the model's tokenizer.
        texts: strings or ``(name, text)`` pairs, where text is a string or an iterable of its pieces. With
            ``max_tokens`` and a sequence of texts, windows are drawn in turn from texts spread over the sequence.
        splits: the split layers, each ``1 <= S < num_layers``; maps cover layers ``S + 1`` to the last.
        default_split: the split that ``attach`` takes when none is named; the highest if None.
        max_tokens: stop after this many tokens, held-out ones included; None reads all texts.
        window_tokens: tokens in one forward pass.
        head: rows left out at the start of each window: attention sinks are outside the maps' domain.
        ridge_lambda: the penalty, relative to the mean diagonal of Sxx, or ``"auto"``: the value of ``LAMBDA_GRID``
            with the least held-out error, chosen for each split.
        held_out: the share of windows that never enter the sums: every ``round(1 / held_out)``-th, from the second.
        dtype: of the stored weights; held-out figures are read with the weights as stored.
        progress: called as ``progress(phase, done, total)``.

    Raises:
        FitError: an argument makes no sense, there are fewer rows than input columns, activations are not finite, or
            the normal equations are singular.
        UnsupportedModelError: the model's layout is unknown.

    Memory: the moments take ``8 d^2 (1 + late layers)`` bytes for each split (twice that with ``"auto"``), whatever
    the texts' length.
    """
    layout = decoder_layout(model)
    splits = _checked_splits(splits, layout.num_layers)
    _check_arguments(model, layout, splits, default_split, max_tokens, window_tokens, head, ridge_lambda, held_out)
    if dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise FitError(f"dtype {dtype}: a map file holds bfloat16, float16 or float32")
    report = progress or (lambda phase, done, total: None)

    sample = _Sample(layout, splits, held_out=held_out, keep_held_out_sums=ridge_lambda == "auto")
    windows = text_windows(tokenizer, texts, window_tokens=window_tokens, min_tokens=head + 1, max_tokens=max_tokens)
    with BlockInputs(layout, sample.needed_layers(), head) as block_inputs:
        report("capture", 0, max_tokens)
        for window in windows:
            sample.add(window, block_inputs)
            report("capture", sample.tokens, max_tokens)
        _check_rows(sample.rows, layout.hidden_size * len(FEATURES))
        split_maps = {}
        for done, split in enumerate(splits):
            report("solve", done, len(splits))
            split_maps[split] = _solve_split(layout, split, sample, ridge_lambda, dtype)
        report("solve", len(splits), len(splits))
        held_out_rows = _measure(layout, split_maps, sample.held_out_windows, block_inputs, report)

    return RidgeMaps(
        fingerprint=fingerprint(model, tokenizer),
        fit={
            "rows": sample.rows,
            "held_out_rows": held_out_rows,
            "head": head,
            "window_tokens": window_tokens,
            "texts": _text_entries(sample.texts),
        },
        splits=split_maps,
        default_split=max(splits) if default_split is None else default_split,
    )


def build_features(names: Sequence[str], block_inputs: dict[int, torch.Tensor], split: int) -> torch.Tensor:
    """The map's input for consecutive rows of one window: ``[rows, n_in]`` float32. The one place that builds x.

    Raises:
        FitError: a feature is unknown.
    """
    parts = []
    for name in names:
        if name != "stream":
            raise FitError(f"unknown feature {name!r}; this version fits {FEATURES}")
        parts.append(block_inputs[split].float())
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def target_rows(target: str, block_input: torch.Tensor) -> torch.Tensor:
    """What a map predicts of ``[rows, d]`` block inputs: themselves in float32, divided by their RMS if normalized."""
    hidden = block_input.float()
    if target == "raw":
        return hidden
    mean_square = hidden.square().mean(-1, keepdim=True)
    return hidden * mean_square.clamp_min(torch.finfo(torch.float32).tiny).rsqrt()


def solve_ridge(moments: CentredMoments, ridge_lambda: float) -> torch.Tensor:
    """The ridge weights ``(Sxx + lambda mean(diag Sxx) I)^-1 Sxy``: ``[n_in, n_out]`` float64, one Cholesky.

    Raises:
        FitError: the penalised Sxx is not positive definite.
    """
    penalised = moments.sxx.clone()
    penalised.diagonal().add_(ridge_lambda * float(moments.sxx.diagonal().mean()))
    factor, info = torch.linalg.cholesky_ex(penalised)
    if int(info) != 0:
        raise FitError(
            f"Sxx + lambda is not positive definite at column {int(info)} of {len(penalised)} "
            f"(lambda {ridge_lambda:g}, {moments.n} rows): use a larger lambda (1e-3) or more varied text"
        )
    return torch.cholesky_solve(moments.sxy, factor)


def squared_error(moments: CentredMoments, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """The sum over rows of ``(y - x W - b)^2`` for each output column, from the rows' moments: ``[n_out]`` float64."""
    weight = weight.double()
    spread = moments.syy - 2 * (weight * moments.sxy).sum(0) + (weight * (moments.sxx @ weight)).sum(0)
    offset = moments.y_mean - moments.x_mean @ weight - bias.double()
    return spread.clamp_min(0) + moments.n * offset.square()


def choose_lambda(fitted: CentredMoments, held_out: CentredMoments, grid: Sequence[float] = LAMBDA_GRID) -> float:
    """The grid's value with the least held-out squared error, each column relative to its own held-out variance.

    Values whose system is singular are passed over.

    Raises:
        FitError: every value's system is singular.
    """
    variance = held_out.syy.clamp_min(torch.finfo(torch.float64).tiny)
    best: tuple[float, float] | None = None
    failure: FitError | None = None
    for ridge_lambda in grid:
        try:
            weight = solve_ridge(fitted, ridge_lambda)
        except FitError as error:
            failure = error
            continue
        bias = fitted.y_mean - fitted.x_mean @ weight
        error_share = float((squared_error(held_out, weight, bias) / variance).mean())
        if best is None or error_share < best[0]:
            best = (error_share, ridge_lambda)
    if best is None:
        raise failure or FitError("lambda: the grid is empty")
    return best[1]


class _Sample:
    """What one pass over the texts leaves: sums for each split, and a few held-out windows to measure on."""

    def __init__(
        self, layout: DecoderLayout, splits: Sequence[int], *, held_out: float, keep_held_out_sums: bool
    ) -> None:
        self._layout = layout
        self._late = range(min(splits) + 1, layout.num_layers)
        self._every = round(1 / held_out) if held_out else 0
        self._windows_seen = 0
        self._stride = 1
        device = _moments_device(layout)
        width = layout.hidden_size

        def zeros() -> dict[int, Moments]:
            return {s: Moments(width * len(FEATURES), width * (layout.num_layers - 1 - s), device) for s in splits}

        self.sums = zeros()
        self.held_out_sums = zeros() if keep_held_out_sums else None
        self.held_out_windows: list[Window] = []
        self._held_out_seen = 0
        self.rows = 0
        self.tokens = 0
        self.texts: dict[int, TextRecord] = {}

    def needed_layers(self) -> set[int]:
        """The layers whose block inputs a pass must deliver."""
        return set(self.sums) | set(self._late)

    def add(self, window: Window, block_inputs: BlockInputs) -> None:
        """Put one window into the sums, or aside as held out."""
        number, self._windows_seen = self._windows_seen, self._windows_seen + 1
        self.tokens += len(window.ids)
        self.texts[id(window.text)] = window.text
        if self._every and number % self._every == 1:
            self._hold_out(window)
            sums = self.held_out_sums
        else:
            sums = self.sums
        if sums is None:
            return
        inputs = block_inputs.run(window.ids)
        rows = len(next(iter(inputs.values())))
        if sums is self.sums:
            window.text.rows += rows
            self.rows += rows
        y = self._targets(inputs)  # [rows, late layers * d]
        for split, moments in sums.items():
            x = build_features(FEATURES, inputs, split).to(moments.device)  # [rows, n_in]
            moments.add(x, y[:, y.shape[1] - moments.n_out :])

    def _targets(self, inputs: dict[int, torch.Tensor]) -> torch.Tensor:
        device = next(iter(self.sums.values())).device
        parts = [target_rows(self._layout.target(late), inputs[late]).to(device) for late in self._late]
        if not parts:  # the last layer as split: nothing to predict
            return torch.zeros(len(next(iter(inputs.values()))), 0, device=device)
        return torch.cat(parts, dim=1)

    def _hold_out(self, window: Window) -> None:
        """Keep every stride-th held-out window; a full list doubles the stride, so the kept ones stay spread."""
        if self._held_out_seen % self._stride == 0:
            if len(self.held_out_windows) == _METRIC_WINDOWS:
                self.held_out_windows = self.held_out_windows[::2]
                self._stride *= 2
            if self._held_out_seen % self._stride == 0:
                self.held_out_windows.append(window)
        self._held_out_seen += 1


def _solve_split(
    layout: DecoderLayout, split: int, sample: _Sample, ridge_lambda: float | str, dtype: torch.dtype
) -> SplitMaps:
    """Solve one split's maps, all late layers as one right-hand side, and round them to the stored dtype."""
    late = range(split + 1, layout.num_layers)
    fitted = sample.sums[split].centred()
    if isinstance(ridge_lambda, str):
        if sample.held_out_sums is None or sample.held_out_sums[split].n == 0:
            raise FitError("lambda 'auto' needs held-out windows, and the texts gave none; add text or name a lambda")
        ridge_lambda = choose_lambda(fitted, sample.held_out_sums[split].centred()) if late else LAMBDA_GRID[0]
    layers = {}
    if late:
        weight = solve_ridge(fitted, ridge_lambda).to(dtype)  # [n_in, late * d]
        # Against the rounded weight: the mean prediction stays exact where outlier dimensions have large means.
        bias = fitted.y_mean - fitted.x_mean @ weight.double()
        if not (bool(torch.isfinite(weight).all()) and bool(torch.isfinite(bias).all())):
            raise FitError(f"split {split}: maps are not finite in {dtype}; store them in bfloat16 or float32")
        width = layout.hidden_size
        for slot, layer in enumerate(late):
            columns = slice(slot * width, (slot + 1) * width)
            layers[layer] = LayerMap(
                layer, weight[:, columns].contiguous().cpu(), bias[columns].float().contiguous().cpu()
            )
    return SplitMaps(split, layers, FEATURES, _target(layout, late), float(ridge_lambda))


@dataclass
class _Agreement:
    """Running comparison of one late layer's predicted and exact inputs, keys and values."""

    rows: int = 0
    input_cosine: float = 0.0
    identity_input_cosine: float = 0.0
    input_error: float = 0.0  # sums of squares
    input_square: float = 0.0
    key_error: float = 0.0
    key_square: float = 0.0
    key_norms: list[float] = field(default_factory=lambda: [0.0, 0.0])  # exact, predicted
    value_norms: list[float] = field(default_factory=lambda: [0.0, 0.0])
    value_cosine: float = 0.0
    identity_key_cosine: float = 0.0
    key_cosines: list[torch.Tensor] = field(default_factory=list)

    def add_inputs(self, predicted: torch.Tensor, exact: torch.Tensor, stream: torch.Tensor) -> None:
        """Add ``[rows, d]`` float32 predictions, targets, and the stream as the identity prediction."""
        self.rows += len(exact)
        self.input_cosine += float(cosine_similarity(predicted, exact, dim=-1).sum())
        self.identity_input_cosine += float(cosine_similarity(stream, exact, dim=-1).sum())
        self.input_error += float((predicted - exact).square().sum())
        self.input_square += float(exact.square().sum())

    def add_keys_values(
        self,
        predicted: tuple[torch.Tensor, torch.Tensor],
        exact: tuple[torch.Tensor, torch.Tensor],
        identity_keys: torch.Tensor,
    ) -> None:
        """Add keys and values ``[rows, kv_heads, head_dim]``, float32."""
        self.key_cosines.append(cosine_similarity(predicted[0], exact[0], dim=-1).mean(-1))  # [rows]
        self.value_cosine += float(cosine_similarity(predicted[1], exact[1], dim=-1).mean(-1).sum())
        self.identity_key_cosine += float(cosine_similarity(identity_keys, exact[0], dim=-1).mean(-1).sum())
        self.key_error += float((predicted[0] - exact[0]).square().sum())
        self.key_square += float(exact[0].square().sum())
        for sums, which in ((self.key_norms, 0), (self.value_norms, 1)):
            sums[0] += float(exact[which].norm(dim=-1).sum())
            sums[1] += float(predicted[which].norm(dim=-1).sum())

    def metrics(self) -> dict[str, float | list[float]]:
        """The figures by their names in the file; a ratio whose denominator is zero is left out."""
        figures: dict[str, float | list[float]] = {
            "input_cosine": self.input_cosine / self.rows,
            "identity_input_cosine": self.identity_input_cosine / self.rows,
        }
        if self.input_square > 0:
            figures["input_relative_error"] = math.sqrt(self.input_error / self.input_square)
        if self.key_cosines:
            cosines = torch.cat(self.key_cosines).double()
            levels = torch.tensor(KEY_COSINE_PERCENTS, dtype=torch.float64) / 100
            figures["key_cosine"] = float(cosines.mean())
            figures["key_cosine_quantiles"] = torch.quantile(cosines.cpu(), levels).tolist()
            figures["value_cosine"] = self.value_cosine / self.rows
            figures["identity_key_cosine"] = self.identity_key_cosine / self.rows
            if self.key_square > 0:
                figures["key_relative_error"] = math.sqrt(self.key_error / self.key_square)
            for name, (exact, predicted) in (("key", self.key_norms), ("value", self.value_norms)):
                if predicted > 0:
                    figures[f"{name}_norm_ratio"] = exact / predicted
        return {name: _rounded(figures[name]) for name in sorted(figures)}


def _measure(
    layout: DecoderLayout,
    split_maps: dict[int, SplitMaps],
    windows: Sequence[Window],
    block_inputs: BlockInputs,
    report: Progress,
) -> int:
    """Fill in every layer's held-out metrics, from a second run of a few held-out windows; returns their rows.

    Cosines of keys and values are means over heads, then rows; quantiles are over rows. ``*_norm_ratio`` is the mean
    exact norm over the mean predicted norm; relative errors are Frobenius norms over those of the exact rows.
    """
    agreements = {(split, layer): _Agreement() for split, maps in split_maps.items() for layer in maps.layers}
    rows = 0
    with torch.no_grad():
        for done, window in enumerate(windows):
            report("held-out", done, len(windows))
            inputs = block_inputs.run(window.ids)
            rows += len(next(iter(inputs.values())))
            for layer in sorted({layer for _, layer in agreements}):
                exact_pair = project_keys_values(layout, layer, inputs[layer])
                for split, maps in split_maps.items():
                    if layer not in maps.layers:
                        continue
                    exact = target_rows(maps.target, inputs[layer])
                    stream = inputs[split].to(exact.device)
                    x = build_features(maps.features, inputs, split).to(exact.device)
                    layer_map = maps.layers[layer]
                    predicted = torch.addmm(
                        layer_map.bias.to(exact.device), x, layer_map.weight.to(exact.device).float()
                    )
                    agreement = agreements[split, layer]
                    agreement.add_inputs(predicted, exact, stream.float())
                    predicted_pair = project_keys_values(layout, layer, predicted.to(stream.dtype))
                    identity_pair = project_keys_values(layout, layer, stream)
                    if exact_pair and predicted_pair and identity_pair:
                        agreement.add_keys_values(predicted_pair, exact_pair, identity_pair[0])
        report("held-out", len(windows), len(windows))
    for (split, layer), agreement in agreements.items():
        if agreement.rows:
            split_maps[split].layers[layer].metrics.update(agreement.metrics())
    return rows


def project_keys_values(
    layout: DecoderLayout, layer_idx: int, block_input: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Keys after k_norm and before RoPE, and values, of ``[rows, d]`` block inputs: ``[rows, kv_heads, head_dim]``.

    Float32 copies of what the layer's own norm and projections give in their dtype; None where the layer has no
    ``k_proj`` and ``v_proj`` (fused projections, latent attention).
    """
    layer = layout.layers[layer_idx]
    attention: Any = getattr(layer, "self_attn", None)
    if not hasattr(attention, "k_proj") or not hasattr(attention, "v_proj"):
        return None
    norm = input_norm(layer)
    normed = block_input if norm is None else norm(block_input)
    keys, values = attention.k_proj(normed), attention.v_proj(normed)
    heads = (len(keys), -1, int(attention.head_dim))
    k_norm = getattr(attention, "k_norm", None)
    if k_norm is not None and k_norm.weight.numel() == keys.shape[-1]:
        keys = k_norm(keys).view(heads)  # over all heads at once (olmo2, olmo3)
    elif k_norm is not None:
        keys = k_norm(keys.view(heads))
    return keys.view(heads).float(), values.view(heads).float()


def _checked_splits(splits: Sequence[int], num_layers: int) -> list[int]:
    found = sorted({int(split) for split in splits})
    if not found:
        raise FitError("splits: expected at least one split layer, found none")
    for split in found:
        if not 1 <= split < num_layers:
            raise FitError(f"split {split}: expected 1 <= split < {num_layers}, the model's number of layers")
    return found


def _check_arguments(
    model: nn.Module,
    layout: DecoderLayout,
    splits: Sequence[int],
    default_split: int | None,
    max_tokens: int | None,
    window_tokens: int,
    head: int,
    ridge_lambda: float | str,
    held_out: float,
) -> None:
    if model.training:
        raise FitError("the model is in training mode (dropout would enter the maps): call model.eval() first")
    if default_split is not None and default_split not in splits:
        raise FitError(f"default_split {default_split}: expected one of the splits {list(splits)}")
    if isinstance(ridge_lambda, str) and ridge_lambda != "auto":
        raise FitError(f"ridge_lambda {ridge_lambda!r}: expected a number >= 0 or 'auto'")
    if not isinstance(ridge_lambda, str) and not (ridge_lambda >= 0 and math.isfinite(ridge_lambda)):
        raise FitError(f"ridge_lambda {ridge_lambda}: expected a finite number >= 0 or 'auto'")
    if not 0 <= held_out <= 0.5:
        raise FitError(f"held_out {held_out}: expected a share between 0 and 0.5")
    if head < 0:
        raise FitError(f"head {head}: expected >= 0")
    if window_tokens <= head + 1:
        raise FitError(f"window_tokens {window_tokens}: expected more than head + 1 = {head + 1}")
    longest = getattr(layout.config, "max_position_embeddings", None)
    if longest is not None and window_tokens > longest:
        raise FitError(f"window_tokens {window_tokens}: the model has {longest} positions (max_position_embeddings)")
    if max_tokens is not None and max_tokens < 1:
        raise FitError(f"max_tokens {max_tokens}: expected >= 1")
    _target(layout, range(min(splits) + 1, layout.num_layers))


def _check_rows(rows: int, n_in: int) -> None:
    if rows < n_in:
        raise FitError(
            f"{rows} calibration rows for {n_in} input columns: a map needs at least as many rows as columns, "
            f"and about {100 * n_in} to be good; add text"
        )
    if rows < _FEW_ROWS_PER_COLUMN * n_in:
        warnings.warn(
            f"only {rows} calibration rows for {n_in} input columns; "
            f"{_FEW_ROWS_PER_COLUMN * n_in} are few and {100 * n_in} are enough",
            UserWarning,
            stacklevel=3,
        )


def _target(layout: DecoderLayout, late: Iterable[int]) -> str:
    """The one target that all these layers share."""
    targets = {layout.target(layer) for layer in late}
    if len(targets) > 1:
        raise FitError(f"late layers differ in what a map must predict ({sorted(targets)}); one file names one target")
    return targets.pop() if targets else "normalized"


def _moments_device(layout: DecoderLayout) -> torch.device:
    """Where the sums live: beside the last layer, or on the CPU where its device has no float64."""
    device = next(layout.layers[-1].parameters()).device
    return device if device.type in ("cpu", "cuda", "xpu") else torch.device("cpu")


def _text_entries(texts: dict[int, TextRecord]) -> list[dict[str, Any]]:
    entries = [{"name": t.name, "sha256": t.digest.hexdigest(), "rows": t.rows} for t in texts.values()]
    sizes = itertools.accumulate(len(json.dumps(entry, ensure_ascii=False).encode()) + 2 for entry in entries)
    room = sum(size <= _LISTED_TEXTS_BYTES for size in sizes)
    listed, rest = entries[:room], entries[room:]
    if not rest:
        return listed
    record = TextRecord(f"{len(rest)} more texts (sha256 of their sha256s in order)", sum(t["rows"] for t in rest))
    for entry in rest:
        record.digest.update(entry["sha256"].encode())
    return [*listed, {"name": record.name, "sha256": record.digest.hexdigest(), "rows": record.rows}]


def _rounded(value: float | list[float]) -> float | list[float]:
    """Six digits: more would be noise, and a short header is easier to read."""
    return [round(item, 6) for item in value] if isinstance(value, list) else round(value, 6)
