"""The gate on hybrid models: states kept where a pass ends, put back exactly, and a tier that is refused by name."""

from __future__ import annotations

import copy
import re
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from recall import KEYS, WORDING, filler_texts, word_tokenizer
from test_distance import documents
from test_gate import _check_figures, _Page
from test_recurrent import RECURRENT, assert_close
from test_states import corrected, random_corrections
from tiny import NUM_LAYERS, SPLIT, prompt, random_maps, remember, tiny_model
from torch import nn

from ridgefill.capture import BlockInputs
from ridgefill.errors import RidgeFillError, UnsupportedModelError
from ridgefill.evaluate.answers import answer_item, greedy_answers, is_right
from ridgefill.evaluate.controls import direct_obstacle, identity_maps, swapped_maps
from ridgefill.evaluate.distance import FarSettings
from ridgefill.evaluate.filled import BulkPrefill, FilledTail
from ridgefill.evaluate.gate import GateRun, GateSettings, Limits, Material, _unselectable, run_gate
from ridgefill.evaluate.known import KnownLayers
from ridgefill.evaluate.needle import Filler, build_items
from ridgefill.evaluate.paired import PairedPrompt, Variants
from ridgefill.evaluate.quality import prefill_logits, score_fill, score_tail
from ridgefill.evaluate.report import write_report
from ridgefill.evaluate.splice import EVERYTHING, STATE, study_splices
from ridgefill.layout import decoder_layout
from ridgefill.maps import LayerMap, RidgeMaps

HEAD, TOKENS, TAIL = 4, 80, 24
END = TOKENS - TAIL
LAST = NUM_LAYERS - 1
# A late layer of each kind, and both kinds in one.
FAMILIES = ["qwen3_next", "falcon_h1", "lfm2", "granitemoehybrid"]
REFUSAL = "selected rows cannot run through recurrent layers"


def hybrid(family: str, **overrides: Any) -> nn.Module:
    return remember(tiny_model(family, **overrides))


def decoded(model: nn.Module, filled: FilledTail) -> torch.Tensor:
    """The logits of one step behind a tail."""
    return prefill_logits(model, torch.tensor([[7]]), 1, filled.cache)


# --- one prompt in many variants -----------------------------------------------------------------------------------


def truth(inputs: torch.Tensor, noise: float = 0.0) -> Any:
    """A layer's map that knows its true block inputs ``[bulk's end, d]``, and gives them with so much noise."""
    given = inputs + noise * inputs.std() * torch.randn(inputs.shape, generator=torch.Generator().manual_seed(6))
    return SimpleNamespace(
        predict=lambda features: given[-features.shape[1] :].unsqueeze(0),
        scaled=lambda *keys_values: keys_values,
        state_correction=None,
    )


def knowing(model: nn.Module, ids: torch.Tensor, noise: dict[int, float] | None = None) -> Variants:
    """Variants whose fill of one prompt is exact, but for the noise in some layers' inputs."""
    variants, late = Variants(model, random_maps(model)), range(SPLIT + 1, NUM_LAYERS)
    with BlockInputs(variants.layout, late) as block_inputs:
        inputs = block_inputs.run(ids[0].tolist())
    maps = {layer: truth(inputs[layer][:END], (noise or {}).get(layer, 0.0)) for layer in late}
    variants._settings[SPLIT, "fill"] = replace(variants.settings(SPLIT), maps=maps)
    return variants


@pytest.mark.parametrize("family", RECURRENT)
def test_with_true_inputs_a_fill_is_stock(family: str) -> None:
    model, ids = hybrid(family), prompt(TOKENS)
    found = []
    for variants in (knowing(model, ids), Variants(model, random_maps(model))):
        pair = PairedPrompt(variants, ids, tail=TAIL, head=HEAD, splits=(SPLIT,))
        with pair.variant(SPLIT, "fill") as filled, pair.variant(0, "stock") as stock:
            assert filled.rows_filled == END - HEAD
            score = score_tail(stock.logits, filled.logits, ids, rows_filled=filled.rows_filled)
            if not found:
                assert_close(filled.cache, stock.cache, range(NUM_LAYERS))
                torch.testing.assert_close(decoded(model, filled), decoded(model, stock), rtol=1e-3, atol=1e-3)
        found.append(score.kl)
    exact, random = found
    assert exact < 1e-7
    assert random > 1e-4


