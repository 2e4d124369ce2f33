"""A ladder's figures are those of single fills and of the cost formula, and its marks are the Pareto set."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from tiny import prompt, tiny_model
from tiny_tokenizer import byte_tokenizer, random_text

from ridgefill import _core
from ridgefill.capture import TextRecord, Window
from ridgefill.cli.main import commands
from ridgefill.errors import FitError
from ridgefill.evaluate.quality import prefill_logits, score_fill
from ridgefill.evaluate.stats import Interval
from ridgefill.ladder import Rung, _beats, ladder, ladder_splits
from ridgefill.layout import model_shape
from ridgefill.solve import fit

WINDOW = 96


def windows(count: int, rows: int = WINDOW) -> list[Window]:
    return [Window(ids.tolist(), TextRecord("held out")) for ids in prompt(rows, batch=count, seed=5)]


def fitted(model: Any, splits: tuple[int, ...]) -> Any:
    texts = [random_text(WINDOW, seed) for seed in range(16)]
    return fit(model, byte_tokenizer(), texts, splits, window_tokens=WINDOW, features=("stream",), gains="none")


@pytest.mark.parametrize(
    ("layers", "splits"), [(30, [10, 15, 18, 20, 22]), (16, [5, 8, 10, 11, 12]), (6, [2, 3, 4]), (2, [1]), (1, [1])]
)
def test_a_ladder_spreads_over_the_depth(layers: int, splits: list[int]) -> None:
    assert ladder_splits(layers) == splits


def test_rungs_are_single_fills_and_the_cost_formula() -> None:
    model = tiny_model("llama", hidden_size=32)
    maps = fitted(model, (1, 2, 4))
    held = windows(3)
    found = ladder(model, maps, [*held, *windows(1, 20)])  # twenty rows are no prompt
    assert [rung.split for rung in found] == [1, 2, 4]
    for rung in found:
        assert (rung.prompts, rung.tail, rung.end_tokens) == (3, 48, 24)
        scores = []
        for window in held:
            ids = torch.tensor([window.ids])
            stock = prefill_logits(model, ids, 48)
            scores.append(score_fill(model, maps, ids, stock, split=rung.split, tail=48, min_bulk=1))
        for name in ("kl", "dnll", "dnll_end"):
            mean = sum(getattr(score, name) for score in scores) / 3
            assert getattr(rung, name).estimate == pytest.approx(mean, abs=1e-5)
        assert rung.kl.low <= rung.kl.estimate <= rung.kl.high
        cost = _core.prefill_cost(
            json.dumps(model_shape(model)), prompt_tokens=8192, split=rung.split, tail=512, head=4, fused_rank=32
        )
        assert rung.ratio == cost.ratio
    assert found[0].ratio > found[1].ratio > found[2].ratio > 1


def test_long_prompts_show_the_last_512_tokens() -> None:
    model = tiny_model("llama", hidden_size=32)
    (rung,) = ladder(model, fitted(model, (4,)), windows(2, 2048))
    assert (rung.tail, rung.end_tokens) == (1024, 512)


def test_too_few_prompts_are_refused() -> None:
    model = tiny_model("llama", hidden_size=32)
    with pytest.raises(FitError, match="at least 2 held-out prompts of 64 rows or more, found 1"):
        ladder(model, fitted(model, (4,)), windows(1))


def test_marks_are_the_pareto_set() -> None:
    """Only what another rung beats in both, or in one and equals in the other, is unmarked."""

    def rung(ratio: float, kl: float) -> Rung:
        point = Interval(kl, kl, kl)
        return Rung(1, ("stream",), ratio, point, point, point, 1, 1, 1)

    rungs = [rung(2.0, 0.3), rung(1.8, 0.2), rung(1.7, 0.25), rung(1.7, 0.1), rung(1.7, 0.1), rung(1.6, 0.1)]
    marked = [not any(_beats(other, one) for other in rungs) for one in rungs]
    assert marked == [True, True, False, True, True, False]
    assert not _beats(rungs[0], replace(rungs[0]))


def test_the_command_fits_a_ladder_and_shows_it(tmp_path: Path) -> None:
    tiny_model("llama", hidden_size=32).save_pretrained(tmp_path / "model")
    byte_tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "text.txt").write_text(random_text(WINDOW * 20, 1))
    common = ["--features", "stream", "--gains", "none", "--threads", str(torch.get_num_threads())]
    reading = ["fit", str(tmp_path / "model"), "--text", str(tmp_path / "text.txt"), "--window", str(WINDOW)]
    reading += ["--checkpoint", str(tmp_path / "sums"), "-o", str(tmp_path / "maps"), "--split", "auto", *common]
    result = CliRunner().invoke(commands, [*reading, "--json"])
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert (
        [rung["split"] for rung in document["ladder"]] == [entry["split"] for entry in document["splits"]] == [2, 3, 4]
    )
    assert any(rung["pareto"] for rung in document["ladder"])
    again = ["fit", str(tmp_path / "model"), "--moments", str(tmp_path / "sums"), "-o", str(tmp_path / "maps"), *common]
    result = CliRunner().invoke(commands, [*again, "--split", "auto"])
    assert result.exit_code == 0, result.output
    assert "ladder: 2 held-out prompts" in result.stdout
    for rung in document["ladder"]:
        assert f"{rung['kl']['estimate']:+.4f}" in result.stdout
    assert "pareto" in result.stdout
    result = CliRunner().invoke(commands, [*again, "--split", "3"])
    assert "ladder: " not in result.stdout
    # Windows of so few rows are no prompts; the maps are not lost.
    (tmp_path / "maps").unlink()
    short = [*reading, "--window", "50", "--checkpoint", str(tmp_path / "short")]
    result = CliRunner().invoke(commands, short)
    assert result.exit_code == 1
    assert f"found 0: add text (the maps themselves are in {tmp_path / 'maps'})" in result.stderr
    assert (tmp_path / "maps").exists()
