"""The ways a model is called: generate in its variants, wrappers, dtypes, prompts in pieces, requests of their own."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from tiny import SPLIT, TAIL, call, in_pieces, left_padded, prompt, random_maps, tiny_model
from tiny_tokenizer import byte_tokenizer, random_text
from torch import nn
from transformers import DynamicCache, StaticCache, pipeline

import ridgefill
from ridgefill import caches
from ridgefill.errors import AttachError, UnsupportedModelError
from ridgefill.layout import cache_argument_name, fingerprint

ROWS, HEAD, MIN_BULK = 160, 4, 16
SETTINGS: dict[str, Any] = {"tail": TAIL, "head": HEAD, "min_bulk": MIN_BULK}
FILLED = ROWS - TAIL - HEAD
GREEDY: dict[str, Any] = {"max_new_tokens": 16, "min_new_tokens": 16, "do_sample": False}


@pytest.fixture
def llama() -> nn.Module:
    return tiny_model("llama")


def logits(model: nn.Module, ids: torch.Tensor | None = None, mask: torch.Tensor | None = None) -> torch.Tensor:
    return call(model, prompt(ROWS) if ids is None else ids, mask, DynamicCache(config=model.config))


# --- generate ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize(
    "settings",
    [
        {"do_sample": True, "num_return_sequences": 3, "top_k": 0},
        {"num_beams": 3, "num_return_sequences": 2},
        {"num_beams": 2, "do_sample": True},
        {"use_cache": True, "repetition_penalty": 1.3},
    ],
    ids=["return-sequences", "beams", "beams-sampled", "processors"],
)
def test_plumb_generates_what_stock_generates(family: str, settings: dict[str, Any]) -> None:
    model = tiny_model(family)
    ids, mask = left_padded(ROWS, (0, 7))

    def answer() -> torch.Tensor:
        torch.manual_seed(5)
        return model.generate(ids, attention_mask=mask, **{**GREEDY, **settings})

    stock = answer()
    with ridgefill.attach(model, random_maps(model), tier="plumb", **SETTINGS) as attachment:
        assert torch.equal(answer(), stock)
        assert attachment.status()["rows_filled"] == FILLED - 7
    assert len(set(stock[0, ROWS:].tolist())) > 3, "a constant answer would equal anything"


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_assisted_decoding_fills_target_and_draft(family: str) -> None:
    """With a draft that is mostly right and one that is mostly wrong: accepted and cropped rows both occur."""
    fills = family != "gemma3" or caches.past_fits_masks()  # not in transformers 5.16
    target, ids = tiny_model(family), prompt(ROWS)
    stock = target.generate(ids, **GREEDY)
    for draft in (tiny_model(family), tiny_model(family, seed=3)):
        with (
            ridgefill.attach(target, random_maps(target), tier="plumb", **SETTINGS) as of_target,
            ridgefill.attach(draft, random_maps(draft), tier="plumb", **SETTINGS) as of_draft,
        ):
            assert torch.equal(target.generate(ids, assistant_model=draft, **GREEDY), stock)
            if not fills:
                assert transformers.__version__.startswith("5.16.")
                assert {a.status()["rows_filled"] for a in (of_target, of_draft)} == {0}
                assert "record their past" in of_target.history[0]["reason"]
                continue
            assert of_target.status()["counters"]["filled"] == of_draft.status()["counters"]["filled"] == 1
            # The target's first call brings the draft's first guesses behind the prompt.
            assert of_target.history[0]["rows_filled"] >= FILLED
            assert of_draft.history[0]["rows_filled"] == FILLED
        assert torch.equal(target.generate(ids, assistant_model=draft, **GREEDY), stock)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("kind", ["own", "static"])
def test_generate_goes_on_with_the_cache_of_an_earlier_turn(family: str, kind: str) -> None:
    model = tiny_model(family)
    argument = cache_argument_name(model.forward)
    first, second = prompt(ROWS), prompt(120, seed=8)

    def turns() -> torch.Tensor:
        given = {}
        if kind == "static":
            given = {argument: StaticCache(config=model.config, max_cache_len=400), "disable_compile": True}
        before = model.generate(first, return_dict_in_generate=True, **given, **GREEDY)
        given[argument] = given.get(argument) or getattr(before, argument)
        ids = torch.cat([before.sequences, second], dim=1)
        return model.generate(ids, attention_mask=torch.ones_like(ids), **given, **GREEDY)

    stock = turns()
    with ridgefill.attach(model, random_maps(model), tier="plumb", **SETTINGS) as attachment:
        assert torch.equal(turns(), stock)
        prefills = [record["rows_filled"] for record in attachment.history]
    # The first answer's last token is not in the cache yet.
    assert prefills == [FILLED, 121 - TAIL]


@pytest.mark.parametrize("family", ["llama", "gemma3", "mixtral"])
def test_eager_attention_fills(family: str) -> None:
    model = tiny_model(family, attention="eager")
    ids, mask = left_padded(ROWS, (0, 5))
    stock = logits(model, ids, mask)
    with ridgefill.attach(model, random_maps(model), tier="plumb", share=0.2, **SETTINGS) as attachment:
        plumb = logits(model, ids, mask)
        assert attachment.status()["rows_selected"] == math.ceil(0.2 * (FILLED - 5))
    assert float((plumb - stock).abs().max()) <= 2e-5 * float(stock.abs().max())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_fills(llama: nn.Module, dtype: torch.dtype) -> None:
    llama.to(dtype)
    stock = logits(llama).double()
    pieces = in_pieces(llama, prompt(ROWS), None, DynamicCache(config=llama.config), 0, ROWS - TAIL).double()
    with ridgefill.attach(llama, random_maps(llama), tier="plumb", **SETTINGS) as attachment:
        plumb = logits(llama).double()
        assert attachment.status()["rows_filled"] == FILLED
    own, found = (float((other - stock).norm() / stock.norm()) for other in (pieces, plumb))
    assert found <= max(2 * own, 4 * torch.finfo(dtype).eps)


# --- wrapped and replaced modules ----------------------------------------------------------------------------------


class Int8Linear(nn.Module):
    """A linear layer that keeps int8 codes and one scale for each output, and no weight to read."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        scale = linear.weight.detach().abs().amax(1, keepdim=True) / 127
        self.register_buffer("codes", (linear.weight.detach() / scale).round().to(torch.int8))
        self.register_buffer("scale", scale)
        self.bias = linear.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.codes.to(x.dtype) * self.scale.to(x.dtype), self.bias)


