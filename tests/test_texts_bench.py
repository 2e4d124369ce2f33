"""`benches/texts.py`: every set is fitted, tried on held-out text of all, and what it prints is what was measured."""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from click import BadParameter
from click.testing import CliRunner
from tiny import tiny_model
from tiny_tokenizer import byte_tokenizer, random_text
from transformers import AutoModelForCausalLM

from ridgefill.errors import RidgeFillError
from ridgefill.evaluate.paired import evaluate
from ridgefill.evaluate.windows import Window
from ridgefill.solve import fit
from ridgefill.texts import ChatFormat, find_texts

ROOT = Path(__file__).parent.parent
TOKENS, TAIL = 400, 64


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "benches"))
    return importlib.import_module("texts")


def write_texts(folder: Path, seed: int, characters: int) -> None:
    folder.mkdir()
    for number in range(8):
        (folder / f"{number}.txt").write_text(random_text(characters, 100 * seed + number))


def test_each_fit_is_tried_on_held_out_text_of_every_set(bench: Any, tmp_path: Path) -> None:
    tiny_model("llama", hidden_size=32).save_pretrained(tmp_path / "model")
    byte_tokenizer().save_pretrained(tmp_path / "model")
    write_texts(tmp_path / "a", 1, 500)
    write_texts(tmp_path / "b", 2, 900)
    arguments = ["--set", f"a={tmp_path / 'a'}", "--set", f"b={tmp_path / 'b'}", "--model", str(tmp_path / "model")]
    arguments += [
        "--split",
        "3",
        "--fit-tokens",
        "1600",
        "--window",
        "100",
        "--tokens",
        str(TOKENS),
        "--tail",
        str(TAIL),
    ]
    arguments += ["--per-set", "2", "--json", str(tmp_path / "out.json")]
    with pytest.warns(UserWarning, match="are not chosen: 1 held-out prompts"):  # of so little text
        result = CliRunner().invoke(bench.main, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    document = json.loads((tmp_path / "out.json").read_text())
    cells = {(entry["fitted_on"], entry["tried_on"]): entry for entry in document["table"]}
    assert set(cells) == {(fitted, tried) for fitted in ("a", "b", "mixed") for tried in ("a", "b", "all")}
    for (_, tried), entry in cells.items():
        assert entry["windows"] == (4 if tried == "all" else 2)
        assert entry["rows_filled"] == TOKENS - TAIL - 4
        assert f"{entry['kl']['estimate']:.4f} [{entry['kl']['low']:.4f}" in result.stdout
    # One cell by hand: fitted on a's first three of four texts, tried on b's fourth ones, one behind the other.
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model").eval()
    files = find_texts([tmp_path / "a"], skipped=[])
    with pytest.warns(UserWarning, match="are not chosen"):
        maps = fit(model, byte_tokenizer(), [*files[:3], *files[4:7]], (3,), max_tokens=1600, window_tokens=100)
    joined = "".join((tmp_path / "b" / name).read_text() for name in ("3.txt", "7.txt"))
    ids = torch.tensor(byte_tokenizer()(joined)["input_ids"])
    windows = [Window("b", str(at), ids[None, at : at + TOKENS]) for at in (0, 2 * TOKENS)]  # of four, evenly spaced
    scores = [r.score for r in evaluate(model, maps, windows, splits=[3], tail=TAIL, variants=("fill",))]
    assert cells["a", "b"]["kl"]["estimate"] == pytest.approx(sum(score.kl for score in scores) / 2, rel=1e-4)
    assert cells["a", "b"]["kl"] != cells["b", "b"]["kl"]


def test_the_standard_sets_share_no_text_between_their_parts(bench: Any) -> None:
    chat = ChatFormat()
    chat.tokenizer = byte_tokenizer()
    assert [text_set.name for text_set in bench.standard_sets(chat)] == ["docs", "code", "prose"]
    chat.tokenizer.chat_template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    sets = bench.standard_sets(chat)
    assert [text_set.name for text_set in sets] == ["docs", "code", "prose", "chat"]
    for text_set in sets:
        calibration, held_out = (
            {whole for _, text in texts if len(whole := "".join(text)) > 100}
            for texts in (text_set.calibration, text_set.held_out)
        )
        assert calibration
        assert held_out
        assert not calibration & held_out
    talk = "".join(sets[-1].held_out[0][1])
    assert re.match(r"<user>What does the documentation of \S+ say\?<assistant>", talk)
    assert talk.count("<user>") == talk.count("<assistant>") >= 1
    assert len(bench.mixed(sets)) == 4 * min(len(text_set.calibration) for text_set in sets)


def test_sets_too_small_are_refused(bench: Any, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("short")
    with pytest.raises(RidgeFillError, match=r"set a: .*a.txt holds 1 texts; at least 4 are needed"):
        bench.named_set(f"a={tmp_path / 'a.txt'}", "text", ChatFormat())
    text_set = bench.TextSet("a", [], [("x", "short")])
    with pytest.raises(RidgeFillError, match="its held-out texts hold 0 windows of 50 tokens, expected 2"):
        bench.held_out_windows(byte_tokenizer(), text_set, 50, 2)
    with pytest.raises(BadParameter, match="'nonsense' is not like NAME=PATH"):
        bench.named_set("nonsense", "text", ChatFormat())
