"""The cost formula: examples worked by hand, the design's anchors, and what must never happen."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ridgefill import _core
from ridgefill.errors import ScheduleError


def llama(hidden: int, layers: int, heads: int, kv_heads: int, head_dim: int, mlp: int, vocab: int) -> dict[str, Any]:
    layer = {
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "mlp_flops_per_row": 2 * 3 * hidden * mlp,  # gate, up and down
        "window": None,
    }
    return {"hidden_size": hidden, "vocab_size": vocab, "layers": [dict(layer) for _ in range(layers)]}


SMOLLM2 = llama(576, 30, 9, 3, 64, 1536, 49152)
LLAMA_1B = llama(2048, 16, 32, 8, 64, 8192, 128256)


def cost(shape: dict[str, Any], **arguments: Any) -> _core.PrefillCost:
    return _core.prefill_cost(json.dumps(shape), **{"tail": 512, "head": 4, **arguments})


def test_a_model_small_enough_to_count_by_hand() -> None:
    # d=2, one query head and one key head of 2, MLP 10 per row, vocabulary 3; 6 rows: head 1, bulk 3, tail 2.
    shape = llama(2, 3, 1, 1, 2, 0, 3)
    for layer in shape["layers"]:
        layer["mlp_flops_per_row"] = 10
    # A row: q, k, v 2*2*(2+4)=24, o 2*2*2=8, MLP 10: 42. Attention: 4*2 = 8 per visible key; 1+2+...+6 = 21 keys.
    exact_layer = 6 * 42 + 8 * 21
    lm_head = 2 * 2 * 3
    result = cost(shape, prompt_tokens=6, split=1, tail=2, head=1, min_bulk=1)
    assert result.rows_filled == 3
    assert result.exact_flops == 3 * exact_layer + lm_head
    # A late layer's exact rows are 0, 4 and 5: they see 1+5+6 = 12 keys.
    late_exact = 3 * 42 + 8 * 12
    # Bulk: layer 1 projects keys and values, 2*2*4 = 16 a row; layer 2 also maps, 2*2*2 = 8 a row.
    fill = 3 * 16 + 3 * (16 + 8)
    assert result.fill_flops == fill
    assert result.filled_flops == exact_layer + 2 * late_exact + fill + lm_head
    assert result.ratio == result.exact_flops / result.filled_flops

    # Two features: the map is twice as wide.
    assert cost(shape, prompt_tokens=6, split=1, tail=2, head=1, min_bulk=1, features=2).fill_flops == 3 * 16 + 3 * 32
    # Fused, rank 1: 2*2*4 for keys and values, 2*2*1 for the scale.
    assert cost(shape, prompt_tokens=6, split=1, tail=2, head=1, min_bulk=1, fused_rank=1).fill_flops == 3 * 16 + 3 * 20


def test_windows_by_hand() -> None:
    shape = llama(2, 2, 1, 1, 2, 0, 3)
    shape["layers"][1]["window"] = 2
    # Layer 0 sees 21 keys over 6 rows; with a window of 2, 1+2+2+2+2+2 = 11.
    result = cost(shape, prompt_tokens=6, split=1, tail=2, head=1, min_bulk=1)
    assert result.exact_flops == 2 * 6 * 32 + 8 * (21 + 11) + 12
    # The exact rows 0, 4, 5 see 1+2+2 keys; only the last 2 bulk rows are filled.
    assert result.filled_flops == 6 * 32 + 8 * 21 + 3 * 32 + 8 * 5 + 2 * 16 + 12
    assert result.rows_filled == 3


def test_cached_rows_are_seen_and_not_computed() -> None:
    shape = llama(2, 2, 1, 1, 2, 0, 3)
    whole = cost(shape, prompt_tokens=6, split=1, tail=6, head=0)
    first = cost(shape, prompt_tokens=2, split=1, tail=6, head=0, logits_to_keep=0)
    rest = cost(shape, prompt_tokens=6, cached_tokens=2, split=1, tail=6, head=0)
    assert first.exact_flops + rest.exact_flops == whole.exact_flops


@pytest.mark.parametrize(
    ("shape", "split", "prompt", "ratio"),
    [
        (SMOLLM2, 15, 8192, 1.7295),  # design section 7: 1.73
        (SMOLLM2, 15, 4096, 1.6025),  # design section 7: 1.60
        # The design says 1.64: its prototype also paid for a map at layer S (1.641 with it), which needs none.
        (LLAMA_1B, 8, 4096, 1.6502),
    ],
)
def test_the_designs_anchors(shape: dict[str, Any], split: int, prompt: int, ratio: float) -> None:
    assert cost(shape, prompt_tokens=prompt, split=split).ratio == pytest.approx(ratio, abs=1e-4)


@settings(max_examples=300)
@given(prompt=st.integers(1, 20000), split=st.integers(0, 29), tail=st.integers(1, 3000), rank=st.integers(1, 256))
def test_filling_never_costs_more_here_and_less_tail_costs_less(prompt: int, split: int, tail: int, rank: int) -> None:
    result = cost(SMOLLM2, prompt_tokens=prompt, split=split, tail=tail)
    assert 0 < result.filled_flops <= result.exact_flops
    assert result.ratio >= 1
    assert cost(SMOLLM2, prompt_tokens=prompt, split=split, tail=tail + 1).filled_flops >= result.filled_flops
    assert cost(SMOLLM2, prompt_tokens=prompt + 1, split=split, tail=tail).exact_flops > result.exact_flops
    assert cost(SMOLLM2, prompt_tokens=prompt, split=split, tail=tail, features=2).filled_flops >= result.filled_flops
    fused = [cost(SMOLLM2, prompt_tokens=prompt, split=split, tail=tail, fused_rank=r) for r in (rank, rank + 1)]
    assert fused[0].filled_flops <= fused[1].filled_flops
    if split < 29:
        assert cost(SMOLLM2, prompt_tokens=prompt, split=split + 1, tail=tail).filled_flops >= result.filled_flops
    if result.rows_filled == 0:
        assert result.filled_flops == result.exact_flops
        assert result.fill_flops == 0


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"split": 30}, "split is 30; the model has layers 0 to 29"),
        ({"split": -1}, "split is -1"),
        ({"features": 0}, "features is 0"),
        ({"tail": 0}, "tail is 0"),
        ({"cached_tokens": 9000}, "prompt_tokens - cached_tokens is -808"),
        ({"fused_rank": -1}, "fused_rank is -1"),
    ],
)
def test_nonsense_is_refused(change: dict[str, int], words: str) -> None:
    with pytest.raises(ScheduleError, match=words):
        cost(SMOLLM2, **{"prompt_tokens": 8192, "split": 15, **change})


@pytest.mark.parametrize(
    "shape",
    ["", "{}", "[]", '{"hidden_size": 1, "vocab_size": 1, "layers": []}', json.dumps({**SMOLLM2, "colour": 1})],
)
def test_a_bad_shape_is_refused(shape: str) -> None:
    with pytest.raises(ScheduleError, match="shape"):
        _core.prefill_cost(shape, prompt_tokens=8192, split=15, tail=512, head=4)
