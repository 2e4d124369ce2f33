"""The gate on a model whose answers are known, verdicts by hand, what it records, and its page beside its numbers."""

from __future__ import annotations

import itertools
import json
import logging
import re
import shutil
import subprocess
from dataclasses import asdict, replace
from html import escape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from recall import KEYS, SPLIT, WORDING, filler_texts, recall_maps, recall_model, word_tokenizer
from test_distance import documents
from tiny import SPLIT as TINY_SPLIT
from tiny import random_maps, tiny_model

from ridgefill.attachment import attach
from ridgefill.cli.main import commands
from ridgefill.errors import MapSchemaError, RidgeFillError
from ridgefill.evaluate.answers import Answer
from ridgefill.evaluate.distance import FarSettings, GroupScore
from ridgefill.evaluate.gate import (
    GateRun,
    GateSettings,
    Material,
    _controls,
    _result,
    _spread,
    map_file_entry,
    run_gate,
    standard_material,
    verdict_of,
)
from ridgefill.evaluate.needle import Filler, Item, build_items
from ridgefill.evaluate.report import _pareto, page, write_report
from ridgefill.maps import RidgeMaps
from ridgefill.verdict import gate_word

TOKENS, TAIL = 120, 24
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
SETTINGS = GateSettings(
    (SPLIT,), ("speed",), (TOKENS,), tail=TAIL, min_bulk=1, items=88, documents=4, far=FarSettings(16, 1.0)
)


def material() -> Material:
    def items(tokens: int) -> list[Item]:
        tokenizer = word_tokenizer()
        filler = Filler(tokenizer, filler_texts(40))
        options: dict[str, Any] = {"tail": TAIL, "needles": (1,), "wordings": [replace(WORDING, keys=KEYS[:1])]}
        return build_items(tokenizer, filler, tokens=tokens, count=SETTINGS.items, controls=4, **options)

    return Material(items, lambda tokens: documents(SETTINGS.documents, tokens))


def gate(damage: str, **changes: Any) -> GateRun:
    model = recall_model()
    settings = replace(SETTINGS, **changes)
    return run_gate(model, word_tokenizer(), recall_maps(model, damage), settings, material())


@pytest.fixture(scope="module")
def runs() -> dict[str, GateRun]:
    return {damage: gate(damage) for damage in ("none", "forget")}


# --- on a model whose answers are known ----------------------------------------------------------------------------


def test_maps_that_remember_pass_and_their_controls_fail(runs: dict[str, GateRun]) -> None:
    document = runs["none"].document
    (result,) = document["results"]
    assert (document["verdict"], result["verdict"], result["reasons"]) == ("pass", "pass", [])
    needles = result["needles"]
    assert (needles["items"], needles["stock"], needles["right"]) == (88, 88, 88)
    assert needles["outside"] == {"items": 4, "right": 4}
    assert result["rows_filled"] == TOKENS - TAIL - 4
    assert {(c["control"], c["failed"]) for c in document["controls"]} == {("swapped", True), ("head=0", True)}
    assert document["stock_accuracy"] == [{"tokens": TOKENS, "needles": 1, "right": 1.0}]
    # The stream handed on is what these maps predict; late layers without the bulk know nothing.
    kl = {entry["name"]: entry["whole tail"]["kl"]["estimate"] for entry in document["baselines"]}
    assert set(kl) == {"identity", "direct", "no bulk", "drop"}
    assert kl["identity"] < 1e-3 < kl["no bulk"]
    (cost,) = document["cost"]
    assert cost["rows_filled"] == TOKENS - TAIL - 4
    assert all(cost[name] > 0 for name in ("ttft_ratio", "decode_ratio", "short_ratio", "peak_mib_exact"))


def test_maps_that_forget_fail_both_lines_and_the_report_says_where(runs: dict[str, GateRun]) -> None:
    (result,) = runs["forget"].document["results"]
    assert result["verdict"] == "fail"
    assert (result["needles"]["verdict"], result["distance"]["verdict"]) == ("fail", "fail")
    assert result["needles"]["right"] == 0
    # After 11 needles lost of 11 (p < .001) no more is asked, controls outside the fill apart.
    assert any("0 of 11 found where stock finds 11" in reason for reason in result["reasons"])
    assert len(result["needles"]["disagreements"]) == 11


