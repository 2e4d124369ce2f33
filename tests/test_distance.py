"""Far-dependent tokens on a model that needs what is far; every group and sum by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from recall import KEYS, SPLIT, WORDING, filler_texts, recall_maps, recall_model, word_tokenizer
from tiny import prompt, tiny_model
from tiny_tokenizer import byte_tokenizer

from ridgefill.errors import RidgeFillError
from ridgefill.evaluate.distance import (
    GROUPS,
    FarSettings,
    GroupScore,
    differences,
    next_token_losses,
    rare_repeats,
    score_document,
    short_context_losses,
    summarise,
    token_groups,
)
from ridgefill.evaluate.needle import Filler, build_items
from ridgefill.evaluate.paired import Variants
from ridgefill.evaluate.quality import prefill_logits
from ridgefill.evaluate.windows import Window

TAIL = 24


def documents(count: int, tokens: int = 120) -> list[Window]:
    """A fact in the bulk, its key in the tail, and behind the key the fact's words: two tokens need the bulk."""
    tokenizer = word_tokenizer()
    options: dict[str, Any] = {"tail": TAIL - 2, "needles": (1,), "wordings": [replace(WORDING, keys=KEYS[:1])]}
    filler = Filler(tokenizer, filler_texts())
    found = []
    for item in build_items(tokenizer, filler, tokens=tokens - 2, count=count, **options):
        answer = torch.tensor([tokenizer(item.expected, add_special_tokens=False)["input_ids"]])
        found.append(Window("needles", item.name, torch.cat([item.ids, answer], dim=1)))
    return found


def test_a_forgotten_bulk_shows_on_far_dependent_tokens_and_drowns_in_the_average() -> None:
    model, scores = recall_model(), []
    for damage in ("none", "forget"):
        variants = Variants(model, recall_maps(model, damage))
        far = FarSettings(window=16, threshold=1.0)
        for document in documents(3):
            scored = score_document(variants, word_tokenizer(), document, [(SPLIT, "fill")], tail=TAIL, far=far)
            scores += [GroupScore(**{**vars(s), "variant": damage}) for s in scored]
    # The fact's two words, last in each document: nothing nearer than the bulk says either.
    model, ids = recall_model(), documents(1)[0].ids
    short, full = (
        short_context_losses(model, ids, TAIL, 16),
        next_token_losses(prefill_logits(model, ids, TAIL), ids),
    )
    assert float((short - full)[-2:].min()) > 1.0
    groups = {group: summarise(scores, SPLIT, "forget", group) for group in GROUPS}
    assert groups["rare repeats"] is None  # no word of this model is a name
    far_tokens, everything = groups["far-dependent"], groups["whole tail"]
    assert far_tokens is not None
    assert everything is not None
    assert 6 <= far_tokens.tokens < everything.tokens
    assert far_tokens.dnll.low > 1.0
    assert far_tokens.dnll.estimate > 1.5 * everything.dnll.estimate
    kept = summarise(scores, SPLIT, "none", "far-dependent")
    assert kept is not None
    assert abs(kept.dnll.estimate) < 1e-3
    assert kept.agree.estimate == 1.0
    assert all(d > 1.0 for d in differences(scores, SPLIT, "forget", "none", "far-dependent"))


def test_short_contexts_are_as_long_as_they_say() -> None:
    model, tail, window = tiny_model("llama"), 40, 12
    ids = prompt(100)
    found = short_context_losses(model, ids, tail, window)
    assert found.shape == (tail - 1,)
    for label, context in ((61, 12), (61 + 31, 43), (93, 12), (99, 18)):
        logits = prefill_logits(model, ids[:, label - context : label], 1)
        by_hand = -float(logits[0].log_softmax(-1)[ids[0, label]])
        assert float(found[label - 61]) == pytest.approx(by_hand, rel=1e-4)
    # With room for everything it is the ordinary loss, and the prefix is not put before what already begins with it.
    whole = short_context_losses(model, ids, tail, 1000, prefix=[1])
    torch.testing.assert_close(whole, next_token_losses(prefill_logits(model, ids, tail), ids), rtol=1e-4, atol=1e-4)
    started = short_context_losses(model, ids, tail, window, prefix=[1])
    logits = prefill_logits(model, torch.cat([torch.tensor([[1]]), ids[:, 49:61]], dim=1), 1)
    assert float(started[0]) == pytest.approx(-float(logits[0].log_softmax(-1)[ids[0, 61]]), rel=1e-4)


