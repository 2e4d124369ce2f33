"""Maps held as int8 codes or streamed from the host: the same columns, and no slot overwritten before its use."""

from __future__ import annotations

import contextlib
import itertools
import random
from collections import Counter
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from test_prefill import call as call_keeping
from tiny import NUM_LAYERS, SPLIT, exact_scale, feature_maps, prompt, tiny_model
from transformers import DynamicCache

import ridgefill
from ridgefill import assembly, residency
from ridgefill import attachment as attachment_module
from ridgefill.errors import AttachError
from ridgefill.fused import FusedMaps
from ridgefill.matrices import dequantised, quantised
from ridgefill.residency import Copies, CudaQueues, Dense, Int8, Streamed, held_bytes

ROWS, TAIL, HEAD = 96, 16, 4
SETTINGS: dict[str, Any] = {"tail": TAIL, "head": HEAD, "min_bulk": 8, "form": "fused"}
LATE = range(SPLIT + 1, NUM_LAYERS)


def filled(model: Any, maps: Any, **settings: Any) -> tuple[list[torch.Tensor], dict[str, Any], FusedMaps]:
    """The late layers' keys and values of one filled prompt, the status behind it, and the maps as they are held."""
    cache = DynamicCache(config=model.config)
    with ridgefill.attach(model, maps, **{**SETTINGS, **settings}) as attachment:
        call_keeping(model, prompt(ROWS), None, cache, 1)
        status, fused = attachment.status(), attachment.settings.fused
    assert status["rows_filled"] == ROWS - TAIL - HEAD
    assert fused is not None
    return [t for layer in LATE for t in (cache.layers[layer].keys, cache.layers[layer].values)], status, fused


