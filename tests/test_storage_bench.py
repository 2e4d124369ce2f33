"""`benches/storage.py`: every way of storing one solution is scored, and what it prints is what was measured."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from tiny import prompt, tiny_model
from tiny_tokenizer import byte_tokenizer, random_text
from transformers import AutoModelForCausalLM, AutoTokenizer

from ridgefill.evaluate.filled import BulkPrefill
from ridgefill.evaluate.quality import prefill_logits
from ridgefill.evaluate.windows import Window
from ridgefill.solve import fit_sums, sum_texts

ROOT = Path(__file__).parent.parent
SPLIT, TOKENS, TAIL, WINDOW = 3, 200, 48, 100
STORED = [
    *("bfloat16", "int8, converted", "float32", "int8", "bfloat16, rank 12", "int8, rank 12"),
    *("bfloat16, rank 8", "int8, rank 8", "bfloat16, rank 4", "int8, rank 4"),
]


def test_every_way_of_storing_is_scored_beside_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benches"))
    bench: Any = importlib.import_module("storage")
    tiny_model("llama", hidden_size=32).save_pretrained(tmp_path / "model")
    byte_tokenizer().save_pretrained(tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model").eval()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    texts = [random_text(WINDOW, seed) for seed in range(12)]
    sums = sum_texts(
        model, tokenizer, texts, (SPLIT,), window_tokens=WINDOW, features=("stream",), checkpoint=tmp_path / "m"
    )
    # Random prompts: what the bench reads otherwise takes longer to cut into windows than all the rest.
    windows = [Window("prose", str(n), ids) for n, ids in enumerate(torch.split(prompt(TOKENS, batch=2), 1))]
    monkeypatch.setattr(bench, "held_out_windows", lambda *_, tokens, per_kind, kinds: windows[:per_kind])
    monkeypatch.setattr(bench, "unseen_texts", lambda _: [])
    arguments = ["--moments", str(tmp_path / "m"), "--model", str(tmp_path / "model"), "--split", str(SPLIT)]
    arguments += ["--tokens", str(TOKENS), "--tail", str(TAIL), "--per-kind", "2", "--kinds", "prose"]
    result = CliRunner().invoke(bench.main, [*arguments, "--json", str(tmp_path / "out.json")], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    rows = {row["stored"]: row for row in json.loads((tmp_path / "out.json").read_text())["table"]}
    assert list(rows) == STORED
    for name, row in rows.items():
        assert row["rows_filled"] == TOKENS - TAIL - 4
        assert f"{row['kl']['estimate']:.4f} [{row['kl']['low']:.4f}, {row['kl']['high']:.4f}]" in result.stdout
        assert (row["kl_change"]["estimate"] == 0) == (name == "bfloat16")
        assert row["read_ms"] > 0 < row["dense_ms"]
    assert rows["int8"]["bytes"] < rows["bfloat16"]["bytes"] < rows["float32"]["bytes"]
    assert abs(rows["int8"]["bytes"] - rows["int8, converted"]["bytes"]) < 500  # the digits of held-out figures

    # Two cells by hand.
    found = {}
    for name, storage in (("bfloat16", {}), ("int8, rank 4", {"dtype": torch.int8, "rank": 4})):
        maps = fit_sums(model, tokenizer, sums, features=("stream",), gains="none", **storage)
        scores = []
        for window in windows:
            bulk = BulkPrefill(model, maps, window.ids, split=SPLIT, tail=TAIL)
            scores.append(bulk.score(maps, prefill_logits(model, window.ids, TAIL)).kl)
        found[name] = sum(scores) / len(scores)
        assert rows[name]["kl"]["estimate"] == pytest.approx(found[name], rel=1e-6)
    change = rows["int8, rank 4"]["kl_change"]["estimate"]
    assert change == pytest.approx(found["int8, rank 4"] - found["bfloat16"], rel=1e-4)

    # A file and its conversion, with the file's own gains; here those of the fit's first row, which has none.
    maps = fit_sums(model, tokenizer, sums, features=("stream",), gains="none")
    maps.save(tmp_path / "maps.safetensors")
    arguments = ["--maps", str(tmp_path / "maps.safetensors"), *arguments[2:], "--json", str(tmp_path / "file.json")]
    assert CliRunner().invoke(bench.main, arguments, catch_exceptions=False).exit_code == 0
    of_file = json.loads((tmp_path / "file.json").read_text())["table"]
    assert [row["stored"] for row in of_file] == STORED[:2]
    for row in of_file:
        assert row["kl"] == rows[row["stored"]]["kl"]
