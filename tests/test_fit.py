"""A fit is the closed-form ridge solution over the rows that it says, and says what it saw."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from tiny import CORE_FAMILIES, NUM_LAYERS, tiny_model
from tiny_tokenizer import BOS, byte_tokenizer, random_text

from ridgefill.agreement import KEY_COSINE_PERCENTS, project_keys_values
from ridgefill.capture import BlockInputs, special_prefix, text_windows
from ridgefill.errors import FitError
from ridgefill.layout import decoder_layout
from ridgefill.maps import RidgeMaps
from ridgefill.moments import reference_moments
from ridgefill.ridge import LAMBDA_GRID, PlainSystem, choose_lambda, solve_ridge, squared_error
from ridgefill.solve import fit as fit_maps

D = 32
WINDOW = 96
HEAD = 4


def _model(family: str = "llama", **overrides: Any) -> Any:
    return tiny_model(family, **{"hidden_size": D, **overrides})


def fit(*args: Any, **settings: Any) -> RidgeMaps:
    """The closed form alone; choosing features and gains has tests of its own (test_features)."""
    return fit_maps(*args, **{"features": ("stream",), "gains": "none", **settings})


def _texts(count: int = 12, characters: int = WINDOW) -> list[str]:
    """Texts of one window each."""
    return [random_text(characters, seed) for seed in range(count)]


def _ridge_by_lstsq(x: NDArray[Any], y: NDArray[Any], ridge_lambda: float) -> tuple[NDArray[Any], NDArray[Any]]:
    """Centred ridge as plain least squares on an augmented system, without normal equations."""
    dx, dy = x - x.mean(0), y - y.mean(0)
    penalty = ridge_lambda * np.square(dx).sum(0).mean()
    weight = np.linalg.lstsq(
        np.vstack([dx, np.sqrt(penalty) * np.eye(x.shape[1])]),
        np.vstack([dy, np.zeros((x.shape[1], y.shape[1]))]),
        rcond=None,
    )[0]
    return weight, y.mean(0) - x.mean(0) @ weight


# --- the solution ----------------------------------------------------------------------------------------------------


def test_solve_ridge_is_the_augmented_least_squares_solution() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(300, 8, generator=generator, dtype=torch.float64) * torch.logspace(-2, 3, 8, dtype=torch.float64)
    y = torch.randn(300, 5, generator=generator, dtype=torch.float64) + x[:, :5]
    for ridge_lambda in (1e-6, 1e-3, 1.0):
        expected, _ = _ridge_by_lstsq(x.numpy(), y.numpy(), ridge_lambda)
        found = solve_ridge(reference_moments(x, y), ridge_lambda)
        np.testing.assert_allclose(found.numpy(), expected, rtol=1e-7, atol=1e-9)


def test_squared_error_from_moments_is_that_of_the_rows() -> None:
    generator = torch.Generator().manual_seed(1)
    x, y, weight, bias = (
        torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in ((200, 6), (200, 4), (6, 4), (4,))
    )
    expected = (y + 3 - x @ weight - bias).square().sum(0)
    torch.testing.assert_close(squared_error(reference_moments(x, y + 3), weight, bias), expected)


@pytest.mark.parametrize(("signal", "noise"), [(1.0, 0.0), (1.0, 3.0), (0.1, 3.0), (0.0, 1.0)])
def test_auto_lambda_is_the_grids_best_on_the_held_out_rows(signal: float, noise: float) -> None:
    generator = torch.Generator().manual_seed(2)
    truth = signal * torch.randn(20, 3, generator=generator, dtype=torch.float64)

    def draw(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.randn(rows, 20, generator=generator, dtype=torch.float64)
        return x, x @ truth + noise * torch.randn(rows, 3, generator=generator, dtype=torch.float64)

    (x, y), (x_out, y_out) = draw(60), draw(400)
    by_rows = []
    for ridge_lambda in LAMBDA_GRID:
        weight, bias = _ridge_by_lstsq(x.numpy(), y.numpy(), ridge_lambda)
        residual = y_out.numpy() - x_out.numpy() @ weight - bias
        by_rows.append((np.square(residual).sum(0) / np.square(y_out.numpy() - y_out.numpy().mean(0)).sum(0)).mean())
    fitted, held_out = PlainSystem(reference_moments(x, y)), PlainSystem(reference_moments(x_out, y_out))
    found = choose_lambda(fitted, held_out, width=2)  # three columns: the last is looked at alone
    assert found == LAMBDA_GRID[int(np.argmin(by_rows))]
    if noise == 0:
        assert found == min(LAMBDA_GRID)
    if signal == 0:
        assert found == max(LAMBDA_GRID)


def test_a_singular_system_says_what_to_do() -> None:
    x = torch.randn(50, 3, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    x[:, 2] = 0
    with pytest.raises(FitError, match=r"not positive definite at column 3 of 3 \(lambda 0, 50 rows\): use a larger"):
        solve_ridge(reference_moments(x, x), 0.0)


# --- the whole fit, against numpy ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("family", "target"), [("llama", "normalized"), ("olmo3", "raw")])
def test_fit_equals_numpy_over_the_same_rows(family: str, target: str) -> None:
    model, tokenizer = _model(family), byte_tokenizer(bos=True)
    texts = _texts(12, WINDOW - 1)  # one window each, BOS included
    maps = fit(model, tokenizer, texts, (1, 2), window_tokens=WINDOW, head=HEAD, dtype=torch.float32)
    hidden = []
    for number, text in enumerate(texts):
        if number != 1:  # the held-out one
            ids = torch.tensor([[BOS, *tokenizer(text, add_special_tokens=False)["input_ids"]]])
            with torch.no_grad():
                states = model(ids, output_hidden_states=True).hidden_states
            hidden.append([state[0, HEAD:].double().numpy() for state in states])
    for split in (1, 2):
        x = np.concatenate([states[split] for states in hidden])
        assert sorted(maps.splits[split].layers) == list(range(split + 1, NUM_LAYERS))
        assert maps.splits[split].target == target
        assert maps.fit["rows"] == len(x) == 11 * (WINDOW - HEAD)
        for layer, layer_map in maps.splits[split].layers.items():
            y = np.concatenate([states[layer] for states in hidden])
            if target == "normalized":
                y = y / np.sqrt(np.square(y).mean(-1, keepdims=True))
            weight, bias = _ridge_by_lstsq(x, y, 1e-3)
            np.testing.assert_allclose(layer_map.weight.numpy(), weight, rtol=1e-3, atol=1e-4 * np.abs(weight).max())
            np.testing.assert_allclose(layer_map.bias.numpy(), bias, rtol=1e-3, atol=1e-4 * np.abs(bias).max())
    assert maps.default_split == 2


def test_a_late_input_that_is_the_stream_is_found_as_the_identity() -> None:
    model = _model("olmo3")  # raw targets: the map itself must be the identity
    with torch.no_grad():
        for layer in model.model.layers[2:]:
            layer.post_attention_layernorm.weight.zero_()
            layer.post_feedforward_layernorm.weight.zero_()
    maps = fit(model, byte_tokenizer(), _texts(), (2,), window_tokens=WINDOW, ridge_lambda=1e-9)
    for layer_map in maps.splits[2].layers.values():
        torch.testing.assert_close(layer_map.weight.float(), torch.eye(D), rtol=0, atol=1e-3)
        torch.testing.assert_close(layer_map.bias, torch.zeros(D), rtol=0, atol=1e-2)
        assert layer_map.metrics["input_cosine"] > 0.99999
        assert layer_map.metrics["identity_input_cosine"] > 0.99999
        assert layer_map.metrics["key_relative_error"] < 1e-3
        assert layer_map.metrics["key_norm_ratio"] == pytest.approx(1, abs=1e-3)


def test_held_out_windows_never_enter_the_sums() -> None:
    model, tokenizer = _model(), byte_tokenizer()
    texts = _texts()
    other_held_out = [texts[0], random_text(WINDOW, 99), *texts[2:]]
    other_fitted = [random_text(WINDOW, 99), *texts[1:]]
    base, same, differs = (
        fit(model, tokenizer, t, (2,), window_tokens=WINDOW).splits[2].layers[3]
        for t in (texts, other_held_out, other_fitted)
    )
    assert torch.equal(base.weight, same.weight)
    assert base.metrics != same.metrics
    assert not torch.equal(base.weight, differs.weight)


def test_auto_lambda_takes_its_value_from_the_grid_and_needs_held_out_windows() -> None:
    model, tokenizer = _model(), byte_tokenizer()
    maps = fit(model, tokenizer, _texts(), (2,), window_tokens=WINDOW, ridge_lambda="auto")
    assert maps.splits[2].ridge_lambda in LAMBDA_GRID
    fixed = fit(model, tokenizer, _texts(), (2,), window_tokens=WINDOW, ridge_lambda=maps.splits[2].ridge_lambda)
    assert torch.equal(fixed.splits[2].layers[4].weight, maps.splits[2].layers[4].weight)
    with pytest.raises(FitError, match="needs held-out windows"):
        fit(model, tokenizer, _texts(), (2,), window_tokens=WINDOW, ridge_lambda="auto", held_out=0)


def test_held_out_zero_uses_every_window_and_stores_no_figures() -> None:
    maps = fit(_model(), byte_tokenizer(), _texts(), (2,), window_tokens=WINDOW, held_out=0)
    assert maps.fit["rows"] == 12 * (WINDOW - HEAD)
    assert maps.fit["held_out_rows"] == 0
    assert all(not layer_map.metrics for layer_map in maps.splits[2].layers.values())


def test_the_last_layer_as_split_has_no_maps() -> None:
    maps = fit(_model(), byte_tokenizer(), _texts(), (NUM_LAYERS - 1,), window_tokens=WINDOW)
    assert maps.splits[NUM_LAYERS - 1].layers == {}


def test_file_says_what_was_read(tmp_path: Path) -> None:
    texts = [
        ("first", random_text(3 * WINDOW, 1)),
        ("second", [random_text(WINDOW * 4, 2), random_text(WINDOW * 5, 3)]),
    ]
    phases = []
    maps = fit(
        _model(),
        byte_tokenizer(),
        texts,
        (1, 3),
        default_split=1,
        window_tokens=WINDOW,
        progress=lambda phase, done, total: phases.append((phase, done, total)),
    )
    whole = {"first": texts[0][1], "second": "".join(texts[1][1])}
    assert maps.fit == {
        "rows": 11 * (WINDOW - HEAD),
        "held_out_rows": WINDOW - HEAD,
        "head": HEAD,
        "window_tokens": WINDOW,
        "texts": [
            {
                "name": "first",
                "sha256": hashlib.sha256(whole["first"].encode()).hexdigest(),
                "rows": 2 * (WINDOW - HEAD),
            },
            {
                "name": "second",
                "sha256": hashlib.sha256(whole["second"].encode()).hexdigest(),
                "rows": 9 * (WINDOW - HEAD),
            },
        ],
    }
    assert [phase for phase, done, total in phases if done == total] == ["solve", "held-out", "choose"]
    assert ("capture", 12 * WINDOW, None) in phases
    maps.save(tmp_path / "maps.safetensors")
    loaded = RidgeMaps.load(tmp_path / "maps.safetensors")
    assert loaded.fit == maps.fit
    assert loaded.default_split == 1
    assert torch.equal(loaded.splits[1].layers[4].weight, maps.splits[1].layers[4].weight)
    assert loaded.splits[3].layers[4].metrics == maps.splits[3].layers[4].metrics


def test_equal_inputs_give_equal_files(tmp_path: Path) -> None:
    for name in ("a", "b"):
        fit(_model(), byte_tokenizer(), _texts(), (2,), window_tokens=WINDOW).save(tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


# --- held-out figures ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", sorted(CORE_FAMILIES))
def test_every_family_fits_with_its_figures(family: str) -> None:
    maps = fit(_model(family), byte_tokenizer(), _texts(), (2,), window_tokens=WINDOW)
    for layer_map in maps.splits[2].layers.values():
        figures = layer_map.metrics
        assert 0 < figures["input_cosine"] <= 1
        assert figures["input_cosine"] > figures["identity_input_cosine"] - 0.05
        assert ("key_cosine" in figures) == (family != "phi3")  # one fused projection: no keys to compare
        if family != "phi3":
            quantiles = figures["key_cosine_quantiles"]
            assert len(quantiles) == len(KEY_COSINE_PERCENTS)
            assert quantiles == sorted(quantiles)
            assert quantiles[0] <= figures["key_cosine"] <= quantiles[-1] <= 1


@pytest.mark.parametrize("family", sorted(set(CORE_FAMILIES) - {"phi3"}))
def test_projected_keys_and_values_are_those_of_the_cache(family: str) -> None:
    model = _model(family)
    layout = decoder_layout(model)
    with torch.no_grad():
        for token in (5, 77):
            # One token at position 0, where RoPE turns by nothing: the cache holds keys after k_norm, unrotated.
            output = model(torch.tensor([[token]]), use_cache=True, output_hidden_states=True)
            cache = getattr(output, "cache", None) or output.past_key_values
            for layer in range(NUM_LAYERS):
                pair = project_keys_values(layout, layer, output.hidden_states[layer][0])
                assert pair is not None
                torch.testing.assert_close(pair[0], cache.layers[layer].keys[0].transpose(0, 1))
                torch.testing.assert_close(pair[1], cache.layers[layer].values[0].transpose(0, 1))


# --- windows ---------------------------------------------------------------------------------------------------------


def _windows(texts: Any, *, bos: bool = False, window: int = 50, max_tokens: int | None = None) -> list[Any]:
    tokenizer = byte_tokenizer(bos=bos)
    return list(text_windows(tokenizer, texts, window_tokens=window, min_tokens=5, max_tokens=max_tokens))


@pytest.mark.parametrize("bos", [False, True])
def test_windows_hold_each_text_once_and_never_mix_two(bos: bool) -> None:
    texts = [("long", random_text(40_000, 1)), ("short", "xyzzy" * 7), ("tiny", "no")]
    windows = _windows(texts, bos=bos)
    prefix = [BOS] if bos else []
    for name, text in texts[:2]:
        mine = [w.ids for w in windows if w.text.name == name]
        assert all(len(ids) == 50 for ids in mine[:-1])
        assert all(ids[: len(prefix)] == prefix for ids in mine)
        joined = [token for ids in mine for token in ids[len(prefix) :]]
        expected = byte_tokenizer()(text)["input_ids"]
        assert joined == expected[: len(joined)]
        assert len(expected) - len(joined) < 5  # a remainder below min_tokens is dropped
    assert not [w for w in windows if w.text.name == "tiny"]


def test_special_prefix_is_the_tokenizers_own() -> None:
    assert special_prefix(byte_tokenizer()) == []
    assert special_prefix(byte_tokenizer(bos=True)) == [BOS]


def test_memory_is_bounded_whatever_the_texts_length() -> None:
    taken = 0

    def endless() -> Iterator[str]:
        nonlocal taken
        while taken < 10_000_000:
            taken += 1000
            yield random_text(1000, taken)

    windows = text_windows(byte_tokenizer(), [("long", endless())], window_tokens=512, min_tokens=5, max_tokens=None)
    for number in range(1, 100):
        next(windows)
        assert taken < 512 * number + 40_000  # a piece or two ahead of the windows, never the text


def test_a_token_limit_is_exact_and_draws_from_texts_all_over_the_list() -> None:
    texts = [(str(number), random_text(1000, number)) for number in range(200)]
    windows = _windows(texts, max_tokens=1570)
    assert sum(len(w.ids) for w in windows) == 1570
    assert len({w.text.name for w in windows}) == 32
    quarters = [int(w.text.name) // 50 for w in windows]
    assert min(quarters.count(quarter) for quarter in range(4)) >= 7
    # A generator has no "all over": it is read in its order.
    in_order = _windows((text for text in texts), max_tokens=1570)
    assert {w.text.name for w in in_order} == {"0", "1"}


def test_a_text_cut_by_the_limit_is_hashed_whole() -> None:
    text = random_text(100_000, 4)
    for texts in ([("a", text), ("b", text)], iter([("a", text)])):
        windows = _windows(texts, max_tokens=200)
        assert {w.text.digest.hexdigest() for w in windows} == {hashlib.sha256(text.encode()).hexdigest()}


# --- life cycle and refusals -----------------------------------------------------------------------------------------


def _hooks(model: Any) -> int:
    return sum(len(module._forward_pre_hooks) + len(module._forward_hooks) for module in model.modules())


def test_hooks_are_gone_after_a_fit_and_after_an_exception_inside_the_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokenizer = _model(), byte_tokenizer()
    fit(model, tokenizer, _texts(), (2,), window_tokens=WINDOW)
    assert _hooks(model) == 0
    seen = []

    def fails(*_: Any, **__: Any) -> None:
        seen.append(_hooks(model))
        raise RuntimeError("inside the forward")

    monkeypatch.setattr(model.model.layers[3].mlp, "forward", fails)
    with pytest.raises(RuntimeError, match="inside the forward"):
        fit(model, tokenizer, _texts(), (2,), window_tokens=WINDOW)
    assert seen == [4]  # layers 2 to 5 are watched
    assert _hooks(model) == 0


def test_layers_above_the_last_block_input_do_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    model = _model()

    def fails(*_: Any, **__: Any) -> None:
        raise AssertionError("ran")

    monkeypatch.setattr(model.model.layers[-1], "forward", fails)
    monkeypatch.setattr(model, "forward", fails)
    fit(model, byte_tokenizer(), _texts(), (2,), window_tokens=WINDOW)


def test_a_captured_input_survives_an_in_place_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    model = _model()
    layout = decoder_layout(model)
    with BlockInputs(layout, [2, 3]) as inputs:
        expected = inputs.run([5, 6, 7])[2]
        original = model.model.layers[2].forward

        def in_place(hidden_states: torch.Tensor, **kwargs: Any) -> Any:
            output = original(hidden_states.clone(), **kwargs)
            hidden_states.zero_()
            return output

        monkeypatch.setattr(model.model.layers[2], "forward", in_place)
        assert torch.equal(inputs.run([5, 6, 7])[2], expected)


def test_activations_that_are_not_finite_name_the_layer() -> None:
    model = _model()
    with torch.no_grad():
        model.model.layers[2].mlp.down_proj.weight[0, 0] = float("inf")
    with pytest.raises(FitError, match="the input of layer 3 is not finite"):
        fit(model, byte_tokenizer(), _texts(), (1,), window_tokens=WINDOW)


def test_few_rows_warn_and_too_few_are_refused() -> None:
    model, tokenizer = _model(), byte_tokenizer()
    with pytest.warns(UserWarning, match="only 184 calibration rows for 32 input columns; 640 are few and 3200"):
        fit(model, tokenizer, _texts(3), (2,), window_tokens=WINDOW)
    with pytest.raises(FitError, match="26 calibration rows for 32 input columns"):
        fit(model, tokenizer, [random_text(30)], (2,), window_tokens=WINDOW)
    with pytest.raises(FitError, match="0 calibration rows"):
        fit(model, tokenizer, [], (2,), window_tokens=WINDOW)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"splits": (0,)}, "split 0: expected 1 <= split < 6"),
        ({"splits": (2, 6)}, "split 6: expected 1 <= split < 6"),
        ({"splits": ()}, "expected at least one split"),
        ({"default_split": 3}, r"default_split 3: expected one of the splits \[2\]"),
        ({"ridge_lambda": "best"}, "ridge_lambda 'best'"),
        ({"ridge_lambda": -1.0}, "ridge_lambda -1.0"),
        ({"ridge_lambda": float("nan")}, "ridge_lambda nan"),
        ({"held_out": 0.9}, "held_out 0.9"),
        ({"head": -1}, "head -1"),
        ({"window_tokens": 5}, r"expected more than head \+ 1 = 5"),
        ({"window_tokens": 5000}, "the model has 4096 positions"),
        ({"max_tokens": 0}, "max_tokens 0"),
    ],
)
def test_arguments_that_make_no_sense_are_refused_by_name(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(FitError, match=message):
        fit(_model(), byte_tokenizer(), _texts(), **{"splits": (2,), "window_tokens": WINDOW, **arguments})


def test_a_model_in_training_mode_is_refused() -> None:
    with pytest.raises(FitError, match=r"call model.eval\(\) first"):
        fit(_model().train(), byte_tokenizer(), _texts(), (2,), window_tokens=WINDOW)


def test_maps_that_overflow_their_dtype_are_refused() -> None:
    model = _model("olmo3")
    with torch.no_grad():
        model.model.layers[2].post_feedforward_layernorm.weight.fill_(1e7)
    with pytest.raises(FitError, match=r"split 2: maps are not finite in torch.float16"):
        fit(model, byte_tokenizer(), _texts(), (2,), window_tokens=WINDOW, dtype=torch.float16)
