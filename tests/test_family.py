"""Families as data: what the core reads from a config.json is what transformers builds from it."""

from __future__ import annotations

import copy
import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import LATENT, LINEAR
from torch import nn

from ridgefill import _core
from ridgefill.demo import model_folder
from ridgefill.errors import ScheduleError
from ridgefill.layout import cache_argument_name, model_shape

WINDOW = 24
ROWS = 40
COMMON: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
_SHARED = {**_EXPERTS, "shared_expert_intermediate_size": 40}
_ROUTED = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
_MLA = {**_ROUTED, **LATENT}
_INDEXER = {
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 16,
    "indexer_budget": 16,
    "indexer_compress_ratio": 4,
}
_NGRAMS = {"ngram_vocab_size_base": 50, "heads_per_ngram": 2, "ple_conv_kernel_size": 3, "split_ngram_parts": 1}
_GEMMA4 = {
    "head_dim": 16,
    "global_head_dim": 24,
    "sliding_window": WINDOW,
    "vocab_size_per_layer_input": 96,
    "hidden_size_per_layer_input": 8,
}
_MAMBA = {
    "mamba_d_ssm": 48,
    "mamba_n_heads": 6,
    "mamba_d_state": 8,
    "mamba_d_conv": 3,
    "mamba_chunk_size": 16,
}
_FULL, _SLIDING, _STATE = "full_attention", "sliding_attention", "linear_attention"
_SLIDES = {"use_sliding_window": True, "sliding_window": WINDOW}

