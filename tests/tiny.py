"""Tiny random models of every model family, maps for them, and prompts: what the identity tests run on."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from ridgefill.layout import cache_argument_name, decoder_layout, fingerprint
from ridgefill.maps import LayerMap, RidgeMaps, SplitMaps

NUM_LAYERS = 6
SPLIT = 3
WINDOW = 24
VOCAB = 320
FEATURES = ("stream", "previous:2", "mean:0.9", "previous:1")
TAIL = 32


@dataclass(frozen=True)
class Family:
    """One row of docs/families.md: a tiny config of a model family, and what a fill of it is expected to do.

    Attributes:
        model: transformers' class.
        settings: what its config says besides the common sizes; of a multimodal model, its text config.
        shows: what is special about it, in a few words.
        writers: the writers of its late layers, as `Attachment.status` names them.
        wrapper: of a multimodal model, what its own config says.
        attention: transformers' attention implementation.
        refused: words of `attach`'s refusal, or None where it fills.
        quality_refused: words of the refusal of tier ``quality``, or None where it runs.
        plain_cache: whether stock runs with a cache that was made without a config.
    """

    model: str
    settings: dict[str, Any] = field(default_factory=dict)
    shows: str = "dense"
    writers: str = "direct"
    wrapper: dict[str, Any] | None = None
    attention: str = "sdpa"
    refused: str | None = None
    quality_refused: str | None = None
    plain_cache: bool = True

    @property
    def model_class(self) -> Any:
        """The class itself."""
        import transformers

        return getattr(transformers, self.model)


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
_FULL, _SLIDING = "full_attention", "sliding_attention"
_GEMMA_TYPES = [_SLIDING, _SLIDING, _FULL] * 2
_TURNS = [_SLIDING, _FULL] * 3
_MOE = {"num_experts_per_tok": 2}
# Of attention through a latent (MLA).
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12,
    "v_head_dim": 20,
}
_ROUTED = {
    **_MOE,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "moe_intermediate_size": 48,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
LINEAR = {
    "head_dim": 16,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_conv_kernel_dim": 3,
}
_SHARED_EXPERT = {**_MOE, "num_experts": 4, "moe_intermediate_size": 48, "shared_expert_intermediate_size": 40}
_GEMMA4 = {
    "head_dim": 16,
    "global_head_dim": 24,
    "sliding_window": WINDOW,
    "vocab_size_per_layer_input": VOCAB,
    "hidden_size_per_layer_input": 8,
    "layer_types": _TURNS,
}
# Its scaled embeddings would make a tied head repeat one token for ever.
_GEMMA3 = {
    "head_dim": 16,
    "sliding_window": WINDOW,
    "layer_types": _GEMMA_TYPES,
    "query_pre_attn_scalar": 16,
    "tie_word_embeddings": False,
}
# Positions from 32 on scale the queries: the tail's, and some of the bulk's.
_MINISTRAL_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale_all_dim": 1.0,
    "mscale": 1.0,
    "llama_4_scaling_beta": 0.1,
}
_VISION = {"hidden_size": 16, "intermediate_size": 16, "patch_size": 4}
_VISION_LAYER = {**_VISION, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 8}
# A late layer of each kind beside the split layer, which keeps a state.
_STATES = ["linear_attention", _FULL, "linear_attention"] * 2
_RECURRENT: dict[str, Any] = {
    "writers": "direct, recurrent",
    "quality_refused": "selected rows cannot run through recurrent layers",
    "plain_cache": False,
}

# Every decoder type of the planner's family table (rust/src/family/families.rs), and more; CONTRIBUTING's recipe adds
# one row. `make families` makes docs/families.md of it.
FAMILIES: dict[str, Family] = {
    "llama": Family("LlamaForCausalLM"),
    "mistral": Family("MistralForCausalLM", {"sliding_window": None}),
    "mistral-sliding": Family(
        "MistralForCausalLM",
        {"sliding_window": WINDOW},
        "sliding windows alone",
        quality_refused="none lies at or below layer 3",
    ),
    "qwen2": Family("Qwen2ForCausalLM", shows="biases"),
    "qwen2-sliding": Family(
        "Qwen2ForCausalLM",
        {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2},
        "biases, late layers slide",
    ),
    "qwen3": Family("Qwen3ForCausalLM", {"head_dim": 16}, "k_norm"),
    "gemma2": Family(
        "Gemma2ForCausalLM",
        {"head_dim": 16, "sliding_window": WINDOW, "query_pre_attn_scalar": 16, "tie_word_embeddings": False},
        "logit softcapping, sliding and global layers",
        attention="eager",
    ),
    "gemma3": Family("Gemma3ForCausalLM", _GEMMA3, "k_norm, sliding and global layers, two rotary tables"),
    "phi3": Family("Phi3ForCausalLM", shows="fused qkv", writers="generic"),
    "phi3-partial": Family(
        "Phi3ForCausalLM",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
        "fused qkv, partial rotary",
        "generic",
    ),
    "mixtral": Family("MixtralForCausalLM", {"num_local_experts": 4, **_MOE}, "MoE"),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM",
        {"head_dim": 16, "num_experts": 4, "moe_intermediate_size": 48, "decoder_sparse_step": 1, **_MOE},
        "MoE, k_norm",
    ),
    "olmo2": Family("Olmo2ForCausalLM", shows="no input norm, k_norm over all heads", writers="generic"),
    "olmo3": Family(
        "Olmo3ForCausalLM",
        {"sliding_window": WINDOW, "layer_types": _TURNS},
        "no input norm, sliding and global layers, two rotary tables",
        "generic",
    ),
    "smollm3": Family(
        "SmolLM3ForCausalLM",
        {"no_rope_layer_interval": 2, "tie_word_embeddings": False},
        "layers without rotary embedding",
        "direct, generic",
    ),
    "cohere2": Family(
        "Cohere2ForCausalLM",
        {"sliding_window": WINDOW, "tie_word_embeddings": False},
        "layer norm, parallel MLP, global layers without rotary embedding",
        "direct, generic",
    ),
    "starcoder2": Family("Starcoder2ForCausalLM", {"use_bias": True, "sliding_window": None}, "layer norm, biases"),
    "granite": Family(
        "GraniteForCausalLM",
        {
            "attention_multiplier": 0.25,
            "residual_multiplier": 0.5,
            "embedding_multiplier": 2.0,
            "logits_scaling": 2.0,
        },
        "multipliers",
    ),
    "ministral3": Family(
        "Ministral3ForCausalLM", {"head_dim": 16, "rope_parameters": _MINISTRAL_ROPE}, "queries scaled by position"
    ),
    "glm4_moe": Family(
        "Glm4MoeForCausalLM",
        {**_ROUTED, "head_dim": 16, "use_qk_norm": True, "attention_bias": True},
        "MoE, k_norm, partial rotary",
    ),
    "gpt_oss": Family(
        "GptOssForCausalLM",
        {**_MOE, "num_local_experts": 4, "head_dim": 16, "sliding_window": WINDOW, "layer_types": _TURNS},
        "MoE, attention sinks, sliding and global layers",
        attention="eager",
    ),
    "deepseek_v3": Family(
        "DeepseekV3ForCausalLM",
        {**_ROUTED, **LATENT},
        "MLA: a latent and one rotated key; MoE",
        "generic",
    ),
    "gemma3-images": Family(
        "Gemma3ForConditionalGeneration",
        _GEMMA3,
        "multimodal: text-only calls fill",
        wrapper={
            "vision_config": {"model_type": "siglip_vision_model", "vision_use_head": False, **_VISION_LAYER},
            "mm_tokens_per_image": 4,
            "image_token_index": 1,  # no prompt holds it by chance
            "tie_word_embeddings": False,
        },
    ),
    "mistral3-images": Family(
        "Mistral3ForConditionalGeneration",
        {"model_type": "ministral3", "head_dim": 16, "rope_parameters": _MINISTRAL_ROPE},
        "multimodal: text-only calls fill",
        wrapper={
            "vision_config": {"model_type": "pixtral", **_VISION_LAYER},
            "image_token_index": 1,
            "tie_word_embeddings": False,
        },
    ),
    "qwen3_vl-images": Family(
        "Qwen3VLForConditionalGeneration",
        {
            "head_dim": 16,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e4,
                "mrope_section": [4, 2, 2],
                "mrope_interleaved": True,
            },
        },
        "multimodal: text-only calls fill; multi-section rotary",
        wrapper={
            "vision_config": {
                **_VISION,
                "depth": 1,
                "num_heads": 2,
                "out_hidden_size": 64,
                "num_position_embeddings": 16,
                "deepstack_visual_indexes": [0],
            },
            "image_token_id": 1,
            "tie_word_embeddings": False,
        },
    ),
    "qwen3_next": Family(
        "Qwen3NextForCausalLM",
        {**LINEAR, **_SHARED_EXPERT, "layer_types": _STATES},
        "gated delta net beside attention; MoE",
        **_RECURRENT,
    ),
    "qwen3_5": Family("Qwen3_5ForCausalLM", LINEAR, "gated delta net beside attention", **_RECURRENT),
    "qwen3_5_moe": Family(
        "Qwen3_5MoeForCausalLM",
        {**LINEAR, **_SHARED_EXPERT, "layer_types": _STATES},
        "gated delta net beside attention; MoE",
        **_RECURRENT,
    ),
    "falcon_h1": Family(
        "FalconH1ForCausalLM",
        {
            "mamba_d_ssm": 48,
            "mamba_n_heads": 6,
            "mamba_d_state": 8,
            "mamba_d_conv": 3,
            "mamba_chunk_size": 16,
            "key_multiplier": 0.5,
            "attention_in_multiplier": 2.0,
        },
        "Mamba 2 and attention in every layer, multipliers",
        **{**_RECURRENT, "writers": "recurrent"},
    ),
    "lfm2": Family(
        "Lfm2ForCausalLM",
        {"full_attn_idxs": [1, 3, 5], "block_multiple_of": 16},
        "short convolutions beside attention, k_norm",
        **{**_RECURRENT, "writers": "generic, recurrent"},
    ),
    "granitemoehybrid": Family(
        "GraniteMoeHybridForCausalLM",
        {
            **_MOE,
            "num_local_experts": 4,
            "shared_intermediate_size": 40,
            "position_embedding_type": "rope",
            "layer_types": _STATES,
            "mamba_n_heads": 8,
            "mamba_d_state": 8,
            "mamba_d_conv": 3,
            "mamba_chunk_size": 16,
        },
        "Mamba 2 beside attention; MoE",
        **_RECURRENT,
    ),
    "gemma4": Family(
        "Gemma4ForCausalLM",
        _GEMMA4,
        "heads of two widths, per-layer inputs",
        refused="layers differ in their heads (config.per_layer_config), which a map file does not describe",
    ),
    "gemma4-shared": Family(
        "Gemma4ForCausalLM",
        {**_GEMMA4, "num_kv_shared_layers": 2},
        "layers that reuse another layer's keys and values",
        refused="layers that reuse another layer's cache are not supported yet",
    ),
    "qwen4_exp": Family(
        "Qwen4ExpForCausalLM",
        {
            **LINEAR,
            **_SHARED_EXPERT,
            "hc_lowrank": 12,
            "indexer_n_heads": 2,
            "indexer_kv_heads": 1,
            "indexer_head_dim": 16,
            "indexer_budget": 16,
            "indexer_compress_ratio": 4,
        },
        "gated delta net, indexed attention, several residual streams",
        refused="layer 3 keeps more than keys and values and one state (DynamicIndexedLayer)",
    ),
}
# Also run through every turn, writer and fit; all families go through the matrix of tests/family_matrix.py.
CORE_FAMILIES = (
    "llama",
    "mistral",
    "mistral-sliding",
    "qwen2",
    "qwen3",
    "gemma3",
    "phi3",
    "mixtral",
    "qwen3_moe",
    "olmo3",
)
DIRECT_FAMILIES = {name for name in CORE_FAMILIES if FAMILIES[name].writers == "direct"}


def remember(model: nn.Module) -> nn.Module:
    """Make recurrent states forget over some 80 rows, as those of trained models do: random ones forget at once."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):
                parameter.fill_(-4.0)
            if name.endswith("dt_bias"):
                parameter.zero_()
    return model


