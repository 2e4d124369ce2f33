"""What a fill is compared with: controls that must be worse, and baselines that it should beat (design section 6)."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from ridgefill.errors import RidgeFillError
from ridgefill.fused import is_rms_norm
from ridgefill.layout import decoder_layout, input_norm
from ridgefill.maps import LayerMap, RidgeMaps, SplitMaps

if TYPE_CHECKING:
    from torch import nn

    from ridgefill.layout import DecoderLayout
    from ridgefill.prefill import FillSettings
    from ridgefill.rows import Selection
    from ridgefill.writers import LayerWriter


def identity_maps(maps: RidgeMaps) -> RidgeMaps:
    """Return maps that hand the stream on as it is: ``W`` = identity (other features ignored), ``b`` = 0, no gains."""

    def identity(layer_map: LayerMap) -> LayerMap:
        weight = torch.zeros(layer_map.weight.shape)
        weight.fill_diagonal_(1)
        return LayerMap(layer_map.layer, weight, torch.zeros_like(layer_map.bias))

    splits = {
        split: replace(maps_, layers={layer: identity(m) for layer, m in maps_.layers.items()})
        for split, maps_ in maps.splits.items()
    }
    return replace(maps, splits=splits)


def swapped_maps(maps: RidgeMaps, split: int, a: int, b: int) -> RidgeMaps:
    """Return ``maps`` with the maps of late layers ``a`` and ``b`` of one split exchanged.

    Raises:
        RidgeFillError: one of them has no map, or both are the same layer.
    """
    chosen: SplitMaps = maps.at(split)
    if a == b or a not in chosen.layers or b not in chosen.layers:
        raise RidgeFillError(f"cannot swap the maps of layers {a} and {b}: split {split} maps {sorted(chosen.layers)}")
    layers = dict(chosen.layers)
    for layer, other in ((a, b), (b, a)):  # a correction is of the layer's own state, whatever predicts its inputs
        correction = chosen.layers[layer].state_correction
        layers[layer] = replace(chosen.layers[other], layer=layer, state_correction=correction)
    return replace(maps, splits={**maps.splits, split: replace(chosen, layers=layers)})


def direct_obstacle(layout: DecoderLayout, maps: SplitMaps) -> str | None:
    """Why no ridge straight to keys and values follows from a split's maps, in words; None where it does."""
    for layer in maps.layers:
        if layout.keeps_state(layer):
            return f"layer {layer}: a {layout.layer_types[layer]} layer's state is not linear in its block inputs"
        norm = input_norm(layout.layers[layer])
        if norm is not None and not (maps.target == "normalized" and is_rms_norm(norm)):
            return f"layer {layer}: a {type(norm).__name__} of {maps.target} block inputs is not linear in them"
    return None


def direct_ridge(settings: FillSettings, maps: SplitMaps) -> FillSettings:
    """Return settings under which late layers get keys and values as a ridge predicts them, without a norm.

    The baseline that fits un-normalised keys and values (before k_norm and RoPE) instead of block inputs. It needs no
    fit of its own: ridge is linear in its target, and over block inputs of length 1 keys and values are linear too, so
    its solution is this one, ``(x W_l + b_l) diag(g) [Wk | Wv]`` (design section 2.1). A fill multiplies that by the
    row scale ``1 / rms(x W_l + b_l)`` and by gains, and this does not.

    Raises:
        RidgeFillError: the maps predict something in which keys and values are not linear.
    """
    if reason := direct_obstacle(settings.layout, maps):
        raise RidgeFillError(f"split {maps.split} has no direct ridge: {reason}")
    writers = dict(settings.writers)
    for layer in settings.maps:
        if (norm := input_norm(settings.layout.layers[layer])) is not None:
            writers[layer] = _without_row_scale(writers[layer], norm)
    bare = {layer: replace(m, key_gain=None, value_gain=None) for layer, m in settings.maps.items()}
    return replace(settings, maps=bare, writers=writers, fused=None, epilogues=None)


def _without_row_scale(writer: LayerWriter, norm: nn.Module) -> LayerWriter:
    """The same writer, its layer's RMS norm taken for its gain alone."""

    def undo(_: nn.Module, args: tuple[Any, ...], normed: torch.Tensor) -> torch.Tensor:
        length: torch.Tensor = args[0].float().square().mean(-1, keepdim=True).sqrt()  # [batch, rows, 1]
        return normed * length.to(normed.dtype)

    def write(block_input: torch.Tensor, layer_kwargs: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
        handle = norm.register_forward_hook(undo)
        try:
            return writer.write(block_input, layer_kwargs)
        finally:
            handle.remove()

    return replace(writer, write=write)


@contextmanager
def late_layers_without_bulk(
    model: nn.Module, *, split: int, head: int, tail: int, rows: int, selection: Selection | None = None
) -> Iterator[None]:
    """Hide the bulk from layers ``split`` and later while a prompt's tail, and decode steps after it, run over a cache.

    Columns of absolute positions ``[head, rows - tail)`` are masked, but for the rows that ``selection`` has chosen
    when the tail reaches the split; everything else stays the model's own. A recurrent state has no columns to mask:
    the cache must hold the state behind the head in these layers. A fill that does not beat this control is worth
    nothing.

    Raises:
        RidgeFillError: (inside) a late layer got no 4-D mask, so that nothing could be hidden from it.
    """
    layout = decoder_layout(model)

    def hide(
        layer_idx: int, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, dict[str, Any]]:
        mask = kwargs.get("attention_mask")
        hidden_states = args[0] if args else kwargs["hidden_states"]
        kept = kwargs.get(layout.cache_argument)
        kept = None if kept is None or len(kept.layers) <= layer_idx else kept.layers[layer_idx]
        if mask is None and hidden_states.shape[1] == 1 and kept is not None:  # a decode step sees all rows unmasked
            mask = torch.ones(1, 1, 1, kept.keys.shape[-2] + 1, dtype=torch.bool, device=hidden_states.device)
        if not isinstance(mask, torch.Tensor) or mask.ndim != 4:
            found = f"{mask.ndim}-D" if isinstance(mask, torch.Tensor) else type(mask).__name__
            raise RidgeFillError(f"cannot hide the bulk: {type(module).__name__} got a mask that is {found}, not 4-D")
        # A sliding layer's cache ends at the same row but may begin later: column j is position end - columns + j.
        end = rows if kept is None else int(kept.get_seq_length()) + hidden_states.shape[1]
        positions = torch.arange(end - mask.shape[-1], end, device=mask.device)
        hidden = (positions >= head) & (positions < rows - tail)
        if selection is not None and selection.rows is not None:
            hidden &= ~torch.isin(positions, selection.rows[0])
        mask = mask.masked_fill(hidden, False if mask.dtype == torch.bool else torch.finfo(mask.dtype).min)
        return args, {**kwargs, "attention_mask": mask}

    handles = []
    try:
        for layer_idx in filter(layout.keeps_keys, range(split, layout.num_layers)):
            hook = functools.partial(hide, layer_idx)
            handles.append(layout.layers[layer_idx].register_forward_pre_hook(hook, with_kwargs=True))
        yield
    finally:
        for handle in handles:
            handle.remove()
