"""Where a model keeps its decoder layers, and what identifies it: read once, by fit and attach alike."""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ridgefill.errors import UnsupportedModelError

if TYPE_CHECKING:
    import torch
    from torch import nn

# Elements of the embeddings, and of each of the layers' matrices, that tell two sets of weights apart: 30 ms for 210
# matrices. A few tensors, as design section 5 has it, would not show an adapter that was merged into the others.
_EMBEDDING_ANCHORS, _MATRIX_ANCHORS = 256, 16
_TOKENIZER_PROBE = "Head, bulk and tail: 1,024 rows; naïve café — 東京\n\tdef f(x): return x**2"
_INPUT_NORM_NAMES = ("input_layernorm", "ln_1", "norm1", "attention_norm", "operator_norm")
_LINEAR, _HYBRID = "linear_attention", "hybrid"
# What a layer keeps, by the class of the cache layer that the model would build for itself (by name, because older
# versions of transformers lack some): keys and values, a recurrent state or a convolution's tail, or both.
_LAYER_TYPES = {
    "DynamicLayer": "full_attention",
    "DynamicSlidingWindowLayer": "sliding_attention",
    "LinearAttentionLayer": _LINEAR,
    "LinearAttentionAndFullAttentionLayer": _HYBRID,
}


@dataclass(frozen=True)
class DecoderLayout:
    """A decoder-only model taken apart: base model, layers, and what differs between layers.

    ``base`` is what is called; ``decoder`` holds the layers: the base itself, or the language model inside a multimodal
    one. ``config`` is the decoder's. ``layer_types[l]`` is what layer ``l`` is, in Hugging Face's words, as the cache
    that the model itself would build has it: ``full_attention``, ``sliding_attention``, ``linear_attention`` (a
    recurrent state, a short convolution, or both; no keys and values) or ``hybrid`` (attention beside such a state).
    ``windows[l]`` is its sliding window in tokens, or ``None``. ``cache_argument`` is the name that decoder layers give
    the cache (``past_key_values`` became ``cache`` in transformers 5.24: probed by signature, never by version).
    """

    base: nn.Module
    decoder: nn.Module
    layers: nn.ModuleList
    config: Any
    layer_types: tuple[str, ...]
    windows: tuple[int | None, ...]
    cache_argument: str

    @functools.cached_property
    def config_values(self) -> dict[str, Any]:
        """The config's own attributes, live; each call reads some, and transformers' getattr takes microseconds."""
        values: dict[str, Any] = vars(self.config)
        return values

    @property
    def num_layers(self) -> int:
        """The number of decoder layers."""
        return len(self.layers)

    @property
    def hidden_size(self) -> int:
        """The width of the residual stream."""
        return int(self.config.hidden_size)

    @property
    def embeddings(self) -> torch.Tensor:
        """The input embeddings ``[vocab, d]``: the residual stream begins in their dtype and on their device."""
        weight: torch.Tensor = self.base.get_input_embeddings().weight  # type: ignore[operator]
        return weight

    @property
    def rope_switch(self) -> int | None:
        """Rows past which the rotary tables of all rows change with a call's length (longrope, dynamic), or None."""
        parameters = getattr(self.config, "rope_parameters", None) or {}
        tables = [t for t in parameters.values() if isinstance(t, dict) and "rope_type" in t] or [parameters]
        lengths = []
        for table in tables:
            kind = str(table.get("rope_type"))
            if kind == "longrope" or "dynamic" in kind:
                original = table.get("original_max_position_embeddings")
                original = original or getattr(self.config, "original_max_position_embeddings", None)
                lengths.append(int(original or self.config.max_position_embeddings))
        return min(lengths, default=None)

    @functools.cached_property
    def recurrent(self) -> bool:
        """Whether any layer keeps a state that every row goes through."""
        return any(self.keeps_state(layer_idx) for layer_idx in range(self.num_layers))

    def keeps_state(self, layer_idx: int) -> bool:
        """Whether this layer keeps a recurrent state or a convolution's tail."""
        return self.layer_types[layer_idx] in (_LINEAR, _HYBRID)

    def keeps_keys(self, layer_idx: int) -> bool:
        """Whether this layer keeps keys and values."""
        return self.layer_types[layer_idx] != _LINEAR

    def target(self, layer_idx: int) -> str:
        """What a map predicts for this layer: ``normalized`` block input, or ``raw`` where no input norm follows."""
        return "raw" if input_norm(self.layers[layer_idx]) is None else "normalized"


def input_norm(layer: nn.Module) -> Any:
    """The norm that a decoder layer applies to its block input, or None where it has none (olmo3)."""
    return next((getattr(layer, name) for name in _INPUT_NORM_NAMES if hasattr(layer, name)), None)


def key_norm(attention: Any) -> Any:
    """The norm that an attention layer applies to its keys, or None where it has none."""
    return next((getattr(attention, name) for name in ("k_norm", "k_layernorm") if hasattr(attention, name)), None)


def cache_argument_name(function: Any) -> str | None:
    """The name under which ``function`` takes its cache, or None when it takes none."""
    parameters = inspect.signature(function).parameters
    return next((name for name in ("cache", "past_key_values") if name in parameters), None)


