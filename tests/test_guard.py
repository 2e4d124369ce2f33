"""The guard is silent on text of the fit's own kind, and catches other text, weights and rotary tables."""

from __future__ import annotations

import copy
import functools
import random
from typing import Any

import pytest
import torch
from tiny import SPLIT, call, left_padded, prompt, random_maps, tiny_model
from tiny_tokenizer import byte_tokenizer, random_text
from torch import nn
from transformers import DynamicCache

import ridgefill
from ridgefill.demo import calibration_texts, standard_texts
from ridgefill.errors import AttachError
from ridgefill.guard import PROBE_ROWS
from ridgefill.maps import RidgeMaps

ROWS, TAIL, HEAD, MIN_BULK = 80, 8, 4, 8
SETTINGS: dict[str, Any] = {"tail": TAIL, "head": HEAD, "min_bulk": MIN_BULK}
FILLED = ROWS - TAIL - HEAD - PROBE_ROWS


@functools.cache
def fitted(family: str, features: tuple[str, ...] = ("stream",)) -> tuple[nn.Module, RidgeMaps]:
    """A model calm enough that a map fits it (smaller weights, larger embeddings), and its maps for words of letters.

    Windows are as long as head and probe rows: in so small a model a row's place says more than its text.
    """
    model = tiny_model(family, initializer_range=0.08)
    window = HEAD + PROBE_ROWS
    with torch.no_grad():
        model.model.embed_tokens.weight.normal_(0, 1, generator=torch.Generator().manual_seed(0))
    texts = [random_text(window, seed) for seed in range(160)]
    maps = ridgefill.fit(
        model, byte_tokenizer(), texts, (SPLIT,), window_tokens=window, features=features, gains="none", held_out=1 / 4
    )
    return model, maps


def tokens(text: str) -> torch.Tensor:
    return torch.tensor([byte_tokenizer()(text)["input_ids"][:ROWS]])


def run(model: nn.Module, ids: torch.Tensor, mask: torch.Tensor | None = None, cache: Any = None) -> torch.Tensor:
    return call(model, ids, mask, DynamicCache(config=model.config) if cache is None else cache, 1)


def other_alphabet(seed: int) -> str:
    draw = random.Random(seed)
    return "".join(draw.choice("абвгдежзиклмнопрстуф ") for _ in range(ROWS))


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_text_of_its_own_kind_passes(family: str) -> None:
    model, maps = fitted(family)
    windows = 100 if family == "llama" else 40
    with ridgefill.attach(model, maps, guard="warn", **SETTINGS) as attachment:
        for seed in range(windows):
            run(model, tokens(random_text(ROWS, 1000 + seed)))
        counters = attachment.status()["counters"]
        assert counters["filled"] == windows
        assert attachment.status()["rows_filled"] == FILLED
        assert attachment.status()["spans"]["head"] == [0, HEAD + PROBE_ROWS]
    assert counters.get("guard alarms", 0) <= windows // 100


@pytest.mark.parametrize("mode", ["warn", "exact"])
@pytest.mark.parametrize("turns", [1, 2])
@pytest.mark.parametrize("kind", ["random tokens", "other alphabet"])
def test_another_kind_of_text_is_caught(kind: str, turns: int, mode: str, caplog: pytest.LogCaptureFixture) -> None:
    model, maps = fitted("llama")

    def text(seed: int) -> torch.Tensor:
        return prompt(ROWS, seed=seed) if kind == "random tokens" else tokens(other_alphabet(seed))

    with ridgefill.attach(model, maps, guard=mode, **SETTINGS) as attachment:
        for seed in range(20):
            cache = DynamicCache(config=model.config)
            if turns == 2:
                with attachment.request(tier="exact"):
                    run(model, tokens(random_text(40, seed)), None, cache)
            found = run(model, text(seed), None, cache)
            status = attachment.status()
            if mode == "warn":
                assert status["rows_filled"] == FILLED + (HEAD if turns == 2 else 0)
                assert "(mean rank 0." in status["alarm"]
                continue
            assert status["rows_filled"] == 0
            assert status["reason"].startswith("the guard: keys of the 32 rows after the head ")
            stock = DynamicCache(config=model.config)
            with attachment.request(tier="exact"):
                if turns == 2:
                    run(model, tokens(random_text(40, seed)), None, stock)
                assert torch.equal(found, run(model, text(seed), None, stock))
            assert cache.get_seq_length() == stock.get_seq_length()
        assert attachment.status()["counters"]["guard alarms"] == 20
        assert attachment.status()["guard"] == mode
    assert caplog.text.count("the guard: ") == 1, "a kind of alarm is logged once"


@pytest.mark.parametrize("features", [("stream",), ("stream", "previous:1")], ids=["stream", "previous"])
def test_padding_turns_and_features_are_compared_row_for_row(features: tuple[str, ...]) -> None:
    """What only a misaligned row would trip: left pads, a cached beginning, maps that read the row before."""
    model, maps = fitted("llama", features)
    first, second = tokens(random_text(ROWS, 7)), tokens(random_text(ROWS, 8))
    _, mask = left_padded(ROWS, (0, 5))
    batch = torch.cat([first, second])
    batch[1, :5] = 0
    with ridgefill.attach(model, maps, guard="exact", **SETTINGS) as attachment:
        run(model, batch, mask)
        assert attachment.status()["rows_filled"] == FILLED - 5
        cache = DynamicCache(config=model.config)
        run(model, first, None, cache)
        run(model, second, None, cache)
        assert attachment.status()["rows_filled"] == FILLED + HEAD - (len(features) - 1)
        cache = attachment.prefill(first, n_ahead=ROWS)
        assert attachment.status()["rows_filled"] == FILLED + TAIL
        assert attachment.status()["counters"].get("guard alarms", 0) == 0
        cache = attachment.prefill(prompt(ROWS), n_ahead=40, cache=cache)
        assert attachment.status()["counters"]["guard alarms"] == 1
        assert cache.get_seq_length() == 2 * ROWS