def tiny_model(family: str, *, seed: int = 0, attention: str | None = None, **overrides: Any) -> nn.Module:
    """A random float32 model in eval mode; the same seed gives the same weights."""
    row = FAMILIES[family]
    settings = {**_COMMON, **row.settings, **overrides}
    if row.wrapper is not None:
        settings = {"text_config": settings, **row.wrapper}
    config = row.model_class.config_class(**copy.deepcopy(settings))  # a config may keep what it is given
    config._attn_implementation = attention or row.attention
    torch.manual_seed(seed)
    model = row.model_class(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1 and "bias" in name:
                parameter.normal_(0, 0.1)  # a bias of zero would hide a path that forgets it
    return model


def call(model: nn.Module, ids: torch.Tensor, mask: torch.Tensor | None, cache: Any, keep: int = TAIL) -> torch.Tensor:
    """The logits of the last ``keep`` rows, from one forward into ``cache``."""
    argument = cache_argument_name(model.forward)
    with torch.no_grad():
        return model(ids, attention_mask=mask, use_cache=True, logits_to_keep=keep, **{argument: cache}).logits


def after_first_turn(model: nn.Module, ids: torch.Tensor, mask: torch.Tensor | None, first: int, cache: Any) -> Any:
    """The cache with a conversation's first rows in it, where there are any, run before anything is attached."""
    if first:
        call(model, ids[:, :first], None if mask is None else mask[:, :first], cache, 1)
    return cache


def in_pieces(
    model: nn.Module, ids: torch.Tensor, mask: torch.Tensor | None, cache: Any, cached: int, end: int, keep: int = TAIL
) -> torch.Tensor:
    """Stock, run in the pieces that a fill uses: rows up to the bulk's end, then the tail."""
    cut = end - cached
    call(model, ids[:, :cut], None if mask is None else mask[:, :end], cache, 1)
    return call(model, ids[:, cut:], mask, cache, keep)


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