def test_a_budget_that_is_spent_leaves_prompts_out_and_the_verdict_says_so() -> None:
    found = gate("none", budget_seconds=1e-6)
    assert found.document["needle_items"] == 8
    assert found.document["documents"] == 3
    (result,) = found.document["results"]
    assert result["verdict"] == "undecided"
    assert "points" in result["reasons"][0]
    assert found.document["splices"] == {}
    # The eight that were run are spread over the depths.
    depths = [a.depth for a in found.answers if a.variant == "fill" and a.depth is not None]
    assert min(depths) < 0.2
    assert max(depths) > 0.8


def test_a_prompt_too_short_for_the_product_to_fill_fails_the_gate() -> None:
    (result,) = gate("none", min_bulk=256, budget_seconds=1e-6).document["results"]
    assert result["verdict"] == "fail"
    assert any("it filled no row of 120 tokens: 120 rows are fewer" in reason for reason in result["reasons"])


def test_every_beginning_of_the_queue_has_all_kinds_and_depths() -> None:
    found = _spread(
        [replace(item, kind=kind) for item in material().items(TOKENS)[:40] for kind in ("digits", "words")]
    )
    assert len(found) == 80
    assert [item.kind for item in found] == ["digits", "words"] * 40
    for kind in ("digits", "words"):
        depths = [item.depth for item in found[:16] if item.kind == kind and item.depth is not None]
        assert len({int(4 * depth / max(depths) * 0.999) for depth in depths}) == 4


def test_settings_that_make_no_sense_are_refused() -> None:
    with pytest.raises(RidgeFillError, match="expected splits"):
        gate("none", tiers=("fast",))
    with pytest.raises(MapSchemaError, match="no maps for split 2"):
        gate("none", splits=(2,))


def test_maps_fitted_on_the_gate_s_own_texts_are_refused() -> None:
    from ridgefill.demo import standard_texts

    name, _ = standard_texts("docs", "held-out")[0]
    maps = recall_maps(recall_model())
    seen = replace(maps, fit={**maps.fit, "texts": [{"name": name, "sha256": "0" * 64, "rows": 1}]})
    with pytest.raises(RidgeFillError, match="fitted on docs/"):
        standard_material(word_tokenizer(), seen, SETTINGS)


# --- verdicts by hand ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [(-0.1, 0.04, "pass"), (0.0, 0.05, "pass"), (0.04, 0.06, "undecided"), (0.051, 0.1, "fail")],
)
def test_a_line_is_decided_by_its_interval(low: float, high: float, expected: str) -> None:
    assert verdict_of(low, high, 0.05) == expected


def _answers(lost: int, count: int = 100, label: str = "filled") -> list[Answer]:
    found = []
    for number in range(count):
        for variant, split in (("stock", 0), ("fill", 3)):
            right = variant == "stock" or number >= lost
            shown = (f"i{number}", 64, "words", 1, "bulk", 0.5, split, variant, 0.0, label, 9, 0.0, "?", "a b")
            found.append(Answer(*shown, "a b" if right else "c", right))
    return found


def _scores(kl: float = 0.0, dnll: float = 0.0, far: float = 0.0, control: float = 1.0) -> list[GroupScore]:
    found = []
    for document in ("a", "b", "c"):
        for variant, added in (("fill", 0.0), ("swapped", control), ("head=0", 1.0)):
            for group, loss in (("whole tail", dnll), ("far-dependent", far)):
                found.append(GroupScore(document, 3, variant, group, 10, 10 * (kl + added), 10 * loss, 10.0))
            found += [
                GroupScore(document, 3, variant, group, 0, 0.0, 0.0, 0.0)
                for group in ("rare repeats", "last", "after the bulk")
            ]
    return found


def _judged(answers: list[Answer], scores: list[GroupScore], rows_filled: int = 9) -> dict[str, Any]:
    settings = replace(SETTINGS, splits=(3,))
    cost = [{"split": 3, "tier": "speed", "rows_filled": rows_filled, "tokens": 64, "reason": "too short"}]
    return _result(answers, scores, cost, _controls(scores, 3, settings.tiers), 3, "speed", settings)


