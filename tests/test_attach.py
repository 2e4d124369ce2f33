"""The life of an attachment: what attach refuses, which calls run stock and why, exceptions, copies, threads."""

from __future__ import annotations

import copy
import dataclasses
import gc
import logging
import re
import threading
import time
import weakref
from typing import Any

import pytest
import torch
from tiny import SPLIT, left_padded, prompt, random_maps, tiny_model
from torch import nn
from transformers import DynamicCache, QuantizedCache, StaticCache

import ridgefill
from ridgefill import caches
from ridgefill.errors import (
    AlreadyAttachedError,
    AttachError,
    MapMismatchError,
    MapSchemaError,
    UnsupportedModelError,
)
from ridgefill.layout import cache_argument_name, decoder_layout

ROWS, TAIL, HEAD, MIN_BULK = 160, 32, 4, 16
SETTINGS: dict[str, Any] = {"tail": TAIL, "head": HEAD, "min_bulk": MIN_BULK}
FILLED = ROWS - TAIL - HEAD


@pytest.fixture
def llama() -> nn.Module:
    return tiny_model("llama")


def run(model: nn.Module, ids: torch.Tensor | None = None, **kwargs: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(prompt(ROWS) if ids is None else ids, **{"use_cache": True, "logits_to_keep": 1, **kwargs}).logits


def hook_count(model: nn.Module) -> int:
    return sum(len(m._forward_pre_hooks) + len(m._forward_hooks) for m in model.modules())


# --- what attach refuses -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"tier": "best"}, "unknown tier 'best'"),
        ({"tail": 0}, "tail must be an integer of at least 1, found 0"),
        ({"head": -1}, "head must be an integer of at least 0"),
        ({"min_bulk": 0.5}, r"min_bulk must be .* found 0.5"),
        ({"tail": True}, "tail must be"),
    ],
)
def test_parameters_out_of_range_are_named(llama: nn.Module, settings: dict[str, Any], word: str) -> None:
    with pytest.raises(AttachError, match=word):
        ridgefill.attach(llama, random_maps(llama), **settings)
    assert hook_count(llama) == 0


def test_a_split_that_the_file_lacks_is_refused(llama: nn.Module) -> None:
    with pytest.raises(MapSchemaError, match=r"no maps for split 2: .* hold splits \[3\]"):
        ridgefill.attach(llama, random_maps(llama), split=2)
    assert hook_count(llama) == 0


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model_type", "qwen2"),
        ("hidden_size", 128),
        ("num_key_value_heads", 4),
        ("head_dim", 32),
        ("vocab_size", 7),
        ("layer_types", ["sliding_attention"] * 6),
        ("rope", {"rope_theta": 5.0}),
    ],
)
def test_maps_of_another_model_are_refused_by_name(llama: nn.Module, field: str, value: Any) -> None:
    maps = random_maps(llama)
    other = dataclasses.replace(maps, fingerprint={**maps.fingerprint, field: value})
    with pytest.raises(MapMismatchError, match=field) as caught:
        ridgefill.attach(llama, other)
    assert caught.value.kind == field
    assert hook_count(llama) == 0


def test_other_weights_warn_and_still_attach(llama: nn.Module, caplog: pytest.LogCaptureFixture) -> None:
    maps = random_maps(llama)
    with torch.no_grad():
        llama.get_input_embeddings().weight.mul_(1.5)
    with caplog.at_level(logging.WARNING, "ridgefill"), ridgefill.attach(llama, maps, **SETTINGS) as attachment:
        assert len(attachment.status()["warnings"]) == 1
    assert "weights" in caplog.text


def test_weight_anchors_do_not_depend_on_the_dtype(llama: nn.Module) -> None:
    maps = random_maps(llama)
    with ridgefill.attach(llama.to(torch.bfloat16), maps, **SETTINGS) as attachment:
        assert attachment.status()["warnings"] == []


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"layers": lambda layers: dict(list(layers.items())[:-1])}, "lack late layers [5]"),
        ({"features": lambda _: ("stream", "mlp")}, "unknown feature 'mlp'"),
        ({"features": lambda _: ("stream", "previous:1")}, "weight [64, 64]; maps that read stream + previous:1 have"),
        ({"target": lambda _: "mixer_input"}, "mixer_input"),
    ],
)
def test_valid_maps_that_cannot_be_applied_are_refused(llama: nn.Module, change: dict[str, Any], word: str) -> None:
    maps = random_maps(llama)
    only = maps.at(None)
    changed = dataclasses.replace(only, **{name: make(getattr(only, name)) for name, make in change.items()})
    with pytest.raises(AttachError, match=re.escape(word)):
        ridgefill.attach(llama, dataclasses.replace(maps, splits={SPLIT: changed}), **SETTINGS)
    assert hook_count(llama) == 0


