"""Splices on damage that is known: wrong keys go to keys, wrong values to values, wrong lengths to scale."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from recall import NUM_LAYERS, RECALL, SPLIT, recall_maps, recall_model
from test_distance import documents
from tiny import prompt, random_maps, tiny_model

from ridgefill.errors import RidgeFillError
from ridgefill.evaluate.paired import KeptFill, PairedPrompt, Variants
from ridgefill.evaluate.splice import (
    COMPONENTS,
    Recovered,
    Splice,
    SpliceStudy,
    attribution,
    mixed,
    put_back,
    study_splices,
)

TAIL = 24


def study(damage: str) -> SpliceStudy:
    model = recall_model()
    prompts = [document.ids for document in documents(2)]
    found = study_splices(Variants(model, recall_maps(model, damage)), prompts, SPLIT, tail=TAIL)
    assert found is not None
    return found


def test_wrong_keys_are_attributed_to_keys_in_the_layer_that_reads_them() -> None:
    found = study("keys")
    assert found.kl > 0.1
    assert found.share("keys") > 0.99
    assert found.share("key directions") > 0.99
    assert abs(found.share("values")) < 0.05
    assert abs(found.share("key norms")) < 0.3
    by_layer = {r.splice.layers[0]: r.share for r in found.layers if r.splice.component == "keys"}
    assert by_layer[RECALL] > 0.99
    assert all(abs(share) < 0.01 for layer, share in by_layer.items() if layer != RECALL)
    # Layers that do nothing recover nothing, from either end, until the one that does is among them.
    assert [r.share > 0.99 for r in found.upwards] == [layer >= RECALL for layer in range(SPLIT + 1, NUM_LAYERS)]
    assert [r.share > 0.99 for r in found.downwards] == [layer <= RECALL for layer in range(NUM_LAYERS - 1, SPLIT, -1)]
    # Head 0 does the work, head 1 reads nothing.
    of_recall = {r.splice.head: r.share for r in found.heads if r.splice.layers == (RECALL,)}
    assert of_recall[0] > 0.99
    assert abs(of_recall[1]) < 0.01
    told = attribution(found)
    assert told["component"] == "keys"
    assert next(iter(told["worst_layers"])) == RECALL
    assert any("add a feature" in line for line in told["recommendations"])
    has_it = attribution(found, features=("stream", "previous:1"))["recommendations"]
    assert [line for line in told["recommendations"] if "add a feature" not in line] == has_it
    assert not any("gains" in line for line in told["recommendations"])


def test_wrong_values_are_attributed_to_values() -> None:
    found = study("values")
    assert found.share("values") > 0.99
    assert abs(found.share("keys")) < 0.05
    assert attribution(found)["component"] == "values"


def test_wrong_lengths_are_attributed_to_scale() -> None:
    found = study("scale")
    assert found.kl > 0.1
    assert found.share("key norms") > 0.99
    assert abs(found.share("key directions")) < 0.01
    told = attribution(found)
    assert told["scale"] > 0.99
    assert told["recommendations"][0].startswith("enable key gains")


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_everything_put_back_is_stock_and_parts_are_not(family: str) -> None:
    model = tiny_model(family)
    variants = Variants(model, random_maps(model))
    found = study_splices(variants, [prompt(96), prompt(96, seed=5)], 3, tail=16)
    assert found is not None
    assert found.share("both") == pytest.approx(1, abs=1e-4)
    assert found.share("keys") < 0.999
    assert found.upwards[-1].share == pytest.approx(1, abs=1e-4)
    assert found.downwards[-1].share == pytest.approx(1, abs=1e-4)
    assert len(found.layers) == 4 * 2
    assert len(found.heads) == 2 * 2
    assert {r.splice.component for r in found.whole} == set(COMPONENTS)


def test_norms_and_directions_by_hand() -> None:
    filled, exact = torch.tensor([[3.0, 4.0]]), torch.tensor([[0.0, 10.0]])
    torch.testing.assert_close(mixed(filled, exact, "key norms"), torch.tensor([[6.0, 8.0]]))
    torch.testing.assert_close(mixed(filled, exact, "key directions"), torch.tensor([[0.0, 5.0]]))
    assert mixed(filled, exact, "values") is exact
    assert not mixed(torch.zeros(1, 2), exact, "value norms").any()


def test_a_splice_touches_its_rows_layers_and_heads_alone() -> None:
    model = tiny_model("llama")
    pair = PairedPrompt(Variants(model, random_maps(model)), prompt(64), tail=16, splits=(3,))
    before: dict[str, Any] = {}

    def edit(cache: Any) -> None:
        before["keys"], before["values"] = (cache.layers[4].keys.clone(), cache.layers[4].values.clone())
        before["other"] = cache.layers[5].keys.clone()
        put_back(pair, Splice("keys", (4,), 1), cache)
        changed = (cache.layers[4].keys != before["keys"]).any(-1)[0]  # [kv_heads, rows]
        assert not changed[0].any()
        assert changed[1].nonzero().flatten().tolist() == list(range(4, 48))
        assert torch.equal(cache.layers[4].values, before["values"])
        assert torch.equal(cache.layers[5].keys, before["other"])

    step, _ = pair.filled(3, "fill")
    edit(step.cache)
    assert before


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_edits_of_a_kept_fill_give_what_a_whole_pass_each_gives(family: str) -> None:
    model = tiny_model(family)
    pair = PairedPrompt(Variants(model, random_maps(model)), prompt(96), tail=16, splits=(3,))
    kept = KeptFill(pair, 3)
    with pair.variant(3, "fill") as filled:
        torch.testing.assert_close(kept.logits, filled.logits)
    edits = [partial(put_back, pair, Splice(component, (5,))) for component in ("keys", "values", "both") * 3]
    expected = []
    for edit in edits[:3]:
        step, _ = pair.filled(3, "fill")
        edit(step.cache)
        expected += pair.tail_logits([step.cache])  # through every layer
    assert not torch.allclose(expected[0], expected[1])
    for first_layer in (3, 4, 5):
        found = list(kept.edited(edits, first_layer))  # more than one pass holds
        torch.testing.assert_close(found, [*expected, *expected, *expected])
    # What lies below the first layer is not looked at again; and the fill itself is as it was.
    torch.testing.assert_close(list(kept.edited(edits[:1], 6)), [kept.logits])
    torch.testing.assert_close(list(kept.edited([lambda cache: None], 3)), [kept.logits])


def test_an_exact_fill_has_nothing_to_recover_and_no_prompt_is_an_error() -> None:
    model = recall_model()
    variants = Variants(model, recall_maps(model))
    assert study_splices(variants, [document.ids for document in documents(1)], SPLIT, tail=TAIL) is None
    with pytest.raises(RidgeFillError, match="0 prompts"):
        study_splices(variants, [], SPLIT, tail=TAIL)


def test_a_split_is_raised_only_where_few_layers_hold_the_damage() -> None:
    def found(shares: list[float]) -> list[str]:
        late = tuple(range(11, 11 + len(shares)))
        whole = [Recovered(Splice(c, late), 0.1, 1.0 if c == "both" else 0.1) for c in COMPONENTS]
        upwards = [Recovered(Splice("both", late[: i + 1]), 0.1, share) for i, share in enumerate(shares)]
        layers = [Recovered(Splice(c, (layer,)), 0.1, 0.0) for c in ("keys", "values") for layer in late]
        return list(attribution(SpliceStudy(10, 1, 1.0, whole, layers, upwards, [], []))["recommendations"])

    assert found([0.5, 0.8, 0.9, 0.9, 1.0, 1.0])[0].startswith("raise the split to 12")
    assert found([0.1, 0.2, 0.3, 0.8, 0.9, 1.0])[0].startswith("select rows")