# What each config.json says besides COMMON: every field that changes a shape, and every way to derive layer types.
CASES: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 24, "tie_word_embeddings": True}),
    ("llama", {"num_key_value_heads": None}),
    ("mistral", {"sliding_window": WINDOW}),
    ("mistral", {"sliding_window": None, "head_dim": 8}),
    ("mixtral", {"num_local_experts": 4}),
    ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 3, "sliding_window": WINDOW, "head_dim": 24}),
    ("qwen2", {"sliding_window": WINDOW}),
    ("qwen2", {**_SLIDES, "max_window_layers": 3, "tie_word_embeddings": True}),
    ("qwen2", {**_SLIDES, "layer_types": [_SLIDING, _FULL, _FULL, _SLIDING]}),
    ("qwen3", {"head_dim": 24, "tie_word_embeddings": True}),
    ("qwen3", {**_SLIDES, "max_window_layers": 1, "attention_bias": True}),
    ("qwen3_moe", {**_EXPERTS, "head_dim": 24}),
    ("qwen3_moe", {**_EXPERTS, "decoder_sparse_step": 2, "mlp_only_layers": [3], "attention_bias": True}),
    ("qwen3_moe", {**_EXPERTS, **_SLIDES}),
    ("qwen3_next", {**LINEAR, **_SHARED}),
    (
        "qwen3_next",
        {**LINEAR, **_SHARED, "full_attention_interval": 2, "mlp_only_layers": [0], "attention_bias": True},
    ),
    ("qwen3_next", {**LINEAR, **_SHARED, "layer_types": [_FULL, _STATE, _STATE, _FULL], "decoder_sparse_step": 2}),
    ("qwen3_5_text", {**LINEAR}),
    ("qwen3_5_text", {**LINEAR, "full_attention_interval": 3, "attention_bias": True, "tie_word_embeddings": True}),
    ("qwen3_5_moe_text", {**LINEAR, **_SHARED}),
    ("qwen3_5_moe_text", {**LINEAR, **_SHARED, "layer_types": [_STATE, _FULL, _FULL, _STATE]}),
    ("qwen4_exp_text", {**LINEAR, **_SHARED, **_INDEXER, "hc_lowrank": 12}),
    (
        "qwen4_exp_text",
        {
            **LINEAR,
            **_SHARED,
            **_INDEXER,
            **_NGRAMS,
            "hc_count": 2,
            "hc_lowrank": 12,
            "ple_layer_ids": [3, 1],
            "ple_embed_dim": 32,
            "layer_types": [_STATE, _FULL, _STATE, "indexed_attention"],
        },
    ),
    ("gemma2", {"head_dim": 16, "sliding_window": WINDOW}),
    ("gemma2", {"head_dim": 16, "sliding_window": WINDOW, "attention_bias": True, "tie_word_embeddings": False}),
    ("gemma3_text", {"head_dim": 16, "sliding_window": WINDOW, "num_hidden_layers": 7}),
    ("gemma3_text", {"head_dim": 16, "sliding_window": WINDOW, "sliding_window_pattern": 2, "attention_bias": True}),
    ("gemma3_text", {"head_dim": 16, "sliding_window": WINDOW, "layer_types": [_FULL, _SLIDING, _SLIDING, _FULL]}),
    ("gemma4_text", {**_GEMMA4, "num_hidden_layers": 7}),
    (
        "gemma4_text",
        {
            **_GEMMA4,
            "num_hidden_layers": 6,
            "layer_types": [_SLIDING, _FULL] * 3,
            "num_kv_shared_layers": 3,
            "use_double_wide_mlp": True,
            "attention_bias": True,
        },
    ),
    (
        "gemma4_text",
        {
            **_GEMMA4,
            "layer_types": [_SLIDING, _FULL, _SLIDING, _SLIDING],
            "hidden_size_per_layer_input": 0,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "enable_moe_block": True,
            "num_experts": 4,
            "top_k_experts": 2,
            "moe_intermediate_size": 48,
            "attention_bias": True,
            "tie_word_embeddings": False,
        },
    ),
    ("phi3", {}),
    ("phi3", {"sliding_window": WINDOW, "num_key_value_heads": None, "tie_word_embeddings": True}),
    ("gpt_oss", {"num_local_experts": 4, "head_dim": 24, "sliding_window": WINDOW}),
    (
        "gpt_oss",
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "head_dim": 16,
            "sliding_window": WINDOW,
            "attention_bias": False,
            "layer_types": [_FULL, _FULL, _SLIDING, _FULL],
        },
    ),
    ("deepseek_v3", _MLA),
    (
        "deepseek_v3",
        {**_MLA, "q_lora_rank": None, "attention_bias": True, "n_shared_experts": 2, "first_k_dense_replace": 3},
    ),
    ("deepseek_v3", {**_MLA, "attention_bias": True, "tie_word_embeddings": True}),
    ("glm4_moe", _ROUTED),
    ("glm4_moe", {**_ROUTED, "head_dim": 24, "use_qk_norm": True, "attention_bias": True, "n_shared_experts": 2}),
    ("olmo3", {"sliding_window": WINDOW}),
    ("olmo3", {"sliding_window": WINDOW, "attention_bias": True, "layer_types": [_FULL, _SLIDING, _FULL, _FULL]}),
    ("granite", {}),
    ("granite", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True, "num_key_value_heads": None}),
    ("smollm3", {}),
    ("smollm3", {**_SLIDES, "no_rope_layer_interval": 2, "attention_bias": True}),
    ("smollm3", {**_SLIDES, "no_rope_layers": [0, 1, 1, 0], "mlp_bias": True, "tie_word_embeddings": False}),
    ("ministral3", {"head_dim": 24}),
    ("ministral3", {"head_dim": 16, "sliding_window": WINDOW, "tie_word_embeddings": True}),
    ("falcon_h1", _MAMBA),
    (
        "falcon_h1",
        {
            **_MAMBA,
            "mamba_d_ssm": None,
            "mamba_n_heads": 8,
            "mamba_d_head": 16,
            "mamba_n_groups": 2,
            "mamba_rms_norm": True,
            "mamba_conv_bias": False,
            "mamba_proj_bias": True,
            "projectors_bias": True,
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": True,
        },
    ),
    ("lfm2", {"full_attn_idxs": [1, 3], "block_multiple_of": 16}),
    ("lfm2", {"conv_bias": True, "block_ff_dim": 100, "block_ffn_dim_multiplier": 1.3, "tie_embedding": False}),
    ("lfm2", {"layer_types": ["conv", _FULL, "conv", "conv"], "block_auto_adjust_ff_dim": False, "conv_L_cache": 4}),
]


