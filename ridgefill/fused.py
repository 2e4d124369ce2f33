"""Fused maps: from the split layer's features straight to keys and values, all late layers in one product.

Ridge is linear in its target, so a layer's projections and its map make one matrix (design section 2.1):

    K = s (x M_k + c_k) + b_k     M = W diag(g) [Wk | Wv],   c = b diag(g) [Wk | Wv],   s = 1 / rms(x W + b)

``g`` is the layer norm's gain and ``b_k`` the projection's own bias, which the row scale does not touch. The scale
needs the prediction's length alone: ``d rms^2 = |x W + b|^2`` is taken from its ``r`` principal directions ``U``, found
by the fit in the calibration rows' own metric, and the mean energy of the others. Beside each layer's M lies its
``W U``, so one product of ``n_in x (2 kv_dim + r)`` replaces two of ``n_in x d`` and ``d x 2 kv_dim``.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ridgefill.layout import key_norm
from ridgefill.matrices import dense
from ridgefill.residency import Copies, Dense, Held, Holding, Streamed, held_bytes
from ridgefill.synth import ResidentMap, resident_gain
from ridgefill.writers import key_rotation, probe_layers

if TYPE_CHECKING:
    import torch
    from torch import nn

    from ridgefill.layout import DecoderLayout
    from ridgefill.maps import LayerMap, SplitMaps
    from ridgefill.writers import LayerWriter

# Fused and two-step keys on the same row scale differ by rounding: 8 bits of bfloat16 a few times over.
_MOST_DIFFERENCE = 0.05


@dataclass(frozen=True)
class FusedLayer:
    """One late layer's columns of the product, and what its epilogue does with them."""

    columns: slice  # of z: keys, values, then the scale's directions
    kv_dim: int
    head_dim: int
    hidden_size: int
    residual: float  # mean energy of a prediction outside the scale's directions
    eps: float
    key_bias: torch.Tensor | None  # [kv_dim]
    value_bias: torch.Tensor | None
    k_norm: nn.Module | None
    rotate: Callable[[torch.Tensor, Any], torch.Tensor]
    key_gain: torch.Tensor | None  # [kv_heads, 1, 1]
    value_gain: torch.Tensor | None

    @property
    def rank(self) -> int:
        """Directions from which the row scale is taken."""
        return int(self.columns.stop - self.columns.start) - 2 * self.kv_dim

    def scale(self, z: torch.Tensor) -> torch.Tensor:
        """``1 / rms`` of the predictions whose columns are ``z`` ``[batch, rows, columns]``: ``[batch, rows, 1]``."""
        energy = z[..., 2 * self.kv_dim :].float().square().sum(-1, keepdim=True) + self.residual
        return (energy / self.hidden_size + self.eps).rsqrt().to(z.dtype)

    def keys_values(
        self, z: torch.Tensor, tables: Any, scale: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The epilogue: row scale, biases, k_norm, rotation, gains.

        Args:
            z: ``[batch, rows, columns]``, this layer's columns of the product.
            tables: its rotary tables for these rows.
            scale: the rows' scale ``[batch, rows, 1]`` where it is known better than from ``z``.

        Returns:
            Keys and values ``[batch, kv_heads, rows, head_dim]``.
        """
        scale = self.scale(z) if scale is None else scale
        keys, values = z[..., : self.kv_dim] * scale, z[..., self.kv_dim : 2 * self.kv_dim] * scale
        if self.key_bias is not None:
            keys = keys + self.key_bias
        if self.value_bias is not None:
            values = values + self.value_bias
        heads = (*z.shape[:-1], -1, self.head_dim)
        keys, values = keys.reshape(heads).transpose(1, 2), values.reshape(heads).transpose(1, 2)
        if self.k_norm is not None:
            keys = self.k_norm(keys)
        keys = self.rotate(keys, tables)
        return (
            keys if self.key_gain is None else keys * self.key_gain,
            values if self.value_gain is None else values * self.value_gain,
        )


@dataclass(frozen=True)
class FusedMaps:
    """All late layers' fused maps of one split, side by side; layers of one sliding window, or of none, together."""

    weights: Held | Streamed  # [n_in, columns]
    bias: torch.Tensor  # [columns], on the device and in the dtype of the products
    layers: dict[int, FusedLayer]  # in the order of their columns

    @property
    def nbytes(self) -> int:
        """Bytes it takes on its device; of maps on the host, that of their slots."""
        weights = self.weights
        size = weights.slots * weights.slot_bytes if isinstance(weights, Streamed) else held_bytes(weights)
        return size + self.bias.nbytes

    @property
    def host_bytes(self) -> int:
        """Bytes of pinned host memory."""
        return sum(map(held_bytes, self.weights.layers)) if isinstance(self.weights, Streamed) else 0

    def groups(self, key: Callable[[int], Any]) -> list[list[int]]:
        """Layers that share a product: consecutive ones of one ``key``; alone where columns are made or fetched."""
        if isinstance(self.weights, Dense):
            return [list(group) for _, group in itertools.groupby(self.layers, key)]
        return [[layer] for layer in self.layers]

    def columns(self, groups: list[list[int]], copies: Copies) -> Iterator[tuple[list[int], torch.Tensor]]:
        """Each of these `groups` and its columns ``[n_in, columns]``: for work queued before the next is asked for."""
        if isinstance(self.weights, Streamed):
            order = list(self.layers)
            wanted = [order.index(layer) for (layer,) in groups]
            yield from zip(groups, self.weights.columns(wanted, copies), strict=False)  # the last one resumes nothing
            return
        for group in groups:
            first, last = self.layers[group[0]].columns.start, self.layers[group[-1]].columns.stop
            yield group, self.weights.columns(first, last)

    def product(self, x: torch.Tensor, layers: list[int], columns: torch.Tensor) -> tuple[torch.Tensor, int]:
        """``x M + c`` of consecutive layers, whose ``columns`` these are, for features ``[batch, rows, n_in]``.

        Returns:
            ``[batch, rows, columns]``, and the column among all layers' at which it begins.
        """
        import torch

        first, last = self.layers[layers[0]].columns.start, self.layers[layers[-1]].columns.stop
        z = torch.addmm(self.bias[first:last], x.flatten(0, 1), columns)
        return z.view(*x.shape[:2], -1), first


def fused_maps(
    split_maps: SplitMaps, layout: DecoderLayout, writers: dict[int, LayerWriter], holding: Holding | None = None
) -> tuple[FusedMaps | None, str]:
    """Derive a split's fused maps from the file's and the model's own projections; or None and why they do not exist.

    They exist where every late layer has a direct writer, an RMS norm and a scale basis in the file, and all lie on one
    device; each is compared, as it is held, with the two-step form on a few rows.

    Args:
        holding: how they are held; None: in the stream's dtype, on the device.
    """
    import torch

    holding = holding or Holding()
    order = sorted(split_maps.layers, key=lambda layer: (layout.windows[layer] or 0, layer))
    if not order:
        return None, "no late layer has a map"
    device, dtype = next(layout.layers[order[0]].parameters()).device, layout.embeddings.dtype
    if any(next(layout.layers[layer].parameters()).device != device for layer in order):
        return None, "the late layers lie on several devices"
    held: list[Held] = []
    biases: list[torch.Tensor] = []
    layers: dict[int, FusedLayer] = {}
    start = 0
    for layer in order:
        layer_map = split_maps.layers[layer]
        if reason := _obstacle(layout, layer, layer_map, writers[layer]):
            return None, reason
        weight, bias = _fuse(layout, layer, layer_map)
        layers[layer] = _fused_layer(layout, layer, layer_map, slice(start, start + weight.shape[1]))
        held.append(holding.layer(weight, dtype))
        biases.append(bias.to(dtype))
        start += weight.shape[1]
    fused = FusedMaps(holding.together(held, device), torch.cat(biases), layers)
    calls, _, _ = probe_layers(layout)
    worst = 0.0
    for layer in order:
        difference = _difference(fused, layout, split_maps.layers[layer], writers[layer], calls[layer])
        if not difference <= _MOST_DIFFERENCE:  # NaN too
            return None, f"layer {layer}: fused and two-step keys and values differ by {difference:.0%} on probe rows"
        worst = max(worst, difference)
    return fused, f"within {worst:.1%} of the two-step form on probe rows"


def _obstacle(layout: DecoderLayout, layer: int, layer_map: LayerMap, writer: LayerWriter) -> str | None:
    module = layout.layers[layer]
    if writer.name != "direct":
        return f"layer {layer} has no direct writer: {writer.reason}"
    norm: Any = module.input_layernorm
    if not is_rms_norm(norm):
        return f"layer {layer}: its input norm is a {type(norm).__name__}, not an RMS norm"
    if layer_map.scale_basis is None or layer_map.scale_residual is None:
        return f"layer {layer}: the file holds no scale basis; fit the maps again"
    return None


def is_rms_norm(norm: nn.Module) -> bool:
    """Whether a norm divides rows by their root mean square, multiplies them by a gain, and does nothing else."""
    return "RMS" in type(norm).__name__ and getattr(norm, "bias", None) is None


def _eps(layout: DecoderLayout, layer: int) -> float:
    norm: Any = layout.layers[layer].input_layernorm
    return float(getattr(norm, "variance_epsilon", getattr(norm, "eps", 0.0)))


def _fuse(layout: DecoderLayout, layer: int, layer_map: LayerMap) -> tuple[torch.Tensor, torch.Tensor]:
    """One layer's ``[n_in, 2 kv_dim + r]`` columns and their bias, in float32."""
    import torch

    module: Any = layout.layers[layer]
    device = next(module.parameters()).device
    weight, bias = dense(layer_map.weight, torch.float32, device), layer_map.bias.to(device).float()
    rows = torch.cat([weight, bias.unsqueeze(0)])  # the bias goes through the projections like one more row
    with torch.no_grad():
        # An RMS norm hands its gain over when it is given ones: rms(1 ... 1) = 1, but for eps.
        ones = torch.ones(1, rows.shape[1], device=device, dtype=layout.embeddings.dtype)
        gained = rows * module.input_layernorm(ones).float() * (1 + _eps(layout, layer)) ** 0.5
        assert layer_map.scale_basis is not None  # an obstacle, were it missing
        parts = [
            _project(module.self_attn.k_proj, gained),
            _project(module.self_attn.v_proj, gained),
            rows @ dense(layer_map.scale_basis, torch.float32, device),
        ]
    fused = torch.cat(parts, dim=1)
    return fused[:-1], fused[-1]


def _project(projection: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    """``rows`` through the linear part of a projection, its bias left out, in float32."""
    import torch
    from torch import nn

    if type(projection) is nn.Linear:
        return rows @ projection.weight.float().T
    # Packed or adapted weights: through the module itself, less what it makes of zero.
    dtype = next((p.dtype for p in projection.parameters() if p.is_floating_point()), torch.float32)
    rows = rows.to(dtype)
    projected: torch.Tensor = projection(rows).float() - projection(torch.zeros_like(rows[:1])).float()
    return projected


def _fused_layer(layout: DecoderLayout, layer: int, layer_map: LayerMap, columns: slice) -> FusedLayer:
    attention: Any = layout.layers[layer].self_attn
    device, dtype = next(attention.parameters()).device, layout.embeddings.dtype
    rotate = key_rotation(attention)
    assert rotate is not None  # a direct writer has it
    assert layer_map.scale_basis is not None  # obstacles, were they missing
    assert layer_map.scale_residual is not None

    def bias(projection: nn.Module) -> torch.Tensor | None:
        found: torch.Tensor | None = getattr(projection, "bias", None)
        return None if found is None else found.detach().to(dtype)

    return FusedLayer(
        columns=columns,
        kv_dim=(columns.stop - columns.start - layer_map.scale_basis.shape[1]) // 2,
        head_dim=int(attention.head_dim),
        hidden_size=layout.hidden_size,
        residual=float(layer_map.scale_residual),
        eps=_eps(layout, layer),
        key_bias=bias(attention.k_proj),
        value_bias=bias(attention.v_proj),
        k_norm=key_norm(attention),
        rotate=rotate,
        key_gain=resident_gain(layer_map.key_gain, device, dtype),
        value_gain=resident_gain(layer_map.value_gain, device, dtype),
    )


def _difference(
    fused: FusedMaps, layout: DecoderLayout, layer_map: LayerMap, writer: LayerWriter, call: dict[str, Any]
) -> float:
    """How far one layer's fused keys or values are from the two-step ones on a few random rows: relative, the worse.

    Both get the two-step prediction's own row scale: how well the file's basis gives it is a figure of the fit.
    """
    import torch

    layer_kwargs = {name: value for name, value in call.items() if name != "hidden_states"}
    rows, dtype, device = call["hidden_states"].shape[1], fused.bias.dtype, fused.bias.device
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, rows, layer_map.weight.shape[0], generator=generator).to(device, dtype)
    layer = fused.layers[layer_map.layer]
    two_step = ResidentMap.of(layer_map, device, dtype)
    with torch.no_grad():
        predicted = two_step.predict(x)
        expected = two_step.scaled(*writer.write(predicted, layer_kwargs))
        scale = (predicted.float().square().mean(-1, keepdim=True) + layer.eps).rsqrt().to(dtype)
        _, columns = next(fused.columns([[layer_map.layer]], Copies()))
        z, _ = fused.product(x, [layer_map.layer], columns)
        found = layer.keys_values(z, layer_kwargs["position_embeddings"], scale)
    differences = [
        (ours - theirs).float().norm() / theirs.float().norm().clamp_min(1e-30)
        for ours, theirs in zip(found, expected, strict=True)
    ]
    return float(torch.stack(differences).max())  # torch's maximum of a NaN is NaN