def test_each_line_and_each_control_can_fail_the_gate_alone() -> None:
    assert _judged(_answers(0), _scores())["verdict"] == "pass"
    for answers, scores, rows, reason in (
        (_answers(20), _scores(), 9, "needles: 80 of 100"),
        (_answers(6), _scores(), 9, "needles: 94 of 100"),  # p < .05, whatever the interval leaves open
        (_answers(0), _scores(kl=0.2), 9, "whole tail: kl"),
        (_answers(0), _scores(dnll=0.1), 9, "whole tail: dnll"),
        (_answers(0), _scores(far=0.5), 9, "far-dependent: dnll"),
        (_answers(0), _scores(control=0.0), 9, "the control 'swapped' is not certainly worse"),
        (_answers(0), _scores(), 0, "filled no row of 64 tokens: too short"),
    ):
        result = _judged(answers, scores, rows)
        assert result["verdict"] == "fail", reason
        assert len(result["reasons"]) == 1
        assert reason in result["reasons"][0]
    assert _judged(_answers(3), _scores())["verdict"] == "undecided"


def test_needles_outside_the_fill_cannot_carry_the_line() -> None:
    with pytest.raises(RidgeFillError, match="no answer of"):
        _judged(_answers(0, label="exact"), _scores())


# --- what is recorded ----------------------------------------------------------------------------------------------


def test_the_map_file_keeps_verdicts_and_the_losses_of_what_passed(runs: dict[str, GateRun], tmp_path: Path) -> None:
    model = recall_model()
    for damage, kept in (("none", 1), ("forget", 0)):
        maps = recall_maps(model, damage)
        replace(maps, gate=map_file_entry(runs[damage].document)).save(tmp_path / "maps.safetensors")
        loaded = RidgeMaps.load(tmp_path / "maps.safetensors")
        assert loaded.gate is not None
        assert len(loaded.gate["results"]) == kept
        assert len(loaded.gate["verdicts"]) == 1
        with attach(model, loaded, tail=TAIL) as attachment:
            status = attachment.status()
        if kept:
            assert (status["gate"], status["warnings"]) == ("pass", [])
            assert set(loaded.gate["results"][0]) == {"split", "tier", "dnll", "tail"}
        else:
            assert status["gate"].startswith("fail: needles: 0 of 11")
            assert status["warnings"] == [f"the maps' gate: {status['gate']}"]


def test_attach_warns_of_a_gate_that_did_not_pass(caplog: pytest.LogCaptureFixture) -> None:
    model = tiny_model("llama")
    verdict = {"split": TINY_SPLIT, "tier": "speed", "verdict": "fail", "reasons": ["needles: 1 of 9"]}
    maps = replace(random_maps(model), gate={"verdicts": [verdict], "settings": {"tail": 512}})
    with caplog.at_level(logging.WARNING, "ridgefill"), attach(model, maps):
        pass
    assert "the maps' gate: fail: needles: 1 of 9" in caplog.text


@pytest.mark.parametrize(
    ("changes", "word", "warns"),
    [
        ({}, "pass", False),
        ({"tail": 1024}, "pass", False),
        ({"tail": 256}, "pass, but run on other settings: tail 512, here 256", True),
        ({"head": 8}, "pass, but run on other settings: head 4, here 8", True),
        ({"split": 9}, "not run on split 9, tier speed; its verdicts are on 15 quality, 15 speed", True),
        ({"tier": "quality", "share": 0.1}, "undecided: too few", True),
        ({"tier": "exact"}, "none needed: tier exact changes no answer", False),
        ({"tier": "auto"}, "pass", False),
        ({"gate": None}, "no gate has run on these maps", False),
        ({"gate": {"results": []}}, "no gate has run on these maps", False),
    ],
)
def test_the_gate_in_words(changes: dict[str, Any], word: str, warns: bool) -> None:
    gate = {
        "verdicts": [
            {"split": 15, "tier": "speed", "verdict": "pass", "reasons": []},
            {"split": 15, "tier": "quality", "verdict": "undecided", "reasons": ["too few"]},
        ],
        "settings": {"tail": 512, "head": 4, "share": 0.1},
    }
    asked = {"split": 15, "tier": "speed", "tail": 512, "head": 4, "share": None, "chosen_otherwise": False}
    given = {**asked, **changes}
    assert gate_word(given.pop("gate", gate), **given) == (word, f"the maps' gate: {word}" if warns else None)