class LoraLinear(nn.Module):
    """A linear layer with a low-rank update beside it."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.base_layer = linear
        self.down = nn.Linear(linear.in_features, 4, bias=False)
        self.up = nn.Linear(4, linear.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base_layer(x) + self.up(self.down(x))


def replace_linears(model: nn.Module, replacement: Callable[[nn.Linear], nn.Module], names: tuple[str, ...]) -> None:
    for layer in model.model.layers:
        for parent in list(layer.modules()):
            for name, child in list(parent.named_children()):
                if name in names and type(child) is nn.Linear:
                    setattr(parent, name, replacement(child))


@pytest.mark.parametrize("family", ["llama", "qwen2", "phi3"])
def test_quantised_projections_fill(family: str) -> None:
    model = tiny_model(family)
    float_logits = logits(model)
    names = ("q_proj", "k_proj", "v_proj", "qkv_proj", "o_proj", "gate_proj", "up_proj", "gate_up_proj", "down_proj")
    replace_linears(model, Int8Linear, names)
    stock = logits(model)
    assert not torch.equal(stock, float_logits)
    with ridgefill.attach(model, random_maps(model), tier="plumb", **SETTINGS) as attachment:
        plumb = logits(model)
        assert attachment.status()["rows_filled"] == FILLED
        assert set(attachment.status()["writers"].values()) == {"generic" if family == "phi3" else "direct"}
    assert float((plumb - stock).abs().max()) <= 1e-5 * float(stock.abs().max())
    with ridgefill.attach(model, random_maps(model), tier="speed", **SETTINGS) as attachment:
        logits(model)
        assert attachment.status()["rows_filled"] == FILLED


class PeftLike(nn.Module):
    """What `peft.PeftModel` is to its callers: ``generate`` calls the model inside, ``forward`` passes by its hooks."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.base_model = model
        model.peft_config = {"default": "a rank of 4"}

    def get_base_model(self) -> nn.Module:
        return self.base_model

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        return self.base_model.generate(*args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.base_model.forward(*args, **kwargs)


def test_a_peft_model_fills_in_generate(llama: nn.Module) -> None:
    maps, ids = random_maps(llama), prompt(ROWS)
    before = fingerprint(llama)
    replace_linears(llama, LoraLinear, ("q_proj", "k_proj", "v_proj"))
    peft = PeftLike(llama).eval()
    stock, stock_logits = peft.generate(ids, **GREEDY), peft(ids, use_cache=True, logits_to_keep=1).logits
    assert fingerprint(peft)["anchors"] != before["anchors"], "an adapter's maps are not the base model's"
    with ridgefill.attach(peft, maps, tier="plumb", **SETTINGS) as attachment:
        assert torch.equal(peft.generate(ids, **GREEDY), stock)
        assert attachment.status()["rows_filled"] == FILLED
        assert any("weights" in warning for warning in attachment.status()["warnings"])
        assert torch.equal(peft(ids, use_cache=True, logits_to_keep=1).logits, stock_logits)
        assert attachment.status()["counters"]["filled"] == 1
        with pytest.raises(AttachError, match="already has maps attached"):
            ridgefill.attach(llama, maps)
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in peft.modules())