def test_weights_that_changed_after_the_fit_are_caught() -> None:
    """An update of low rank, merged into the attention of every layer: the file's weight anchors do not see it."""
    model, maps = fitted("llama")
    merged = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for layer in merged.model.layers:
            for projection in (layer.self_attn.q_proj, layer.self_attn.v_proj, layer.self_attn.o_proj):
                out, inner = projection.weight.shape
                update = torch.randn(out, 8, generator=generator) @ torch.randn(8, inner, generator=generator)
                projection.weight += 0.8 * projection.weight.norm() / update.norm() * update
    with ridgefill.attach(merged, maps, guard="warn", **SETTINGS) as attachment:
        assert attachment.status()["warnings"] == []
        for seed in range(20):
            run(merged, tokens(random_text(ROWS, 2000 + seed)))
        assert attachment.status()["counters"]["guard alarms"] == 20
        assert attachment.status()["counters"]["filled"] == 20


def test_rotary_tables_that_changed_after_attach_are_caught() -> None:
    model = copy.deepcopy(fitted("llama")[0])
    with ridgefill.attach(model, fitted("llama")[1], guard="exact", **SETTINGS) as attachment:
        run(model, tokens(random_text(ROWS, 7)))
        assert attachment.status()["rows_filled"] == FILLED
        model.model.rotary_emb.inv_freq /= 4
        run(model, tokens(random_text(ROWS, 7)))
        assert attachment.status()["reason"].startswith("the guard: the model's rotary frequencies are not those")
        model.model.rotary_emb.inv_freq *= 4
        run(model, tokens(random_text(ROWS, 7)))
        assert attachment.status()["rows_filled"] == FILLED
        model.model.rotary_emb.attention_scaling = 1.1
        run(model, tokens(random_text(ROWS, 7)))
        assert attachment.status()["rows_filled"] == 0


def test_a_guard_that_could_not_compare_is_refused() -> None:
    model, maps = fitted("llama")
    with pytest.raises(AttachError, match="unknown guard 'on'; known: off, warn, exact"):
        ridgefill.attach(model, maps, guard="on")
    with pytest.raises(AttachError, match="tier 'plumb' predicts nothing"):
        ridgefill.attach(model, maps, guard="warn", tier="plumb")
    with pytest.raises(AttachError, match="the maps of split 3 hold none"):
        ridgefill.attach(model, random_maps(model), guard="warn")
    assert not model._forward_pre_hooks


def test_the_guard_is_off_unless_asked_for() -> None:
    model, maps = fitted("llama")
    with ridgefill.attach(model, maps, **SETTINGS) as attachment:
        run(model, prompt(ROWS))
        assert attachment.status()["guard"] == "off"
        assert attachment.status()["rows_filled"] == FILLED + PROBE_ROWS


@pytest.mark.slow
def test_real_weights(smollm2: tuple[nn.Module, Any]) -> None:
    """SmolLM2 on the demo's texts: at most 1% of 300 held-out windows alarm; the four changes do, every time."""
    (model, tokenizer), split = smollm2, 20
    texts = calibration_texts(120_000)
    maps = ridgefill.fit(model, tokenizer, texts, (split,), max_tokens=30_000, features=("stream",), gains="none")
    settings: dict[str, Any] = {"tail": 8, "head": 4, "min_bulk": 8, "guard": "warn"}
    rows = 56
    held_out: list[int] = []
    for _, text in standard_texts("docs", "held-out"):
        held_out += tokenizer(text)["input_ids"]
    windows = [torch.tensor([held_out[at : at + rows]]) for at in range(0, 300 * rows, rows)]
    assert len(windows[-1][0]) == rows

    def alarms(run_on: nn.Module, prompts: list[torch.Tensor]) -> int:
        with ridgefill.attach(run_on, maps, **settings) as attachment:
            for ids in prompts:
                call(run_on, ids, None, DynamicCache(config=run_on.config), 1)
            assert attachment.status()["counters"]["filled"] == len(prompts)
            return int(attachment.status()["counters"].get("guard alarms", 0))

    generator = torch.Generator().manual_seed(0)
    noise = [torch.randint(3, model.config.vocab_size, (1, rows), generator=generator) for _ in range(30)]
    chinese = "人人生而自由，在尊严和权利上一律平等。他们赋有理性和良心，并应以兄弟关系的精神相对待。" * 4
    foreign = [torch.tensor([tokenizer(chinese[at:])["input_ids"][:rows]]) for at in range(0, 40, 2)]
    merged = copy.deepcopy(model)
    with torch.no_grad():
        for layer in merged.model.layers:
            for projection in (layer.self_attn.q_proj, layer.self_attn.v_proj):
                out, inner = projection.weight.shape
                update = torch.randn(out, 8, generator=generator) @ torch.randn(8, inner, generator=generator)
                projection.weight += projection.weight.norm() / update.norm() * update
    own, random_tokens, other_language = (alarms(model, prompts) for prompts in (windows, noise, foreign))
    other_weights = alarms(merged, windows[:30])
    print(f"split {split}: {own}/300 own, {random_tokens}/30 random, {other_language}/20 Chinese, {other_weights}/30")
    assert own <= 3
    assert (random_tokens, other_language, other_weights) == (30, 20, 30)