def test_a_model_cast_after_attach_runs_stock(llama: nn.Module) -> None:
    with ridgefill.attach(llama, random_maps(llama), **SETTINGS) as attachment:
        run(llama.to(torch.bfloat16))
        assert "attach again" in attachment.status()["reason"]


def test_compiled_layers_are_refused(llama: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    maps = random_maps(llama)
    monkeypatch.setattr(torch, "compile", lambda function: function)  # the real one imports a compiler for minutes
    llama.model.layers[1].compile()
    with pytest.raises(UnsupportedModelError, match="compiled"):
        ridgefill.attach(llama, maps)


def test_rope_that_depends_on_the_length_fills_only_below_its_switch() -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    model = tiny_model("llama", rope_parameters=rope, max_position_embeddings=ROWS)
    with ridgefill.attach(model, random_maps(model), **SETTINGS) as attachment:
        run(model)
        assert attachment.status()["rows_filled"] == FILLED
        run(model, prompt(ROWS + 1))
        assert "rotary tables" in attachment.status()["reason"]


def test_inputs_that_require_gradients_run_stock(llama: nn.Module) -> None:
    llama.requires_grad_(False)
    embeddings = llama.get_input_embeddings()(prompt(ROWS)).requires_grad_()
    with ridgefill.attach(llama, random_maps(llama), **SETTINGS) as attachment:
        llama(inputs_embeds=embeddings, use_cache=True, logits_to_keep=1).logits.sum().backward()
        assert "gradients" in attachment.status()["reason"]
    assert embeddings.grad is not None


def test_one_mask_row_serves_a_batch(llama: nn.Module) -> None:
    ids = prompt(ROWS, batch=2)
    with ridgefill.attach(llama, random_maps(llama), **SETTINGS) as attachment:
        filled = run(llama, ids, attention_mask=torch.ones(1, ROWS, dtype=torch.long))
        assert attachment.status()["rows_filled"] == FILLED
        assert torch.equal(filled, run(llama, ids))


@pytest.mark.parametrize("cast", [lambda mask: 2 * mask, torch.Tensor.bool, torch.Tensor.float])
def test_any_value_but_zero_marks_a_row_of_the_prompt(llama: nn.Module, cast: Any) -> None:
    ids, mask = left_padded(ROWS, (9,))
    with ridgefill.attach(llama, random_maps(llama), **SETTINGS) as attachment:
        found = []
        for given in (mask, cast(mask)):
            run(llama, ids, attention_mask=given)
            found.append(attachment.status()["spans"])
    assert found[0]["head"] == [0, HEAD + 9]
    assert found[0] == found[1]


def test_double_attach_is_refused_and_two_models_are_not(llama: nn.Module) -> None:
    other = tiny_model("llama", seed=5)
    with ridgefill.attach(llama, random_maps(llama), **SETTINGS) as first:
        with pytest.raises(AlreadyAttachedError):
            ridgefill.attach(llama, random_maps(llama))
        with ridgefill.attach(other, random_maps(other), **SETTINGS) as second:
            run(llama)
            run(other)
            assert first.status()["rows_filled"] == second.status()["rows_filled"] == FILLED
    with ridgefill.attach(llama, random_maps(llama), **SETTINGS):
        pass
    assert hook_count(llama) == hook_count(other) == 0


def test_a_compiled_model_is_refused(llama: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda function: function)
    llama.compile()
    with pytest.raises(UnsupportedModelError, match=r"compiled by torch\.compile"):
        ridgefill.attach(llama, random_maps(tiny_model("llama")))


def test_an_unknown_layout_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match=r"Linear: expected a causal language model"):
        ridgefill.attach(nn.Linear(2, 2), random_maps(tiny_model("llama")))


# --- which calls run stock, and that they are stock ----------------------------------------------------------------