def test_rows_chosen_in_another_way_are_another_setting() -> None:
    gate = {
        "verdicts": [{"split": 15, "tier": "quality", "verdict": "pass", "reasons": []}],
        "settings": {"tail": 512, "head": 4, "share": 0.1},
    }
    asked: dict[str, Any] = {"split": 15, "tier": "quality", "tail": 512, "head": 4}
    assert gate_word(gate, **asked, share=0.2, chosen_otherwise=False) == ("pass", None)
    assert "share 0.1, here 0.05" in gate_word(gate, **asked, share=0.05, chosen_otherwise=False)[0]
    assert "default choice of rows" in gate_word(gate, **asked, share=0.2, chosen_otherwise=True)[0]


# --- the page ------------------------------------------------------------------------------------------------------


class _Page(HTMLParser):
    """Every marked number with its path, the tags that are open at the end, and what the page would load."""

    def __init__(self) -> None:
        super().__init__()
        self.figures: list[tuple[str, str]] = []
        self.open: list[str] = []
        self.loads: list[str] = []
        self.tags: list[str] = []
        self._path: str | None = None

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.tags.append(tag)
        self.loads += [value or "" for name, value in attrs if name in ("src", "href", "data")]
        if tag not in ("meta", "br"):
            self.open.append(tag)
        self._path = given.get("data-figure")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._path is not None:
            self.figures.append((self._path, data))
            self._path = None


def _number(text: str) -> float:
    plain = text.replace(",", "")
    return float(plain[:-1]) / 100 if plain.endswith("%") else float(plain)


def _check_figures(found: _Page, document: dict[str, Any]) -> None:
    for path, shown in found.figures:
        value: Any = document
        for part in path.split("."):
            value = value[int(part)] if isinstance(value, list) else value[part]
        digits = len(shown.rstrip("%").partition(".")[2])
        unit = 100 if shown.endswith("%") else 1
        if "e" in shown:
            assert _number(shown) == pytest.approx(value, rel=0.05)
        else:
            assert abs(_number(shown) - value) <= 0.5001 / unit / 10**digits, (path, shown, value)


def test_the_page_shows_the_numbers_of_gate_json_and_loads_nothing(runs: dict[str, GateRun], tmp_path: Path) -> None:
    for damage, run in runs.items():
        write_report(tmp_path / damage, run)
        document = json.loads((tmp_path / damage / "gate.json").read_text())
        text = (tmp_path / damage / "index.html").read_text()
        assert text == page(document)
        found = _Page()
        found.feed(text)
        assert found.open == []
        assert found.loads == []
        assert "script" not in found.tags
        assert {"svg", "circle", "polyline"} <= set(found.tags)
        assert ("rect" in found.tags) == (damage == "forget")  # an exact fill has nothing to recover, so no bars
        assert len(found.figures) > 60
        _check_figures(found, document)
        for result in document["results"]:
            assert f"{result['verdict']} (" in text
            assert all(escape(reason) in text for reason in result["reasons"])


def test_names_of_points_that_lie_together_hide_neither_each_other_nor_a_point() -> None:
    ratios, losses = (1.21, 1.2, 1.205, 1.5, 1.2), (0.011, 0.01, 0.0105, 0.1, 0.01)
    names = [f"S={split}, quality" for split in (15, 16, 17, 18, 19)]
    groups = [{"groups": {"whole tail": {"kl": {"estimate": loss}}}} for loss in losses]
    document = {
        "cost": [{"ttft_ratio": ratio} for ratio in ratios],
        "results": [{"verdict": "pass", "distance": group} for group in groups],
    }
    chart = _pareto(document, names)
    texts = {
        m[3]: (float(m[1]), float(m[2])) for m in re.finditer(r'<text x="(.*?)" y="(.*?)" .*?>(.*?)</text>', chart)
    }
    points = [(float(m[1]), float(m[2])) for m in re.finditer(r'<circle cx="(.*?)" cy="(.*?)"', chart)]
    assert len(points) == len(names)
    boxes = [(x, x + 85, y) for x, y in (texts[name] for name in names)]
    for (begin, end, foot), (begin_2, end_2, foot_2) in itertools.combinations(boxes, 2):
        assert end <= begin_2 or end_2 <= begin or abs(foot - foot_2) >= 12
    for (begin, end, foot), (x, y) in itertools.product(boxes, points):
        assert x <= begin or end <= x or not foot - 9 < y < foot


