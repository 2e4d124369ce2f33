"""What maps read beyond the stream, gains, and how a fit chooses them: against plain loops, numpy, and by hand."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from test_prefill import call as call_keeping
from tiny import FEATURES, SPLIT, feature_maps, left_padded, prompt, random_maps, tiny_model
from tiny_tokenizer import byte_tokenizer, random_text
from transformers import DynamicCache

import ridgefill
from ridgefill.agreement import Agreement, HeadSums
from ridgefill.capture import BlockInputs, TextRecord, Window
from ridgefill.errors import AttachError, FitError, UnsupportedModelError
from ridgefill.features import Features, FeatureState
from ridgefill.layout import decoder_layout
from ridgefill.maps import RidgeMaps
from ridgefill.rows import Gate, SelectionSettings, attention_scorer
from ridgefill.scorers import AttentionScorer
from ridgefill.solve import fit
from ridgefill.tune import choose
from ridgefill.writers import generic_writer, probe_layers

ROWS, TAIL, HEAD = 96, 16, 4
SETTINGS: dict[str, Any] = {"tail": TAIL, "head": HEAD, "min_bulk": 8}


def call(model: Any, ids: torch.Tensor, mask: torch.Tensor | None, cache: Any) -> torch.Tensor:
    return call_keeping(model, ids, mask, cache, 1)


def by_hand(names: tuple[str, ...], stream: np.ndarray, pads: int = 0) -> np.ndarray:
    """Features of one sequence ``[rows, d]``, row by row in float64; the first ``pads`` rows count as zero."""
    stream = stream.astype(np.float64)
    known = stream.copy()
    known[:pads] = 0
    rows, d = stream.shape
    x = np.zeros((rows, len(names) * d))
    for number, name in enumerate(names):
        kind, _, argument = name.partition(":")
        mean = np.zeros(d)
        for row in range(rows):
            if kind == "stream":
                value = stream[row]
            elif kind == "previous":
                before = row - int(argument)
                value = known[before] if before >= 0 else np.zeros(d)
            else:
                square = np.square(known[row]).mean()
                unit = known[row] / np.sqrt(square) if square > 0 else known[row]
                mean = float(argument) * mean + (1 - float(argument)) * unit
                value = mean
            x[row, number * d : (number + 1) * d] = value
    return x


@pytest.mark.parametrize("pieces", [(300,), (1, 2, 297), (128, 128, 44), (7,) * 42 + (6,)])
@pytest.mark.parametrize("pads", [0, 5])
def test_features_are_those_of_a_plain_loop_in_any_pieces(pieces: tuple[int, ...], pads: int) -> None:
    stream = 30 * torch.randn(2, 300, 6, generator=torch.Generator().manual_seed(0))
    visible = torch.ones(2, 300, dtype=torch.bool)
    visible[1, :pads] = False
    state = FeatureState(Features.of(FEATURES))
    parts = zip(torch.split(stream, pieces, dim=1), torch.split(visible, pieces, dim=1), strict=True)
    found = torch.cat([state.extend(rows, seen if pads else None) for rows, seen in parts], dim=1)
    for sequence in range(2):
        expected = by_hand(FEATURES, stream[sequence].numpy(), pads if sequence else 0)
        np.testing.assert_allclose(found[sequence].numpy(), expected, rtol=1e-5, atol=1e-5)


def test_a_copied_state_goes_on_by_itself_and_the_stream_alone_is_not_copied() -> None:
    stream = torch.randn(1, 40, 4, generator=torch.Generator().manual_seed(1))
    state = FeatureState(Features.of(FEATURES))
    whole = FeatureState(Features.of(FEATURES)).extend(stream)
    state.extend(stream[:, :25])
    for _ in range(2):
        torch.testing.assert_close(state.copy().extend(stream[:, 25:]), whole[:, 25:])
    assert FeatureState(Features()).extend(stream) is stream
    half = stream.bfloat16()
    assert FeatureState(Features.of(FEATURES)).extend(half).dtype == torch.bfloat16


@pytest.mark.parametrize(
    "names", [(), ("previous:1",), ("stream", "stream"), ("stream", "previous:0"), ("stream", "mean:1.0"),
              ("stream", "mean:0.50"), ("stream", "previous:x"), ("stream", "mlp"), ("stream", "next:1")]
)  # fmt: skip
def test_unknown_features_are_refused(names: tuple[str, ...]) -> None:
    with pytest.raises(FitError, match="feature"):
        Features.of(names)


# --- a fill with features ---------------------------------------------------------------------------------------------


def expected_keys_values(
    model: Any, maps: RidgeMaps, ids: torch.Tensor, layer: int, state: FeatureState | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of all rows of one sequence, by a plain forward pass, a loop over rows, and the layer itself."""
    layout = decoder_layout(model)
    with BlockInputs(layout, [SPLIT]) as block_inputs:
        stream = block_inputs.run(ids[0].tolist())[SPLIT]
    chosen = maps.splits[SPLIT]
    x = torch.from_numpy(by_hand(chosen.features, stream.numpy())).float()
    layer_map = chosen.layers[layer]
    kwargs = dict(probe_layers(layout)[0][layer])
    positions = torch.arange(ids.shape[1]).unsqueeze(0)
    tables = model.model.rotary_emb(stream.unsqueeze(0), positions)
    kwargs.update(position_ids=positions, position_embeddings=tables)
    del kwargs["hidden_states"]
    with torch.no_grad():
        keys, values = generic_writer(layout, layer)((x @ layer_map.weight + layer_map.bias).unsqueeze(0), kwargs)
    assert layer_map.key_gain is not None
    assert layer_map.value_gain is not None
    return keys * layer_map.key_gain.view(-1, 1, 1), values * layer_map.value_gain.view(-1, 1, 1)


