"""The commands do what their help says, keep stdout clean, and fail in one line."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from tiny import tiny_model
from tiny_tokenizer import byte_tokenizer, random_text

from ridgefill.cli.main import commands
from ridgefill.cli.terminal import says_what_to_install
from ridgefill.maps import RidgeMaps


def _run(*arguments: Any) -> Result:
    return CliRunner().invoke(commands, [str(argument) for argument in arguments])


@pytest.fixture(autouse=True, scope="module")
def _threads() -> Iterator[None]:
    """--threads is for the process: put back what other tests run with."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with its tokenizer in model/, texts in text/, fitted maps in maps.safetensors."""
    root = tmp_path_factory.mktemp("cli")
    model = tiny_model("llama", hidden_size=32, num_hidden_layers=4)
    model.save_pretrained(root / "model")
    byte_tokenizer().save_pretrained(root / "model")
    texts = root / "text"
    (texts / "inner").mkdir(parents=True)
    (texts / ".hidden").mkdir()
    (texts / "a.txt").write_text(random_text(1000, 1))
    (texts / "inner" / "b.txt").write_text(random_text(1000, 2), newline="\r\n")
    (texts / "latin1.txt").write_bytes("na\xefve".encode("latin-1") * 100)
    (texts / "binary.dat").write_bytes(b"\0" * 1000)
    (texts / ".hidden" / "c.txt").write_text(random_text(1000, 3))
    result = _run("fit", root / "model", "--text", texts, "--split", "1,2", "-o", root / "maps.safetensors", *_SMALL)
    assert result.exit_code == 0, result.output
    return root


_SMALL = ("--window", "100", "--threads", "1")


def test_fit_writes_maps_and_says_what_it_skipped(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "maps.safetensors"
    result = _run("fit", folder / "model", "--text", folder / "text", "--split", "2", "-o", out, "--json", *_SMALL)
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)  # nothing else on stdout
    assert document["skipped_files"] == 2
    assert document["backend"] == "torch"
    assert document["backend_reason"] == "the model is on cpu; kernels need an NVIDIA GPU"
    assert "skipped 2 files that are not UTF-8 text" in result.stderr
    assert [text["name"] for text in document["fit"]["texts"]] == ["a.txt", "inner/b.txt"]
    assert str(tmp_path) not in json.dumps({k: v for k, v in document.items() if k != "path"})
    maps = RidgeMaps.load(out)
    assert list(maps.splits) == [2]
    assert list(maps.splits[2].layers) == [3]
    # b.txt keeps its 35 carriage returns: 21 windows, two held out, the last of 35 tokens; no head rows.
    assert maps.fit["rows"] == 18 * 96 + 35 - 4


