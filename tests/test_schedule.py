"""Schedules: what each layer does with bulk rows, from a config alone, in JSON that comes back the same."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ridgefill import _core
from ridgefill.errors import ScheduleError

LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
}


def attention(**more: Any) -> dict[str, Any]:
    return {"kind": "attention", "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, **more}


DELTA = {"kind": "gated_delta", "num_k_heads": 2, "num_v_heads": 4, "k_head_dim": 8, "v_head_dim": 8, "conv_kernel": 4}


def described(*mixers: dict[str, Any]) -> str:
    layers = [{"mixer": mixer, "mlp": {"kind": "dense", "intermediate_size": 128}} for mixer in mixers]
    return json.dumps({"model_type": "mixed", "hidden_size": 64, "vocab_size": 100, "layers": layers})


MIXED = described(attention(), attention(), attention(window=512), DELTA, attention(), attention(shared_from=4))


def test_a_config_gives_a_schedule() -> None:
    model = _core.describe_model(json.dumps(LLAMA))
    schedule = json.loads(_core.layer_schedule(model, split=5, tail=2048))
    assert (schedule["split"], schedule["tail"]) == (5, 2048)
    assert [layer["kind"] for layer in schedule["layers"]] == ["full"] * 5 + ["filled"] * 3
    assert schedule["layers"][5] == {"kind": "filled", "source": 5, "input": "stream"}
    assert schedule["layers"][7] == {"kind": "filled", "source": 5, "input": "map"}


def test_every_kind_of_layer_has_its_role() -> None:
    schedule = json.loads(_core.layer_schedule(MIXED, split=1, tile=64, chunk_tokens=2048))
    kinds = [layer["kind"] for layer in schedule["layers"]]
    assert kinds == ["full", "filled", "windowed_fill", "state_scan", "filled", "skipped"]
    assert schedule["layers"][2]["window"] == 512


@settings(max_examples=200)
@given(
    split=st.integers(0, 5),
    tail=st.integers(1, 5000),
    head=st.integers(0, 16),
    tile=st.integers(1, 128),
    chunks=st.none() | st.integers(1, 99),
)
def test_json_comes_back_the_same(split: int, tail: int, head: int, tile: int, chunks: int | None) -> None:
    chunk = None if chunks is None else chunks * tile
    text = _core.layer_schedule(MIXED, split=split, tail=tail, head=head, tile=tile, chunk_tokens=chunk)
    assert _core.check_schedule(MIXED, text) == text
    layers = json.loads(text)["layers"]
    assert [layer["kind"] == "full" for layer in layers] == [index < split for index in range(6)]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"split": 6}, "split is 6; the model has layers 0 to 5"),
        ({"tail": 0}, "tail is 0"),
        ({"tile": 0}, "tile is 0"),
        ({"chunk_tokens": 100}, "layer 3 scans a state in tiles of 64, and chunk_tokens is 100"),
        ({"split": -1}, "split is -1"),
    ],
)
def test_nonsense_is_refused(change: dict[str, int], words: str) -> None:
    with pytest.raises(ScheduleError, match=words):
        _core.layer_schedule(MIXED, **{"split": 1, "tile": 64, **change})


@pytest.mark.parametrize(
    ("layer", "role", "words"),
    [
        (0, {"kind": "skipped"}, "layer 0 is skipped; expected full"),
        (
            1,
            {"kind": "filled", "source": 3, "input": "map"},
            "layer 1 is filled from layer 3; expected a layer that is not",
        ),
        (4, {"kind": "filled", "source": 3, "input": "map"}, "not computed on bulk rows"),
        (
            4,
            {"kind": "filled", "source": 1, "input": "stream"},
            "only a layer's own block input serves it without a map",
        ),
        (4, {"kind": "full"}, "layer 4 is full; expected filled"),
        (
            2,
            {"kind": "windowed_fill", "source": 1, "input": "map", "window": 9},
            "windowed_fill of 9; expected windowed_fill",
        ),
        (3, {"kind": "guessed"}, "schedule: unknown variant `guessed`"),
    ],
)
def test_a_schedule_that_would_leave_a_hole_is_refused(layer: int, role: dict[str, Any], words: str) -> None:
    schedule = json.loads(_core.layer_schedule(MIXED, split=1))
    schedule["layers"][layer] = role
    with pytest.raises(ScheduleError, match=words):
        _core.check_schedule(MIXED, json.dumps(schedule))


def test_a_schedule_belongs_to_its_model() -> None:
    text = _core.layer_schedule(MIXED, split=1)
    with pytest.raises(ScheduleError, match="made for a mixed, the model is a llama"):
        _core.check_schedule(_core.describe_model(json.dumps(LLAMA)), text)
