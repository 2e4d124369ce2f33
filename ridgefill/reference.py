"""The readable oracle of every fast path: float64, one step a line, no shortcuts."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from ridgefill.epilogue import EpilogueLayer, Place


def predict_block_input(stream: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """A late layer's predicted block input, ``x W + b`` (design section 2), ``[batch, rows, d]`` in float64."""
    return stream.double() @ weight.double() + bias.double()


def rms_norm(hidden_states: torch.Tensor, gain: torch.Tensor, eps: float) -> torch.Tensor:
    """``h / sqrt(mean(h^2) + eps) * gain`` over the last dimension, in float64."""
    hidden_states = hidden_states.double()
    scale = (hidden_states.pow(2).mean(-1, keepdim=True) + eps).rsqrt()
    return hidden_states * scale * gain.double()


def rotate(states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Half-split rotary embedding of ``[batch, heads, rows, dim]`` by tables ``[batch, rows, dim]``, in float64."""
    import torch

    half = states.shape[-1] // 2
    turned = torch.cat([-states[..., half:], states[..., :half]], dim=-1)
    return states * cos.double().unsqueeze(1) + turned * sin.double().unsqueeze(1)


def keys_values(
    normed: torch.Tensor,
    key_weight: torch.Tensor,
    value_weight: torch.Tensor,
    head_dim: int,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    key_bias: torch.Tensor | None = None,
    value_bias: torch.Tensor | None = None,
    key_norm: tuple[torch.Tensor, float] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys (after k_norm and RoPE) and values of normed rows, for a Llama-shaped attention, in float64.

    Args:
        normed: ``[batch, rows, d]``, the block input after the layer's own input norm.
        key_weight, value_weight: ``[kv_heads * head_dim, d]`` as ``nn.Linear`` keeps them.
        cos, sin: ``[batch, rows, head_dim]``.
        key_norm: gain ``[head_dim]`` and eps of a per-head RMS norm of the keys.

    Returns:
        Two tensors ``[batch, kv_heads, rows, head_dim]``.
    """
    batch, rows, _ = normed.shape

    def project(weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        out = normed.double() @ weight.double().T
        if bias is not None:
            out = out + bias.double()
        return out.view(batch, rows, -1, head_dim).transpose(1, 2)

    keys = project(key_weight, key_bias)
    if key_norm is not None:
        keys = rms_norm(keys, *key_norm)
    return rotate(keys, cos, sin), project(value_weight, value_bias)


def rotate_pairs(states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, interleaved: bool) -> torch.Tensor:
    """Rotary embedding of the first elements of ``[batch, heads, rows, dim]``, in float64.

    Args:
        cos, sin: ``[batch or 1, rows, rotary_dim]``; entry i multiplies element i.
        interleaved: elements ``(2i, 2i + 1)`` turn together, not ``(i, i + rotary_dim / 2)``.
    """
    import torch

    states, cos, sin = states.double(), cos.double().unsqueeze(1), sin.double().unsqueeze(1)
    turning, rest = states[..., : cos.shape[-1]], states[..., cos.shape[-1] :]
    if interleaved:
        turned = torch.stack([-turning[..., 1::2], turning[..., ::2]], dim=-1).flatten(-2)
    else:
        half = turning.shape[-1] // 2
        turned = torch.cat([-turning[..., half:], turning[..., :half]], dim=-1)
    return torch.cat([turning * cos + turned * sin, rest], dim=-1)


def epilogue(z: torch.Tensor, layer: EpilogueLayer, place: Place) -> tuple[torch.Tensor, torch.Tensor]:
    """One layer's keys and values from the product's columns (design section 2.1), in float64.

    Args:
        z: ``[batch, rows, columns]``.
        place: its tables and, where given, its scale; what it says of a cache is not read.

    Returns:
        Two tensors ``[batch, kv_heads, rows, head_dim]``.
    """
    batch, rows, _ = z.shape
    kv_dim = layer.kv_heads * layer.head_dim
    z = z.double()[..., layer.column : layer.column + 2 * kv_dim + layer.rank]
    if place.scale is None:
        energy = z[..., 2 * kv_dim :].pow(2).sum(-1)
        scale = ((energy + layer.residual) / layer.hidden_size + layer.eps).rsqrt()  # [batch, rows]
    else:
        scale = place.scale.double().view(batch, rows)

    def heads(first: int, bias: torch.Tensor | None) -> torch.Tensor:
        rows_of = z[..., first : first + kv_dim] * scale.unsqueeze(-1)
        if bias is not None:
            rows_of = rows_of + bias.double()
        return rows_of.view(batch, rows, layer.kv_heads, layer.head_dim).transpose(1, 2)

    keys, values = heads(0, layer.key_bias), heads(kv_dim, layer.value_bias)
    if layer.key_norm is not None:
        keys = rms_norm(keys, layer.key_norm, layer.norm_eps)
    if place.cos is not None and place.sin is not None:
        keys = rotate_pairs(keys, place.cos, place.sin, interleaved=layer.interleaved)
    if layer.key_gain is not None:
        keys = keys * layer.key_gain.double().view(-1, 1, 1)
    if layer.value_gain is not None:
        values = values * layer.value_gain.double().view(-1, 1, 1)
    return keys, values