def difference(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> float:
    """The largest relative error among pairs of tensors."""
    return max(float((a - b).norm() / b.norm()) for a, b in zip(found, expected, strict=True))


# --- int8 -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("n_in", "n_out"), [(1, 3), (128, 5), (129, 2), (300, 7)])
def test_codes_are_those_of_a_plain_loop(n_in: int, n_out: int) -> None:
    weight = torch.randn(n_in, n_out) * torch.logspace(-6, 3, n_out)
    weight[:, -1] = 0
    codes, scales = quantised(weight)
    assert (codes.dtype, scales.dtype) == (torch.int8, torch.bfloat16)
    assert (codes.shape, scales.shape) == ((n_in, n_out), (-(-n_in // 128), n_out))
    for column, group in itertools.product(range(n_out), range(len(scales))):
        rows = slice(128 * group, 128 * group + 128)
        values = weight[rows, column].numpy()
        scale = torch.tensor(np.abs(values).max() / np.float32(127)).to(torch.bfloat16)
        assert torch.equal(scales[group, column], scale)
        divisor = np.float32(scale.float()) if scale else np.float32(1)
        expected = np.clip(np.round(values / divisor), -127, 127)
        np.testing.assert_array_equal(codes[rows, column].numpy(), expected)
    # Half a step, also of an absmax whose scale was rounded down: it is 127 (1 + 2^-8) < 127.5 steps at most.
    steps = scales.float().repeat_interleave(128, 0)[:n_in]
    error = (dequantised(codes, scales, torch.float32) - weight).abs()
    assert bool((error <= 0.501 * steps).all())


@pytest.mark.parametrize("weight", [torch.randn(70, 9), torch.randn(9, 128).t(), torch.randn(300, 24)[:, ::2]])
def test_any_layout_in_memory_gives_contiguous_codes(weight: torch.Tensor) -> None:
    found, expected = quantised(weight), quantised(weight.contiguous())
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.is_contiguous()
        assert torch.equal(ours, theirs)


def test_a_fill_from_int8_maps_is_close_by_either_backend(kernels_on_host: Counter[str]) -> None:
    model = tiny_model("llama")
    maps = exact_scale(model, feature_maps(model, ("stream", "previous:1")))
    expected, plain, dense = filled(model, maps, backend="torch")
    by_torch, on_cpu, dequantised_once = filled(model, maps, backend="torch", map_dtype="int8")
    assert not kernels_on_host
    by_kernel, status, held = filled(model, maps, backend="cuda", map_dtype="int8")
    # A tile for each late layer, made once for the fill (once more at attach, for the probe), whatever its rows.
    assert kernels_on_host == {"dequantise_f32": 2 * len(LATE), "synth_kv_f32": len(LATE)}
    assert 1e-4 < difference(by_torch, expected) < 0.02
    assert difference(by_kernel, by_torch) < 1e-5
    assert [s["map_dtype"] for s in (plain, on_cpu, status)] == ["model", "int8", "int8"]
    # Codes and a bf16 scale for 128 inputs, where n_in is 128; a CPU holds what products read.
    assert isinstance(held.weights, Int8)
    columns = len(held.bias)
    assert status["map_bytes"] == 128 * columns + 2 * columns + held.bias.nbytes
    assert isinstance(dequantised_once.weights, Dense)
    assert on_cpu["map_bytes"] == plain["map_bytes"] == dense.nbytes
    assert status["host_map_bytes"] == 0
    assert status["map_copies"] is None


def test_columns_of_int8_maps_are_the_same_by_torch_and_by_kernel(kernels_on_host: Counter[str]) -> None:
    codes, scales = quantised(torch.randn(130, 40))
    for first, last in ((0, 40), (3, 20), (8, 24)):
        found = [Int8(codes, scales, torch.bfloat16, kernel).columns(first, last) for kernel in (True, False)]
        assert torch.equal(*found)
        assert torch.equal(found[0], dequantised(codes, scales, torch.bfloat16)[:, first:last])
    assert set(kernels_on_host) == {"dequantise_bf16", "dequantise_bf16_any"}


# --- streams ----------------------------------------------------------------------------------------------------------


class Deferred:
    """Two queues whose work is done later, in any order that each queue and the events allow: what a device may do."""

    def __init__(self, *, heedless: bool = False) -> None:
        self.compute: list[tuple[str, Any]] = []
        self.copies: list[tuple[str, Any]] = []
        self.done: list[str] = []
        self._events = itertools.count()
        self._heedless = heedless  # copies wait for nothing: what a forgotten wait would do

    def pinned(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def copy(self, to: torch.Tensor, from_: torch.Tensor) -> None:
        self.copies.append(("work", lambda: to.copy_(from_)))

    def mark(self, *, copies: bool) -> int:
        event = next(self._events)
        (self.copies if copies else self.compute).append(("mark", event))
        return event

    def wait(self, event: int, *, copies: bool) -> None:
        if not (copies and self._heedless):
            (self.copies if copies else self.compute).append(("wait", event))

    def milliseconds(self, first: int, second: int) -> float:
        return float(second - first)

    def run(self, choose: Callable[[list[str]], str]) -> None:
        """Do all the work, letting ``choose`` pick among the queues whose next item may go."""
        reached: set[int] = set()
        while self.compute or self.copies:
            queues = {"compute": self.compute, "copies": self.copies}
            able = [n for n, q in queues.items() if q and not (q[0][0] == "wait" and q[0][1] not in reached)]
            assert able, "both queues wait for each other"
            name = choose(able)
            kind, what = queues[name].pop(0)
            if kind == "mark":
                reached.add(what)
            if kind == "work":
                what()
                self.done.append(name)


def parts(count: int) -> tuple[Dense, ...]:
    """Layers of different widths, each filled with its own number."""
    return tuple(Dense(torch.full((3 + number % 2, 5), float(number)).t()) for number in range(count))


def seen(
    wanted: Sequence[int], slots: int, choose: Callable[[list[str]], str], monkeypatch: Any, **options: Any
) -> tuple[list[torch.Tensor], Deferred, Copies]:
    """What each product reads of its layer's columns, when it is its turn to run."""
    queues, copies, read = Deferred(**options), Copies(), []
    monkeypatch.setattr(residency, "queues_of", lambda _: queues)
    streamed = Streamed(parts(6), torch.device("cpu"), slots)
    for columns in streamed.columns(wanted, copies):
        queues.compute.append(("work", lambda columns=columns: read.append(columns.clone())))
    queues.run(choose)
    return read, queues, copies


def first_of(*order: str) -> Callable[[list[str]], str]:
    return lambda able: next(name for name in order if name in able)


ORDERS = [first_of("copies", "compute"), first_of("compute", "copies")]
ORDERS += [random.Random(seed).choice for seed in range(60)]


@pytest.mark.parametrize("slots", [1, 2])
@pytest.mark.parametrize("wanted", [(0,), (4, 1), (0, 1, 2, 3, 4, 5), (5, 0, 3)])
def test_every_product_reads_its_own_layer_in_any_order_of_work(
    wanted: tuple[int, ...], slots: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for choose in ORDERS:
        read, _, copies = seen(wanted, slots, choose, monkeypatch)
        assert [tensor.shape[0] for tensor in read] == [5] * len(wanted)
        for tensor, number in zip(read, wanted, strict=True):
            assert torch.equal(tensor, parts(6)[number].weight)
        assert copies.copied_bytes == sum(held_bytes(parts(6)[number]) for number in wanted)
        figures = copies.figures()
        assert figures is not None
        assert figures["copied_bytes"] == copies.copied_bytes


@pytest.mark.parametrize("slots", [1, 2])
def test_a_copy_that_would_not_wait_is_seen(slots: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: without the copies' waits, a slot is overwritten before its layer was read."""
    read, _, _ = seen(range(6), slots, ORDERS[0], monkeypatch, heedless=True)
    assert not all(torch.equal(tensor, parts(6)[number].weight) for number, tensor in enumerate(read))


def test_the_first_copy_waits_for_work_that_still_reads_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """An allocator hands out what was freed in the order of the computing queue, which another queue does not keep."""
    queues, memory, read = Deferred(), torch.zeros(80, dtype=torch.uint8), []
    queues.compute.append(("work", lambda: read.append(memory.clone())))
    monkeypatch.setattr(residency, "queues_of", lambda _: queues)
    monkeypatch.setattr(torch, "empty", lambda *_, **__: memory)
    assert len(list(Streamed(parts(2)[1:], torch.device("cpu"), 1).columns((0,), Copies()))) == 1
    queues.run(ORDERS[0])
    assert not read[0].any()
    assert memory.any()


def test_two_slots_copy_the_next_layer_beside_this_one_s_products(monkeypatch: pytest.MonkeyPatch) -> None:
    eager = ORDERS[0]  # copies as early as they may be
    one, two = (seen(range(4), slots, eager, monkeypatch)[1].done for slots in (1, 2))
    assert one == ["copies", "compute"] * 4
    assert two == ["copies", "copies", "compute", "copies", "compute", "copies", "compute", "compute"]


def test_overlap_is_the_share_of_copying_that_no_product_waited_for() -> None:
    assert Copies().figures() is None
    times = Copies(Deferred(), 64, copying=[(0, 4), (4, 10)], waiting=[(0, 4), (20, 21)])
    assert times.figures() == {"copied_bytes": 64, "copy_ms": 10.0, "waited_ms": 5.0, "overlap": 0.5}
    assert Copies(Deferred(), 64, [(0, 1)], [(0, 9)]).figures()["overlap"] == 0  # type: ignore[index]


class Immediate(Deferred):
    """Queues that do everything at once, and know what was pinned."""

    held: list[torch.Tensor]

    def pinned(self, tensor: torch.Tensor) -> torch.Tensor:
        self.held.append(tensor.clone())
        return self.held[-1]

    def copy(self, to: torch.Tensor, from_: torch.Tensor) -> None:
        pinned = {tensor.data_ptr() for tensor in self.held}
        assert from_.data_ptr() in pinned, "only pinned memory is copied without waiting"
        to.copy_(from_)


@pytest.fixture
def host_streams(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """Streams as a CUDA device has them, on the CPU; returns what lies in pinned memory."""
    held: list[torch.Tensor] = []

    def made(_: torch.device) -> Immediate:
        queues = Immediate()
        queues.held = held
        return queues

    monkeypatch.setattr(residency, "queues_of", made)
    monkeypatch.setattr(assembly, "host_obstacle", lambda _: None)
    return held


@pytest.mark.parametrize("map_dtype", ["model", "int8"])
@pytest.mark.parametrize("backend", ["torch", "cuda"])
@pytest.mark.parametrize("slots", [1, 2])
def test_maps_on_the_host_fill_what_maps_on_the_device_fill(
    slots: int, backend: str, map_dtype: str, host_streams: list[torch.Tensor], kernels_on_host: Counter[str]
) -> None:
    model = tiny_model("gemma3")  # layers that slide keep fewer rows than the others
    maps = exact_scale(model, feature_maps(model, ("stream",)))
    how: dict[str, Any] = {"backend": backend, "map_dtype": map_dtype}
    expected, device, _ = filled(model, maps, **how)
    assert not host_streams
    found, status, fused = filled(model, maps, **how, residency="host", slots=slots)
    assert difference(found, expected) < 1e-5
    assert (device["residency"], status["residency"]) == ("device", "host")
    assert isinstance(fused.weights, Streamed)
    assert status["host_map_bytes"] == sum(-(-tensor.nbytes // 16) * 16 for tensor in host_streams)
    assert status["map_bytes"] == slots * fused.weights.slot_bytes + fused.bias.nbytes
    assert status["map_copies"]["copied_bytes"] == status["host_map_bytes"]  # each layer once
    assert device["host_map_bytes"] == 0
    assert device["map_copies"] is None
    codes = map_dtype == "int8" and backend == "cuda"
    assert {tensor.dtype for tensor in host_streams} == ({torch.int8, torch.bfloat16} if codes else {torch.float32})


def test_a_call_that_runs_stock_reports_no_copies(host_streams: list[torch.Tensor]) -> None:
    model = tiny_model("llama")
    maps = exact_scale(model, feature_maps(model, ("stream",)))
    with ridgefill.attach(model, maps, residency="host", **SETTINGS) as attachment:
        call_keeping(model, prompt(ROWS), None, DynamicCache(config=model.config), 1)
        assert attachment.status()["map_copies"] is not None
        call_keeping(model, prompt(20), None, DynamicCache(config=model.config), 1)
        assert attachment.status()["map_copies"] is None


def test_cuda_queues_order_work_by_torch_s_streams_and_events(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which stream each call goes to; the streams themselves need a device."""
    log: list[Any] = []

    class Stream:
        def __init__(self, name: str) -> None:
            self.name = name

        def wait_event(self, event: Any) -> None:
            log.append(("wait", self.name, event))

    class Event:
        def __init__(self, *, enable_timing: bool) -> None:
            assert enable_timing

        def record(self, stream: Stream) -> None:
            log.append(("mark", stream.name))

        def synchronize(self) -> None:
            log.append("synchronize")

        def elapsed_time(self, _: Any) -> float:
            return 1.5

    @contextlib.contextmanager
    def on(stream: Stream) -> Any:
        log.append(("on", stream.name))
        yield

    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: Stream("current"))
    monkeypatch.setattr(torch.cuda, "Stream", lambda _: Stream("copies"))
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    queues = CudaQueues(torch.device("cuda", 0))
    to: Any = SimpleNamespace(
        record_stream=lambda stream: log.append(("kept for", stream.name)),
        copy_=lambda _, non_blocking: log.append(("copy", non_blocking)),
    )
    queues.copy(to, torch.ones(1))
    assert log == [("kept for", "copies"), ("on", "copies"), ("copy", True)]
    log.clear()
    ready, free = queues.mark(copies=True), queues.mark(copies=False)
    queues.wait(ready, copies=False)
    queues.wait(free, copies=True)
    assert log == [("mark", "copies"), ("mark", "current"), ("wait", "current", ready), ("wait", "copies", free)]
    assert queues.milliseconds(free, ready) == 1.5
    assert log[-1] == "synchronize"


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"map_dtype": "int4"}, "unknown map_dtype 'int4'; known: model, int8"),
        ({"residency": "disk"}, "unknown residency 'disk'; known: device, host"),
        ({"slots": 3}, "slots must be 1 or 2, found 3"),
        ({"slots": True}, "slots must be 1 or 2, found True"),
        ({"residency": "host"}, "residency 'host' cannot run: the late layers are on cpu"),
        ({"residency": "host", "tier": "quality"}, "tier 'quality' reads two-step maps"),
        ({"map_dtype": "int8", "form": "two-step"}, "only fused maps are held so, and split 3 runs two-step"),
        ({"map_dtype": "int8", "tier": "plumb", "form": "auto"}, "tier plumb writes the true block inputs"),
    ],
)
def test_what_cannot_be_held_so_is_refused_by_name(settings: dict[str, Any], message: str) -> None:
    model = tiny_model("llama")
    maps = exact_scale(model, feature_maps(model, ("stream",)))
    with pytest.raises(AttachError, match=message):
        ridgefill.attach(model, maps, **{**SETTINGS, **settings})
    assert not attachment_module.is_attached(model)