@pytest.mark.parametrize("chat", [False, True], ids=["text", "chat"])
def test_a_pipeline_fills(llama: nn.Module, chat: bool) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{% for turn in messages %}{{ turn['role'] }}: {{ turn['content'] }}\n{% endfor %}"
    generate = pipeline("text-generation", model=llama, tokenizer=tokenizer)
    text = random_text(ROWS)
    given: Any = [{"role": "user", "content": text}] if chat else text
    stock = generate(given, **GREEDY)
    with ridgefill.attach(llama, random_maps(llama), tier="plumb", **SETTINGS) as attachment:
        assert generate(given, **GREEDY) == stock
        assert attachment.status()["rows_filled"] == FILLED + (len("user: \n") if chat else 0)


# --- prompts in pieces ---------------------------------------------------------------------------------------------


def in_announced_pieces(
    attachment: ridgefill.Attachment, model: nn.Module, ids: torch.Tensor, mask: torch.Tensor | None, pieces: list[int]
) -> torch.Tensor:
    """All but the last piece by `Attachment.prefill`, the last by the model itself."""
    cache, done = None, 0
    for rows in pieces:
        end = done + rows
        seen = None if mask is None else mask[:, :end]
        cache = attachment.prefill(ids[:, done:end], n_ahead=ROWS - end, cache=cache, attention_mask=seen)
        assert {layer.get_seq_length() for layer in cache.layers} == {end}
        done = end
    return call(model, ids[:, done:], mask, cache)


@pytest.mark.parametrize("padded", [False, True], ids=["one", "left-padded"])
@pytest.mark.parametrize("pieces", [[1, 50, 64], [70, 20, 20, 10], [110, 26]], ids=str)
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_prompt_in_pieces_is_filled_like_a_prompt_in_one(family: str, pieces: list[int], padded: bool) -> None:
    model = tiny_model(family)
    ids, mask = left_padded(ROWS, (0, 5)) if padded else (prompt(ROWS), None)
    settings, maps = {**SETTINGS, "min_bulk": 1}, random_maps(model)
    stock = logits(model, ids, mask)
    filled = FILLED - (5 if padded else 0)
    for tier, tolerance in (("speed", 1e-4), ("plumb", 2e-5)):
        with ridgefill.attach(model, maps, tier=tier, **settings) as attachment:
            whole = logits(model, ids, mask)
            attachment.history.clear()
            found = in_announced_pieces(attachment, model, ids, mask, pieces)
            records = list(attachment.history)
        whole, exact = whole[:, -found.shape[1] :], stock[:, -found.shape[1] :]  # the last piece may be a short one
        assert float((found - whole).abs().max()) <= tolerance * float(stock.abs().max()), tier
        assert len(records) == len(pieces) + 1
        assert sum(record["rows_filled"] for record in records) == filled, [r["reason"] for r in records]
        assert tier == "speed" or float((found - exact).abs().max()) <= 2e-5 * float(stock.abs().max())


