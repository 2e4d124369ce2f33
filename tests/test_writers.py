"""Both writers against each other and against the float64 oracle."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny import CORE_FAMILIES, DIRECT_FAMILIES, NUM_LAYERS, SPLIT, tiny_model

from ridgefill import reference
from ridgefill.errors import UnsupportedModelError
from ridgefill.layout import decoder_layout
from ridgefill.synth import ResidentMap
from ridgefill.writers import direct_writer, generic_writer, late_layer_writers


def layer_kwargs(model: torch.nn.Module, layer_idx: int, rows: int) -> dict[str, Any]:
    """What the model itself gives this layer for ``rows`` rows."""
    seen: dict[str, Any] = {}
    layer = decoder_layout(model).layers[layer_idx]

    def hook(_: Any, __: Any, kwargs: dict[str, Any]) -> None:
        seen.update(kwargs)

    handle = layer.register_forward_pre_hook(hook, with_kwargs=True)
    try:
        with torch.no_grad():
            model(torch.arange(3, 3 + rows).unsqueeze(0), use_cache=False)
    finally:
        handle.remove()
    return {name: value for name, value in seen.items() if name != "hidden_states"}


@pytest.mark.parametrize("family", sorted(DIRECT_FAMILIES))
@pytest.mark.parametrize("rows", [1, 17, 129])
def test_direct_equals_generic(family: str, rows: int) -> None:
    model = tiny_model(family)
    layout = decoder_layout(model)
    for layer_idx in range(SPLIT, NUM_LAYERS):
        kwargs = layer_kwargs(model, layer_idx, rows)
        block_input = 3 * torch.randn(1, rows, layout.hidden_size)
        direct = direct_writer(layout, layer_idx)
        assert direct is not None
        with torch.no_grad():
            for ours, theirs in zip(
                direct(block_input, kwargs), generic_writer(layout, layer_idx)(block_input, kwargs), strict=True
            ):
                assert ours.shape == theirs.shape == (1, 2, rows, 16)
                torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_writers_match_the_float64_oracle(family: str) -> None:
    """Error at most twice that of the same float32 arithmetic written in plain PyTorch: here, 1e-5 relative."""
    model = tiny_model(family)
    layout = decoder_layout(model)
    layer, rows = layout.layers[SPLIT + 1], 17
    kwargs = layer_kwargs(model, SPLIT + 1, rows)
    x = torch.randn(1, rows, layout.hidden_size)
    predictor = ResidentMap(torch.randn(layout.hidden_size, layout.hidden_size), torch.randn(layout.hidden_size))
    with torch.no_grad():
        keys, values = generic_writer(layout, SPLIT + 1)(predictor.predict(x), kwargs)
        attention = layer.self_attn
        block_input = reference.predict_block_input(x, predictor.weight, predictor.bias)
        norm = layer.input_layernorm
        key_norm = getattr(attention, "k_norm", None)
        want_keys, want_values = reference.keys_values(
            reference.rms_norm(block_input, norm.weight, norm.variance_epsilon),
            attention.k_proj.weight,
            attention.v_proj.weight,
            attention.head_dim,
            *kwargs["position_embeddings"],
            key_bias=attention.k_proj.bias,
            value_bias=attention.v_proj.bias,
            key_norm=None if key_norm is None else (key_norm.weight, key_norm.variance_epsilon),
        )
    for ours, oracle in ((keys, want_keys), (values, want_values)):
        assert oracle.dtype == torch.float64
        assert float((ours - oracle).abs().max()) < 1e-5 * float(oracle.abs().max())


@pytest.mark.parametrize("family", CORE_FAMILIES)
def test_each_family_gets_the_expected_writer(family: str) -> None:
    model = tiny_model(family)
    writers, rotary_modules = late_layer_writers(decoder_layout(model), SPLIT)
    assert set(writers) == set(range(SPLIT, NUM_LAYERS))
    assert {w.name for w in writers.values()} == {"direct" if family in DIRECT_FAMILIES else "generic"}
    # These two make one rotary table for their global layers and another for their sliding ones.
    assert bool(rotary_modules) == (family in ("gemma3", "olmo3"))


def test_a_direct_path_with_other_arithmetic_is_not_used() -> None:
    """A layer that looks Llama-shaped but scales its keys: the probe must notice and keep the generic writer."""
    model = tiny_model("llama")
    attention_class = type(model.model.layers[SPLIT].self_attn)

    class ScaledKeys(attention_class):  # type: ignore[valid-type,misc]
        def forward(self, hidden_states: torch.Tensor, **kwargs: Any) -> Any:
            return super().forward(2 * hidden_states, **kwargs)

    ScaledKeys.__module__ = attention_class.__module__  # where its rotary function is looked up
    model.model.layers[SPLIT + 1].self_attn.__class__ = ScaledKeys
    writers, _ = late_layer_writers(decoder_layout(model), SPLIT)
    assert writers[SPLIT + 1].name == "generic"
    assert "other keys or values" in writers[SPLIT + 1].reason
    assert writers[SPLIT].name == "direct"


def test_a_layer_with_tensors_of_its_own_is_refused() -> None:
    model = tiny_model("llama")

    def extra(_: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        return args, {**kwargs, "per_layer_input": torch.zeros(1)}

    handle = model.model.layers[SPLIT + 1].register_forward_pre_hook(extra, with_kwargs=True)
    with pytest.raises(UnsupportedModelError, match=r"layer 4 .*per_layer_input"):
        late_layer_writers(decoder_layout(model), SPLIT)
    handle.remove()
