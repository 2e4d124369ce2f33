"""The guard is silent on text of the fit's own kind, and catches other text, weights and rotary tables."""

from __future__ import annotations

import copy
import functools
import importlib
import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from rich.console import Console
from tiny import SPLIT, call, left_padded, prompt, random_maps, tiny_model
from tiny_tokenizer import byte_tokenizer, random_text
from torch import nn
from transformers import DynamicCache, StaticCache

import ridgefill
from ridgefill import guard as guard_module
from ridgefill.demo import calibration_texts
from ridgefill.errors import AttachError
from ridgefill.guard import PROBE_ROWS, Guard
from ridgefill.maps import RidgeMaps

ROWS, TAIL, HEAD, MIN_BULK = 80, 8, 4, 8
SETTINGS: dict[str, Any] = {"tail": TAIL, "head": HEAD, "min_bulk": MIN_BULK}
FILLED = ROWS - TAIL - HEAD - PROBE_ROWS


@functools.cache
def fitted(
    family: str, features: tuple[str, ...] = ("stream",), window: int = HEAD + PROBE_ROWS
) -> tuple[nn.Module, RidgeMaps]:
    """A model calm enough that a map fits it (smaller weights, larger embeddings), and its maps for words of letters.

    Windows are as long as head and probe rows: in so small a model a row's place says more than its text.
    """
    model = tiny_model(family, initializer_range=0.08)
    with torch.no_grad():
        model.model.embed_tokens.weight.normal_(0, 1, generator=torch.Generator().manual_seed(0))
    texts = [random_text(window, seed) for seed in range(160)]
    maps = ridgefill.fit(
        model, byte_tokenizer(), texts, (SPLIT,), window_tokens=window, features=features, gains="none", held_out=1 / 4
    )
    return model, maps