def test_pieces_without_an_announcement_keep_their_tails(llama: nn.Module) -> None:
    """What `prefill` is for: a forward call must take each piece's last rows for the prompt's."""
    ids = prompt(ROWS)
    with ridgefill.attach(llama, random_maps(llama), **SETTINGS) as attachment:
        cache = DynamicCache(config=llama.config)
        call(llama, ids[:, :80], None, cache, 1)
        assert attachment.status()["spans"]["fill"] == [HEAD, 80 - TAIL]
        cache = attachment.prefill(ids[:, :80], n_ahead=80)
        assert attachment.status()["spans"] == {"head": [0, HEAD], "fill": [HEAD, 80], "tail": [80, 80]}
        assert attachment.status()["selection"].startswith("rows of a piece are not selected")
        attachment.prefill(ids[:, 80:84], n_ahead=76, cache=cache)
        assert "fewer than min_bulk=16" in attachment.status()["reason"]
        with attachment.request(tier="exact"):
            cache = attachment.prefill(ids[:, 84:120], n_ahead=40, cache=cache)
        assert attachment.status()["reason"] == "the tier is exact"
        assert caches.cached_tokens(cache) == 120


def test_a_piece_that_fails_leaves_its_cache_as_it_was(llama: nn.Module) -> None:
    def fail(*_: Any) -> None:
        raise ZeroDivisionError("a hook of the test")

    with ridgefill.attach(llama, random_maps(llama), **SETTINGS) as attachment:
        cache = attachment.prefill(prompt(80), n_ahead=200)
        handle = llama.model.layers[SPLIT + 1].self_attn.k_proj.register_forward_hook(fail)
        with pytest.raises(ZeroDivisionError):
            attachment.prefill(prompt(80), n_ahead=120, cache=cache)
        handle.remove()
        assert caches.cached_tokens(cache) == 80
        assert attachment.status()["counters"]["undone after an exception"] == 1
        with pytest.raises(AttachError, match="n_ahead must be an integer of at least 0, found -1"):
            attachment.prefill(prompt(80), n_ahead=-1)
        with attachment.request(exact_spans=[(3, 9)]), pytest.raises(AttachError, match="exact_spans"):
            attachment.prefill(prompt(80), n_ahead=10)
    with pytest.raises(AttachError, match="detached"):
        attachment.prefill(prompt(80), n_ahead=10)


# --- requests with settings of their own ---------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_request_changes_its_own_calls_alone(family: str) -> None:
    model = tiny_model(family)
    stock, maps = logits(model), random_maps(model)
    with ridgefill.attach(model, maps, tier="speed", **SETTINGS):
        speed = logits(model)
    with ridgefill.attach(model, maps, tier="quality", share=0.2, **SETTINGS) as attachment:
        quality = logits(model)
        with attachment.request(tier="speed"):
            assert torch.equal(logits(model), speed)
            assert (attachment.status()["tier"], attachment.status()["ran"]) == ("quality", "speed")
            with attachment.request(tier="exact"):
                assert torch.equal(logits(model), stock)
            assert torch.equal(logits(model), speed)
        with attachment.request(tail=64):
            logits(model)
            assert attachment.status()["spans"]["tail"] == [ROWS - 64, ROWS]
        assert torch.equal(logits(model), quality)
        assert attachment.status()["ran"] == "quality"
    assert not torch.equal(quality, speed)
    with ridgefill.attach(model, maps, tier="speed", **SETTINGS):
        assert torch.equal(logits(model), speed), "a request ends with its attachment"


@pytest.mark.parametrize("family", ["llama", "gemma3", "olmo3"])
@pytest.mark.parametrize("padded", [False, True], ids=["one", "left-padded"])
def test_exact_spans_run_exactly(family: str, padded: bool) -> None:
    model = tiny_model(family)
    ids, mask = left_padded(ROWS, (0, 5)) if padded else (prompt(ROWS), None)
    stock, maps = logits(model, ids, mask), random_maps(model)
    bulk = FILLED - (5 if padded else 0)
    for tier, spans, most in (("speed", [(0, ROWS)], 2e-5), ("plumb", [(50, 60), (55, 70)], 2e-5)):
        with ridgefill.attach(model, maps, tier=tier, **SETTINGS) as attachment, attachment.request(exact_spans=spans):
            found = logits(model, ids, mask)
            status = attachment.status()
        assert status["rows_selected"] == (bulk if tier == "speed" else 20)
        assert status["rows_filled"] == bulk - status["rows_selected"]
        assert float((found - stock).abs().max()) <= most * float(stock.abs().max()), tier


