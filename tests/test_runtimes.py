"""What a model runs on: decode steps that are compiled, layers that accelerate places, flex attention."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tiny import SPLIT, TAIL, call, left_padded, prompt, random_maps, tiny_model
from torch import nn
from transformers import CompileConfig, DynamicCache, StaticCache

import ridgefill
from ridgefill.errors import AttachError, UnsupportedModelError
from ridgefill.layout import cache_argument_name

ROWS, HEAD, MIN_BULK, PAD = 160, 4, 16, 7
SETTINGS: dict[str, Any] = {"tail": TAIL, "head": HEAD, "min_bulk": MIN_BULK}
FILLED = ROWS - TAIL - HEAD
GREEDY: dict[str, Any] = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False}
FEW: dict[str, Any] = {**GREEDY, "max_new_tokens": 4, "min_new_tokens": 4}


def difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest error, as a part of the largest logit."""
    return float((found - expected).abs().max() / expected.abs().max())


# --- compiled decode steps -----------------------------------------------------------------------------------------


@pytest.fixture
def graphs() -> Iterator[list[torch.fx.GraphModule]]:
    """The graphs that `backend` is given, in a torch.compile that knows no earlier one."""
    torch.compiler.reset()
    seen.clear()
    yield seen
    torch.compiler.reset()
    seen.clear()


seen: list[torch.fx.GraphModule] = []


def backend(graph: torch.fx.GraphModule, _: list[torch.Tensor], **__: Any) -> Callable[..., Any]:
    """Runs a graph as it is: no compiler, but all of the tracing."""
    seen.append(graph)
    return graph.forward


def compiled_generate(model: nn.Module, ids: torch.Tensor, mask: torch.Tensor | None, **settings: Any) -> Any:
    """Generate as transformers does on a GPU: prefill as it is, decode steps compiled, each as one graph."""
    config = CompileConfig(fullgraph=True, backend=backend, mode="default")
    config._compile_all_devices = True
    given = {"cache_implementation": "static", "compile_config": config, **GREEDY, **settings}
    return model.generate(ids, attention_mask=mask, **given)


@pytest.mark.parametrize(("family", "share"), [("llama", None), ("gemma3", 0.2)])
def test_compiled_decode_steps_are_whole_graphs(
    family: str, share: float | None, graphs: list[torch.fx.GraphModule]
) -> None:
    """As many graphs as without an attachment: a break of ours would be an error, a recompilation one more."""
    model = tiny_model(family)
    ids, mask = left_padded(ROWS, (0, PAD))
    plain = model.generate(ids, attention_mask=mask, cache_implementation="static", disable_compile=True, **GREEDY)
    assert not graphs
    stock = compiled_generate(model, ids, mask)
    own = len(graphs)
    assert own >= 1
    assert torch.equal(stock, plain)
    torch.compiler.reset()
    graphs.clear()
    with ridgefill.attach(model, random_maps(model), tier="plumb", share=share, **SETTINGS) as attachment:
        for _ in range(2):
            assert torch.equal(compiled_generate(model, ids, mask), stock)
            status = attachment.status()
            assert status["rows_filled"] + status["rows_selected"] == FILLED - PAD
            assert bool(status["rows_selected"]) is (share is not None)
        assert len(graphs) == own
        assert "decode" not in attachment.status()["counters"], "a compiled step passes by the hooks"


def test_rows_of_compiled_decode_steps_are_known_to_be_missing(graphs: list[torch.fx.GraphModule]) -> None:
    model = tiny_model("llama")
    with ridgefill.attach(model, random_maps(model), stream="device", **SETTINGS) as attachment:
        answer = compiled_generate(model, prompt(ROWS), None, return_dict_in_generate=True)
        assert attachment.status()["rows_filled"] == FILLED
        assert graphs
        with pytest.raises(AttachError, match="hooks have not seen all"):
            attachment.repair(getattr(answer, cache_argument_name(model.forward) or ""))


