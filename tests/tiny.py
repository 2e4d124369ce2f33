"""Tiny random models of many families, maps for them, and prompts: what the identity tests run on."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ridgefill.layout import decoder_layout, fingerprint
from ridgefill.maps import LayerMap, RidgeMaps, SplitMaps

NUM_LAYERS = 6
SPLIT = 3
WINDOW = 24
VOCAB = 320
FEATURES = ("stream", "previous:2", "mean:0.9", "previous:1")

# Larger than the usual .02: attention must matter, or an error in a late layer would not show in the logits.
_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "initializer_range": 0.15,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_GEMMA_TYPES = ["sliding_attention", "sliding_attention", "full_attention"] * 2
_MOE = {"num_experts_per_tok": 2}

# Every family of issue 3; CONTRIBUTING's recipe adds one row.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", {}),
    "mistral": ("MistralForCausalLM", {"sliding_window": None}),
    "mistral-sliding": ("MistralForCausalLM", {"sliding_window": WINDOW}),
    "qwen2": ("Qwen2ForCausalLM", {}),
    "qwen3": ("Qwen3ForCausalLM", {"head_dim": 16}),
    "gemma3": (
        "Gemma3ForCausalLM",
        {
            "head_dim": 16,
            "sliding_window": WINDOW,
            "layer_types": _GEMMA_TYPES,
            "query_pre_attn_scalar": 16,
            "tie_word_embeddings": False,  # its scaled embeddings would make a tied head repeat one token for ever
        },
    ),
    "phi3": ("Phi3ForCausalLM", {}),
    "mixtral": ("MixtralForCausalLM", {"num_local_experts": 4, **_MOE}),
    "qwen3_moe": (
        "Qwen3MoeForCausalLM",
        {"head_dim": 16, "num_experts": 4, "moe_intermediate_size": 48, "decoder_sparse_step": 1, **_MOE},
    ),
    "olmo3": (
        "Olmo3ForCausalLM",
        {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"] * 3},
    ),
}
DIRECT_FAMILIES = {"llama", "mistral", "mistral-sliding", "qwen2", "qwen3", "gemma3", "mixtral", "qwen3_moe"}


def tiny_model(family: str, *, seed: int = 0, attention: str = "sdpa", **overrides: Any) -> nn.Module:
    """A random float32 model in eval mode; the same seed gives the same weights."""
    import transformers

    class_name, settings = FAMILIES[family]
    model_class = getattr(transformers, class_name)
    config = model_class.config_class(**{**_COMMON, **settings, **overrides})
    config._attn_implementation = attention
    torch.manual_seed(seed)
    model = model_class(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1 and "bias" in name:
                parameter.normal_(0, 0.1)  # a bias of zero would hide a path that forgets it
    return model


def random_maps(model: nn.Module, *, split: int = SPLIT, seed: int = 1, identity: bool = False) -> RidgeMaps:
    """Maps with random weights (or W = identity, b = 0) for every late layer of ``model``."""
    layout = decoder_layout(model)
    d = layout.hidden_size
    generator = torch.Generator().manual_seed(seed)
    layers = {}
    for layer in range(split + 1, layout.num_layers):
        weight = torch.eye(d) if identity else torch.randn(d, d, generator=generator) / d**0.5
        bias = torch.zeros(d) if identity else 0.1 * torch.randn(d, generator=generator)
        layers[layer] = LayerMap(layer, weight, bias)
    splits = {split: SplitMaps(split, layers, target=layout.target(split))}
    fit = {"rows": 1, "held_out_rows": 0, "head": 4, "window_tokens": 1, "texts": []}
    return RidgeMaps(fingerprint(model), fit, splits, split)


def feature_maps(model: Any, names: tuple[str, ...] = FEATURES) -> RidgeMaps:
    """Random maps over these features, with random gains."""
    maps = random_maps(model)
    d, generator = decoder_layout(model).hidden_size, torch.Generator().manual_seed(7)
    heads = model.config.num_key_value_heads
    layers = {
        layer: replace(
            layer_map,
            weight=torch.randn(len(names) * d, d, generator=generator) / (len(names) * d) ** 0.5,
            key_gain=1 + torch.rand(heads, generator=generator),
            value_gain=2 + torch.rand(heads, generator=generator),
        )
        for layer, layer_map in maps.splits[SPLIT].layers.items()
    }
    return replace(maps, splits={SPLIT: replace(maps.splits[SPLIT], layers=layers, features=names)})


def exact_scale(model: Any, maps: RidgeMaps) -> RidgeMaps:
    """The same maps with a scale basis of full rank: every direction, nothing outside."""
    d = decoder_layout(model).hidden_size
    layers = {
        layer: replace(m, scale_basis=torch.eye(d), scale_residual=torch.zeros(1))
        for layer, m in maps.splits[SPLIT].layers.items()
    }
    return replace(maps, splits={SPLIT: replace(maps.splits[SPLIT], layers=layers)})


def prompt(rows: int, *, batch: int = 1, seed: int = 2) -> torch.Tensor:
    """Random token ids ``[batch, rows]`` without the special ones."""
    return torch.randint(3, VOCAB, (batch, rows), generator=torch.Generator().manual_seed(seed))


def left_padded(rows: int, pads: tuple[int, ...], *, seed: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and attention mask ``[len(pads), rows]``, each sequence with its own number of left pads."""
    ids = prompt(rows, batch=len(pads), seed=seed)
    mask = torch.ones_like(ids)
    for row, count in enumerate(pads):
        ids[row, :count] = 0
        mask[row, :count] = 0
    return ids, mask
