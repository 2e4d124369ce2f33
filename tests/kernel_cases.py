"""Awkward layers, tables and shapes, and torch's own epilogue: what the kernels' tests and a device's checks share."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from ridgefill.epilogue import EpilogueLayer, Place
from ridgefill.fused import FusedLayer

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def random_layers(
    count: int, *, heads: int, head_dim: int, rank: int, rotary_dim: int, **options: Any
) -> tuple[list[EpilogueLayer], int]:
    """Layers side by side, with every step or, for odd ones, none; and the columns they take."""
    width = 2 * heads * head_dim + rank
    layers = []
    for index in range(count):
        layer = EpilogueLayer(index * width, heads, head_dim, rank, 0.3, 40, 1e-6, rotary_dim=rotary_dim, **options)
        if index % 2 == 0:
            layer = replace(
                layer,
                key_bias=torch.randn(heads * head_dim),
                value_bias=torch.randn(heads * head_dim),
                key_norm=1 + 0.2 * torch.randn(head_dim),
                norm_eps=1e-5,
                key_gain=1 + 0.1 * torch.rand(heads),
                value_gain=1 + 0.1 * torch.rand(heads),
            )
        layers.append(layer)
    return layers, count * width


def tables(batch: int, rows: int, rotary_dim: int) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    if not rotary_dim:
        return None, None
    angle = 6.3 * torch.rand(batch, rows, rotary_dim)
    return angle.cos(), angle.sin()


def torch_epilogue(z: torch.Tensor, layer: EpilogueLayer, place: Place) -> tuple[torch.Tensor, torch.Tensor]:
    """The torch backend's epilogue, every step rounded to z's dtype."""

    def at(tensor: torch.Tensor | None, *shape: int) -> Any:
        return None if tensor is None else tensor.to(z.dtype).view(shape or tensor.shape)

    def norm(keys: torch.Tensor) -> torch.Tensor:
        wide = keys.float()
        scaled = wide * (wide.square().mean(-1, keepdim=True) + layer.norm_eps).rsqrt()
        return at(layer.key_norm) * scaled.to(z.dtype)  # type: ignore[no-any-return]

    def rotate(keys: torch.Tensor, cos_sin: Any) -> torch.Tensor:
        if cos_sin[0] is None:
            return keys
        cos, sin = (table.unsqueeze(1) for table in cos_sin)
        turning, rest = keys[..., : layer.rotary_dim], keys[..., layer.rotary_dim :]
        if layer.interleaved:
            turned = torch.stack([-turning[..., 1::2], turning[..., ::2]], dim=-1).flatten(-2)
        else:
            turned = torch.cat([-turning[..., layer.rotary_dim // 2 :], turning[..., : layer.rotary_dim // 2]], dim=-1)
        return torch.cat([turning * cos + turned * sin, rest], dim=-1)

    kv_dim = layer.kv_heads * layer.head_dim
    columns = slice(layer.column, layer.column + 2 * kv_dim + layer.rank)
    fused = FusedLayer(
        columns,
        kv_dim,
        layer.head_dim,
        layer.hidden_size,
        layer.residual,
        layer.eps,
        at(layer.key_bias),
        at(layer.value_bias),
        None if layer.key_norm is None else norm,  # type: ignore[arg-type]
        rotate,
        at(layer.key_gain, -1, 1, 1),
        at(layer.value_gain, -1, 1, 1),
    )
    scale = at(place.scale, *z.shape[:2], 1)
    return fused.keys_values(z[..., columns], (at(place.cos), at(place.sin)), scale)


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


SHAPES = [
    # batch, rows, heads, head_dim, rank, rotary_dim, options
    (1, 1, 1, 64, 16, 64, {}),
    (2, 17, 2, 128, 32, 128, {}),
    (1, 129, 3, 64, 8, 32, {}),
    (3, 17, 2, 96, 24, 96, {"interleaved": True}),
    (1, 17, 5, 15, 7, 6, {}),
    (2, 5, 3, 37, 0, 10, {"interleaved": True}),
    (1, 3, 1, 512, 8, 256, {}),
    (1, 17, 2, 256, 8, 64, {"interleaved": True}),
    (2, 17, 4, 8, 1, 0, {}),
]