def causal_lm(model: nn.Module) -> nn.Module:
    """The model inside a PEFT wrapper (whose ``generate`` calls it), or the model itself."""
    unwrap: Any = getattr(model, "get_base_model", None)
    inner: nn.Module = model if unwrap is None else unwrap()
    return inner


def is_compiled(module: Any) -> bool:
    """Whether torch.compile has a module's call, hooks and all: ``compile(module)`` or ``module.compile()``."""
    return getattr(module, "_compiled_call_impl", None) is not None or hasattr(module, "_orig_mod")


def compiled_forward(module: Any) -> bool:
    """Whether a module's forward alone is compiled: ``module.forward = torch.compile(module.forward)``."""
    return hasattr(getattr(module, "forward", None), "_torchdynamo_orig_callable")


def decoder_layout(model: nn.Module) -> DecoderLayout:
    """Find the decoder of a Hugging Face causal language model, or the one inside a multimodal model.

    Raises:
        UnsupportedModelError: the model is compiled, keeps weights on disk, or its layout is unknown; the message
            names what was found.
    """
    from torch import nn

    model = causal_lm(model)
    name = type(model).__name__
    base = getattr(model, getattr(model, "base_model_prefix", "") or "model", None)
    # A multimodal base merges images into the embeddings and hands them to its language model.
    decoder = getattr(base, "language_model", base)
    layers = getattr(decoder, "layers", None)
    inner = [base, decoder, *(layers if isinstance(layers, nn.ModuleList) else ())]
    # A forward of the whole model that is compiled alone is all right: its hooks run outside of it.
    if any(is_compiled(part) for part in (model, *inner)) or any(compiled_forward(part) for part in inner):
        raise UnsupportedModelError(
            f"{name} is compiled by torch.compile, which hooks cannot see into; attach to the uncompiled model"
        )
    if "disk" in (getattr(model, "hf_device_map", None) or {}).values():
        raise UnsupportedModelError(f"{name} keeps layers on disk (hf_device_map); load it into memory first")
    config = getattr(decoder, "config", None)
    if config is None or base is None or decoder is None or not isinstance(layers, nn.ModuleList):
        raise UnsupportedModelError(
            f"{name}: expected a causal language model with .config and a base model with .layers (a ModuleList), "
            f"found config={type(config).__name__}, base={type(decoder).__name__}, layers={type(layers).__name__}"
        )
    if len(layers) != getattr(config, "num_hidden_layers", None):
        raise UnsupportedModelError(
            f"{name}: config.num_hidden_layers is {getattr(config, 'num_hidden_layers', None)}, "
            f"but the base model has {len(layers)} layers"
        )
    if any(parameter.is_meta for parameter in base.parameters()):
        raise UnsupportedModelError(f"{name} keeps weights off their device (offload hooks); load it into memory first")
    if getattr(config, "num_kv_shared_layers", 0):
        raise UnsupportedModelError(f"{name}: layers that reuse another layer's cache are not supported yet")
    if getattr(config, "is_heterogeneous", False):
        raise UnsupportedModelError(
            f"{name}: layers differ in their heads (config.per_layer_config), which a map file does not describe"
        )
    argument = cache_argument_name(layers[0].forward)
    if argument is None or "hidden_states" not in inspect.signature(layers[0].forward).parameters:
        raise UnsupportedModelError(
            f"{name}: {type(layers[0]).__name__}.forward takes no hidden_states and cache argument"
        )
    return DecoderLayout(base, decoder, layers, config, *_layer_types(name, config), argument)


def _layer_types(name: str, config: Any) -> tuple[tuple[str, ...], tuple[int | None, ...]]:
    """Each layer's type and sliding window, read off the cache that the model would build for itself."""
    from transformers import DynamicCache
    from transformers.cache_utils import DynamicLayer

    cache_layers = DynamicCache(config=config).layers
    types: list[str] = []
    windows: list[int | None] = []
    for layer_idx in range(config.num_hidden_layers):
        layer = cache_layers[layer_idx] if layer_idx < len(cache_layers) else DynamicLayer()
        kind = _LAYER_TYPES.get(type(layer).__name__)
        states = getattr(layer, "recurrent_states", {0: None})
        if kind is None or not isinstance(states, dict) or len(states) != 1:
            raise UnsupportedModelError(
                f"{name}: layer {layer_idx} keeps more than keys and values and one state ({type(layer).__name__}); "
                "only full and sliding-window attention and recurrent layers can be filled"
            )
        types.append(kind)
        windows.append(int(layer.sliding_window) if kind == "sliding_attention" else None)
    if {_LINEAR, _HYBRID} & set(types) and "sliding_attention" in types:
        raise UnsupportedModelError(f"{name}: sliding windows beside recurrent layers are not supported yet")
    if set(types) == {_LINEAR}:
        raise UnsupportedModelError(f"{name}: no layer keeps keys and values, so its cache does not count its rows")
    return tuple(types), tuple(windows)


def head_dim(config: Any) -> int:
    """The width of one attention head."""
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def num_key_value_heads(config: Any) -> int:
    """The number of key and value heads."""
    return int(getattr(config, "num_key_value_heads", None) or config.num_attention_heads)