def described(config: dict[str, Any] | str) -> dict[str, Any]:
    text = config if isinstance(config, str) else json.dumps(config)
    description: dict[str, Any] = json.loads(_core.describe_model(text))
    return description


def figures(config: dict[str, Any] | str, rows: int = 1) -> dict[str, Any]:
    result: dict[str, Any] = json.loads(_core.model_figures(json.dumps(described(config)), rows=rows))
    return result


def built(config: dict[str, Any]) -> tuple[Any, type[nn.Module]]:
    """transformers' own reading of a config.json, and the class that it builds."""
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    # As from_pretrained does, which copies: from_dict empties the dict that it is given.
    read = AutoConfig.for_model(config["model_type"]).__class__.from_dict(copy.deepcopy(config))
    return read, MODEL_FOR_CAUSAL_LM_MAPPING[type(read)]


def count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def cache_shapes(layer: Any) -> list[dict[str, Any]]:
    """What one layer of a DynamicCache holds: every tensor that transformers' cache layers know."""
    held = []
    for name in ("keys", "values", "indexer_keys"):
        tensor = getattr(layer, name, None)
        if tensor is not None:
            held.append({"name": name, "shape": list(tensor.shape[1:])})
    conv, recurrent = getattr(layer, "conv_states", {}), getattr(layer, "recurrent_states", {})
    for name, states in (("conv", conv), ("recurrent", recurrent)):
        if states.get(0) is not None:
            held.append({"name": name, "shape": list(states[0].shape[1:])})
    extra = [tensor for index, tensor in sorted(conv.items()) if index > 0 and tensor is not None]
    assert all(tensor is None for index, tensor in recurrent.items() if index > 0)
    return held + [{"name": "extra", "shape": list(tensor.shape[1:])} for tensor in extra]


@pytest.mark.parametrize("case", CASES, ids=[f"{index}-{name}" for index, (name, _) in enumerate(CASES)])
def test_counts_and_caches_are_those_of_the_model(case: tuple[str, dict[str, Any]]) -> None:
    from transformers import DynamicCache

    model_type, settings = case
    raw = {**COMMON, **settings, "model_type": model_type}
    config, model_class = built(raw)
    # What save_pretrained would write describes the same model.
    assert described(config.to_json_string()) == described(raw)
    assert described(config.to_json_string(use_diff=False)) == described(raw)

    model = model_class(config).eval()
    layers = model.model.layers
    cache = DynamicCache(config=config)
    argument = cache_argument_name(model.forward)
    with torch.no_grad():
        model(torch.arange(ROWS)[None] % 90 + 3, use_cache=True, **{argument: cache})
    found = figures(raw, ROWS)
    assert found["parameters"] == count(model)
    assert [layer["parameters"] for layer in found["layers"]] == [count(layer) for layer in layers]
    assert [layer["cache"] for layer in found["layers"]] == [cache_shapes(layer) for layer in cache.layers]
    assert any(layer["cache"] for layer in found["layers"])


def test_every_known_type_has_a_case() -> None:
    cases = {name.removesuffix("_text") for name, _ in CASES}
    assert cases == set(_core.known_model_types())