def other_arguments(model: nn.Module) -> dict[str, tuple[dict[str, Any], str]]:
    """Calls of a fillable length that are not eligible, and the words of their reasons."""
    right_pads, mask = left_padded(ROWS, (9,))
    holes = torch.ones_like(right_pads)
    holes[0, 50] = 0
    many = torch.ones_like(right_pads)
    many[0, : ROWS // 2] = 0
    cache = cache_argument_name(model.forward)
    return {
        "all logits": ({"logits_to_keep": 0}, "logits_to_keep is 0"),
        "many logits": ({"logits_to_keep": TAIL + 1}, f"logits_to_keep is {TAIL + 1}"),
        "logits by index": ({"logits_to_keep": torch.tensor([3])}, "logits_to_keep is a Tensor"),
        "no cache": ({"use_cache": False}, "use_cache is off"),
        "hidden states": ({"output_hidden_states": True}, "'output_hidden_states' is given"),
        "labels": ({"labels": prompt(ROWS), "logits_to_keep": 1}, "'labels' is given"),
        "right padding": ({"attention_mask": mask.flip(1)}, "not left padding"),
        "holes": ({"attention_mask": holes}, "not left padding"),
        "too many pads": ({"attention_mask": many}, "left pads of"),
        "short mask": ({"attention_mask": mask[:, 1:]}, "columns, expected"),
        "quantised cache": ({cache: _quantised_cache(model)}, "the cache keeps a"),
    }


def _quantised_cache(model: nn.Module) -> Any:
    """A cache whose layers are not on the allow-list, without the packages that real quantised ones need."""
    from transformers.cache_utils import DynamicLayer

    class OtherLayer(DynamicLayer):
        pass

    assert issubclass(QuantizedCache, DynamicCache.__mro__[1])
    cache = DynamicCache(config=model.config)
    cache.layers = [OtherLayer() for _ in cache.layers]
    return cache


@pytest.mark.parametrize("case", sorted(other_arguments(tiny_model("llama"))))
def test_ineligible_calls_run_stock_and_say_why(llama: nn.Module, case: str, caplog: pytest.LogCaptureFixture) -> None:
    try:
        stock: Any = run(llama, **copy.deepcopy(other_arguments(llama)[case][0]))
    except (ValueError, RuntimeError, IndexError) as error:  # a call that stock refuses must be refused alike
        stock = type(error)
    with ridgefill.attach(llama, random_maps(llama), **SETTINGS) as attachment:
        arguments, word = other_arguments(llama)[case]
        for _ in range(2):
            if isinstance(stock, type):
                with pytest.raises(stock):
                    run(llama, **copy.deepcopy(arguments))
            else:
                assert torch.equal(run(llama, **copy.deepcopy(arguments)), stock)
        status = attachment.status()
        assert status["rows_filled"] == 0
        assert status["spans"] is None
        assert word in status["reason"], status["reason"]
    assert caplog.text.count(word) == 1, "each reason is logged once"


def test_training_gradients_and_short_prompts_run_stock(llama: nn.Module) -> None:
    with ridgefill.attach(llama, random_maps(llama), **SETTINGS) as attachment:
        llama(prompt(ROWS), use_cache=True, logits_to_keep=1)
        assert "gradients are enabled" in attachment.status()["reason"]
        llama.train()
        run(llama)
        assert "training mode" in attachment.status()["reason"]
        llama.eval()
        run(llama, prompt(TAIL + MIN_BULK - 1))
        assert "fewer than tail=32 and min_bulk=16" in attachment.status()["reason"]
        run(llama, prompt(TAIL + MIN_BULK))
        assert f"min_bulk={MIN_BULK}" in attachment.status()["reason"]
        run(llama, prompt(TAIL + MIN_BULK + HEAD))
        assert attachment.status()["rows_filled"] == MIN_BULK
        assert attachment.status()["counters"]["filled"] == 1
        assert len(attachment.history) == 5


def test_the_exact_tier_never_fills(llama: nn.Module) -> None:
    stock = run(llama)
    with ridgefill.attach(llama, random_maps(llama), tier="exact", **SETTINGS) as attachment:
        assert torch.equal(run(llama), stock)
        assert attachment.status()["reason"] == "the tier is exact"


def test_positional_arguments_and_old_cache_name_fill(llama: nn.Module) -> None:
    ids = prompt(ROWS)
    with ridgefill.attach(llama, random_maps(llama), **SETTINGS) as attachment, torch.no_grad():
        named = run(llama)
        positional = llama(ids, torch.ones_like(ids), use_cache=True, logits_to_keep=1).logits
        assert attachment.status()["rows_filled"] == FILLED
        assert torch.equal(named, positional)


def test_a_custom_4d_mask_runs_stock_and_a_causal_one_fills(llama: nn.Module) -> None:
    causal = torch.ones(ROWS, ROWS, dtype=torch.bool).tril()[None, None]
    custom = causal.clone()
    custom[..., 100:, 50] = False
    with ridgefill.attach(llama, random_maps(llama), **SETTINGS) as attachment:
        run(llama, attention_mask=custom)
        assert "not causal attention with padding" in attachment.status()["reason"]
        filled = run(llama, attention_mask=causal)
        assert attachment.status()["rows_filled"] == FILLED
        assert torch.equal(filled, run(llama))
        additive = torch.zeros(causal.shape).masked_fill(~causal, torch.finfo(torch.float32).min)
        assert torch.equal(filled, run(llama, attention_mask=additive))


# --- exceptions ----------------------------------------------------------------------------------------------------


CACHES = {
    "plain": lambda config: DynamicCache(),
    "by config": lambda config: DynamicCache(config=config),
    "static": lambda config: StaticCache(config=config, max_cache_len=256),
}


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("kind", sorted(CACHES))
@pytest.mark.parametrize("first", [0, 10, 60])
@pytest.mark.parametrize("where", ["early", "late writer", "tail"])
def test_an_exception_restores_the_cache(family: str, kind: str, first: int, where: str) -> None:
    """Whatever fails, the cache answers afterwards as if the failed call had never been made."""
    model = tiny_model(family)
    argument = cache_argument_name(model.forward)
    ids = prompt(first + ROWS)

    def cache_at_entry() -> Any:
        cache = CACHES[kind](model.config)
        if first:
            run(model, ids[:, :first], **{argument: cache})
        return cache

    expected = run(model, ids[:, first:], **{argument: cache_at_entry()})
    cache = cache_at_entry()
    with ridgefill.attach(model, random_maps(model), **SETTINGS) as attachment:
        handle = _failing_hook(model, where, head_pass=first == 0)
        with pytest.raises(ZeroDivisionError):
            run(model, ids[:, first:], **{argument: cache})
        handle.remove()
        assert caches.cached_tokens(cache) == first
        assert attachment.status()["counters"]["undone after an exception"] == 1
    assert hook_count(model) == 0
    again = run(model, ids[:, first:], **{argument: cache})
    torch.testing.assert_close(again, expected, rtol=1e-5, atol=1e-5)


def _failing_hook(model: nn.Module, where: str, *, head_pass: bool) -> Any:
    layers = decoder_layout(model).layers
    calls = []

    def fail_on(number: int) -> Any:
        def hook(*_: Any, **__: Any) -> None:
            calls.append(0)
            if len(calls) >= number:
                raise ZeroDivisionError("a hook of the test")

        return hook

    # A fresh prompt's head runs through every layer first, into a cache of its own.
    if where == "early":
        return layers[SPLIT - 1].register_forward_hook(fail_on(2 if head_pass else 1))
    if where == "late writer":  # layer S is written by then
        return layers[SPLIT + 1].self_attn.k_proj.register_forward_hook(fail_on(2 if head_pass else 1))

    def only_tail(module: nn.Module, args: Any, output: Any) -> None:
        if output[0].shape[1] == TAIL:
            raise ZeroDivisionError("a hook of the test")

    return layers[-1].self_attn.register_forward_hook(only_tail)


def test_an_interrupted_call_is_undone_before_the_next(llama: nn.Module) -> None:
    """A KeyboardInterrupt skips forward hooks: the next call on this thread must find a clean state."""
    cache = DynamicCache(config=llama.config)
    argument = cache_argument_name(llama.forward)

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    with ridgefill.attach(llama, random_maps(llama), **SETTINGS) as attachment:
        handle = llama.lm_head.register_forward_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            run(llama, **{argument: cache})
        handle.remove()
        run(llama)
        assert attachment.status()["rows_filled"] == FILLED
        assert caches.cached_tokens(cache) == 0


# --- copies, threads, lifetime, cost -------------------------------------------------------------------------------


def test_a_deepcopy_is_clean_and_can_itself_be_attached(llama: nn.Module) -> None:
    stock = run(llama)
    with ridgefill.attach(llama, random_maps(llama), **SETTINGS) as attachment:
        filled = run(llama)
        clone = copy.deepcopy(llama)
        assert torch.equal(run(clone), stock)
        assert len(attachment.history) == 1, "the copy's call is not this attachment's"
        with ridgefill.attach(clone, random_maps(clone, seed=9), **SETTINGS) as other:
            assert not torch.equal(run(clone), stock)
            assert other.status()["rows_filled"] == FILLED
            assert torch.equal(run(llama), filled)
        assert torch.equal(run(clone), stock)
    assert not torch.equal(filled, stock)


def test_two_threads_generate_on_one_model(llama: nn.Module) -> None:
    settings: dict[str, Any] = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False}
    prompts = [prompt(ROWS + 5 * i, seed=20 + i) for i in range(4)]
    results: dict[int, torch.Tensor] = {}
    with ridgefill.attach(llama, random_maps(llama), **SETTINGS) as attachment:
        alone = [llama.generate(ids, attention_mask=torch.ones_like(ids), **settings) for ids in prompts]

        def work(which: int) -> None:
            ids = prompts[which]
            for _ in range(3):
                results[which] = llama.generate(ids, attention_mask=torch.ones_like(ids), **settings)

        threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert attachment.status()["counters"]["filled"] == 16
    assert all(torch.equal(results[i], alone[i]) for i in range(4))


