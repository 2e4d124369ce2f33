"""`ridgefill bench --calibrate`: rates that the planner takes, measured at the model's widths."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from ridgefill import _core
from ridgefill.calibrate import _widths, bfloat16_rate_share, calibrate
from ridgefill.cli.main import commands
from ridgefill.errors import RidgeFillError

CONFIG = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
}


def test_the_matrices_are_the_model_s() -> None:
    description = json.loads(_core.describe_model(json.dumps(CONFIG)))
    attention, matrices = _widths(description)
    assert attention == (4, 2, 16)
    assert matrices == [(64, 64), (64, 32), (64, 32), (64, 64), (64, 128), (64, 128), (128, 64)]
    # Together they are the weights that the cost model counts.
    weights = sum(n_in * n_out for n_in, n_out in matrices)
    assert weights == json.loads(_core.model_figures(json.dumps(description)))["layers"][0]["weights"]
    description["layers"][0]["mixer"] = {"kind": "gated_delta"}
    with pytest.raises(RidgeFillError, match="no attention whose rate could be measured"):
        calibrate(description, dtype=torch.float32, device=torch.device("cpu"))


def test_the_command_prints_rates_that_the_planner_takes(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    given = ["bench", str(tmp_path), "--calibrate", "--dtype", "float32", "--seconds", "0.4"]
    result = CliRunner().invoke(commands, given)
    assert result.exit_code == 0, result.output
    rates = json.loads(result.stdout)
    assert json.loads(_core.check_rates(result.stdout)) == rates
    assert "float32" in rates["source"]
    # A machine that runs torch at all does a thousand and no machine does 10^18 of anything a second.
    for name in ("matmul_flops_per_s", "masked_attention_flops_per_s", "weight_bytes_per_s"):
        assert 1e3 < rates[name] < 1e18
    assert rates["masked_attention_flops_per_s"] <= rates["attention_flops_per_s"] < 1e18
    assert rates["weight_bytes_per_s"] <= rates["memory_bytes_per_s"] < 1e18
    assert 1e-7 < rates["layer_call_s"] < 1


def test_bfloat16_is_measured_beside_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    assert 1e-3 < bfloat16_rate_share(0.05) < 1e3
    rates = {torch.bfloat16: 20.0, torch.float32: 160.0}
    monkeypatch.setattr("ridgefill.calibrate._matmul_rate", lambda _, dtype, __, ___: rates[dtype])
    assert bfloat16_rate_share() == 0.125


def test_what_cannot_be_measured_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    for more, words in ((["--device", "abacus"], "device abacus: "), ([], "")):
        where = tmp_path if more else tmp_path / "gone"
        result = CliRunner().invoke(commands, ["bench", str(where), "--calibrate", *more])
        assert result.exit_code == 1
        assert result.stderr.startswith("error: ")
        assert words in result.stderr
    assert CliRunner().invoke(commands, ["bench", str(tmp_path)]).exit_code == 2