@pytest.fixture(autouse=True)
def _no_language(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """To a model of random weights no token is likelier than others."""
    if not request.node.name.startswith("test_real_weights"):
        monkeypatch.setattr(guard_module, "_LEAST_LIKELINESS", 0.0)


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
                assert "(at home 1%, at most 30%)" in status["alarm"]
                continue
            assert status["rows_filled"] == 0
            assert status["reason"].startswith("the guard: keys of the 32 rows after the head: ")
            stock = DynamicCache(config=model.config)
            with attachment.request(tier="exact"):
                if turns == 2:
                    run(model, tokens(random_text(40, seed)), None, stock)
                assert torch.equal(found, run(model, text(seed), None, stock))
            assert cache.get_seq_length() == stock.get_seq_length()
        assert attachment.status()["counters"]["guard alarms"] == 20
        assert attachment.status()["guard"] == mode
    assert caplog.text.count("the guard: keys of the 32 rows after the head") == 1, "a kind of alarm is logged once"


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


def test_one_sequence_of_a_batch_is_enough() -> None:
    model, maps = fitted("llama")
    batch = torch.cat([*(tokens(random_text(ROWS, 300 + seed)) for seed in range(7)), tokens(other_alphabet(3))])
    with ridgefill.attach(model, maps, guard="exact", **SETTINGS) as attachment:
        run(model, batch[:7])
        assert attachment.status()["rows_filled"] == FILLED
        run(model, batch)
        assert attachment.status()["reason"].startswith("the guard: ")


def test_tokens_that_are_no_likelier_than_others_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Likeliness is the share of the vocabulary with a lower logit than the next token, of the probe rows alone."""
    model, maps = fitted("llama")
    ids = torch.cat([tokens(random_text(ROWS, seed)) for seed in range(3)])
    with torch.no_grad():
        logits = model(ids).logits
    rows = slice(HEAD, HEAD + PROBE_ROWS)
    following = ids[:, HEAD + 1 : HEAD + PROBE_ROWS + 1]
    own = logits[:, rows].gather(-1, following.unsqueeze(-1))
    expected = (logits[:, rows] < own).float().mean((1, 2)).min()
    with ridgefill.attach(model, maps, guard="exact", **SETTINGS) as attachment:
        run(model, ids)
        assert attachment.status()["probe_likeliness"] == pytest.approx(float(expected), abs=1e-6)
        with torch.no_grad():
            model(inputs_embeds=model.get_input_embeddings()(ids), use_cache=True, logits_to_keep=1)
        assert attachment.status()["rows_filled"] == FILLED
        assert attachment.status()["probe_likeliness"] is None, "embeddings do not say which tokens follow"
        monkeypatch.setattr(guard_module, "_LEAST_LIKELINESS", float(expected) + 0.01)
        run(model, ids)
        assert attachment.status()["rows_filled"] == 0
        assert "likelier than" in attachment.status()["reason"]


LONG, LONG_TAIL = 160, 48


@functools.cache
def fitted_long(family: str, features: tuple[str, ...] = ("stream",)) -> tuple[nn.Module, RidgeMaps]:
    """The same for prompts of ``LONG`` rows, whose tails are compared."""
    return fitted(family, features, LONG)


def long_text(seed: int) -> torch.Tensor:
    return torch.tensor([byte_tokenizer()(random_text(LONG, seed))["input_ids"][:LONG]])


def caches_of(config: Any) -> dict[str, Any]:
    return {
        "plain": DynamicCache(),
        "by config": DynamicCache(config=config),
        "static": StaticCache(config=config, max_cache_len=LONG + 8),
    }


def test_a_tail_of_another_kind_is_caught_behind_the_fill(caplog: pytest.LogCaptureFixture) -> None:
    """A prompt that begins like those of the fit: the rows after its head say nothing of what follows."""
    model, maps = fitted_long("llama")
    settings = {**SETTINGS, "tail": LONG_TAIL}
    with ridgefill.attach(model, maps, guard="exact", **settings) as attachment:
        for seed in range(20):
            run(model, long_text(500 + seed))
        own = attachment.status()["counters"]
        assert own["filled"] == 20
        assert own.get("guard alarms in tails", 0) == 0
        assert attachment.status()["tail_outliers"] < 0.1
        for seed in range(20):
            ids = long_text(600 + seed)
            ids[:, 60:] = prompt(LONG - 60, seed=seed)
            run(model, ids)
            status = attachment.status()
            assert status["alarm"] == ""
            assert status["rows_filled"] == LONG - LONG_TAIL - HEAD - PROBE_ROWS, "the call is done: it stays filled"
            assert status["tail_alarm"].startswith("keys of the tail's first 32 rows: ")
            assert status["tail_outliers"] > 0.3 > status["probe_outliers"]
        assert attachment.status()["counters"]["guard alarms in tails"] == 20
    assert caplog.text.count("the guard: keys of the tail's first 32 rows") == 1
    with ridgefill.attach(model, maps, **settings) as attachment:
        run(model, ids)
        assert (attachment.status()["tail_outliers"], attachment.status()["tail_alarm"]) == (None, "")


@pytest.mark.parametrize("features", [("stream",), ("stream", "previous:1")], ids=["stream", "previous"])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_tails_are_compared_row_for_row(family: str, features: tuple[str, ...]) -> None:
    """Caches that keep all rows or a window, pads, cached beginnings, other tiers: the same rows, or fewer of them."""
    model, maps = fitted_long(family, features)
    ids = long_text(7)
    _, mask = left_padded(LONG, (0, 5))
    batch = torch.cat([ids, long_text(8)])
    batch[1, :5] = 0

    def outliers(attachment: ridgefill.Attachment) -> float:
        status = attachment.status()
        assert status["rows_filled"] > 0, status["reason"]
        assert status["tail_alarm"] == ""
        return float(status["tail_outliers"])

    # Of the tail's rows a cache of gemma3's by config holds the last window alone: 24 rows of 48, none of the first.
    with ridgefill.attach(model, maps, guard="exact", **{**SETTINGS, "tail": LONG_TAIL}) as attachment:
        found = {}
        for kind, cache in caches_of(model.config).items():
            run(model, ids, None, cache)
            found[kind] = outliers(attachment)
        assert found["by config"] == pytest.approx(found["static"], abs=0.05)
        if family == "llama":
            assert found["plain"] == pytest.approx(found["by config"], abs=0.05)
        run(model, batch, mask)
        assert outliers(attachment) < 0.2
        with attachment.request(tail=20):  # all of a tail that is shorter than the sample
            run(model, ids)
            assert outliers(attachment) < 0.2
    if features == ("stream",):
        with ridgefill.attach(
            model, maps, guard="exact", tier="quality", share=0.2, **{**SETTINGS, "tail": LONG_TAIL}
        ) as attachment:
            run(model, ids)
            assert outliers(attachment) < 0.2


def test_a_tail_one_row_off_would_be_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    model, maps = fitted_long("llama")
    check_tail = Guard.check_tail

    def one_off(self: Guard, settings: Any, step: Any, tail: Any, rows_behind: int) -> None:
        check_tail(self, settings, step, tail, rows_behind - 1)

    with ridgefill.attach(model, maps, guard="warn", **{**SETTINGS, "tail": LONG_TAIL}) as attachment:
        run(model, long_text(7))
        assert attachment.status()["tail_alarm"] == ""
        monkeypatch.setattr(Guard, "check_tail", one_off)
        run(model, long_text(7))
        assert attachment.status()["tail_alarm"]


def merged(model: nn.Module, size: float, layers: slice = slice(None)) -> nn.Module:
    """A copy with an adapter of rank 8 merged into these layers' attention: ``size`` times their weights' norm."""
    other, generator = copy.deepcopy(model), torch.Generator().manual_seed(3)
    with torch.no_grad():
        for layer in other.model.layers[layers]:
            for projection in (layer.self_attn.q_proj, layer.self_attn.v_proj, layer.self_attn.o_proj):
                out, inner = projection.weight.shape
                update = torch.randn(out, 8, generator=generator) @ torch.randn(8, inner, generator=generator)
                projection.weight += size * projection.weight.norm() / update.norm() * update
    return other


def test_weights_that_changed_after_the_fit_are_caught() -> None:
    model, maps = fitted("llama")
    changed = merged(model, 0.8)
    with ridgefill.attach(changed, maps, guard="warn", **SETTINGS) as attachment:
        for seed in range(20):
            run(changed, tokens(random_text(ROWS, 2000 + seed)))
        assert attachment.status()["counters"]["guard alarms"] == 20
        assert attachment.status()["counters"]["filled"] == 20


@pytest.mark.parametrize("layer", [0, 2, 5])
def test_a_small_adapter_merged_into_one_layer_is_named_at_attach(layer: int) -> None:
    """No guard hears so small a change; the file's weight anchors do, in every layer."""
    model, maps = fitted("llama")
    with ridgefill.attach(model, maps, **SETTINGS) as attachment:
        assert attachment.status()["warnings"] == []
    with ridgefill.attach(merged(model, 0.01, slice(layer, layer + 1)), maps, **SETTINGS) as attachment:
        (warning,) = attachment.status()["warnings"]
    assert "the model's weights are not those the maps were fitted for" in warning


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


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(Path(__file__).parent.parent / "benches"))
    return importlib.import_module("guard")