def test_an_attachment_lives_with_its_model_and_not_longer() -> None:
    model = tiny_model("llama")
    watch = weakref.ref(ridgefill.attach(model, random_maps(model), **SETTINGS))
    gc.collect()
    attachment = watch()
    assert attachment is not None, "an attachment that nobody keeps must go on working"
    run(model)
    assert attachment.status()["rows_filled"] == FILLED
    model_watch = weakref.ref(model)
    del model, attachment
    gc.collect()
    assert model_watch() is None
    assert watch() is None


def test_detach_inside_and_twice(llama: nn.Module) -> None:
    attachment = ridgefill.attach(llama, random_maps(llama), **SETTINGS)
    attachment.detach()
    attachment.detach()
    assert attachment.status()["attached"] is False
    assert hook_count(llama) == 0


def test_an_interrupted_call_is_undone_by_detach(llama: nn.Module) -> None:
    cache = DynamicCache(config=llama.config)

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    handle = llama.lm_head.register_forward_hook(interrupt)
    attachment = ridgefill.attach(llama, random_maps(llama), **SETTINGS)
    with pytest.raises(KeyboardInterrupt), attachment:
        run(llama, **{cache_argument_name(llama.forward): cache})
    handle.remove()
    assert caches.cached_tokens(cache) == 0
    assert attachment.status()["reason"] == "the call ended with an exception; its fill was undone"