def test_fit_limits_tokens_and_takes_other_options(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "maps.safetensors"
    result = _run(
        *("fit", folder / "model", "--text", folder / "text" / "a.txt", "--split", "1,2", "--default-split", "1"),
        *("-o", out, "--tokens", "800", "--head", "2", "--lambda", "auto", "--dtype", "bfloat16", *_SMALL),
        *("--backend", "torch"),
    )
    assert result.exit_code == 0, result.output
    assert "sums and systems by torch: backend='torch' was asked for" in result.stderr
    maps = RidgeMaps.load(out)
    assert maps.fit["rows"] == 7 * 98
    assert maps.fit["head"] == 2
    assert maps.default_split == 1
    assert maps.fingerprint["tokenizer"] is not None


@pytest.mark.parametrize(("share", "hint"), [(0.125, "float32 8 times as fast: try --dtype float32"), (3.0, "")])
def test_a_cpu_slow_in_bfloat16_gives_a_hint(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, share: float, hint: str
) -> None:
    monkeypatch.setattr("ridgefill.calibrate.bfloat16_rate_share", lambda: share)
    shutil.copytree(folder / "model", tmp_path / "model")
    tiny_model("llama").to(torch.bfloat16).save_pretrained(tmp_path / "model")
    arguments = ("fit", tmp_path / "model", "--text", folder / "text", "--split", "2", "-o", tmp_path / "maps", *_SMALL)
    for chosen, expected in (((), hint), (("--dtype", "bfloat16"), "")):  # who names a dtype gets no advice
        result = _run(*arguments, *chosen)
        assert result.exit_code == 0, result.output
        assert ("try --dtype" in result.stderr) == bool(expected)
        assert expected in result.stderr


def test_few_rows_are_a_warning_line(folder: Path, tmp_path: Path) -> None:
    result = _run(
        *("fit", folder / "model", "--text", folder / "text", "--split", "2"),
        *("-o", tmp_path / "maps.safetensors", "--tokens", "300", *_SMALL),
    )
    assert result.exit_code == 0, result.output
    assert "warning: only 192 calibration rows for 32 input columns" in result.stderr


def test_inspect_shows_the_file(folder: Path) -> None:
    result = _run("inspect", folder / "maps.safetensors")
    assert result.exit_code == 0, result.output
    for part in ("llama, 4 layers, width 32", "rows of 2 texts", "split 1", "split 2, the default", "lambda 0.001"):
        assert part in result.stdout
    as_json = json.loads(_run("inspect", folder / "maps.safetensors", "--json").stdout)
    assert as_json["path"] == str(folder / "maps.safetensors")
    figures = as_json["splits"][0]["layers"][1]["metrics"]
    assert as_json["splits"][0]["layers"][1]["layer"] == 3
    assert f"{figures['key_cosine']:.4f}" in result.stdout


def test_fit_and_convert_store_maps_as_asked(folder: Path, tmp_path: Path) -> None:
    out, small = tmp_path / "maps.safetensors", tmp_path / "small.safetensors"
    arguments = ("fit", folder / "model", "--text", folder / "text", "--split", "1,2", "-o", out, *_SMALL)
    result = _run(*arguments, "--map-dtype", "int8", "--rank", "6", "--features", "stream")
    assert result.exit_code == 0, result.output
    assert "split 2, the default: stream -> normalized input, lambda 0.001, I8, rank 6" in result.stdout
    assert [maps.rank for maps in RidgeMaps.load(out).splits.values()] == [6, 6]
    assert json.loads(_run("inspect", out, "--json").stdout)["stored"] == {"1": "I8, rank 6", "2": "I8, rank 6"}

    given = RidgeMaps.load(folder / "maps.safetensors")
    replace(given, gate={"verdicts": []}).save(out)
    for map_dtype, word in (("int8", "I8"), ("float32", "F32")):
        result = _run("convert", out, "--map-dtype", map_dtype, "-o", small)
        assert result.exit_code == 0, result.output
        sizes = [f"{path}: {path.stat().st_size / 1e6:.1f} MB" for path in (small, out)]
        assert result.stdout == f"{sizes[0]}; {sizes[1]}\n"
        assert "holds no verdicts of the gate" in result.stderr
        found = RidgeMaps.load(small)
        assert found.gate is None
        for split, maps in given.stored_as(getattr(torch, map_dtype)).splits.items():
            for layer, layer_map in maps.layers.items():
                tensors = found.splits[split].layers[layer].tensors
                assert all(torch.equal(tensors[name], tensor) for name, tensor in layer_map.tensors.items())
        stored = json.loads(_run("inspect", small, "--json").stdout)["stored"]
        assert stored == {"1": word, "2": word}
    _run("convert", small, "--map-dtype", "bfloat16", "-o", small)  # onto itself, without a gate
    assert _run("convert", small, "--map-dtype", "bfloat16", "-o", small).stderr == ""


def test_help_and_inspect_load_no_torch(folder: Path) -> None:
    code = (
        "import sys\n"
        "from click.testing import CliRunner\n"
        "from ridgefill.cli.main import commands\n"
        f"file = {str(folder / 'maps.safetensors')!r}\n"
        "for arguments in (['--help'], ['fit', '--help'], ['lm-eval', '--help'], ['--version'], ['inspect', file]):\n"
        "    result = CliRunner().invoke(commands, arguments)\n"
        "    assert result.exit_code == 0, result.output\n"
        "loaded = {'torch', 'transformers', 'cupy', 'lm_eval'} & set(sys.modules)\n"
        "assert not loaded, loaded\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=900)


def test_a_missing_package_says_what_to_install(folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    result = _run("fit", folder / "model", "--text", folder / "text", "--split", "2", "-o", tmp_path / "m")
    assert result.exit_code == 1
    assert "pip install 'ridgefill[hf]'" in result.stderr


def test_a_broken_package_is_not_called_missing() -> None:
    with pytest.raises(ImportError, match=r"libx\.so"), says_what_to_install("hf"):
        raise ImportError("libx.so: cannot open shared object file", name="torch._C", path="_C.so")


_FIT = ("--text", "{text}", "--split", "2", "-o", "{out}", *_SMALL)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("fit", "{model}", "--text", "{text}", "--split", "2", "-o", "{root}"), "is a folder; name a file in it"),
        (("fit", "{model}", "--text", "{text}", "--split", "2", "-o", "{root}/no/m"), "does not exist"),
        (("fit", "{model}", "--text", "{root}/nothing", "--split", "2", "-o", "{out}"), "no such file or folder"),
        (("fit", "{model}", "--text", "{root}/empty", "--split", "2", "-o", "{out}"), "no files found"),
        (("fit", "{root}/nowhere", *_FIT), "no such folder"),
        (("fit", "{root}/weights.gguf", *_FIT), "no such file"),
        (("fit", "{text}/a.txt", *_FIT), "expected a folder, a .gguf file or a hub id"),
        (("fit", "{root}/empty", *_FIT), "cannot load model"),
        (("fit", "{model}", "--text", "{text}", "--split", "9", "-o", "{out}", *_SMALL), "split 9: expected 1 <="),
        (
            ("fit", "{model}", "--text", "{text}/binary.dat", "--split", "2", "-o", "{out}", *_SMALL),
            "0 calibration rows",
        ),
        (("fit", "{model}", *_FIT, "--device", "cpu", "--backend", "cuda"), "backend 'cuda' cannot run: the model is"),
        (("inspect", "{root}/nothing"), "No such file"),
        (("convert", "{root}/nothing", "--map-dtype", "int8", "-o", "{out}"), "No such file"),
        (("convert", "{text}/a.txt", "--map-dtype", "int8", "-o", "{root}/no/m"), "does not exist"),
        (("fit", "{model}", *_FIT, "--rank", "0"), "rank 0: expected None, 'auto' or a number >= 1"),
        (("inspect", "{text}/a.txt"), "a.txt"),
    ],
)
def test_errors_are_one_line_without_traceback(folder: Path, arguments: tuple[str, ...], message: str) -> None:
    (folder / "empty").mkdir(exist_ok=True)
    places = {"root": folder, "model": folder / "model", "text": folder / "text", "out": folder / "out.safetensors"}
    result = _run(*(argument.format(**places) for argument in arguments))
    assert result.exit_code == 1
    lines = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1, result.stderr
    assert message in lines[0]
    assert "Traceback" not in result.output
    assert result.stdout == ""
    assert not (folder / "out.safetensors").exists()