def test_exact_spans_come_on_top_of_what_is_selected(llama: nn.Module) -> None:
    maps, spans = random_maps(llama), [(50, 60), (55, 70), (150, 155)]
    with ridgefill.attach(llama, maps, tier="quality", share=0.1, **SETTINGS) as attachment:
        with attachment.request(exact_spans=spans):
            logits(llama)
            assert attachment.status()["rows_selected"] == math.ceil(0.1 * FILLED) + 20
        with attachment.request(tier="speed", exact_spans=[(150, 155)]):
            logits(llama)
            assert attachment.status()["selection"] == "exact_spans hold no row of the bulk"

    filled, named = DynamicCache(config=llama.config), DynamicCache(config=llama.config)
    with ridgefill.attach(llama, maps, tier="speed", **SETTINGS) as attachment:
        call(llama, prompt(ROWS), None, filled)
        with attachment.request(exact_spans=spans):
            call(llama, prompt(ROWS), None, named)
    for layer_idx in range(SPLIT + 1, len(named.layers)):
        changed = (named.layers[layer_idx].keys - filled.layers[layer_idx].keys)[0, 0, : ROWS - TAIL].abs().amax(-1)
        assert (changed > 1e-3).nonzero().flatten().tolist() == list(range(50, 70))


def test_exact_spans_pass_every_gate(llama: nn.Module) -> None:
    import dataclasses

    lower, upper = random_maps(llama, split=3), random_maps(llama, split=4, seed=5)
    maps = dataclasses.replace(lower, splits={**lower.splits, **upper.splits})
    stock = logits(llama)
    for tier in ("quality", "plumb"):
        with (
            ridgefill.attach(llama, maps, tier=tier, gates={3: 0.5, 4: 0.2}, **SETTINGS) as attachment,
            attachment.request(exact_spans=[(50, 70)]),
        ):
            found = logits(llama)
            assert attachment.status()["gates"] == {3: 62 + 20, 4: 25 + 20}
    assert float((found - stock).abs().max()) <= 2e-5 * float(stock.abs().max())


def test_requests_that_cannot_be_met_are_refused(llama: nn.Module) -> None:
    with ridgefill.attach(llama, random_maps(llama), tier="speed", **SETTINGS) as attachment:
        for request, words in (
            ({"tier": "quality"}, r"has tier 'speed' and can run \['exact', 'speed'\]"),
            ({"tail": 0}, "tail must be an integer of at least 1, found 0"),
            ({"exact_spans": [(9, 9)]}, r"found \(9, 9\)"),
        ):
            with pytest.raises(AttachError, match=words), attachment.request(**request):
                pass
        llama.config._attn_implementation = "flex_attention"
        with pytest.raises(UnsupportedModelError, match="'flex_attention'"), attachment.request(exact_spans=[(5, 9)]):
            pass


def test_requests_of_threads_and_tasks_do_not_mix(llama: nn.Module) -> None:
    stock = logits(llama)
    failures: list[str] = []
    with ridgefill.attach(llama, random_maps(llama), tier="speed", **SETTINGS) as attachment:
        speed = logits(llama)
        together = threading.Barrier(2)

        def work(tier: str, expected: torch.Tensor) -> None:
            with attachment.request(tier=tier):
                for _ in range(8):
                    together.wait()
                    if not torch.equal(logits(llama), expected):
                        failures.append(tier)

        threads = [threading.Thread(target=work, args=args) for args in (("exact", stock), ("speed", speed))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures

        async def task(tier: str) -> torch.Tensor:
            with attachment.request(tier=tier):
                await asyncio.sleep(0)
                return logits(llama)

        async def both() -> list[torch.Tensor]:
            return await asyncio.gather(task("exact"), task("speed"))

        for found, expected in zip(asyncio.run(both()), (stock, speed), strict=True):
            assert torch.equal(found, expected)
    assert not torch.equal(stock, speed)