def test_rare_repeats_are_names_and_numbers_told_in_the_bulk_alone() -> None:
    tokenizer = byte_tokenizer()
    bulk = "Mara met 48213 near The Old Mill and Mara left. The end. The a The b The c. Oslo. "
    between = "Then nothing much happened there. "
    tail = "so Oslo saw 48213 and The Mill, Oslo again, and Quito"
    ids = torch.tensor([tokenizer(bulk + between + tail)["input_ids"]])
    found = rare_repeats(tokenizer, ids, len(tail) + 1, window=40)
    assert found.shape == (len(tail),)
    words = {tail[i : i + 4] for i in range(len(tail)) if found[i] and (i == 0 or not found[i - 1])}
    # "The" is too frequent, "Quito" is new, the second "Oslo" stands 29 tokens behind the first.
    assert words == {"Oslo", "4821", "Mill"}
    assert int(found.sum()) == len("Oslo") + len("48213") + len("Mill")
    assert not rare_repeats(tokenizer, ids, len(tail) + 1, window=200).any()


def test_groups_by_hand() -> None:
    groups = token_groups(torch.tensor([0.0, 2.0, 0.5, 1.0, 3.0]), 1.0)
    shown = {name: mask.int().tolist() for name, mask in groups.items()}
    assert shown == {
        "far-dependent": [0, 1, 0, 0, 1],
        "last": [0, 0, 1, 1, 1],
        "after the bulk": [1, 1, 1, 0, 0],
        "whole tail": [1, 1, 1, 1, 1],
        "distance [0, 32)": [1, 1, 1, 1, 1],
    }
    long = token_groups(torch.zeros(1599), 1.0)
    assert int(long["last"].sum()) == int(long["after the bulk"].sum()) == 512
    assert sum(int(mask.sum()) for name, mask in long.items() if name.startswith("distance")) == 1599


def test_a_summary_weighs_tokens_and_pairs_documents() -> None:
    def score(document: str, variant: str, tokens: int, kl: float) -> GroupScore:
        return GroupScore(document, 3, variant, "whole tail", tokens, kl, 2 * kl, 0.5 * tokens)

    scores = [score("a", "fill", 1, 4.0), score("b", "fill", 3, 0.0), score("a", "x", 1, 1.0), score("b", "x", 3, 3.0)]
    found = summarise(scores, 3, "fill", "whole tail")
    assert found is not None
    assert (found.tokens, found.documents) == (4, 2)
    assert (found.kl.estimate, found.dnll.estimate, found.agree.estimate) == (1.0, 2.0, 0.5)
    assert differences(scores, 3, "fill", "x", "whole tail") == [3.0, -1.0]
    assert summarise([score("a", "fill", 0, 0.0), score("b", "fill", 0, 0.0)], 3, "fill", "whole tail") is None
    # One text without such a token is no unit: half the resamples of two would have nothing to divide by.
    assert summarise([score("a", "fill", 1, 1.0), score("b", "fill", 0, 0.0)], 3, "fill", "whole tail") is None
    with_empty = summarise([*scores, score("c", "fill", 0, 0.0)], 3, "fill", "whole tail")
    assert with_empty == found
    assert math.isfinite(found.kl.high)
    with pytest.raises(RidgeFillError, match="at least two"):
        summarise(scores[:1], 3, "fill", "whole tail")