@pytest.mark.parametrize("family", ["llama", "qwen3", "phi3"])
def test_a_fill_writes_what_its_features_and_gains_say(family: str) -> None:
    model = tiny_model(family)
    maps, ids = feature_maps(model), prompt(ROWS)
    cache = DynamicCache(config=model.config)
    with ridgefill.attach(model, maps, **SETTINGS) as attachment:
        call(model, ids, None, cache)
        assert attachment.status()["rows_filled"] == ROWS - TAIL - HEAD
    for layer in (SPLIT + 1, SPLIT + 2):
        keys, values = expected_keys_values(model, maps, ids, layer)
        bulk = slice(HEAD, ROWS - TAIL)
        torch.testing.assert_close(cache.layers[layer].keys[:, :, bulk], keys[:, :, bulk], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(cache.layers[layer].values[:, :, bulk], values[:, :, bulk], rtol=1e-4, atol=1e-4)


def test_left_padded_sequences_are_filled_as_if_alone() -> None:
    model = tiny_model("llama")
    maps, pads = feature_maps(model), (0, 3, 9)
    ids, mask = left_padded(ROWS, pads)
    cache = DynamicCache(config=model.config)
    with ridgefill.attach(model, maps, **SETTINGS) as attachment:
        call(model, ids, mask, cache)
        start, end = attachment.status()["spans"]["fill"]
    assert start == max(pads) + HEAD
    for sequence, count in enumerate(pads):
        for layer in (SPLIT + 1, SPLIT + 2):
            # Values: keys differ by their rotation, which counts pads.
            _, values = expected_keys_values(model, maps, ids[sequence : sequence + 1, count:], layer)
            found = cache.layers[layer].values[sequence, :, start:end]
            torch.testing.assert_close(found, values[0, :, start - count : end - count], rtol=1e-3, atol=1e-3)


def test_a_continued_cache_runs_the_rows_exactly_that_lack_their_past() -> None:
    """previous:2 needs two rows before; the means start again at the bulk's first row."""
    model = tiny_model("llama")
    names = ("stream", "previous:2", "previous:1")
    maps, ids, cached = feature_maps(model, names), prompt(40 + ROWS), 40
    cache = DynamicCache(config=model.config)
    call(model, ids[:, :cached], None, cache)
    with ridgefill.attach(model, maps, **SETTINGS) as attachment:
        call(model, ids[:, cached:], None, cache)
        spans = attachment.status()["spans"]
    assert spans["head"] == [cached, cached + 2]
    assert spans["fill"] == [cached + 2, cached + ROWS - TAIL]
    fresh = DynamicCache(config=model.config)
    call(model, ids, None, fresh)
    for layer in (SPLIT + 1, SPLIT + 2):
        keys, _ = expected_keys_values(model, maps, ids, layer)
        bulk = slice(cached + 2, cached + ROWS - TAIL)
        torch.testing.assert_close(cache.layers[layer].keys[:, :, bulk], keys[:, :, bulk], rtol=1e-4, atol=1e-4)
    exact = slice(0, cached + 2)
    torch.testing.assert_close(
        cache.layers[SPLIT + 1].keys[:, :, exact], fresh.layers[SPLIT + 1].keys[:, :, exact], rtol=1e-4, atol=1e-4
    )


def test_a_scorer_that_predicts_reads_the_tails_own_features() -> None:
    model = tiny_model("llama")
    maps, ids, seen = feature_maps(model), prompt(ROWS), []

    def scorer(tail: Any) -> Any:
        seen.append(tail._features)
        return [ridgefill.scorers.Ranking(torch.zeros(tail.batch, tail.bulk_rows))]

    with ridgefill.attach(model, maps, tier="quality", share=0.2, scorer=scorer, **SETTINGS) as attachment:
        call(model, ids, None, DynamicCache(config=model.config))
        assert attachment.status()["rows_selected"] > 0
    with BlockInputs(decoder_layout(model), [SPLIT]) as block_inputs:
        # Late layers do not change the split layer's stream, so a plain pass gives the tail's too.
        stream = block_inputs.run(ids[0].tolist())[SPLIT]
    expected = by_hand(FEATURES, stream.numpy())[-TAIL:]
    np.testing.assert_allclose(seen[0][0].numpy(), expected, rtol=1e-4, atol=1e-4)


def test_a_later_gate_needs_maps_of_the_stream_alone() -> None:
    model = tiny_model("llama")
    low, high = random_maps(model, split=2), feature_maps(model)
    maps = replace(low, splits={**low.splits, **high.splits})
    with pytest.raises(AttachError, match=r"gate 3: its maps read \['stream', 'previous:2'"):
        ridgefill.attach(model, maps, tier="quality", gates={2: 0.3, 3: 0.1}, **SETTINGS)
    assert not ridgefill.attachment.is_attached(model)


def test_features_that_this_version_lacks_are_refused_at_attach() -> None:
    model = tiny_model("llama")
    maps = random_maps(model)
    maps = replace(maps, splits={SPLIT: replace(maps.splits[SPLIT], features=("stream", "mlp"))})
    with pytest.raises(AttachError, match="unknown feature 'mlp'"):
        ridgefill.attach(model, maps)


# --- fits -------------------------------------------------------------------------------------------------------------

WINDOW = 96


def texts(count: int = 12) -> list[str]:
    return [random_text(WINDOW, seed) for seed in range(count)]


def test_a_fit_over_features_equals_numpy() -> None:
    model = tiny_model("llama", hidden_size=32)
    names = ("stream", "previous:1", "mean:0.9")
    settings: dict[str, Any] = {"features": names, "gains": "none", "dtype": torch.float32}
    with pytest.warns(UserWarning, match="calibration rows for 96 input columns"):
        maps = fit(model, byte_tokenizer(), texts(), (2,), window_tokens=WINDOW, **settings)
    assert maps.splits[2].features == names
    x, y = [], []
    with BlockInputs(decoder_layout(model), [2, 4]) as block_inputs:
        for number, text in enumerate(texts()):
            if number != 1:  # the held-out one
                inputs = block_inputs.run(byte_tokenizer()(text)["input_ids"])
                x.append(by_hand(names, inputs[2].numpy())[HEAD:])
                target = inputs[4].double().numpy()[HEAD:]
                y.append(target / np.sqrt(np.square(target).mean(-1, keepdims=True)))
    x_all, y_all = np.concatenate(x), np.concatenate(y)
    dx, dy = x_all - x_all.mean(0), y_all - y_all.mean(0)
    # Each feature is penalised by its own mean diagonal.
    penalty = 1e-3 * np.repeat(np.square(dx).sum(0).reshape(3, -1).mean(1), 32)
    weight = np.linalg.lstsq(
        np.vstack([dx, np.diag(np.sqrt(penalty))]), np.vstack([dy, np.zeros((96, 32))]), rcond=None
    )[0]
    found = maps.splits[2].layers[4]
    np.testing.assert_allclose(found.weight.numpy(), weight, rtol=2e-3, atol=2e-4)
    np.testing.assert_allclose(found.bias.numpy(), y_all.mean(0) - x_all.mean(0) @ weight, rtol=2e-3, atol=2e-3)


def test_one_pass_over_more_features_gives_the_maps_of_fewer() -> None:
    """``auto`` solves the stream's maps from the columns of a larger sum: the same as a pass over the stream alone."""
    model = tiny_model("llama", hidden_size=32)
    arguments = (model, byte_tokenizer(), texts(16), (2,))
    with pytest.warns(UserWarning, match="held-out prompts"):
        chosen = fit(*arguments, window_tokens=WINDOW, gains="none", dtype=torch.float32).splits[2]
    alone = fit(*arguments, window_tokens=WINDOW, features=("stream",), gains="none", dtype=torch.float32).splits[2]
    assert chosen.features == ("stream",)
    for layer in alone.layers:
        torch.testing.assert_close(chosen.layers[layer].weight, alone.layers[layer].weight, rtol=1e-4, atol=1e-5)


def test_gains_and_what_they_mend() -> None:
    generator = np.random.default_rng(0)
    exact = generator.standard_normal((500, 2, 8))
    # The first head is right but for its scale; the second has an error of its own.
    predicted = np.stack([0.5 * exact[:, 0], 0.8 * exact[:, 1] + 0.3 * generator.standard_normal((500, 8))], axis=1)
    sums = HeadSums()
    for part in range(0, 500, 125):
        sums.add(torch.from_numpy(exact[part : part + 125]), torch.from_numpy(predicted[part : part + 125]))
    norms = np.linalg.norm(exact, axis=-1).sum(0) / np.linalg.norm(predicted, axis=-1).sum(0)
    lsq = (exact * predicted).sum((0, 2)) / np.square(predicted).sum((0, 2))
    np.testing.assert_allclose(sums.gain("norm"), norms, rtol=1e-6)
    np.testing.assert_allclose(sums.gain("lsq"), lsq, rtol=1e-6)
    np.testing.assert_allclose(sums.gain("lsq")[0], 2.0, rtol=1e-6)
    total, direction = sums.errors()
    scale = np.linalg.norm(exact)
    np.testing.assert_allclose(total, np.linalg.norm(exact - predicted) / scale, rtol=1e-9)
    np.testing.assert_allclose(direction, np.linalg.norm(exact - lsq[:, None] * predicted) / scale, rtol=1e-9)
    silent = HeadSums()
    silent.add(torch.ones(3, 1, 2), torch.zeros(3, 1, 2))
    assert silent.gain("lsq").tolist() == silent.gain("norm").tolist() == [1.0]


def true_windows(count: int = 6) -> list[Window]:
    ids = prompt(WINDOW, batch=count, seed=11)
    return [Window(row.tolist(), TextRecord(f"text {number}")) for number, row in enumerate(ids)]


def good_and_bad(model: Any) -> tuple[Any, Any]:
    """Maps that follow the model (fitted) and random ones, both of one split, over two features."""
    with pytest.warns(UserWarning, match="calibration rows"):
        fitted = fit(
            model, byte_tokenizer(), texts(24), (SPLIT,), window_tokens=WINDOW, features=("stream", "previous:1"),
            gains="none",
        )  # fmt: skip
    return fitted, random_maps(model).splits[SPLIT]


def run_choice(model: Any, shared: RidgeMaps, candidates: list[Any], agreements: Any, gains: str = "none") -> Any:
    chosen = choose(
        model,
        shared,
        {SPLIT: candidates},
        agreements,
        true_windows(),
        head=HEAD,
        gains=gains,
        spectra=lambda _: {},
        states=lambda *_: [],
        report=lambda *_: None,
    )
    return chosen.splits[SPLIT]


def test_more_features_are_kept_only_where_they_help() -> None:
    model = tiny_model("llama")
    fitted, bad = good_and_bad(model)
    good = fitted.splits[SPLIT]
    better = run_choice(model, fitted, [bad, good], {})
    assert better.features == ("stream", "previous:1")
    first, second, *_ = better.choice["steps"]
    assert second["kept"]
    assert second["change"][2] < 0 < first["kl"] - second["kl"]
    worse = run_choice(model, fitted, [replace(good, features=("stream", "previous:1")), bad], {})
    assert worse.features == ("stream", "previous:1")
    assert [step["kept"] for step in worse.choice["steps"][:3]] == [True, False, True]


@pytest.mark.parametrize("helps", [None, "key", "value"])
def test_gains_are_chosen_by_kl_and_only_where_they_help(helps: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("qwen3")
    maps = random_maps(model)
    heads = model.config.num_key_value_heads
    agreements = {}
    for layer in maps.splits[SPLIT].layers:
        agreements[SPLIT, 0, layer] = agreement = Agreement()
        ones = torch.ones(4, heads, 16)
        agreement.add_keys_values((ones / 2, ones / 4), (ones, ones), ones)

    class Bulk:
        """KL as the case says: 1 without the gain that helps and half with it, a little different by prompt."""

        def __init__(self, _: Any, __: Any, ids: torch.Tensor, **settings: Any) -> None:
            self.noise = 1e-3 * float(ids.float().mean())

        def score(self, maps: RidgeMaps, _: torch.Tensor, *, choice: None) -> Any:
            layer = maps.splits[SPLIT].layers[SPLIT + 1]
            gain = {"key": layer.key_gain, "value": layer.value_gain, None: None}[helps]
            useless = 0.01 * ((layer.key_gain is not None) + (layer.value_gain is not None))
            return SimpleNamespace(kl=(1.0 if gain is None else 0.5) + useless + self.noise, dnll=0.0)

        def choice(self, *_: Any, **__: Any) -> Any:
            raise UnsupportedModelError("no rows are selected")

    monkeypatch.setattr("ridgefill.tune.BulkPrefill", Bulk)
    chosen = run_choice(model, maps, [maps.splits[SPLIT]], agreements, gains="auto")
    kept = chosen.choice["gains"]
    assert {name for name, kind in kept.items() if kind != "none"} == ({helps} - {None})
    for layer_map in chosen.layers.values():
        assert (layer_map.key_gain is None) == (helps != "key")
        assert (layer_map.value_gain is None) == (helps != "value")
        if helps == "key":
            assert layer_map.key_gain.tolist() == [2.0] * heads
        if helps == "value":
            assert layer_map.value_gain.tolist() == [4.0] * heads
    tried = [step["tried"] for step in chosen.choice["steps"]]
    assert tried == ["stream", "key gain norm", "key gain lsq", "value gain norm", "value gain lsq", "fused, rank 64"]


@pytest.mark.parametrize(("change", "chosen"), [(-0.1, True), (0.1, False), (0.0, None)])
def test_queries_that_choose_rows_are_chosen_by_kl(
    change: float, chosen: bool | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    model = tiny_model("qwen3")
    maps = random_maps(model)
    noise = itertools.cycle((0.01, -0.01))

    class Bulk:
        def __init__(self, *_: Any, **__: Any) -> None:
            self.noise = next(noise)

        def choice(self, used: RidgeMaps, *, share: float) -> SelectionSettings:
            assert share == 0.1
            gate = Gate(SPLIT, share, {}, attention_scorer(decoder_layout(model), used.splits[SPLIT]))
            return SelectionSettings((gate,), {SPLIT: None, SPLIT + 1: None})

        def score(self, _: RidgeMaps, __: torch.Tensor, *, choice: SelectionSettings | None) -> Any:
            predicted = choice is not None and choice.gates[0].scorer.predicted
            return SimpleNamespace(kl=1.0 + predicted * (change + self.noise), dnll=0.0)

    monkeypatch.setattr("ridgefill.tune.BulkPrefill", Bulk)
    split_maps = run_choice(model, maps, [maps.splits[SPLIT]], {})
    both, exact = split_maps.choice["steps"][-2:]
    assert (both["kept"], exact["kept"]) == (chosen is True, chosen is False)
    assert split_maps.choice.get("predicted_queries") is chosen
    replace(maps, splits={SPLIT: split_maps}).save(tmp_path / "maps.safetensors")
    with ridgefill.attach(model, tmp_path / "maps.safetensors", tier="quality") as attachment:
        found = attachment.selection.gates[0].scorer
    assert found == AttentionScorer(predicted=bool(chosen))  # half of the layers are late: by depth alone, exact ones
    deeper = attention_scorer(decoder_layout(model), replace(split_maps, split=4))
    assert deeper == AttentionScorer(predicted=chosen is not False)


def test_named_gains_are_applied_without_a_choice() -> None:
    model = tiny_model("qwen3", hidden_size=32)
    arguments = (model, byte_tokenizer(), texts(), (SPLIT,))
    maps = fit(*arguments, window_tokens=WINDOW, features=("stream",), gains="lsq").splits[SPLIT]
    assert maps.choice is not None
    assert "held-out prompts" in maps.choice["reason"]
    for layer_map in maps.layers.values():
        assert layer_map.key_gain is not None
        assert layer_map.value_gain is not None
        # A ridge prediction is shrunk, and least squares stretches it or leaves it.
        assert layer_map.metrics["key_direction_error"] <= layer_map.metrics["key_relative_error"]


def test_a_fit_of_a_model_with_maps_attached_says_so_before_it_runs() -> None:
    model = tiny_model("llama")
    with ridgefill.attach(model, random_maps(model)), pytest.raises(FitError, match=r"detach\(\) first"):
        fit(model, byte_tokenizer(), texts(), (2,), window_tokens=WINDOW)


def test_gains_and_choices_survive_the_file(tmp_path: Path) -> None:
    model = tiny_model("llama")
    maps = feature_maps(model, ("stream", "previous:1"))
    choice = {"gains": {"key": "lsq", "value": "none"}, "prompts": 8, "steps": [{"tried": "stream", "kl": 0.25}]}
    maps = replace(maps, splits={SPLIT: replace(maps.splits[SPLIT], choice=choice)})
    maps.save(tmp_path / "maps.safetensors")
    loaded = RidgeMaps.load(tmp_path / "maps.safetensors").splits[SPLIT]
    assert loaded.choice == choice
    assert loaded.features == ("stream", "previous:1")
    assert loaded.map_bytes() == maps.splits[SPLIT].map_bytes()
    for layer, layer_map in maps.splits[SPLIT].layers.items():
        found = loaded.layers[layer]
        assert found.tensors.keys() == layer_map.tensors.keys()
        assert all(torch.equal(found.tensors[name], tensor) for name, tensor in layer_map.tensors.items())


@pytest.mark.parametrize("settings", [{"features": "stream"}, {"features": ("mlp",)}, {"gains": "best"}])
def test_settings_that_make_no_sense_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(FitError, match="expected"):
        fit(tiny_model("llama"), byte_tokenizer(), texts(), (2,), window_tokens=WINDOW, **settings)
