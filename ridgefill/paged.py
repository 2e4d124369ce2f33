"""Late layers' keys and values in a paged cache: each row at the slot that an engine gave it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from ridgefill.epilogue import Place, synth_launch
from ridgefill.errors import KernelError
from ridgefill.kernels import check_tensor
from ridgefill.prefill import block_rows
from ridgefill.residency import Copies

if TYPE_CHECKING:
    import torch

    from ridgefill.epilogue import EpilogueLayer
    from ridgefill.fused import FusedMaps

_NAME = "write_slots"
Pair = tuple["torch.Tensor", "torch.Tensor"]


def write_slots(
    fused: FusedMaps,
    epilogues: Mapping[int, EpilogueLayer] | None,
    x: torch.Tensor,
    slots: torch.Tensor,
    pages: Mapping[int, Pair],
    tables: Mapping[int, Pair],
    *,
    check_slots: bool = True,
) -> None:
    """Write every late layer's keys and values of ``rows`` rows, of any sequences and in any order, to their slots.

    Args:
        fused: the late layers' maps (``attachment.settings.fused``).
        epilogues: their constants for the kernel (`ridgefill.epilogue.epilogue_layers`); None: torch does the same.
        x: ``[rows, n_in]``, the features that the maps read, on the maps' device and in their dtype.
        slots: int64 ``[rows]``: ``page * page_rows + row`` of each row, negative for rows not kept; no slot twice.
        pages: each late layer's keys and values ``[pages, kv_heads, page_rows, head_dim]``, of any strides but a dense
            last dimension: an engine that keeps ``[pages, page_rows, kv_heads, head_dim]`` passes ``.transpose(1, 2)``.
        tables: each late layer's rotary tables of these rows, ``(cos, sin)`` ``[rows, rotary_dim]``.
        check_slots: read the slots' extremes and look for doubles, for which the host waits; False trusts them: a slot
            past the pages then writes to memory that is not the cache's.

    Raises:
        KernelError: an argument is not what is read; the message names it.
    """
    import torch

    dtype, device = fused.bias.dtype, fused.bias.device
    check_tensor(_NAME, "x", x, dtype=dtype, shape=(None, fused.weights.n_in), device=device, contiguous=False)
    _check_places(fused, slots, len(x), pages, tables, check_slots)
    with torch.no_grad():
        _write(fused, epilogues, x, slots, pages, tables)


def _write(
    fused: FusedMaps,
    epilogues: Mapping[int, EpilogueLayer] | None,
    x: torch.Tensor,
    slots: torch.Tensor,
    pages: Mapping[int, Pair],
    tables: Mapping[int, Pair],
) -> None:
    """The same, its arguments checked."""
    rows, dtype, device = len(x), x.dtype, x.device
    for layers, columns in fused.columns(fused.groups(lambda _: None), Copies()):
        for start in range(0, rows, block_rows(device)):
            some = slice(start, start + block_rows(device))
            z, first = fused.product(x[some].unsqueeze(0), layers, columns)  # [1, block, columns of these layers]
            if epilogues is not None:
                shifted = [replace(epilogues[layer], column=epilogues[layer].column - first) for layer in layers]
                places = [_place(pages[layer], tables[layer], slots, some) for layer in layers]
                synth_launch(z, shifted, places).run(device)
                continue
            kept = slots[some] >= 0
            at = slots[some][kept]
            for layer in layers:
                of_layer = fused.layers[layer]
                mine = z[..., of_layer.columns.start - first : of_layer.columns.stop - first]
                cos, sin = (table[some].unsqueeze(0).to(dtype) for table in tables[layer])
                for page, new in zip(pages[layer], of_layer.keys_values(mine, (cos, sin)), strict=True):
                    # new [1, kv_heads, block, head_dim]
                    page[at // page.shape[2], :, at % page.shape[2]] = new[0].transpose(0, 1)[kept]


def _place(pages: Pair, tables: Pair, slots: torch.Tensor, some: slice) -> Place:
    """Where the kernel writes one layer's rows of a block."""
    cos, sin = (table[some].unsqueeze(0).float().contiguous() for table in tables)
    return Place(*pages, cos, sin, slots=slots[some])


def _check_places(
    fused: FusedMaps,
    slots: torch.Tensor,
    rows: int,
    pages: Mapping[int, Pair],
    tables: Mapping[int, Pair],
    by_value: bool,
) -> None:
    import torch

    dtype, device = fused.bias.dtype, fused.bias.device
    check_tensor(_NAME, "slots", slots, dtype=torch.int64, shape=(rows,), device=device)
    most = -1
    if by_value:
        kept = slots[slots >= 0].sort().values
        most = int(kept[-1]) if len(kept) else -1
        if bool((kept[1:] == kept[:-1]).any()):
            raise KernelError(f"{_NAME}: argument 'slots' names a slot twice, expected each at most once")
    for layer, of_layer in fused.layers.items():
        for name, given in (("pages", pages), ("tables", tables)):
            if layer not in given:
                raise KernelError(f"{_NAME}: argument {name!r} lacks layer {layer}, expected {sorted(fused.layers)}")
        (keys, values), (cos, sin) = pages[layer], tables[layer]
        shape = (None, of_layer.kv_dim // of_layer.head_dim, None, of_layer.head_dim)
        for name, tensor, expected in (("keys", keys, shape), ("values", values, keys.shape)):
            argument = f"pages[{layer}] {name}"
            check_tensor(_NAME, argument, tensor, dtype=dtype, shape=expected, device=device, contiguous=False)
        for name, tensor, width in (("cos", cos, None), ("sin", sin, cos.shape[-1])):
            argument = f"tables[{layer}] {name}"
            check_tensor(_NAME, argument, tensor, dtype=cos.dtype, shape=(rows, width), device=device, contiguous=False)
        if most >= (room := keys.shape[0] * keys.shape[2]):
            raise KernelError(f"{_NAME}: argument 'slots' holds {most}, expected less than layer {layer}'s {room}")
