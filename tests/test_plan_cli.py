"""`ridgefill-plan`: what it prints, its exit codes, its one-line errors, and that it loads no torch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from ridgefill import _core
from ridgefill.cli import plan, plan_tables
from ridgefill.errors import RidgeFillError

LLAMA = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
}
GATES = ("--gate", "16:speed=0.04", "--gate", "16:quality=0.01", "--device", "h100")


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA))
    return path


def run(*arguments: Any, code: int = 0) -> Result:
    result = CliRunner().invoke(plan.commands, [str(argument) for argument in arguments], env={"COLUMNS": "200"})
    assert result.exit_code == code, result.output
    return result


def as_json(*arguments: Any, code: int = 0) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(run(*arguments, "--json", code=code).stdout)
    return found


def test_show(config: Path) -> None:
    shown = as_json("show", config.parent, "--context", "1000")
    # Llama 3.1 8B: 8.03 billion parameters, 128 KiB of bf16 keys and values a token.
    assert shown["parameters"] == 8_030_261_248
    assert shown["cache_bytes"] == 1000 * 128 * 1024
    assert shown["model"]["layers"][0]["count"] == 32
    table = run("show", config).stdout
    assert "8.030 billion parameters" in table
    assert "0-31" in table


def test_schedule(config: Path, tmp_path: Path) -> None:
    made = run("schedule", config, "--split", "16", "--tail", "2048", "--json").stdout
    assert json.loads(made)["layers"][31] == {"kind": "filled", "source": 16, "input": "map"}
    table = run("schedule", config, "--split", "16", "--tail", "2048").stdout
    for words in ("0-15", "17-31", "full", "filled", "the last 2048 rows"):
        assert words in table
    saved = tmp_path / "schedule.json"
    saved.write_text(made)
    assert run("schedule", config, "--split", "16", "--check", saved, "--json").stdout == made
    saved.write_text(made.replace('"split":16', '"split":17'))
    assert (
        "layer 16 is filled; expected full" in run("schedule", config, "--split", "16", "--check", saved, code=1).stderr
    )


def test_search(config: Path) -> None:
    found = as_json(
        "search", config, "--context", "32768", "--gate", "16:speed=0.04", "--max-loss", "0.05", "--device", "h100"
    )
    assert [row["split"] for row in found["splits"]] == list(range(32))
    assert [row["split"] for row in found["splits"] if row["allowed"]] == [16]
    ratios = [row["ttft_ratio"] for row in found["splits"]]
    assert ratios == sorted(ratios, reverse=True)
    table = run("search", config, "--context", "131072").stdout
    assert "unknown" in table
    assert "of a prefill filled from layer 16 on is attention below it, which filling cannot help" in table
    assert "operations only" in table


def test_request(config: Path) -> None:
    fast = as_json("request", config, "--prompt", "50000", "--sensitivity", "latency", *GATES)
    assert (fast["tier"], fast["split"]) == ("speed", 16)
    assert fast["rates"].startswith("assumed for h100")
    text = run("request", config, "--prompt", "50000", "--ttft-ms", "100000", "--exact", "100:200", *GATES).stdout
    for words in ("exact", "the least loss of the plans that meet the TTFT target", "it is in time too", "because"):
        assert words in text
    named = as_json("request", config, "--prompt", "50000", "--sensitivity", "latency", "--exact", "100:200", *GATES)
    assert "100 named rows of the bulk run exactly" in named["reasons"]


def test_the_answer_no_has_its_own_exit_code(config: Path) -> None:
    missed = as_json("request", config, "--prompt", "50000", "--ttft-ms", "1", *GATES, code=3)
    assert missed["meets_target"] is False
    full = run("request", config, "--prompt", "50000", "--memory-gb", "0.001", *GATES, code=3)
    assert full.stderr.startswith("error: no allowed plan fits: 50000 prompt and 0 output tokens")
    nothing = run("search", config, "--context", "8192", "--max-loss", "0.01", "--gate", "16:speed=0.04", code=3)
    assert "no split has a measured loss of 0.01 nats or less in tier speed" in nothing.stderr


def test_trace(config: Path, tmp_path: Path) -> None:
    lines = [
        {"id": "a", "prompt_tokens": 200},
        {"prompt_tokens": 30000, "sensitivity": "latency"},
        {"prompt_tokens": 30000, "cached_tokens": 20000, "sensitivity": "accuracy", "ttft_ms": 60000},
    ]
    trace, out = tmp_path / "trace.jsonl", tmp_path / "plans.jsonl"
    trace.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    found = as_json("trace", config, trace, "-o", out, *GATES)
    assert [one["tier"] for one in found["plans"]] == ["exact", "speed", "exact"]
    assert found["plans"][0]["id"] == "a"
    summary = found["summary"]
    assert summary["plans"] == {"exact": 2, "speed, split 16": 1}
    assert summary["ttft_s"]["p99"] < summary["exact_ttft_s"]["p99"]
    assert [json.loads(line) for line in out.read_text().splitlines()] == found["plans"]
    table = run("trace", config, trace, *GATES).stdout
    for words in ("p50", "p95", "p99", "planned", "speed, split 16"):
        assert words in table
    trace.write_text(json.dumps({"prompt_tokens": 30000, "ttft_ms": 0.001}))
    assert as_json("trace", config, trace, *GATES, code=3)["summary"]["targets_missed"] == 1
    assert as_json("trace", config, trace, "--memory-gb", "0.001", *GATES, code=3)["summary"]["without_a_plan"] == 1


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "line 1: no JSON"),
        ("[]", "line 1: expected an object with prompt_tokens"),
        ('{"prompt_tokens": 5, "colour": 1}', "line 1: unknown field 'colour'; known: id, prompt_tokens"),
        ('{"prompt_tokens": "5"}', "prompt_tokens is '5'; expected an integer"),
        ('{"prompt_tokens": 5, "cached_tokens": 5}', "every one of its prompt_tokens is cached"),
        ('{"prompt_tokens": 5, "sensitivity": "high"}', "sensitivity is 'high'; known: latency"),
        ('{"prompt_tokens": 5, "ttft_ms": 0}', "ttft_ms is 0; expected a number above 0"),
        ("", "holds no request"),
    ],
)
def test_a_broken_trace_names_the_line(config: Path, tmp_path: Path, line: str, words: str) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text(line)
    error = run("trace", config, trace, *GATES, code=1).stderr
    assert words in error
    assert error.startswith("error: ")
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "JSON"),
        ("[]", "expected"),
        ("{}", "model_type"),
        ('{"model_type": "abacus"}', "llama"),
        (json.dumps({**LLAMA, "num_hidden_layers": 0}), "num_hidden_layers"),
        ("\ud800", "is not UTF-8 text"),
    ],
)
def test_a_broken_config_is_one_line(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    error = run("show", path, code=1).stderr
    assert error.startswith("error: ")
    assert str(path) in error
    assert words in error
    assert error.count("\n") == 1


def test_missing_files_are_one_line(config: Path, tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    for arguments in (
        ("show", gone),
        ("show", config, "--layers", gone),
        ("search", config, "--context", "9", "--rates", gone),
        ("search", config, "--context", "9", "--maps", gone),
        ("trace", config, gone, *GATES),
    ):
        error = run(*arguments, code=1).stderr
        assert error.startswith("error: ")
        assert "gone" in error
    with pytest.raises(FileNotFoundError):
        CliRunner().invoke(plan.commands, ["show", str(gone), "--debug"], catch_exceptions=False)


def test_layers_describe_what_no_config_does(config: Path, tmp_path: Path) -> None:
    layers = tmp_path / "layers.json"
    layers.write_text(_core.describe_model(json.dumps(LLAMA)).replace('"llama"', '"mine"'))
    assert as_json("show", tmp_path / "no-config", "--layers", layers)["model"]["model_type"] == "mine"
    layers.write_text("{}")
    assert str(layers) in run("show", config, "--layers", layers, code=1).stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ("request", "--prompt", "9000"),
        ("request", "--prompt", "9000", "--device", "h100", "--rates", "r.json"),
        ("request", "--prompt", "9000", "--cached", "9000", *GATES),
        ("request", "--prompt", "9000", "--exact", "10", *GATES),
        ("request", "--prompt", "9000", "--exact", "10:5", *GATES),
        ("request", "--prompt", "9000", "--exact", "10:20", "--exact", "15:30", *GATES),
        ("request", "--prompt", "9000", "--gate", "16=0.1", "--device", "h100"),
        ("request", "--prompt", "9000", "--gate", "16:exact=0.1", "--device", "h100"),
        ("request", "--prompt", "9000", "--gate", "16:speed=nan", "--device", "h100"),
        ("request", "--prompt", "0", *GATES),
        ("search", "--context", "9", "--cached", "9"),
    ],
)
def test_wrong_usage_is_code_2(config: Path, arguments: tuple[str, ...]) -> None:
    run(arguments[0], config, *arguments[1:], code=2)


def test_rates_are_read_and_refused(config: Path, tmp_path: Path) -> None:
    rates = tmp_path / "rates.json"
    given = {
        "matmul_flops_per_s": 1e12,
        "attention_flops_per_s": 1e12,
        "memory_bytes_per_s": 1e11,
        "layer_call_s": 1e-5,
    }
    rates.write_text(json.dumps(given))
    asked = ("request", config, "--prompt", "50000", "--gate", "16:speed=0.04", "--rates", rates)
    assert as_json(*asked)["rates"] == str(rates)
    rates.write_text(json.dumps({**given, "layer_call_s": -1}))
    error = run(*asked, code=1).stderr
    assert str(rates) in error
    assert "layer_call_s is -1" in error
    assert (
        "unknown; expected one of a100" in run("search", config, "--context", "9", "--device", "abacus", code=1).stderr
    )


def write_maps(path: Path, gate: object, **model: Any) -> None:
    """A valid map file for a Llama of two layers of width 4, with a gate."""
    import numpy as np
    from without_torch import write_maps as write_plain

    write_plain(path)
    old = _core.MapFile.open(path)
    metadata = old.metadata
    metadata["model"] = json.dumps({**json.loads(metadata["model"]), **model})
    metadata["gate"] = json.dumps(gate)
    data = old.read()
    tensors = [(t.name, t.dtype, t.shape, np.array(data[t.start : t.end])) for t in old.tensors]
    _core.write_map_file(path, tensors, metadata)


def test_a_map_file_brings_its_splits_and_gates(tmp_path: Path) -> None:
    config, maps = tmp_path / "config.json", tmp_path / "maps.safetensors"
    tiny = {
        "hidden_size": 4,
        "num_hidden_layers": 2,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "vocab_size": 8,
    }
    config.write_text(json.dumps({**LLAMA, **tiny, "intermediate_size": 16}))
    write_maps(maps, {"results": [{"split": 0, "tier": "speed", "dnll": 0.03, "tail": 700}]})
    search = as_json("search", config, "--context", "9000", "--maps", maps)
    assert [row["loss_nats"] for row in search["splits"]] == [0.03, None]
    given = ("request", config, "--prompt", "9000000", "--sensitivity", "latency", "--device", "h100", "--maps", maps)
    planned = as_json(*given)
    assert (planned["tier"], planned["split"], planned["tail"]) == ("speed", 0, 700)

    for gate, words in (
        ({"results": [{"split": 0}]}, "expected split, tier, dnll"),
        ({"results": [{"split": 1, "tier": "speed", "dnll": 0.1}]}, "names split 1, for which it holds no maps"),
    ):
        write_maps(maps, gate)
        assert words in run(*given, code=1).stderr
    write_maps(maps, {}, vocab_size=9)
    assert "fitted for vocab_size 9, the config has 8" in run(*given, code=1).stderr


def test_plot_says_what_to_install(config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    error = run("search", config, "--context", "8192", "--plot", tmp_path / "pareto.png", code=1).stderr
    assert error == "error: --plot needs matplotlib: run pip install 'ridgefill[plot]'\n"


def test_plot_draws_the_measured_splits(config: Path, tmp_path: Path) -> None:
    class Figure:
        """What matplotlib's figure is asked for."""

        points: list[Any] = []  # noqa: RUF012

        def __init__(self, **_: Any) -> None:
            self.points.clear()

        def subplots(self) -> Figure:
            return self

        def plot(self, x: Any, y: Any, *_: Any, **__: Any) -> None:
            self.points.append(list(zip(x, y, strict=True)))

        def annotate(self, *_: Any, **__: Any) -> None: ...
        def set_xlabel(self, _: str) -> None: ...
        def set_ylabel(self, _: str) -> None: ...
        def savefig(self, path: Path) -> None:
            path.write_bytes(b"drawn")

    gates = ("--gate", "16:speed=0.04", "--gate", "20:speed=0.01", "--gate", "24:speed=0.02")
    rows = as_json("search", config, "--context", "8192", *gates)["splits"]
    plan_tables.draw(Figure, tmp_path / "pareto.png", rows)
    known, best = Figure.points
    assert [loss for loss, _ in known] == [0.04, 0.01, 0.02]
    assert [loss for loss, _ in best] == [0.01, 0.04]  # split 24 is slower than 20 and loses more
    assert (tmp_path / "pareto.png").read_bytes() == b"drawn"
    with pytest.raises(RidgeFillError, match="no split's loss is known"):
        plan_tables.draw(Figure, tmp_path / "none.png", as_json("search", config, "--context", "8192")["splits"])


def test_no_torch_is_loaded(config: Path, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"prompt_tokens": 9000}')
    commands = [
        ["show", str(config)],
        ["schedule", str(config), "--split", "16"],
        ["search", str(config), "--context", "8192", "--device", "h100"],
        ["request", str(config), "--prompt", "9000", *GATES],
        ["trace", str(config), str(trace), *GATES],
    ]
    code = (
        "import sys, json\n"
        "from ridgefill.cli.plan import commands\n"
        f"for arguments in json.loads({json.dumps(json.dumps(commands))}):\n"
        "    commands(arguments, standalone_mode=False)\n"
        "print(sorted({n.partition('.')[0] for n in sys.modules} & {'torch', 'transformers', 'cupy', 'matplotlib'}))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=900, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
