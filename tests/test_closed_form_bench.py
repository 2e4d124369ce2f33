"""`benches/closed_form.py`: weighted sums, narrowed regressions, and that each fit is what its fill was scored with."""

from __future__ import annotations

import importlib
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from tiny import prompt, tiny_model
from tiny_tokenizer import byte_tokenizer, random_text
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from ridgefill.agreement import feature_rows
from ridgefill.attachment import attach
from ridgefill.capture import BlockInputs
from ridgefill.evaluate.filled import filled_tail
from ridgefill.evaluate.quality import prefill_logits, token_scores
from ridgefill.evaluate.windows import Window
from ridgefill.features import STREAM, Features
from ridgefill.layout import decoder_layout
from ridgefill.maps import RidgeMaps
from ridgefill.moments import CentredMoments, reference_moments
from ridgefill.prefill import Step, run_bulk, write_late_layers
from ridgefill.ridge import solve_ridge, squared_error
from ridgefill.solve import fit

ROOT = Path(__file__).parent.parent
SPLITS, TOKENS, TAIL, WIDTH = (3, 4), 400, 64, 96
FEATURES = ("stream", "previous:1")


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "benches"))
    return importlib.import_module("closed_form")


def related_rows(count: int, widths: list[int], n_out: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of correlated parts, and targets that need all of them."""
    x = torch.randn(count, sum(widths)) @ torch.randn(sum(widths), sum(widths)) + 3
    return x, x @ torch.randn(sum(widths), n_out) + torch.randn(count, n_out)


def test_weighted_sums_are_those_of_rows_told_so_often(bench: Any) -> None:
    x, y = related_rows(300, [7], 5)
    weights = torch.randint(0, 4, (300,))
    sums = bench.WeightedSums(7, 5)
    for rows in (slice(0, 130), slice(130, 131), slice(131, 300)):
        sums.add(x[rows], y[rows], weights[rows].float())
    often = torch.arange(300).repeat_interleave(weights)
    expected, found = reference_moments(x[often], y[often]), sums.centred()
    scale = 300 / len(often)  # the sums count as many rows as were added
    assert found.n == sums.rows == 300
    for name in ("x_mean", "y_mean"):
        torch.testing.assert_close(getattr(found, name), getattr(expected, name), rtol=1e-5, atol=1e-5)
    for name in ("sxx", "sxy"):
        wanted = scale * getattr(expected, name)
        torch.testing.assert_close(getattr(found, name), wanted, rtol=1e-5, atol=1e-5 * float(wanted.abs().max()))
    assert sums.effective_rows == pytest.approx(len(often) ** 2 / float(weights.square().sum()))


def test_weights_are_what_their_names_say(bench: Any) -> None:
    ids, counts = [5, 6, 5, 7, 7, 7, 8, 9], Counter({5: 2, 6: 1, 7: 4, 8: 10, 9: 1})
    mass = torch.tensor([9.0, 1.0, 4.0, 1.0, 0.0, 9.0, 7.0, 7.0])
    assert bench.row_weights("plain", ids, mass, counts, 1).tolist() == [1] * 7
    rarity = [1, 1 / 2, 1 / 4, 1 / 4, 1 / 4, 1 / 10, 1]
    assert bench.row_weights("rarity", ids, mass, counts, 1).tolist() == pytest.approx(rarity)
    assert bench.row_weights("rarity^0.5", ids, mass, counts, 1).tolist() == pytest.approx([w**0.5 for w in rarity])
    # The last quarter, two rows, counts as the others do on average.
    assert bench.row_weights("attention", ids, mass, counts, 1).tolist() == pytest.approx(
        [1 / 3, 4 / 3, 1 / 3, 0, 3, 1, 1]
    )
    assert mass[-1] == 7  # the caller's is left alone


def test_attention_is_that_of_the_last_queries(bench: Any) -> None:
    model = tiny_model("llama")
    layout, ids = decoder_layout(model), prompt(60)
    with bench.late_attention(model, layout, 3) as mass, BlockInputs(layout, range(3, 6)) as block_inputs:
        block_inputs.run(ids[0].tolist())
    assert model.config._attn_implementation == "sdpa"
    assert sorted(mass) == [3, 4]  # the last layer's input ends the pass
    model.set_attn_implementation("eager")
    with torch.no_grad():
        exact = model(ids, output_attentions=True).attentions
    for layer, found in mass.items():
        torch.testing.assert_close(found, exact[layer][0, :, 45:].mean((0, 1)))
        assert float(found.sum()) == pytest.approx(1, rel=1e-5)


def moments_of(widths: list[int], n_out: int) -> CentredMoments:
    return reference_moments(*related_rows(400, widths, n_out))


def test_a_regression_is_the_ridge_of_its_parts(bench: Any) -> None:
    moments = moments_of([6, 6, 6], 10)
    regression = bench.Regression(moments, [6, 6, 6], 1e-3)
    expected = solve_ridge(moments, 1e-3, features=3)
    for directions in (None, regression.directions(6), regression.units(6)):
        torch.testing.assert_close(regression.weight(directions), expected, rtol=1e-6, atol=1e-7)
    # Of one unit the weights of the others are zero, and the features' are those beside it alone.
    unit = regression.units(1)
    column = 12 + int(unit[:, 0].argmax())
    found = regression.weight(unit)
    assert torch.equal(found[12:].abs().sum(1) > 0, torch.arange(12, 18) == column)
    penalised = moments.of_columns([*range(12), column])
    penalty = torch.cat([part.mean().expand(6) for part in moments.sxx.diagonal().split(6)])[[*range(12), column]]
    beside = torch.linalg.solve(penalised.sxx + 1e-3 * penalty.diag(), penalised.sxy)
    torch.testing.assert_close(found[[*range(12), column]], beside, rtol=1e-6, atol=1e-7)


def test_no_directions_lose_less_than_those_of_the_reduced_rank_regression(bench: Any) -> None:
    moments = moments_of([5, 12], 20)
    regression = bench.Regression(moments, [5, 12], 1e-9)

    def error(weight: torch.Tensor) -> float:
        return float(squared_error(moments, weight, moments.y_mean - moments.x_mean @ weight).sum())

    whole = error(regression.weight())
    for rank in (1, 3, 8):
        best = error(regression.weight(regression.directions(rank)))
        units = error(regression.weight(regression.units(rank)))
        assert whole * (1 + 1e-6) < best < units
        for _ in range(5):
            assert best < error(regression.weight(torch.randn(12, rank, dtype=torch.float64)))


def test_every_fit_is_scored_beside_plain(bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_model("llama", intermediate_size=WIDTH).save_pretrained(tmp_path / "model")
    byte_tokenizer().save_pretrained(tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model").eval()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    texts = [(f"text {seed}", random_text(300, seed)) for seed in range(12)]
    maps = fit(model, tokenizer, texts, SPLITS, features=FEATURES, gains="none", held_out=0, dtype=torch.float32)
    maps.save(tmp_path / "maps.safetensors")
    windows = [
        Window("prose", str(seed), torch.tensor([tokenizer(random_text(TOKENS, seed))["input_ids"]]))
        for seed in (50, 51)
    ]
    monkeypatch.setattr(bench, "calibration_texts", lambda _: texts)
    monkeypatch.setattr(bench, "held_out_windows", lambda *_, tokens, per_kind: windows)
    monkeypatch.setattr(bench, "unseen_texts", lambda _: [(f"unseen {n}", random_text(900, 100 + n)) for n in range(6)])
    arguments = [str(tmp_path / "maps.safetensors"), "--model", str(tmp_path / "model"), "--splits", "3,4"]
    arguments += ["--weights", "plain,attention,rarity,rarity^0.5", "--fit-tokens", "3600", "--tokens", str(TOKENS)]
    arguments += ["--tail", str(TAIL), "--needles", "2", "--needle-tail", "200", "--json", str(tmp_path / "out.json")]
    arguments += ["--sums", str(tmp_path / "sums")]
    result = CliRunner().invoke(bench.main, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    document = json.loads((tmp_path / "out.json").read_text())
    assert document["settings"]["rows"] == 12 * 296
    found = {(line["split"], line["fit"]): line for line in document["table"]}
    weightings = ["plain", "attention", "rarity", "rarity^0.5"]
    names = {3: ["file", *weightings, *bench.COLUMNS], 4: ["file", *weightings]}
    assert sorted(found) == sorted((split, name) for split, of_split in names.items() for name in of_split)
    for (_, name), line in found.items():
        kl = line["kl"]
        assert f"{kl['estimate']:.4f} [{kl['low']:.4f}, {kl['high']:.4f}]" in result.stdout
        assert ("needles" in line) == (name in weightings)
        assert line.get("needles", {"of": 2})["of"] == 2
    for split in SPLITS:
        # The file holds the same solution of the same rows.
        of_file, plain = found[split, "file"], found[split, "plain"]
        assert plain["kl"]["estimate"] == pytest.approx(of_file["kl"]["estimate"], rel=1e-3)
        assert plain["kl_change"]["estimate"] == plain["needles"]["lost"] == plain["needles"]["gained"] == 0
        assert plain["effective_rows"] == 12 * 296
        for name in weightings[1:]:
            line = found[split, name]
            assert line["effective_rows"] < 12 * 296
            change = line["kl"]["estimate"] - plain["kl"]["estimate"]
            assert line["kl_change"]["estimate"] == pytest.approx(change, rel=1e-6)
            assert abs(change) > 1e-6
    # Once more from the kept sums, without a pass; sums of other settings are refused.
    again = CliRunner().invoke(bench.main, [*arguments, "--needles", "0"], catch_exceptions=False)
    assert again.exit_code == 0, again.output
    assert "calibration window" not in again.output
    repeated = json.loads((tmp_path / "out.json").read_text())["table"]
    assert [line["kl"] for line in repeated] == [line["kl"] for line in document["table"]]
    refused = CliRunner().invoke(bench.main, [*arguments, "--weights", "plain"])
    assert refused.exit_code == 1
    assert "holds sums of other settings" in refused.output
    # Fewer columns than 256: the narrow regressions are the whole ones.
    for source in ("below", "own"):
        assert found[3, f"{source}:256"]["kl"]["estimate"] == pytest.approx(
            found[3, source]["kl"]["estimate"], rel=1e-3
        )
        expected = column_kl(model, tokenizer, maps, texts, windows, source)
        assert found[3, source]["kl"]["estimate"] == pytest.approx(expected, rel=1e-3)


def column_kl(
    model: Any,
    tokenizer: Any,
    maps: RidgeMaps,
    texts: list[tuple[str, str]],
    windows: list[Window],
    source: str,
) -> float:
    """A columns fit's mean KL by another way: all rows at once, one solve, predictions handed over as block inputs."""
    layer = model.model.layers[3]

    def widened(stream: torch.Tensor, below: torch.Tensor) -> torch.Tensor:
        own = layer.mlp.act_fn(layer.mlp.gate_proj(layer.post_attention_layernorm(stream)))
        own = own * layer.mlp.up_proj(layer.post_attention_layernorm(stream))
        return torch.cat([feature_rows(Features.of(FEATURES), stream), {"below": below, "own": own}[source]], dim=1)

    xs, ys, seen = [], [], list[torch.Tensor]()
    handle = model.model.layers[2].mlp.down_proj.register_forward_pre_hook(lambda _, args: seen.append(args[0][0]))
    with torch.no_grad():
        for _, text in texts:
            ids = tokenizer(text)["input_ids"]
            hidden = model(torch.tensor([ids]), output_hidden_states=True).hidden_states
            xs.append(widened(hidden[3][0], seen[-1])[4:])
            late = (hidden[i][0, 4:] for i in (4, 5))
            ys.append(torch.cat([rows * rows.square().mean(-1, keepdim=True).rsqrt() for rows in late], dim=1))
        moments = reference_moments(torch.cat(xs), torch.cat(ys))
        penalty = torch.cat([part.mean().expand(len(part)) for part in moments.sxx.diagonal().split([64, 64, WIDTH])])
        weight = torch.linalg.solve(moments.sxx + 1e-3 * penalty.diag(), moments.sxy)
        bias = moments.y_mean - moments.x_mean @ weight
        scores = []
        for window in windows:
            stock = prefill_logits(model, window.ids, TAIL)
            with attach(model, maps, split=3, tail=TAIL, form="two-step") as attachment:
                settings = replace(attachment.settings, maps={}, features=STREAM)
            cache = DynamicCache(config=model.config)
            step = Step({"input_ids": window.ids}, None, None, cache, 0, 4, TOKENS - TAIL)
            bulk = run_bulk(settings, step)
            predicted = (widened(bulk.stream[0], seen[-1]).double() @ weight + bias).float().split(64, dim=1)
            inputs = {3: bulk.stream, 4: predicted[0][None], 5: predicted[1][None]}
            bulk = replace(bulk, true_inputs=inputs)
            with torch.no_grad():
                write_late_layers(settings, step, bulk)
            with filled_tail(model, settings, step, bulk, window.ids) as filled:
                kl = token_scores(stock, filled.logits, window.ids).kl
            scores.append(float(kl[:-1].mean()))  # of rows with a next token
    handle.remove()
    return sum(scores) / len(scores)