def test_a_compiled_forward_fills_and_its_decode_steps_are_whole_graphs(graphs: list[torch.fx.GraphModule]) -> None:
    """``model.forward = torch.compile(model.forward)``: the hooks run outside of it, where streams are kept too."""
    model = tiny_model("llama")
    ids, argument = prompt(ROWS), cache_argument_name(model.forward)

    def steps(count: int) -> torch.Tensor:
        """A prompt and some decode steps by hand; logits of all of them."""
        cache = StaticCache(config=model.config, max_cache_len=ROWS + 8)
        found = [call(model, ids, None, cache, 1)]
        with torch.no_grad():
            for number in range(count):
                step = model(ids[:, number : number + 1], use_cache=True, logits_to_keep=1, **{str(argument): cache})
                found.append(step.logits)
        return torch.cat(found, dim=1)

    stock = steps(4)
    model.forward = torch.compile(model.forward, backend=backend, fullgraph=True, dynamic=False)
    with ridgefill.attach(model, random_maps(model), tier="plumb", stream="device", **SETTINGS) as attachment:
        plumb = steps(4)
        assert attachment.status()["rows_filled"] == FILLED
        assert len(graphs) == 2, "the tail, and one decode step for all"
        with (
            pytest.raises(UnsupportedModelError, match="forward is compiled"),
            attachment.request(exact_spans=[(5, 9)]),
        ):
            pass
    assert difference(plumb, stock) <= 2e-5
    with pytest.raises(UnsupportedModelError, match="forward is compiled"):
        ridgefill.attach(model, random_maps(model), tier="quality", **SETTINGS)


@pytest.mark.parametrize("part", ["model", "model.layers.1"])
def test_a_compiled_forward_inside_the_model_is_refused(part: str) -> None:
    model = tiny_model("llama")
    maps, module = random_maps(model), model.get_submodule(part)
    module.forward = torch.compile(module.forward, backend=backend)
    with pytest.raises(UnsupportedModelError, match=r"compiled by torch\.compile"):
        ridgefill.attach(model, maps, **SETTINGS)


# --- layers that accelerate places ---------------------------------------------------------------------------------


def placed(model: nn.Module, **settings: Any) -> nn.Module:
    """The model under accelerate's hooks: each module that it would place has one, on the CPU all of them."""
    from accelerate import dispatch_model

    names = ["model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head"]
    names += [f"model.layers.{number}" for number in range(len(model.model.layers))]
    return dispatch_model(model, dict.fromkeys(names, "cpu") | settings.pop("others", {}), **settings)


@pytest.mark.parametrize("family", ["llama", "gemma3", "phi3"])
def test_placed_layers_fill(family: str) -> None:
    """accelerate replaces forwards by its own, which move what they are given: each of ours goes through them."""
    model = tiny_model(family)
    ids, mask = left_padded(ROWS, (0, PAD))
    stock = call(model, ids, mask, DynamicCache(config=model.config))
    answer = model.generate(ids, attention_mask=mask, **GREEDY)
    placed(model, force_hooks=True)
    hooked = [name for name, module in model.named_modules() if hasattr(module, "_hf_hook")]
    assert {f"model.layers.{SPLIT}", f"model.layers.{SPLIT}.self_attn.k_proj"} & set(hooked)
    maps = random_maps(model)
    with ridgefill.attach(model, maps, tier="plumb", share=0.2, **SETTINGS) as attachment:
        plumb = call(model, ids, mask, DynamicCache(config=model.config))
        assert attachment.status()["rows_selected"] == math.ceil(0.2 * (FILLED - PAD))
        assert torch.equal(model.generate(ids, attention_mask=mask, **GREEDY), answer)
        assert attachment.status()["rows_filled"] > 0
    assert difference(plumb, stock) <= 2e-5
    assert [name for name, module in model.named_modules() if hasattr(module, "_hf_hook")] == hooked
    assert torch.equal(call(model, ids, mask, DynamicCache(config=model.config)), stock)


@pytest.mark.parametrize("way", ["cpu_offload", "disk_offload", "disk in the map"])
def test_offloaded_weights_are_refused(way: str, tmp_path: Path) -> None:
    import accelerate

    model, maps = tiny_model("llama"), random_maps(tiny_model("llama"))
    words = "keeps weights off their device"
    if way == "cpu_offload":
        accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
    elif way == "disk_offload":
        accelerate.disk_offload(model, str(tmp_path), execution_device=torch.device("cpu"))
    else:
        placed(model, others={"model.layers.5": "disk"}, offload_dir=str(tmp_path))
        words = "keeps layers on disk"
    with pytest.raises(UnsupportedModelError, match=words):
        ridgefill.attach(model, maps, **SETTINGS)
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())


