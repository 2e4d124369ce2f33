"""The fused form's epilogue as one kernel launch for all late layers of a block of rows (cuda/synth_kv.cu).

`FusedLayer.keys_values` is what it means, in torch and layer by layer. Here a layer's constants are plain float32
tensors (`EpilogueLayer`), each layer's keys and values are written where they stay, and nothing is copied on the way.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ridgefill import reference
from ridgefill.errors import KernelError
from ridgefill.kernels import Launch, blocks, check_range, check_tensor, rows_grid
from ridgefill.matrices import INT8_GROUP

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch

    from ridgefill.fused import FusedLayer, FusedMaps

_ROWS_PER_BLOCK = 4  # SYNTH_WARPS: one warp takes one row
_MAX_HEAD_DIM = 512
# struct SynthLayer: 11 addresses, 7 64-bit and 5 32-bit integers, 4 floats, padding.
_LAYER = struct.Struct("<11Q7q5i4f4x")


@dataclass(frozen=True)
class EpilogueLayer:
    """One late layer's constants; tensors are float32 on the layer's device, None where the layer has no such step.

    Attributes:
        column: where its keys begin in z; ``kv_heads * head_dim`` values and ``rank`` columns of the scale follow.
        residual, hidden_size, eps: ``s = ((|z_r|^2 + residual) / hidden_size + eps)^-1/2``.
        key_bias, value_bias: ``[kv_heads * head_dim]``.
        key_norm, norm_eps: the gain ``[head_dim]`` of a per-head RMS norm of the keys.
        rotary_dim: how many first elements of a head turn; 0: none.
        interleaved: elements ``(2i, 2i + 1)`` turn together, not ``(i, i + rotary_dim / 2)``.
        key_gain, value_gain: ``[kv_heads]``.
    """

    column: int
    kv_heads: int
    head_dim: int
    rank: int
    residual: float
    hidden_size: int
    eps: float
    key_bias: torch.Tensor | None = None
    value_bias: torch.Tensor | None = None
    key_norm: torch.Tensor | None = None
    norm_eps: float = 0.0
    rotary_dim: int = 0
    interleaved: bool = False
    key_gain: torch.Tensor | None = None
    value_gain: torch.Tensor | None = None


@dataclass(frozen=True)
class Place:
    """Where one layer's rows of a block go, and with which tables and scale.

    Attributes:
        keys, values: ``[pages, kv_heads, page_rows, head_dim]`` in z's dtype, any strides but a dense last dimension.
            Without slots a page is one sequence's cache.
        cos, sin: float32 ``[batch or 1, rows, rotary_dim]``, as they multiply the elements; None without rotation.
        row_offset: the row of its sequence's cache where the block begins (without slots).
        slots: int64 ``[batch * rows]``: ``page * page_rows + row`` of each row, negative for rows that are not kept.
        scale: float32 ``[batch * rows]``, the row scale where it is known better than from z.
    """

    keys: torch.Tensor
    values: torch.Tensor
    cos: torch.Tensor | None = None
    sin: torch.Tensor | None = None
    row_offset: int = 0
    slots: torch.Tensor | None = None
    scale: torch.Tensor | None = None


def _element_names() -> dict[torch.dtype, str]:
    import torch

    return {torch.bfloat16: "bf16", torch.float16: "f16", torch.float32: "f32"}


def synth_launch(z: torch.Tensor, layers: Sequence[EpilogueLayer], places: Sequence[Place]) -> Launch:
    """The launch that writes all these layers' keys and values of a block of rows.

    Args:
        z: ``[batch, rows, columns]``, the product; rows may lie further apart than they are wide, sequences follow each
            other.
        layers: which columns, and what to do with them.
        places: one for each layer.

    Raises:
        KernelError: an argument is not what the kernel reads; the message names it.
    """
    import torch

    name = _element_names().get(z.dtype)
    if name is None:
        raise KernelError(f"synth_kv: argument 'z' has dtype {z.dtype}, expected bfloat16, float16 or float32")
    check_tensor("synth_kv", "z", z, dtype=z.dtype, shape=(None, None, None), device=z.device, contiguous=False)
    batch, rows, columns = z.shape
    check_range("synth_kv", "rows", batch * rows, 1, 2**31 - 1)
    if batch > 1 and z.stride(0) != rows * z.stride(1):
        raise KernelError(f"synth_kv: argument 'z' has strides {z.stride()}, expected sequences that follow each other")
    if not layers or len(layers) != len(places):
        raise KernelError(f"synth_kv: {len(layers)} layers and {len(places)} places; expected as many, at least one")
    wide = all(_is_wide(z, layer, place) for layer, place in zip(layers, places, strict=True))
    packed = b"".join(
        _pack(z, columns, index, layer, place) for index, (layer, place) in enumerate(zip(layers, places, strict=True))
    )
    descriptors = torch.frombuffer(bytearray(packed), dtype=torch.uint8)
    if z.is_cuda:  # through pinned memory: a copy from elsewhere would wait for all that the stream still has to do
        descriptors = descriptors.pin_memory().to(z.device, non_blocking=True)
    held = [t for item in (*layers, *places) for t in vars(item).values() if isinstance(t, torch.Tensor)]
    return Launch(
        "synth_kv",
        f"synth_kv_{name}" if wide else f"synth_kv_{name}_any",
        (blocks(batch * rows, _ROWS_PER_BLOCK), len(layers)),
        _ROWS_PER_BLOCK * 32,
        (z.data_ptr(), z.stride(1), batch, rows, descriptors.data_ptr()),
        (z, *held),
        descriptors,
    )


def _is_wide(z: torch.Tensor, layer: EpilogueLayer, place: Place) -> bool:
    """Whether every access can be 16 bytes of elements."""
    lanes = 16 // z.element_size()
    sizes = [layer.column, layer.head_dim, layer.rotary_dim, z.stride(1), z.stride(0)]
    if not layer.interleaved:
        sizes.append(layer.rotary_dim // 2)
    for to in (place.keys, place.values):
        sizes += [stride for stride, length in zip(to.stride()[:-1], to.shape[:-1], strict=True) if length > 1]
    tensors = (z, place.keys, place.values, place.cos, place.sin, layer.key_bias, layer.value_bias, layer.key_norm)
    return all(size % lanes == 0 for size in sizes) and all(t is None or t.data_ptr() % 16 == 0 for t in tensors)


def _pack(z: torch.Tensor, columns: int, index: int, layer: EpilogueLayer, place: Place) -> bytes:
    """One layer's struct SynthLayer, every argument checked."""
    import torch

    def name(argument: str) -> str:
        return f"layers[{index}].{argument}"

    def address(argument: str, tensor: torch.Tensor | None, *shape: int | None, dtype: torch.dtype) -> int:
        if tensor is None:
            return 0
        return check_tensor("synth_kv", name(argument), tensor, dtype=dtype, shape=shape, device=z.device)

    batch, rows, _ = z.shape
    heads, head_dim = layer.kv_heads, layer.head_dim
    check_range("synth_kv", name("head_dim"), head_dim, 1, _MAX_HEAD_DIM)
    check_range("synth_kv", name("kv_heads"), heads, 1, 2**31 // (2 * head_dim) - 1)
    check_range("synth_kv", name("rank"), layer.rank, 0, 2**31 - 1)
    check_range("synth_kv", name("rotary_dim"), layer.rotary_dim, 0, head_dim)
    check_range("synth_kv", name("rotary_dim % 2"), layer.rotary_dim % 2, 0, 0)
    check_range("synth_kv", name("column"), layer.column, 0, columns - 2 * heads * head_dim - layer.rank)
    page_rows = place.keys.shape[2] if place.keys.ndim == 4 else 0
    for argument, tensor in (("keys", place.keys), ("values", place.values)):
        shape = (None, heads, page_rows, head_dim)
        check_tensor("synth_kv", name(argument), tensor, dtype=z.dtype, shape=shape, device=z.device, contiguous=False)
    if place.values.stride()[:3] != place.keys.stride()[:3] or len(place.values) != len(place.keys):
        raise KernelError(
            f"synth_kv: argument {name('values')!r} has strides {place.values.stride()}, expected those of the keys, "
            f"{place.keys.stride()}"
        )
    if place.slots is None:
        check_range("synth_kv", name("row_offset"), place.row_offset, 0, page_rows - rows)
        check_range("synth_kv", name("pages"), len(place.keys), batch, batch)
    tables = 0
    if layer.rotary_dim:
        if place.cos is None or place.sin is None or place.cos.ndim != 3:
            raise KernelError(f"synth_kv: argument {name('cos')!r} is missing, expected tables [batch or 1, rows, dim]")
        tables = len(place.cos)
        check_range("synth_kv", name("cos"), tables, 1 if tables == 1 else batch, batch)
    elif place.cos is not None or place.sin is not None:
        raise KernelError(f"synth_kv: argument {name('cos')!r} is given, expected none where rotary_dim is 0")
    f32 = torch.float32
    return _LAYER.pack(
        address("key_bias", layer.key_bias, heads * head_dim, dtype=f32),
        address("value_bias", layer.value_bias, heads * head_dim, dtype=f32),
        address("key_norm", layer.key_norm, head_dim, dtype=f32),
        address("key_gain", layer.key_gain, heads, dtype=f32),
        address("value_gain", layer.value_gain, heads, dtype=f32),
        address("cos", place.cos, tables, rows, layer.rotary_dim, dtype=f32),
        address("sin", place.sin, tables, rows, layer.rotary_dim, dtype=f32),
        address("scale", place.scale, batch * rows, dtype=f32),
        address("slots", place.slots, batch * rows, dtype=torch.int64),
        place.keys.data_ptr(),
        place.values.data_ptr(),
        layer.column,
        rows * layer.rotary_dim if tables > 1 else 0,
        place.keys.stride(0),
        place.keys.stride(1),
        place.keys.stride(2),
        place.row_offset,
        max(1, page_rows),
        heads,
        head_dim,
        layer.rank,
        layer.rotary_dim,
        int(layer.interleaved),
        layer.residual,
        layer.hidden_size,
        layer.eps,
        layer.norm_eps,
    )


def dequantise_launch(codes: torch.Tensor, scales: torch.Tensor, first: int, out: torch.Tensor) -> Launch:
    """The launch that turns columns of an int8 map into weights: ``out = codes * scales``, rounded once.

    Args:
        codes: int8 ``[n_in, n_out]``.
        scales: bf16 ``[ceil(n_in / 128), n_out]``: absmax / 127 of 128 inputs of a column.
        first: the first column.
        out: ``[n_in, width]``, the tile.

    Raises:
        KernelError: an argument is not what the kernel reads.
    """
    import torch

    element = _element_names().get(out.dtype)
    if element is None:
        raise KernelError(f"dequantise: argument 'out' has dtype {out.dtype}, expected bfloat16, float16 or float32")
    device = out.device
    check_tensor("dequantise", "out", out, dtype=out.dtype, shape=(None, None), device=device)
    (n_in, width), lanes = out.shape, 16 // out.element_size()
    check_tensor("dequantise", "codes", codes, dtype=torch.int8, shape=(n_in, None), device=device)
    n_out = codes.shape[1]
    check_tensor(
        "dequantise", "scales", scales, dtype=torch.bfloat16, shape=(-(-n_in // INT8_GROUP), n_out), device=device
    )
    check_range("dequantise", "first", first, 0, n_out - width)
    wide = all(size % lanes == 0 for size in (n_out, width, first))
    wide = wide and all(t.data_ptr() % 16 == 0 for t in (codes, scales, out))
    return Launch(
        "synth_kv",
        f"dequantise_{element}" if wide else f"dequantise_{element}_any",
        (blocks(width, 256 * (lanes if wide else 1)), rows_grid(n_in)),
        256,
        (codes.data_ptr(), scales.data_ptr(), n_out, n_in, first, width, out.data_ptr()),
        (codes, scales, out),
    )


# --- from a model's own modules ---------------------------------------------------------------------------------------


def epilogue_layers(fused: FusedMaps, tables: Mapping[int, Any]) -> tuple[dict[int, EpilogueLayer] | None, str]:
    """Every fused layer's constants, read off the model's own modules; or None and why the kernel cannot stand for one.

    A norm's gain is what it makes of ones, and a rotation is tried both ways; what comes out is then compared, in
    float64, with `FusedLayer.keys_values` on random rows.

    Args:
        tables: each layer's rotary tables ``(cos, sin)`` ``[1, rows, rotary_dim]``, of a few rows.
    """
    found = {}
    for layer_idx, layer in fused.layers.items():
        made = _epilogue_layer(layer, tables[layer_idx], fused.bias)
        if isinstance(made, str):
            return None, f"layer {layer_idx}: {made}"
        found[layer_idx] = made
    return found, "equal to the torch epilogue on probe rows"


def _epilogue_layer(layer: FusedLayer, tables: Any, like: torch.Tensor) -> EpilogueLayer | str:
    import torch

    if not (isinstance(tables, tuple) and len(tables) == 2 and all(isinstance(t, torch.Tensor) for t in tables)):
        return "its rotary tables are no pair of tensors"
    cos, sin = (table.float().contiguous() for table in tables)
    if layer.head_dim > _MAX_HEAD_DIM or cos.ndim != 3 or cos.shape[-1] > layer.head_dim or cos.shape[-1] % 2:
        return f"heads of {layer.head_dim} with rotary tables {list(cos.shape)} are not what the kernel reads"

    def flat(tensor: torch.Tensor | None) -> torch.Tensor | None:
        return None if tensor is None else tensor.detach().float().reshape(-1).contiguous()

    norm_eps, key_norm = 0.0, None
    with torch.no_grad():
        if layer.k_norm is not None:
            norm_eps = float(getattr(layer.k_norm, "variance_epsilon", getattr(layer.k_norm, "eps", 0.0)))
            ones = torch.ones(1, 1, 1, layer.head_dim, device=like.device, dtype=like.dtype)
            key_norm = flat(layer.k_norm(ones).float() * (1 + norm_eps) ** 0.5)
        generator = torch.Generator().manual_seed(0)
        columns = layer.columns.stop - layer.columns.start
        z = torch.randn(1, cos.shape[1], columns, generator=generator).to(like.device, like.dtype)
        expected = layer.keys_values(z, tables)
        made = EpilogueLayer(
            column=0,
            kv_heads=layer.kv_dim // layer.head_dim,
            head_dim=layer.head_dim,
            rank=layer.rank,
            residual=layer.residual,
            hidden_size=layer.hidden_size,
            eps=layer.eps,
            key_bias=flat(layer.key_bias),
            value_bias=flat(layer.value_bias),
            key_norm=key_norm,
            norm_eps=norm_eps,
            rotary_dim=cos.shape[-1],
            key_gain=flat(layer.key_gain),
            value_gain=flat(layer.value_gain),
        )
        for interleaved in (False, True):
            candidate = replace(made, interleaved=interleaved)
            ours = reference.epilogue(z, candidate, Place(*expected, cos, sin))
            # Torch rounds at each of about ten steps; another rotation or norm is off by tens of per cent.
            if all(
                float((a - b).norm()) <= 16 * torch.finfo(like.dtype).eps * float(b.norm())
                for a, b in zip(ours, (t.double() for t in expected), strict=True)
            ):
                return replace(candidate, column=layer.columns.start)
    return "its epilogue is not the kernel's on probe rows"