def test_another_hook_s_exception_undoes_the_fill(llama: nn.Module) -> None:
    cache = DynamicCache(config=llama.config)

    def fail(*_: Any) -> None:
        raise ZeroDivisionError("another hook")

    handle = llama.register_forward_hook(fail)  # before ours: it raises after the forward, and ours still runs
    with ridgefill.attach(llama, random_maps(llama), **SETTINGS) as attachment:
        with pytest.raises(ZeroDivisionError):
            run(llama, **{cache_argument_name(llama.forward): cache})
        assert caches.cached_tokens(cache) == 0
        assert "filled" not in attachment.status()["counters"]
    handle.remove()


def test_verifying_several_tokens_at_once_is_decoding(llama: nn.Module) -> None:
    cache = DynamicCache(config=llama.config)
    argument = cache_argument_name(llama.forward)
    with ridgefill.attach(llama, random_maps(llama), **SETTINGS) as attachment:
        run(llama, **{argument: cache})
        run(llama, prompt(6), **{argument: cache})
        assert attachment.status()["rows_filled"] == FILLED
        assert attachment.status()["counters"]["decode of several rows"] == 1


def test_status_before_and_after(llama: nn.Module) -> None:
    with ridgefill.attach(llama, random_maps(llama), **SETTINGS) as attachment:
        assert attachment.status()["reason"] == "no prefill has been seen yet"
        run(llama)
        status = attachment.status()
        assert status["spans"] == {"head": [0, 4], "fill": [4, 128], "tail": [128, 160]}
        assert status["tier"] == "speed"
        assert status["split"] == SPLIT
        assert status["tokenizer"].startswith("unchecked")
        assert set(status["timings"]) == {"head_ms", "bulk_ms", "fill_ms", "tail_ms", "total_ms"}
        parts = sum(v for k, v in status["timings"].items() if k != "total_ms")
        assert 0 < parts <= status["timings"]["total_ms"] * 1.001


def test_a_call_that_does_not_fill_costs_microseconds(llama: nn.Module) -> None:
    """A generous bound for a noisy machine, plain and attached calls in turn; benches/ttft.py prints the figure."""
    ids, attached = prompt(1), copy.deepcopy(llama)

    def seconds(model: nn.Module) -> float:
        started = time.perf_counter()
        run(model, ids)
        return time.perf_counter() - started

    with ridgefill.attach(attached, random_maps(attached), **SETTINGS):
        differences = [seconds(attached) - seconds(llama) for _ in range(101)]
    assert sorted(differences)[50] < 1e-3