def test_a_model_that_is_offloaded_after_attach_runs_stock() -> None:
    import accelerate

    model = tiny_model("llama")
    stock = call(model, prompt(ROWS), None, DynamicCache(config=model.config))
    with ridgefill.attach(model, random_maps(model), **SETTINGS) as attachment:
        accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
        assert torch.equal(call(model, prompt(ROWS), None, DynamicCache(config=model.config)), stock)
        assert "is now on meta" in attachment.status()["reason"]


# --- flex attention ------------------------------------------------------------------------------------------------


RUN_AS_WRITTEN = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
# transformers gives create_block_mask an old flag, and torch's own compiler is imported with what torch deprecates.
DEPRECATED = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@pytest.fixture
def flex() -> Iterator[nn.Module]:
    """A Llama with flex attention, run as it is written: a CPU's compiler takes half a minute for each shape."""
    with torch.compiler.set_stance("force_eager"):
        yield tiny_model("llama", attention="flex_attention")


@RUN_AS_WRITTEN
@DEPRECATED
@pytest.mark.parametrize("padded", [False, True], ids=["one", "left-padded"])
def test_flex_attention_fills(flex: nn.Module, padded: bool) -> None:
    sdpa = tiny_model("llama")
    ids, mask = left_padded(ROWS, (0, PAD)) if padded else (prompt(ROWS), None)
    filled, maps = FILLED - (PAD if padded else 0), random_maps(sdpa)
    stock = call(flex, ids, mask, DynamicCache(config=flex.config))
    assert difference(stock, call(sdpa, ids, mask, DynamicCache(config=sdpa.config))) <= 1e-4, "another attention"
    with ridgefill.attach(flex, maps, tier="plumb", **SETTINGS) as attachment:
        plumb = call(flex, ids, mask, DynamicCache(config=flex.config))
        assert attachment.status()["rows_filled"] == filled
    assert difference(plumb, stock) <= 2e-5
    found = []
    for model in (flex, sdpa):
        with ridgefill.attach(model, maps, tier="speed", **SETTINGS) as attachment:
            found.append(call(model, ids, mask, DynamicCache(config=model.config)))
            assert attachment.status()["rows_filled"] == filled
    assert difference(*found) <= 1e-4
    assert difference(found[0], stock) > 1e-2, "random maps must show"


@RUN_AS_WRITTEN
@DEPRECATED
def test_flex_attention_generates(flex: nn.Module) -> None:
    ids = prompt(ROWS)
    answer = flex.generate(ids, **FEW)
    with ridgefill.attach(flex, random_maps(tiny_model("llama")), tier="plumb", **SETTINGS) as attachment:
        assert torch.equal(flex.generate(ids, **FEW), answer)
        assert attachment.status()["rows_filled"] == FILLED


@RUN_AS_WRITTEN
@DEPRECATED
@pytest.mark.skipif(
    transformers.__version__ == "5.20.0",
    reason="transformers 5.20.0 itself fails here: its generate calls contiguous() on a block mask",
)
def test_flex_attention_over_a_static_cache_runs_stock_by_name(flex: nn.Module) -> None:
    """generate makes the mask of a static cache itself, and a block mask does not say what it hides."""
    ids, static = prompt(ROWS), {"cache_implementation": "static", "disable_compile": True, **FEW}
    answer = flex.generate(ids, **static)
    with ridgefill.attach(flex, random_maps(tiny_model("llama")), tier="plumb", **SETTINGS) as attachment:
        assert torch.equal(flex.generate(ids, **static), answer)
        assert attachment.status()["rows_filled"] == 0
        assert "BlockMask" in attachment.status()["reason"]


@RUN_AS_WRITTEN
@DEPRECATED
def test_flex_attention_refuses_selected_rows_by_name(flex: nn.Module) -> None:
    maps, attention = random_maps(tiny_model("llama")), "'flex_attention'"
    with (
        ridgefill.attach(flex, maps, tier="plumb", **SETTINGS) as attachment,
        pytest.raises(UnsupportedModelError, match=attention),
        attachment.request(exact_spans=[(5, 9)]),
    ):
        pass
    with pytest.raises(UnsupportedModelError, match=f"{attention} attention cannot"):
        ridgefill.attach(flex, maps, tier="quality", **SETTINGS)