@pytest.mark.skipif(BROWSER is None, reason="no Chromium is installed")
def test_a_browser_without_network_shows_them_too_and_has_nothing_to_report(
    runs: dict[str, GateRun], tmp_path: Path
) -> None:
    write_report(tmp_path, runs["forget"])
    command = [str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu", "--proxy-server=127.0.0.1:1"]
    command += ["--enable-logging=stderr", f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom"]

    def shown(page: Path) -> tuple[_Page, str]:
        done = subprocess.run([*command, page.as_uri()], capture_output=True, text=True, timeout=120, check=True)
        found = _Page()
        found.feed(done.stdout)
        return found, done.stderr

    found, messages = shown(tmp_path / "index.html")
    assert len(found.figures) > 60
    _check_figures(found, json.loads((tmp_path / "gate.json").read_text()))
    assert ":CONSOLE" not in messages
    # A message would be seen.
    (tmp_path / "faulty.html").write_text("<script>console.error('seen')</script>")
    assert ":CONSOLE" in shown(tmp_path / "faulty.html")[1]


def test_every_answer_and_score_is_kept_beside_the_page(runs: dict[str, GateRun], tmp_path: Path) -> None:
    run = runs["none"]
    write_report(tmp_path, run)
    lines = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    needles = [{k: v for k, v in line.items() if k != "line"} for line in lines if line["line"] == "needles"]
    assert needles == [asdict(answer) for answer in run.answers]
    assert sum(line["line"] == "distance" for line in lines) == len(run.scores) > 0
    assert json.loads((tmp_path / "config.json").read_text())["settings"]["tail"] == TAIL


# --- the command line ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--budget", "soon"], "is not a time"),
        (["--lengths", "1k"], "is not a list of numbers"),
        (["-o", __file__], "is a file; name a folder"),
    ],
)
def test_the_command_refuses_what_it_cannot_read(arguments: list[str], message: str) -> None:
    found = CliRunner().invoke(commands, ["gate", "model", "maps", *arguments])
    assert found.exit_code != 0
    assert message in found.output


def test_the_command_writes_its_report_and_records_the_verdict(
    runs: dict[str, GateRun], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "maps.safetensors"
    recall_maps(recall_model()).save(path)
    before = path.read_bytes()
    monkeypatch.setattr("ridgefill.cli.loading.load_model", lambda *_, **__: (None, None))
    for damage, code, verdict in (("none", 0, "pass"), ("forget", 1, "fail")):
        run = runs[damage]
        refused = [{"split": SPLIT, "tier": "quality", "reason": "its layers are recurrent"}]
        run = replace(run, document={**run.document, "refused": refused})
        monkeypatch.setattr("ridgefill.evaluate.gate.run_gate", lambda *_, run=run, **__: run)
        out = tmp_path / damage
        found = CliRunner().invoke(commands, ["gate", "model", str(path), "-o", str(out)])
        assert found.exit_code == code, found.output
        assert f"split {SPLIT}, tier speed: {verdict}" in found.output
        assert f"split {SPLIT}, tier quality: not judged: its layers are recurrent" in found.output
        assert (out / "index.html").is_file()
        assert path.read_bytes() == before
    found = CliRunner().invoke(commands, ["gate", "model", str(path), "-o", str(out), "--record"])
    assert found.exit_code == 1
    loaded = RidgeMaps.load(path)
    assert loaded.gate == json.loads(json.dumps(map_file_entry(runs["forget"].document)))
    assert replace(loaded, gate=None, path=None).fit == recall_maps(recall_model()).fit