@pytest.mark.parametrize("family", FAMILIES)
def test_stock_in_pieces_is_stock_and_variants_are_the_product_s(family: str) -> None:
    model, ids = hybrid(family), prompt(TOKENS)
    maps = random_maps(model)
    pair = PairedPrompt(Variants(model, maps), ids, tail=TAIL, head=HEAD, splits=(2, SPLIT))
    torch.testing.assert_close(pair.stock, prefill_logits(model, ids, TAIL), rtol=1e-3, atol=1e-3)
    bulk = BulkPrefill(model, maps, ids, split=SPLIT, tail=TAIL, head=HEAD)
    used = {"fill": maps, "identity": identity_maps(maps), "swapped": swapped_maps(maps, SPLIT, 4, 5), "head=0": maps}
    for variant, of_variant in used.items():
        expected = bulk.score(of_variant, pair.stock, fill_head=variant == "head=0")
        found = pair.score(SPLIT, variant)
        assert found.kl == pytest.approx(expected.kl, rel=1e-3), variant
        assert found.kl > 1e-4
        assert found.rows_filled == expected.rows_filled
    product = score_fill(model, maps, ids, pair.stock, split=SPLIT, tail=TAIL, head=HEAD, min_bulk=1)
    assert pair.score(SPLIT, "fill").kl == pytest.approx(product.kl, rel=1e-3)
    assert not any(layer._forward_pre_hooks for layer in pair.layout.layers)