def test_the_bench_names_what_it_misses(bench: Any) -> None:
    def found(case: str, expected: str, alarms: int, tail_alarms: int) -> Any:
        return bench.Outcome(20, case, expected, 100, alarms, tail_alarms, [], [], [])

    fine = [
        found("home: docs", "silent", 0, 2),
        found("home: code", "silent", 2, 0),
        found("noise", "before", 100, 0),
        found("turning", "tail", 0, 100),
        found("a little", "shown", 3, 4),
    ]
    assert bench.home(fine) == (200, 2, 2)
    assert bench.missed(fine) == []
    assert bench.missed([*fine, found("home: prose", "silent", 2, 0)]) == [
        "split 20: 4 of 300 windows at home alarm before the fill"
    ]
    assert bench.missed([*fine[1:], found("home: docs", "silent", 0, 3)])[0].endswith("alarm in their tails")
    for case in (found("noise", "before", 99, 100), found("turning", "tail", 100, 99)):
        words = f"split 20: {case.case}: {case.alarms} and {case.tail_alarms} of 100 windows"
        assert bench.missed([*fine, case]) == [words]


@pytest.mark.slow
def test_real_weights(smollm2: tuple[nn.Module, Any], bench: Any) -> None:
    """SmolLM2, a small fit: at most 1% of 300 held-out windows of all kinds alarm; every change is heard."""
    (model, tokenizer), split = smollm2, 20
    texts = calibration_texts(120_000)
    maps = ridgefill.fit(model, tokenizer, texts, (split,), max_tokens=30_000, features=("stream",), gains="none")
    outcomes = [bench.outcome(case, maps, split) for case in bench.cases(model, tokenizer, 100)]
    bench.print_table(Console(width=140), outcomes)
    assert bench.home(outcomes)[0] == 300
    assert bench.missed(outcomes) == []


def test_the_bench_goes_on_where_it_was_interrupted(
    bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Finished cases are read from the journal, with what is expected of them today; the others run."""
    model, maps = fitted("llama")
    maps.save(tmp_path / "maps.safetensors")
    tests = [bench.Case(name, [prompt(ROWS)], "silent", lambda: model) for name in ("home: a", "home: b", "c")]
    monkeypatch.setattr(bench, "model_folder", lambda _: tmp_path)
    monkeypatch.setattr(bench.common, "load", lambda *_, **__: (model, byte_tokenizer()))
    monkeypatch.setattr(bench, "unseen_texts", lambda _: [])
    monkeypatch.setattr(bench, "cases", lambda *_: tests)
    ran: list[str] = []

    def outcome(case: Any, _: Any, split: int, __: Any) -> Any:
        if case.name == interrupted:
            raise KeyboardInterrupt
        ran.append(case.name)
        return bench.Outcome(split, case.name, case.expected, 100, 0, 0, [], [], [])

    monkeypatch.setattr(bench, "outcome", outcome)
    arguments = [str(tmp_path / "maps.safetensors"), "--splits", str(SPLIT), "--journal", str(tmp_path / "j.jsonl")]
    interrupted = "home: b"
    assert CliRunner().invoke(bench.main, arguments).exit_code != 0
    assert ran == ["home: a"]
    interrupted = ""
    tests[0] = replace(tests[0], expected="before")
    result = CliRunner().invoke(bench.main, [*arguments, "--json", str(tmp_path / "found.json")])
    assert ran == ["home: a", "home: b", "c"]
    assert result.exit_code == 1, result.output
    document = json.loads((tmp_path / "found.json").read_text())
    assert [found["case"] for found in document["outcomes"]] == ["home: a", "home: b", "c"]
    assert document["missed"] == [f"split {SPLIT}: home: a: 0 and 0 of 100 windows"]
