"""How well maps predict held-out rows: inputs, keys and values beside the exact ones, by late layer and kv head."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import cosine_similarity

from ridgefill.features import Features, FeatureState, unit_rms
from ridgefill.layout import input_norm, key_norm
from ridgefill.matrices import dense

if TYPE_CHECKING:
    from ridgefill.capture import BlockInputs, Window
    from ridgefill.layout import DecoderLayout
    from ridgefill.maps import RidgeMaps, SplitMaps

KEY_COSINE_PERCENTS = (1, 5, 25, 50, 75, 95, 99)


def feature_rows(features: Features, stream: torch.Tensor) -> torch.Tensor:
    """The features of a whole sequence's rows, from its first: ``[rows, d] -> [rows, n_in]``, as a fill builds them."""
    return FeatureState(features).extend(stream.unsqueeze(0))[0]


def target_rows(target: str, block_input: torch.Tensor) -> torch.Tensor:
    """What a map predicts of ``[rows, d]`` block inputs: themselves in float32, divided by their RMS if normalized."""
    return block_input.float() if target == "raw" else unit_rms(block_input)


@dataclass
class HeadSums:
    """Running sums over rows, for each kv head, of exact and predicted keys (or values): float64 ``[kv_heads]`` each.

    What gains come from, and how much of an error they take away. They stay on the rows' device until they are read.
    """

    exact_norm: torch.Tensor | float = 0.0
    predicted_norm: torch.Tensor | float = 0.0
    exact_square: torch.Tensor | float = 0.0
    predicted_square: torch.Tensor | float = 0.0
    product: torch.Tensor | float = 0.0

    def add(self, exact: torch.Tensor, predicted: torch.Tensor) -> None:
        """Add rows ``[rows, kv_heads, head_dim]``."""
        exact, predicted = exact.double(), predicted.double()
        self.exact_norm = self.exact_norm + exact.norm(dim=-1).sum(0)
        self.predicted_norm = self.predicted_norm + predicted.norm(dim=-1).sum(0)
        self.exact_square = self.exact_square + exact.square().sum((0, 2))
        self.predicted_square = self.predicted_square + predicted.square().sum((0, 2))
        self.product = self.product + (exact * predicted).sum((0, 2))

    def gain(self, kind: str) -> torch.Tensor:
        """``norm``: sum |k| / sum |k^|; ``lsq``: sum k k^ / sum k^ k^; float32 ``[kv_heads]``, 1 where k^ is zero."""
        above, below = {
            "norm": (self.exact_norm, self.predicted_norm),
            "lsq": (self.product, self.predicted_square),
        }[kind]
        above, below = torch.as_tensor(above), torch.as_tensor(below)
        return torch.where(below > 0, above / below.clamp_min(torch.finfo(torch.float64).tiny), 1.0).float().cpu()

    def errors(self) -> tuple[float, float]:
        """The relative Frobenius error over all heads, as predicted and with the best gain of each head."""
        exact, predicted, product = (
            torch.as_tensor(sums) for sums in (self.exact_square, self.predicted_square, self.product)
        )
        total = float(exact.sum())
        error = (exact - 2 * product + predicted).clamp_min(0)
        tiny = torch.finfo(torch.float64).tiny
        directional = (exact - product.square() / predicted.clamp_min(tiny)).clamp_min(0)
        return math.sqrt(float(error.sum()) / total), math.sqrt(float(directional.sum()) / total)


@dataclass
class Agreement:
    """Running comparison of one late layer's predicted and exact inputs, keys and values."""

    rows: int = 0
    input_cosine: float = 0.0
    identity_input_cosine: float = 0.0
    input_error: float = 0.0  # sums of squares
    input_square: float = 0.0
    keys: HeadSums = field(default_factory=HeadSums)
    values: HeadSums = field(default_factory=HeadSums)
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
        self.keys.add(exact[0], predicted[0])
        self.values.add(exact[1], predicted[1])

    @property
    def has_keys(self) -> bool:
        """Whether keys and values could be compared: their projections are known by name."""
        return bool(self.key_cosines)

    def metrics(self) -> dict[str, float | list[float]]:
        """The figures by their names in the file; a ratio whose denominator is zero is left out."""
        figures: dict[str, float | list[float]] = {
            "input_cosine": self.input_cosine / self.rows,
            "identity_input_cosine": self.identity_input_cosine / self.rows,
        }
        if self.input_square > 0:
            figures["input_relative_error"] = math.sqrt(self.input_error / self.input_square)
        if self.has_keys:
            cosines = torch.cat(self.key_cosines).double()
            levels = torch.tensor(KEY_COSINE_PERCENTS, dtype=torch.float64) / 100
            figures["key_cosine"] = float(cosines.mean())
            figures["key_cosine_quantiles"] = torch.quantile(cosines.cpu(), levels).tolist()
            figures["value_cosine"] = self.value_cosine / self.rows
            figures["identity_key_cosine"] = self.identity_key_cosine / self.rows
            for name, sums in (("key", self.keys), ("value", self.values)):
                if float(torch.as_tensor(sums.exact_square).sum()) > 0:
                    figures[f"{name}_relative_error"], figures[f"{name}_direction_error"] = sums.errors()
                if (predicted := float(torch.as_tensor(sums.predicted_norm).sum())) > 0:
                    figures[f"{name}_norm_ratio"] = float(torch.as_tensor(sums.exact_norm).sum()) / predicted
        return {name: _rounded(figures[name]) for name in sorted(figures)}


