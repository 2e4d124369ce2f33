"""How a late layer turns a block input into what its cache keeps: through the layer itself, or a direct path.

The generic writer calls the layer's own forward with a proxy cache whose ``update`` keeps what it is given and aborts
before the attention product, so norms, biases, k_norm and RoPE variants stay the model's own. The direct writer skips
the query projection for Llama-shaped layers; it is used only where it agrees with the generic one on this very layer.
The recurrent writer is for layers that keep a state (gated delta net, Mamba, short convolution): the layer's own
forward scans the rows into the state of the cache itself, and ends where the state and any keys beside it are known.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ridgefill.errors import UnsupportedModelError
from ridgefill.layout import key_norm

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.utils.hooks import RemovableHandle
    from transformers import Cache

    from ridgefill.layout import DecoderLayout

# block input [batch, rows, d], the layer's keyword arguments -> keys, values [batch, kv_heads, rows, head_dim]. A layer
# that keeps a state scans the rows into the cache among these arguments; where it has no attention, kv_heads is 0.
Writer = Callable[["torch.Tensor", dict[str, Any]], tuple["torch.Tensor", "torch.Tensor"]]

_PROBE_ROWS = 3


class _Captured(Exception):
    """Carries what a layer handed to its cache out of that layer's forward."""

    def __init__(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        super().__init__("the keys and values were taken")
        self.keys, self.values = keys, values


class _ProxyCache:
    """A cache that keeps the first update by raising: nothing after it is computed."""

    def update(self, keys: torch.Tensor, values: torch.Tensor, *_: Any, **__: Any) -> Any:
        raise _Captured(keys, values)


def generic_writer(layout: DecoderLayout, layer_idx: int) -> Writer:
    """A writer that runs the layer's own forward up to its cache update; costs the unused query projection."""
    layer = layout.layers[layer_idx]

    def write(block_input: torch.Tensor, layer_kwargs: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
        kwargs = {**layer_kwargs, "attention_mask": None, layout.cache_argument: _ProxyCache()}
        try:
            # .forward, not __call__: hooks of ours or of others belong to real forwards.
            layer.forward(block_input, **kwargs)
        except _Captured as captured:
            return captured.keys, captured.values
        raise UnsupportedModelError(
            f"{type(layer).__name__} {layer_idx} finished its forward without updating the cache it was given"
        )

    return write


class _Scanned(Exception):
    """Ends a layer's forward where its state has seen every row; never seen outside this file."""


class _ScannedCache:
    """A cache that takes a layer's states as they come, and ends the layer's forward at the ``last`` of its updates."""

    def __init__(self, cache: Cache, last: str) -> None:
        self._cache, self._last = cache, last

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)

    def update(self, keys: torch.Tensor, values: torch.Tensor, *_: Any, **__: Any) -> Any:
        raise _Captured(keys, values)

    def update_conv_state(self, *args: Any, **kwargs: Any) -> Any:
        rows = self._cache.update_conv_state(*args, **kwargs)
        if self._last == "conv":
            raise _Scanned
        return rows

    def update_recurrent_state(self, *args: Any, **kwargs: Any) -> Any:
        state = self._cache.update_recurrent_state(*args, **kwargs)
        if self._last == "recurrent":
            raise _Scanned
        return state


def recurrent_writer(layout: DecoderLayout, layer_idx: int, last: str) -> Writer:
    """A writer that scans rows, in their order and without gaps, into the state that the given cache has of the layer.

    ``last``: the layer's last update of its cache, ``conv``, ``recurrent`` or ``keys``; what it would compute after
    that (of its mixer the output, and its MLP) no filled row needs.
    """
    layer = layout.layers[layer_idx]

    def write(block_input: torch.Tensor, layer_kwargs: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
        # Left pads are the head's: the only mask that a state knows hides none of these rows.
        kwargs = {name: None if name.endswith("attention_mask") else value for name, value in layer_kwargs.items()}
        kwargs[layout.cache_argument] = _ScannedCache(layer_kwargs[layout.cache_argument], last)
        try:
            layer.forward(block_input, **kwargs)
        except _Captured as captured:
            return captured.keys, captured.values
        except _Scanned:
            pass  # not raised for a single row: that takes the layer's decode step, which changes the state in place
        batch, rows, _ = block_input.shape
        return block_input.new_empty(batch, 0, rows, 0), block_input.new_empty(batch, 0, rows, 0)

    return write


def direct_writer(layout: DecoderLayout, layer_idx: int) -> Writer | None:
    """A writer for Llama-shaped layers (Llama, Mistral, Qwen2, Qwen3, SmolLM, Gemma3), or None for another shape."""
    layer = layout.layers[layer_idx]
    attention = getattr(layer, "self_attn", None)
    norm = getattr(layer, "input_layernorm", None)
    k_proj, v_proj = getattr(attention, "k_proj", None), getattr(attention, "v_proj", None)
    rotate = None if attention is None else key_rotation(attention)
    head_dim = getattr(attention, "head_dim", None)
    if getattr(layout.config, "clip_qkv", None) is not None:  # clamps that a probe's few rows may never reach
        return None
    if norm is None or k_proj is None or v_proj is None or rotate is None or head_dim is None:
        return None
    k_norm = key_norm(attention)

    def write(block_input: torch.Tensor, layer_kwargs: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
        normed = norm(block_input)  # [batch, rows, d]
        heads = (*normed.shape[:-1], -1, head_dim)
        keys = k_proj(normed).view(heads).transpose(1, 2)  # [batch, kv_heads, rows, head_dim]
        values = v_proj(normed).view(heads).transpose(1, 2)
        if k_norm is not None:
            keys = k_norm(keys)
        return rotate(keys, layer_kwargs["position_embeddings"]), values

    return write


def key_rotation(attention: nn.Module) -> Callable[[torch.Tensor, Any], torch.Tensor] | None:
    """The model's own rotary embedding of keys ``[batch, kv_heads, rows, head_dim]`` by its tables, or None."""
    apply = getattr(sys.modules[type(attention).__module__], "apply_rotary_pos_emb", None)
    if apply is None:
        return None

    def rotate(keys: torch.Tensor, tables: Any) -> torch.Tensor:
        cos, sin = tables
        # It wants queries too: none, so that it does no work for them.
        _, rotated = apply(keys[:, :0], keys, cos, sin)
        return rotated  # type: ignore[no-any-return]

    return rotate


@dataclass(frozen=True)
class LayerWriter:
    """A late layer's writer, its name (``direct``, ``generic`` or ``recurrent``), and why it was chosen."""

    name: str
    reason: str
    write: Writer
    # Which call of the base model's rotary modules, in order, made this layer's tables; None: the split layer's own.
    rotary_call: int | None
    # The last rows on which all that it keeps depends (a short convolution alone): None where that is every row.
    needed_rows: int | None = None
    # Of its recurrent state, without the batch; None: it has none.
    state_shape: tuple[int, ...] | None = None


def late_layer_writers(layout: DecoderLayout, split: int) -> tuple[dict[int, LayerWriter], tuple[nn.Module, ...]]:
    """Choose a writer for each late layer, by a probe of a few rows through the model and through both writers.

    Returns:
        Writers by layer, and the rotary modules whose outputs must be recorded because late layers use other tables
        than the split layer (empty for most models).

    Raises:
        UnsupportedModelError: a late layer gets arguments that the split layer's do not determine, or keeps no cache.
    """
    calls, rotary_outputs, modules = probe_layers(layout)
    split_kwargs = calls[split]
    writers: dict[int, LayerWriter] = {}
    for layer_idx in range(split, layout.num_layers):
        kwargs = calls[layer_idx]
        rotary_call = _rotary_call(layer_idx, kwargs, split_kwargs, rotary_outputs)
        if layout.keeps_state(layer_idx):
            writers[layer_idx] = _recurrent(layout, layer_idx, kwargs, rotary_call)
            continue
        generic = generic_writer(layout, layer_idx)
        direct = direct_writer(layout, layer_idx)
        name, reason = _choose(layout, layer_idx, direct, generic, kwargs)
        chosen = direct if name == "direct" and direct is not None else generic
        writers[layer_idx] = LayerWriter(name, reason, chosen, rotary_call)
    needed = any(writer.rotary_call is not None for writer in writers.values())
    return writers, modules if needed else ()


def rotary_modules(layout: DecoderLayout) -> tuple[nn.Module, ...]:
    """The decoder's rotary modules, which make the tables that its layers are given."""
    return tuple(module for name, module in layout.decoder.named_children() if "rotary" in name or "rope" in name)


def probe_layers(layout: DecoderLayout) -> tuple[list[dict[str, Any]], list[Any], tuple[nn.Module, ...]]:
    """Run a few rows through the base model: what each layer was given, and the rotary modules and their outputs."""
    import torch

    calls: list[dict[str, Any]] = []
    rotary_outputs: list[Any] = []
    modules = rotary_modules(layout)

    def on_layer(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if len(args) > 1:
            raise UnsupportedModelError(
                f"{type(layout.layers[0]).__name__} takes {len(args)} positional arguments, expected hidden_states only"
            )
        calls.append({**kwargs, "hidden_states": args[0] if args else kwargs["hidden_states"]})

    def on_rotary(_: nn.Module, __: tuple[Any, ...], output: Any) -> None:
        rotary_outputs.append(output)

    handles: list[RemovableHandle] = []
    try:
        handles.extend(layer.register_forward_pre_hook(on_layer, with_kwargs=True) for layer in layout.layers)
        handles.extend(module.register_forward_hook(on_rotary) for module in modules)
        with torch.no_grad():
            layout.base(
                input_ids=torch.arange(_PROBE_ROWS, device=layout.embeddings.device).unsqueeze(0)
                % layout.config.vocab_size,
                use_cache=False,
            )
    finally:
        for handle in handles:
            handle.remove()
    if len(calls) != layout.num_layers:
        raise UnsupportedModelError(
            f"{type(layout.base).__name__} ran {len(calls)} layers in one forward, expected {layout.num_layers}"
        )
    return calls, rotary_outputs, modules


def _rotary_call(
    layer_idx: int, kwargs: dict[str, Any], split_kwargs: dict[str, Any], rotary_outputs: list[Any]
) -> int | None:
    """Where this layer's rotary tables come from; refuses arguments that the split layer's call does not give."""
    import torch

    for name, value in kwargs.items():
        if name in ("hidden_states", "attention_mask", "position_embeddings") or not isinstance(value, torch.Tensor):
            continue
        if value is not split_kwargs.get(name):
            raise UnsupportedModelError(
                f"layer {layer_idx} is given a tensor {name!r} of its own in each forward; such layers cannot be filled"
            )
    tables = kwargs.get("position_embeddings")
    if tables is None or tables is split_kwargs.get("position_embeddings"):
        return None
    for call, output in enumerate(rotary_outputs):
        if output is tables:
            return call
    raise UnsupportedModelError(f"layer {layer_idx}: its position_embeddings come from no rotary module of the model")


def _recurrent(layout: DecoderLayout, layer_idx: int, kwargs: dict[str, Any], rotary_call: int | None) -> LayerWriter:
    """The writer of a layer that keeps a state: a probe finds the last of the layer's updates.

    Raises:
        UnsupportedModelError: the layer attends before its state has seen the rows, or leaves no state.
    """
    import torch
    from transformers import DynamicCache

    cache = DynamicCache(config=layout.config)
    layer_kwargs = {name: value for name, value in kwargs.items() if name != "hidden_states"}
    with torch.no_grad():  # as if the keys came last: a layer without any runs to its end
        writer = recurrent_writer(layout, layer_idx, "keys")
        keys, values = writer(kwargs["hidden_states"], {**layer_kwargs, layout.cache_argument: cache})
    _check_rows(layer_idx, keys, values)
    state: Any = cache.layers[layer_idx]
    conv, recurrent, has_keys = state.conv_states[0], state.recurrent_states[0], keys.shape[1] > 0
    if conv is None or has_keys != layout.keeps_keys(layer_idx):
        raise UnsupportedModelError(
            f"layer {layer_idx}: of {_PROBE_ROWS} probe rows {type(layout.layers[layer_idx]).__name__} leaves "
            f"{'keys' if has_keys else 'no keys'} and {'no state' if conv is None else 'a state'}; expected what a "
            f"{layout.layer_types[layer_idx]} layer keeps, the state before the keys"
        )
    last = "keys" if has_keys else "conv" if recurrent is None else "recurrent"
    reason = {
        "keys": "scans the rows into its state, beside their keys",
        "conv": f"keeps the last {conv.shape[-1]} rows of a convolution",
        "recurrent": "scans the rows into its state",
    }[last]
    return LayerWriter(
        "recurrent",
        reason,
        recurrent_writer(layout, layer_idx, last),
        rotary_call,
        needed_rows=int(conv.shape[-1]) if last == "conv" else None,
        state_shape=None if recurrent is None else tuple(recurrent.shape[1:]),
    )


def _check_rows(layer_idx: int, keys: torch.Tensor, values: torch.Tensor) -> None:
    if keys.ndim != 4 or values.ndim != 4 or keys.shape[-2] != _PROBE_ROWS or values.shape[-2] != _PROBE_ROWS:
        raise UnsupportedModelError(
            f"layer {layer_idx} caches shapes {tuple(keys.shape)} and {tuple(values.shape)}; "
            f"expected [batch, heads, {_PROBE_ROWS}, dim]"
        )


def _choose(
    layout: DecoderLayout, layer_idx: int, direct: Writer | None, generic: Writer, kwargs: dict[str, Any]
) -> tuple[str, str]:
    """``direct`` where it exists and gives this layer's generic keys and values on the probe rows."""
    import torch

    layer_kwargs = {name: value for name, value in kwargs.items() if name != "hidden_states"}
    with torch.no_grad():
        try:
            keys, values = generic(kwargs["hidden_states"], layer_kwargs)
        except (AttributeError, TypeError) as error:
            raise UnsupportedModelError(
                f"layer {layer_idx}: {type(layout.layers[layer_idx]).__name__} wants more of its cache than a fill can "
                f"stand in for: {error}"
            ) from error
        _check_rows(layer_idx, keys, values)
        if direct is None:
            return "generic", f"{type(layout.layers[layer_idx]).__name__} is not Llama-shaped"
        try:
            direct_keys, direct_values = direct(kwargs["hidden_states"], layer_kwargs)
        except (TypeError, RuntimeError, KeyError, ValueError) as error:
            return "generic", f"the direct path does not fit {type(layout.layers[layer_idx]).__name__}: {error}"
    for ours, theirs in ((direct_keys, keys), (direct_values, values)):
        # Same modules, same rows: any difference beyond rounding is another arithmetic, not noise.
        tolerance = 8 * torch.finfo(theirs.dtype).eps * float(theirs.abs().max())
        if ours.shape != theirs.shape or float((ours - theirs).abs().max()) > tolerance:
            return "generic", "the direct path gives other keys or values than the layer itself"
    return "direct", "equal to the layer's own keys and values on the probe rows"