@pytest.mark.parametrize("variant", ["fill", "head=0", "no bulk"])
@pytest.mark.parametrize("family", FAMILIES)
def test_known_layers_leave_what_running_them_leaves(
    family: str, variant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, ids = hybrid(family), prompt(TOKENS)
    variants = Variants(model, random_maps(model))
    variants.settings(SPLIT)  # made at first use, by running a few rows
    pair = PairedPrompt(variants, ids, tail=TAIL, head=HEAD, splits=(SPLIT,))
    runs: list[int] = []
    handle = next(pair.layout.layers[0].children()).register_forward_hook(lambda *_: runs.append(1))

    def run() -> tuple[FilledTail, torch.Tensor, int]:
        runs.clear()
        with pair.variant(SPLIT, variant) as filled:
            return filled, decoded(model, filled), len(runs)

    short, short_step, short_runs = run()
    monkeypatch.setattr(KnownLayers, "hand_back", lambda *_: nullcontext())
    plain, plain_step, plain_runs = run()
    handle.remove()
    assert (short_runs, plain_runs) == (1, 2)  # the step, and with it the tail
    assert_close(short.cache, plain.cache, range(NUM_LAYERS))
    torch.testing.assert_close(short.logits, plain.logits, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(short_step, plain_step, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("head", [0, HEAD])
@pytest.mark.parametrize("family", FAMILIES)
def test_late_layers_without_the_bulk_know_nothing_of_it(family: str, head: int) -> None:
    model, ids, other = hybrid(family), prompt(TOKENS), prompt(TOKENS, seed=9)
    other[:, :head], other[:, END:] = ids[:, :head], ids[:, END:]

    def logits(split: int, given: torch.Tensor) -> torch.Tensor:
        variants = Variants(model, random_maps(model, split=split))
        pair = PairedPrompt(variants, given, tail=TAIL, head=head, splits=(split,))
        with pair.variant(split, "no bulk") as filled:
            return torch.cat([filled.logits, decoded(model, filled)])

    # With all layers late, what the bulk holds cannot matter; with some, it does through the others.
    torch.testing.assert_close(logits(0, ids), logits(0, other), rtol=1e-4, atol=1e-4)
    assert float((logits(SPLIT, ids) - logits(SPLIT, other)).abs().max()) > 1e-2


def test_answers_decoded_together_are_those_decoded_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = word_tokenizer()
    model = hybrid("falcon_h1", vocab_size=len(tokenizer))
    ids = documents(1, TOKENS)[0].ids
    pair = PairedPrompt(Variants(model, random_maps(model)), ids, tail=TAIL, head=HEAD, splits=(SPLIT,))
    tails = []
    for variant in ("stock", "fill", "no bulk", "head=0"):
        with pair.variant(SPLIT, variant) as filled:
            tails.append(filled)

    def answered(number: int, expected: str) -> str:
        return greedy_answers(model, tokenizer, [copy.deepcopy(tails[number])], expected)[0]  # caches grow

    # Stock's own first words are as expected: one pass over several tokens says so, and what it says is the same.
    long = " ".join(KEYS)
    expected = " ".join(answered(0, long).split()[:3])
    checked: list[int] = []
    handle = model.register_forward_pre_hook(
        lambda _, args, kwargs: checked.append((args[0] if args else kwargs["input_ids"]).shape[1]), with_kwargs=True
    )
    together = greedy_answers(model, tokenizer, copy.deepcopy(tails), expected)
    assert max(checked) > 1
    with monkeypatch.context() as patch:
        patch.setattr("ridgefill.evaluate.answers._as_expected", lambda _, tails, *__: [None for _ in tails])
        checked.clear()
        alone = [answered(number, expected) for number in range(len(tails))]
        assert set(checked) == {1}
    handle.remove()
    assert together == alone
    assert is_right(together[0], expected)
    assert len(set(alone)) > 1  # they do differ, so that an exchange would show


# --- controls ------------------------------------------------------------------------------------------------------


def test_a_correction_stays_with_its_layer_when_maps_are_swapped() -> None:
    model = hybrid("qwen3_next")
    found = random_corrections(model)
    assert found.keys() == {LAST}
    maps = corrected(random_maps(model), found)
    swapped = swapped_maps(maps, SPLIT, LAST - 1, LAST).at(SPLIT).layers
    assert swapped[LAST].state_correction is maps.at(SPLIT).layers[LAST].state_correction
    assert swapped[LAST - 1].state_correction is None
    assert swapped[LAST].weight is maps.at(SPLIT).layers[LAST - 1].weight
    assert Variants(model, maps).settings(SPLIT, "swapped").maps[LAST].state_correction is not None


def test_no_direct_ridge_gives_a_state() -> None:
    model = hybrid("qwen3_next")
    layout, maps = decoder_layout(model), random_maps(model)
    assert "layer 5: a linear_attention layer's state is not linear" in str(direct_obstacle(layout, maps.at(SPLIT)))
    with pytest.raises(RidgeFillError, match="split 3 has no direct ridge: layer 5"):
        Variants(model, maps).settings(SPLIT, "direct")


# --- splices -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "layer", "component", "other"),
    [
        ("qwen3_next", 5, STATE, "both"),
        ("qwen3_next", 4, "both", STATE),
        ("granitemoehybrid", 5, STATE, "both"),
        ("lfm2", 4, STATE, "both"),
        ("lfm2", 5, "both", STATE),
    ],
)
def test_a_state_that_was_damaged_recovers_by_itself_and_keys_do_not_help_it(
    family: str, layer: int, component: str, other: str
) -> None:
    model, ids = hybrid(family), prompt(TOKENS)
    study = study_splices(knowing(model, ids, {layer: 1.0}), [ids], SPLIT, tail=TAIL, head=HEAD)
    assert study is not None
    assert study.kl > 1e-5
    assert study.share(component) > 0.99
    assert abs(study.share(other)) < 0.01
    assert study.share(EVERYTHING) > 0.99
    # Each layer keeps states or keys: of the others nothing is put back.
    of_state = {r.splice.layers[0]: r.share for r in study.layers if r.splice.component == STATE}
    layout = decoder_layout(model)
    assert list(of_state) == [late for late in (4, 5) if layout.keeps_state(late)]
    if component == STATE:
        assert of_state[layer] > 0.99
    assert [r.share > 0.99 for r in study.upwards] == [late >= layer for late in (4, 5)]
    assert [r.share > 0.99 for r in study.downwards] == [late <= layer for late in (5, 4)]
    assert {r.splice.layers for r in study.heads} == {(late,) for late in (4, 5) if layout.keeps_keys(late)}


def test_a_layer_with_both_recovers_by_both() -> None:
    model, ids = hybrid("falcon_h1", ssm_out_multiplier=8.0, attention_out_multiplier=0.25), prompt(TOKENS)
    study = study_splices(knowing(model, ids, {LAST: 1.0}), [ids], SPLIT, tail=TAIL, head=HEAD)
    assert study is not None
    assert study.share(EVERYTHING) > 0.99
    assert 0.05 < study.share(STATE) < 0.95
    assert 0.05 < study.share("both") < 0.95


def test_late_layers_that_keep_no_keys_have_a_state_to_put_back_and_nothing_else() -> None:
    model, ids = hybrid("qwen3_5"), prompt(TOKENS)  # its last two layers
    study = study_splices(knowing(model, ids, {LAST: 1.0}), [ids], SPLIT, tail=TAIL, head=HEAD)
    assert study is not None
    assert [(r.splice.component, r.share > 0.99) for r in study.whole] == [(STATE, True)]
    assert study.heads == []


# --- the gate ------------------------------------------------------------------------------------------------------

SETTINGS = GateSettings(
    (SPLIT,),
    ("speed", "quality"),
    (TOKENS,),
    needles=(1,),
    tail=TAIL,
    min_bulk=1,
    documents=3,
    far=FarSettings(16, 0.0),
    limits=Limits(needles=0.4),  # so few prompts see no less
)


def judged_model(family: str) -> nn.Module:
    """A hybrid in which of the layers from the split on only the last does anything, so that its input is the stream.

    Dimension 0 of the stream marks a prompt's first row, and no layer writes to it.
    """
    tokenizer = word_tokenizer()
    model: Any = hybrid(family, vocab_size=len(tokenizer))
    with torch.no_grad():
        for layer_idx, layer in enumerate(decoder_layout(model).layers):
            for name, parameter in layer.named_parameters():
                if any(out in name for out in ("o_proj", "out_proj", "down_proj", "output_linear")):
                    parameter[..., 0, :] = 0  # [d, n], or [experts, d, n]
                    if SPLIT <= layer_idx < LAST:
                        parameter.zero_()
        embeddings = model.get_input_embeddings().weight
        embeddings[:, 0] = 0
        embeddings[tokenizer.bos_token_id, 0] = 1
    return model


def judged_maps(model: nn.Module, *, broken: bool = False) -> RidgeMaps:
    """Exact maps of `judged_model`, but for the very first row; broken, the last layer takes all rows for the same."""
    maps = random_maps(model, identity=True)
    width = decoder_layout(model).hidden_size
    exact, wrong = maps.at(SPLIT).layers[LAST], torch.randn(width, generator=torch.Generator().manual_seed(8))
    exact.weight[0] = 100 * wrong
    forgetful = LayerMap(LAST, torch.zeros(width, width), wrong)
    # The layer before does nothing: that it forgets shows when its map is exchanged for the last one's.
    layers = {LAST - 1: replace(forgetful, layer=LAST - 1), LAST: forgetful if broken else exact}
    return replace(maps, splits={SPLIT: replace(maps.at(SPLIT), layers=layers)})


def judge(model: nn.Module, maps: RidgeMaps, **changes: Any) -> GateRun:
    """A gate on needles whose answers are whatever this random model says to them."""
    tokenizer, variants, found = word_tokenizer(), Variants(model, maps), []
    options: dict[str, Any] = {"tail": TAIL, "needles": (1,), "wordings": [replace(WORDING, keys=KEYS[:1])]}
    for item in build_items(
        tokenizer, Filler(tokenizer, filler_texts()), tokens=TOKENS, count=12, controls=2, **options
    ):
        answer = next(answer_item(variants, tokenizer, item, (), tail=TAIL)).answer
        if words := re.findall(r"\w+", answer):
            found.append(replace(item, expected=words[0]))
    assert sum(item.place == "bulk" for item in found) >= 8
    material = Material(lambda _: found, lambda tokens: documents(3, tokens))
    return run_gate(model, tokenizer, maps, replace(SETTINGS, **changes), material)


@pytest.fixture(scope="module", params=["qwen3_next", "falcon_h1"])
def judged(request: pytest.FixtureRequest) -> tuple[str, GateRun, GateRun]:
    model = judged_model(request.param)
    return request.param, judge(model, judged_maps(model)), judge(model, judged_maps(model, broken=True))


def test_a_hybrid_passes_in_tier_speed_and_the_report_says_why_not_in_quality(
    judged: tuple[str, GateRun, GateRun], tmp_path: Path
) -> None:
    _, run, _ = judged
    document = run.document
    (result,) = document["results"]
    assert (result["split"], result["tier"], result["rows_filled"]) == (SPLIT, "speed", END - HEAD)
    assert (document["verdict"], result["reasons"]) == ("pass", [])
    (refused,) = document["refused"]
    assert (refused["split"], refused["tier"]) == (SPLIT, "quality")
    assert refused["reason"].startswith(REFUSAL)
    assert {(c["control"], c["failed"]) for c in document["controls"]} == {("swapped", True), ("head=0", True)}
    assert {entry["name"] for entry in document["baselines"]} == {"identity", "no bulk"}
    assert result["needles"]["outside"]["items"] > 0
    assert [entry["tier"] for entry in document["cost"]] == ["speed"]
    write_report(tmp_path, run)
    text = (tmp_path / "index.html").read_text()
    assert f"<p>S={SPLIT}, quality: not judged: {REFUSAL}" in text


def test_a_broken_state_shows_in_the_losses_and_the_splices_name_it(
    judged: tuple[str, GateRun, GateRun], tmp_path: Path
) -> None:
    family, exact, broken = judged
    kl = [run.document["results"][0]["distance"]["groups"]["whole tail"]["kl"]["estimate"] for run in (exact, broken)]
    assert kl[1] > 1e-4
    assert kl[1] > 1e3 * kl[0]
    assert broken.document["verdict"] == "fail"
    splices = broken.document["splices"][SPLIT]
    assert splices["recovered"][EVERYTHING] > 0.99
    by_layer = {entry["layer"]: entry["share"] for entry in splices["layers"] if entry["component"] == STATE}
    if family == "qwen3_next":  # the last layer keeps a state and no keys
        assert splices["component"] == STATE
        assert splices["recovered"][STATE] > 0.99
        assert abs(splices["recovered"]["both"]) < 0.01
        assert by_layer.keys() == {LAST}
        assert splices["recommendations"][0].startswith("correct recurrent states: exact ones alone recover 100%")
    else:
        assert splices["recovered"][STATE] < 0.99
        assert by_layer.keys() == {LAST - 1, LAST}
    assert not any("select rows" in line for line in splices["recommendations"])
    write_report(tmp_path, broken)
    text, found = (tmp_path / "index.html").read_text(), _Page()
    found.feed(text)
    assert found.open == []
    _check_figures(found, {**broken.document, "splices": {str(SPLIT): splices}})
    assert f"layer {LAST}, {STATE}: " in text


def test_a_gate_that_is_left_without_a_tier_says_why() -> None:
    model = judged_model("qwen3_next")
    with pytest.raises(UnsupportedModelError, match=f"there is no tier to judge: {REFUSAL}"):
        judge(model, judged_maps(model), tiers=("quality",))


def test_other_models_refuse_tier_quality_by_name_too() -> None:
    def refusals(family: str) -> dict[int, str]:
        model = tiny_model(family)
        return _unselectable(Variants(model, random_maps(model)), SETTINGS)

    assert "none lies at or below layer 3" in refusals("mistral-sliding")[SPLIT]
    assert refusals("llama") == {}