# By split, position among the split's candidates, and late layer.
Agreements = dict[tuple[int, int, int], Agreement]


def measure(
    layout: DecoderLayout,
    candidates: dict[int, list[SplitMaps]],
    windows: Sequence[Window],
    block_inputs: BlockInputs,
    head: int,
    report: Callable[[str, int, int | None], None],
) -> tuple[Agreements, int]:
    """Fill in every layer's held-out metrics, from a second run of a few held-out windows; returns their rows too.

    Cosines of keys and values are means over heads, then rows; quantiles are over rows. ``*_norm_ratio`` is the mean
    exact norm over the mean predicted norm; relative errors are Frobenius norms over those of the exact rows, and
    ``*_direction_error`` is what is left of them when each head has its best gain.
    """
    agreements: Agreements = {}
    rows = 0
    with torch.no_grad():
        for done, window in enumerate(windows):
            report("held-out", done, len(windows))
            inputs = block_inputs.run(window.ids)
            rows += len(window.ids) - head
            exact_pairs = {
                layer: project_keys_values(layout, layer, inputs[layer][head:])
                for layer in sorted({layer for of_split in candidates.values() for layer in of_split[0].layers})
            }
            for split, of_split in candidates.items():
                identity_pairs = {
                    layer: project_keys_values(layout, layer, inputs[split][head:].to(inputs[layer].device))
                    for layer in of_split[0].layers
                }
                for number, maps in enumerate(of_split):
                    x = feature_rows(Features.of(maps.features), inputs[split])[head:].float()
                    for layer, layer_map in maps.layers.items():
                        agreement = agreements.setdefault((split, number, layer), Agreement())
                        exact = target_rows(maps.target, inputs[layer][head:])
                        stream = inputs[split][head:].to(exact.device)
                        weight = dense(layer_map.weight, torch.float32, exact.device)
                        bias = layer_map.bias.to(exact.device)
                        predicted = torch.addmm(bias, x.to(exact.device), weight)
                        agreement.add_inputs(predicted, exact, stream.float())
                        exact_pair, identity_pair = exact_pairs[layer], identity_pairs[layer]
                        predicted_pair = project_keys_values(layout, layer, predicted.to(stream.dtype))
                        if exact_pair and predicted_pair and identity_pair:
                            agreement.add_keys_values(predicted_pair, exact_pair, identity_pair[0])
        report("held-out", len(windows), len(windows))
    for (split, number, layer), agreement in agreements.items():
        candidates[split][number].layers[layer].metrics.update(agreement.metrics())
    return agreements, rows


def measure_scale(maps: RidgeMaps, windows: Sequence[Window], block_inputs: BlockInputs, head: int) -> None:
    """Add each layer's ``scale_error`` to its metrics: the mean of ``|s_fused / s - 1|`` over held-out rows.

    ``s`` is one over the prediction's root mean square, ``s_fused`` what the scale basis makes of it.
    """
    errors: dict[tuple[int, int], list[torch.Tensor]] = {}
    with torch.no_grad():
        for window in windows:
            inputs = block_inputs.run(window.ids)
            for split, of_split in maps.splits.items():
                x = feature_rows(Features.of(of_split.features), inputs[split])[head:].float()
                for layer, layer_map in of_split.layers.items():
                    if layer_map.scale_basis is None or layer_map.scale_residual is None:
                        continue
                    weight = dense(layer_map.weight, torch.float32, x.device)
                    predicted = torch.addmm(layer_map.bias.to(x.device), x, weight)
                    basis = dense(layer_map.scale_basis, torch.float32, x.device)
                    energy = (predicted @ basis).square().sum(-1)
                    energy = energy + layer_map.scale_residual.to(x.device)
                    exact = predicted.square().sum(-1).clamp_min(torch.finfo(torch.float32).tiny)
                    errors.setdefault((split, layer), []).append(((exact / energy).sqrt() - 1).abs().cpu())
    for (split, layer), found in errors.items():
        maps.splits[split].layers[layer].metrics["scale_error"] = _rounded(float(torch.cat(found).mean()))


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
    k_norm = key_norm(attention)
    if k_norm is not None and k_norm.weight.numel() == keys.shape[-1]:
        keys = k_norm(keys).view(heads)  # over all heads at once (olmo2, olmo3)
    elif k_norm is not None:
        keys = k_norm(keys.view(heads))
    return keys.view(heads).float(), values.view(heads).float()


def _rounded(value: float | list[float]) -> float | list[float]:
    """Six digits: more would be noise, and a short header is easier to read."""
    return [round(item, 6) for item in value] if isinstance(value, list) else round(value, 6)