@pytest.mark.parametrize("model_type", _core.known_model_types())
def test_defaults_are_those_of_the_configuration_class(model_type: str) -> None:
    """Full widths on the meta device, from a config.json that says next to nothing."""
    from transformers import AutoConfig

    known = (
        f"{model_type}_text"
        if model_type in ("gemma3", "gemma4", "qwen3_5", "qwen3_5_moe", "qwen4_exp")
        else model_type
    )
    raw = {"model_type": known, "num_hidden_layers": 8}
    if model_type == "qwen4_exp":
        raw |= _INDEXER | {"indexer_head_dim": 256, "ple_layer_ids": [2], "eos_token_id": 2, "ple_embed_dim": 64}
    if model_type == "gemma4":
        raw |= {"enable_moe_block": True, "num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 64}
    config, model_class = built(raw)
    with torch.device("meta"):
        model = model_class(config)
    found = figures(raw)
    assert found["parameters"] == count(model)
    assert [layer["parameters"] for layer in found["layers"]] == [count(layer) for layer in model.model.layers]
    del raw["num_hidden_layers"]
    default = AutoConfig.for_model(known)
    description = described(raw)
    assert sum(run["count"] for run in description["layers"]) == default.num_hidden_layers
    assert description["max_positions"] == default.max_position_embeddings


@pytest.mark.parametrize(
    "model_type", ["gemma3", "gemma4", "qwen3_5", "qwen3_5_moe", "qwen4_exp"], ids=lambda name: str(name)
)
def test_a_wrappers_text_part_is_what_is_described(model_type: str) -> None:
    from transformers import AutoConfig

    settings = next(settings for name, settings in CASES if name == f"{model_type}_text")
    text = {**COMMON, **settings, "model_type": f"{model_type}_text"}
    alone = described(text)
    wrapper = AutoConfig.for_model(model_type, text_config=copy.deepcopy(text))
    assert described(wrapper.to_json_string()) == alone
    # Older wrappers leave the type to themselves.
    nameless = {key: value for key, value in text.items() if key != "model_type"}
    assert described({"model_type": model_type, "text_config": nameless}) == {**alone, "model_type": model_type}
    tied = {"model_type": model_type, "text_config": text, "tie_word_embeddings": not alone["tied_embeddings"]}
    assert described(tied)["tied_embeddings"] is not alone["tied_embeddings"]


@pytest.mark.parametrize("name", ["smollm2-135m", pytest.param("gemma3-270m", marks=pytest.mark.slow)])
def test_real_weights_have_as_many_elements(name: str) -> None:
    folder = Path(model_folder(name))
    elements = 0
    for file in folder.glob("*.safetensors"):
        with file.open("rb") as stream:
            header = json.loads(stream.read(struct.unpack("<Q", stream.read(8))[0]))
        for tensor, entry in header.items():
            if tensor != "__metadata__":
                size = 1
                for dimension in entry["shape"]:
                    size *= dimension
                elements += size
    assert figures((folder / "config.json").read_text())["parameters"] == elements


@pytest.mark.parametrize(("family", "settings"), [("llama", {}), ("mixtral", {"num_local_experts": 4})])
def test_a_live_models_shape_agrees(family: str, settings: dict[str, Any]) -> None:
    """`model_shape` counts a live model's weights, the core its config's: both feed one cost formula."""
    raw = {**COMMON, **settings, "model_type": family, "sliding_window": WINDOW if family == "mixtral" else None}
    config, model_class = built(raw)
    shape = model_shape(model_class(config).eval())
    runs = described(raw)["layers"]
    layers = [run for run in runs for _ in range(run["count"])]
    assert shape["hidden_size"] == COMMON["hidden_size"]
    assert len(shape["layers"]) == len(layers)
    for live, run, counts in zip(shape["layers"], layers, figures(raw)["layers"], strict=True):
        mixer = run["mixer"]
        for field in ("num_attention_heads", "num_key_value_heads", "head_dim", "window"):
            assert live[field] == mixer[field]
        heads = 2 * mixer["num_attention_heads"] + 2 * mixer["num_key_value_heads"]
        attention = shape["hidden_size"] * heads * mixer["head_dim"]
        assert live["mlp_flops_per_row"] == 2 * (counts["weights"] - attention)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ("", "the config is no valid JSON"),
        ("[]", "the config is a list of 0; expected a JSON object"),
        ("{}", "model_type is missing; expected one of deepseek_v3, falcon_h1, "),
        ({"model_type": "gpt2"}, 'model_type "gpt2" is unknown; known are .*--layers'),
        (
            {"model_type": "llama", "num_attention_heads": 0},
            "num_attention_heads is 0; expected a whole number, 1 to 16777216",
        ),
        ({"model_type": "llama", "num_key_value_heads": 5}, "num_key_value_heads is 5; expected a divisor of num_att"),
        (
            {"model_type": "llama", "hidden_size": 2**25},
            "hidden_size is 33554432; expected a whole number, 1 to 16777216",
        ),
        (
            {"model_type": "llama", "hidden_size": 4095},
            "hidden_size is 4095; expected a multiple of num_attention_heads",
        ),
        (
            {"model_type": "llama", "num_hidden_layers": 4097},
            "num_hidden_layers is 4097; expected a whole number, 1 to 4096",
        ),
        ({"model_type": "llama", "vocab_size": "many"}, 'vocab_size is "many"; expected a whole number'),
        ({"model_type": "llama", "attention_bias": 1}, "attention_bias is 1; expected true or false"),
        ({"model_type": "qwen3", "layer_types": ["full_attention"]}, "layer_types is a list of 1; expected as many as"),
        (
            {"model_type": "gemma2", "num_hidden_layers": 1, "layer_types": ["conv"]},
            r'layer_types\[0\] is "conv"; expected one of full_attention, sliding_attention',
        ),
        (
            {"model_type": "gemma3", "text_config": {"head_dim": -1}},
            "text_config.head_dim is -1; expected a whole number",
        ),
        ({"model_type": "gemma3", "text_config": 3}, "text_config is 3; expected an object"),
        ({"model_type": "gemma3_text", "use_bidirectional_attention": True}, "use_bidirectional_attention is true"),
        ({"model_type": "gemma4", "num_kv_shared_layers": 30}, "num_kv_shared_layers is 30; expected fewer than"),
        (
            {"model_type": "qwen4_exp"},
            "indexer_kv_heads is missing; expected a whole number, since layers have indexed",
        ),
        (
            {"model_type": "mixtral", "num_experts_per_tok": 9},
            "num_experts_per_tok is 9; expected at most num_local_experts",
        ),
        ({"model_type": "falcon_h1", "mamba_n_heads": 3}, "mamba_n_heads is 3 heads of 341; expected 1024"),
    ],
)
def test_a_broken_config_is_refused_by_field(config: dict[str, Any] | str, words: str) -> None:
    with pytest.raises(ScheduleError, match=words):
        described(config)


def test_a_models_own_description_is_read_back() -> None:
    for model_type, settings in CASES:
        description = described({**COMMON, **settings, "model_type": model_type})
        assert json.loads(_core.model_figures(json.dumps(description)))["parameters"] > 0
        with pytest.raises(ScheduleError, match="unknown field `colour`"):
            _core.model_figures(json.dumps({**description, "colour": 1}))


def test_the_documented_description_is_read() -> None:
    page = (Path(__file__).parent.parent / "docs" / "layers.md").read_text()
    example = page.split("```json\n")[1].split("```")[0]
    counts = json.loads(_core.model_figures(example, rows=1000))
    attention, windowed = 2 * 1024 * 16 * 64 + 2 * 1024 * 4 * 64, [4, 511, 64]
    assert [layer["weights"] for layer in counts["layers"]] == [
        *[attention + 3 * 1024 * 4096] * 3,
        attention + 1024 * 32 + 4 * 3 * 1024 * 512,
    ]
    assert [layer["cache"][0]["shape"] for layer in counts["layers"]] == [*[windowed] * 3, [4, 1000, 64]]