def fingerprint(model: nn.Module, tokenizer: Any = None) -> dict[str, Any]:
    """The JSON-ready identity of a model: what a map file is refused or warned about (docs/map-format.md)."""
    model = causal_lm(model)
    layout = decoder_layout(model)
    config = layout.config
    whole: Any = model.config  # of a multimodal model: what it was loaded as
    quantization = getattr(whole, "quantization_config", None)
    if quantization is not None and not isinstance(quantization, dict):
        quantization = quantization.to_dict()
    method = None
    if quantization is not None and not quantization.get("dequantize", False):
        method = getattr(quantization.get("quant_method"), "value", quantization.get("quant_method"))
    rope = config.to_dict().get("rope_parameters") or {}
    name = str(getattr(whole, "_name_or_path", "") or type(model).__name__).rstrip("/").rsplit("/", 1)[-1]
    return {
        "model_type": str(config.model_type),
        "name": name.encode("utf-8", "replace").decode(),  # a folder's name need not be UTF-8
        "hidden_size": layout.hidden_size,
        "num_hidden_layers": layout.num_layers,
        "num_attention_heads": int(config.num_attention_heads),
        "num_key_value_heads": num_key_value_heads(config),
        "head_dim": head_dim(config),
        "vocab_size": int(config.vocab_size),
        "layer_types": list(layout.layer_types),
        "sliding_window": next((window for window in layout.windows if window is not None), None),
        "rope": json.loads(json.dumps(rope, default=str)),
        "quantization": None if method is None else str(method),
        "anchors": _weight_anchors(
            layout, adapted=bool(getattr(model, "_hf_peft_config_loaded", False) or getattr(model, "peft_config", None))
        ),
        "tokenizer": None if tokenizer is None else tokenizer_hash(tokenizer),
    }


def tokenizer_hash(tokenizer: Any) -> str:
    """sha256 over a tokenizer's vocabulary and its ids for a fixed probe text.

    The vocabulary alone would miss other merges or another pre-tokenizer; the serialised tokenizer would change with
    every padding setting.
    """
    vocabulary = sorted(tokenizer.get_vocab().items())
    ids = tokenizer(_TOKENIZER_PROBE, add_special_tokens=False)["input_ids"]
    return hashlib.sha256(json.dumps([vocabulary, list(ids)], ensure_ascii=False).encode()).hexdigest()


def _weight_anchors(layout: DecoderLayout, *, adapted: bool) -> str | None:
    """Hash fixed elements, rounded to bf16, of the embeddings and of every layer's every matrix.

    An adapter that was merged into a matrix changes nearly all of its elements by more than that rounding. None where
    weights are not in memory.
    """
    import torch

    embeddings = getattr(layout.base, "get_input_embeddings", lambda: None)()
    chosen = [(getattr(embeddings, "weight", None), _EMBEDDING_ANCHORS)]
    for layer in layout.layers:
        chosen += [(weight, _MATRIX_ANCHORS) for _, weight in sorted(layer.named_parameters()) if weight.ndim >= 2]
    digest = hashlib.sha256(b"adapted" if adapted else b"")
    for weight, count in chosen:
        if weight is None or weight.device.type == "meta":
            return None
        flat = weight.detach().reshape(-1)
        where = torch.linspace(0, flat.numel() - 1, count, dtype=torch.float64).long().to(flat.device)
        elements = flat[where].to(device="cpu", dtype=torch.bfloat16)
        digest.update(elements.view(torch.int16).numpy().tobytes())
    return digest.hexdigest()


def model_shape(model: nn.Module) -> dict[str, Any]:
    """The shape that the cost model needs (rust/src/cost/), counted from the model's own weights.

    ``mlp_flops_per_row`` is two per weight that a row meets outside attention: experts count by the share of them
    that one token activates.

    Raises:
        UnsupportedModelError: layers are recurrent, which this shape cannot say; `_core.describe_model` can.
    """
    layout = decoder_layout(model)
    config = layout.config
    if layout.recurrent:
        raise UnsupportedModelError(
            f"{type(model).__name__}: a shape of attention layers does not describe recurrent ones; describe the model "
            "from its config (ridgefill-plan show)"
        )
    experts = next((n for k in ("num_local_experts", "num_experts") if (n := getattr(config, k, None))), 0)
    active_share = config.num_experts_per_tok / experts if experts else 1.0
    layers = []
    for layer, window in zip(layout.layers, layout.windows, strict=True):
        weights = 0.0
        for name, parameter in layer.named_parameters():
            if parameter.ndim >= 2 and "attn" not in name and "attention" not in name:
                weights += parameter.numel() * (active_share if "experts" in name else 1.0)
        layers.append(
            {
                "num_attention_heads": int(config.num_attention_heads),
                "num_key_value_heads": num_key_value_heads(config),
                "head_dim": head_dim(config),
                "mlp_flops_per_row": 2.0 * weights,
                "window": window,
            }
        )
    return {"hidden_size": layout.hidden_size, "vocab_size": int(config.vocab_size), "layers": layers}
