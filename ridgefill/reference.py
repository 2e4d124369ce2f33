"""The readable oracle of every fast path: float64, one step a line, no shortcuts."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


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
