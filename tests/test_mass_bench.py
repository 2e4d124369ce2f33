"""`benches/mass.py`: no bias changes nothing, one without end hides what is filled, and nothing else is biased."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import SPLIT, prompt, random_maps, tiny_model

from ridgefill.evaluate.paired import PairedPrompt, Variants
from ridgefill.evaluate.windows import Window

TAIL = 16


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(Path(__file__).parent.parent / "benches"))
    return importlib.import_module("mass")


def test_a_bias_reaches_from_the_fill_itself_to_the_rows_dropped(bench: Any) -> None:
    model = tiny_model("llama")
    variants = Variants(model, random_maps(model))
    ids = prompt(96)
    pair = PairedPrompt(variants, ids, tail=TAIL, head=bench.HEAD, splits=(SPLIT,))

    def logits(variant: str, bias: float) -> torch.Tensor:
        spans = {"tail": TAIL, "head": bench.HEAD, "fill_end": pair.fill_end}
        with bench.biased(variants.layout, SPLIT, bias, **spans), pair.variant(SPLIT, variant) as filled:
            return filled.logits

    with pair.variant(SPLIT, "quality") as plain:
        torch.testing.assert_close(logits("quality", 0.0), plain.logits)
    leaning = logits("quality", -1.0)
    assert float((leaning - plain.logits).abs().max()) > 1e-3
    # In the layers above the split nothing is left of what is filled; its own layer's rows are exact and stay.
    hidden = logits("quality", -1e4)
    assert float((hidden - leaning).abs().max()) > 1e-3
    torch.testing.assert_close(logits("quality", -2e4), hidden)
    assert not any(module._forward_pre_hooks for module in model.modules())

    # The columns that lean are the filled ones: not the head's, nor the selected rows', nor the tail's.
    masks: list[torch.Tensor] = []
    spans = {"tail": TAIL, "head": bench.HEAD, "fill_end": pair.fill_end}
    with bench.biased(variants.layout, SPLIT, -3.0, **spans):
        last = variants.layout.layers[-1]
        handle = last.register_forward_pre_hook(
            lambda _, __, kwargs: masks.append(kwargs["attention_mask"]), with_kwargs=True
        )
        with pair.variant(SPLIT, "quality", share=0.2) as filled:
            handle.remove()
    leans = (masks[-1][0, 0, -1] == -3).nonzero().flatten().tolist()
    assert len(filled.selected) > 10
    assert leans == [row for row in range(bench.HEAD, pair.fill_end) if row not in filled.selected.tolist()]


def test_every_bias_is_scored_beside_none(bench: Any) -> None:
    model = tiny_model("llama")
    window = Window("docs", "a", prompt(96))
    lines = bench.score_window(Variants(model, random_maps(model)), window, (SPLIT,), (-0.5, 0.5), tail=TAIL)
    assert [line["bias"] for line in lines] == [0.0, -0.5, 0.5]
    assert len({line["kl"] for line in lines}) == 3
    assert all(line["rows_filled"] > 60 for line in lines)