def test_debug_shows_the_traceback(folder: Path) -> None:
    result = _run("inspect", folder / "nothing", "--debug")
    assert isinstance(result.exception, FileNotFoundError)
    assert "error: " not in result.stderr


def test_an_unexpected_error_names_its_kind(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ridgefill.cli import maps

    def broken(_: Path) -> None:
        raise KeyError("oops")

    monkeypatch.setattr(maps, "read_document", broken)
    result = _run("inspect", folder / "maps.safetensors")
    assert result.exit_code == 1
    assert "error: unexpected KeyError: 'oops' (--debug shows where)" in result.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ("fit",),
        ("fit", "model", "--text", "t", "--split", "a,b", "-o", "m"),
        ("fit", "model", "--text", "t", "--split", "2", "--lambda", "much", "-o", "m"),
        ("fit", "model", "--text", "t", "--split", "2", "--tokens", "many", "-o", "m"),
        ("fit", "model", "--text", "t", "--split", "2", "--rank", "low", "-o", "m"),
        ("convert", "maps.safetensors", "-o", "m"),
        ("inspect",),
        ("nonsense",),
    ],
)
def test_usage_errors_exit_with_two(arguments: tuple[str, ...]) -> None:
    result = _run(*arguments)
    assert result.exit_code == 2
    assert "Usage: " in result.stderr


def test_demo_passes_its_options_and_prints_json(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from ridgefill import demo

    calls = []

    def run(**options: Any) -> dict[str, Any]:
        calls.append(options)
        return {"ratio": 1.5}

    monkeypatch.setattr(demo, "run", run, raising=False)
    result = _run("demo", "--cache", tmp_path, "--out", tmp_path / "m", "--quick", "--json")
    assert result.exit_code == 0, result.output
    assert calls == [{"cache": tmp_path, "out": tmp_path / "m", "json_output": True, "quick": True}]
    assert json.loads(result.stdout) == {"ratio": 1.5}
