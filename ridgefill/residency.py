"""How fused maps are held: dense or as int8 codes, on the device or in pinned host memory.

A product needs the columns of consecutive layers as one dense matrix on the device. `Dense` has all of them there.
`Int8` makes a layer's from its codes when it is asked for. `Streamed` copies a layer's to one of a few slots on the
device, on a stream of its own, while layers before it compute.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from ridgefill.epilogue import dequantise_launch
from ridgefill.matrices import dequantised, quantised
from ridgefill.synth import laid_out

if TYPE_CHECKING:
    import torch

MAP_DTYPES = ("model", "int8")
RESIDENCIES = ("device", "host")


@dataclass(frozen=True)
class Dense:
    """A weight ``[n_in, n_out]`` as products read it."""

    weight: torch.Tensor

    @property
    def n_in(self) -> int:
        """How many features it takes."""
        return self.weight.shape[0]

    @property
    def n_out(self) -> int:
        """How many columns there are."""
        return self.weight.shape[1]

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """What is held."""
        return (self.weight.t(),)

    def of(self, tensors: Sequence[torch.Tensor]) -> Dense:
        """The same, held elsewhere."""
        return Dense(tensors[0].t())

    def columns(self, first: int, last: int) -> torch.Tensor:
        """Columns ``[first, last)``: a view."""
        return self.weight[:, first:last]


@dataclass(frozen=True)
class Int8:
    """A weight as `quantised` gives it; its columns are made when they are asked for."""

    codes: torch.Tensor
    scales: torch.Tensor
    dtype: torch.dtype
    by_kernel: bool

    @property
    def n_in(self) -> int:
        """How many features it takes."""
        return self.codes.shape[0]

    @property
    def n_out(self) -> int:
        """How many columns there are."""
        return self.codes.shape[1]

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """What is held."""
        return (self.codes, self.scales)

    def of(self, tensors: Sequence[torch.Tensor]) -> Int8:
        """The same, held elsewhere."""
        return Int8(tensors[0], tensors[1], self.dtype, self.by_kernel)

    def columns(self, first: int, last: int) -> torch.Tensor:
        """Columns ``[first, last)``, dequantised: 3 bytes of memory traffic an element in 16 bits."""
        if not self.by_kernel:
            return dequantised(self.codes[:, first:last], self.scales[:, first:last], self.dtype)
        tile = self.codes.new_empty(len(self.codes), last - first, dtype=self.dtype)
        dequantise_launch(self.codes, self.scales, first, tile).run(tile.device)
        return tile


Held = Dense | Int8


def held_bytes(held: Held) -> int:
    """Bytes that it takes where it lies, each tensor at a multiple of 16: what a kernel's widest access asks for."""
    return sum(_aligned(tensor.nbytes) for tensor in held.tensors)


def _aligned(size: int) -> int:
    return -(-size // 16) * 16


# --- from the host ----------------------------------------------------------------------------------------------------


class Queues(Protocol):
    """A device's two queues of work, one that computes and one that copies; each does its work in order."""

    def pinned(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor in host memory from which copies need not wait for the host."""

    def copy(self, to: torch.Tensor, from_: torch.Tensor) -> None:
        """Queue a copy from pinned memory on the queue that copies."""

    def mark(self, *, copies: bool) -> Any:
        """An event: what the queue held until now is done."""

    def wait(self, event: Any, *, copies: bool) -> None:
        """Let what is queued from now on wait for the event."""

    def milliseconds(self, first: Any, second: Any) -> float:
        """The time between two events; waits until both have come."""


class CudaQueues:
    """Torch's current stream of a device, and another one for copies."""

    def __init__(self, device: torch.device) -> None:
        import torch

        self._streams = (torch.cuda.current_stream(device), torch.cuda.Stream(device))

    def pinned(self, tensor: torch.Tensor) -> torch.Tensor:
        """As `Queues.pinned`."""
        return tensor.cpu().pin_memory()

    def copy(self, to: torch.Tensor, from_: torch.Tensor) -> None:
        """As `Queues.copy`."""
        import torch

        to.record_stream(self._streams[1])  # an exception may drop the slot before its copy is done
        with torch.cuda.stream(self._streams[1]):
            to.copy_(from_, non_blocking=True)

    def mark(self, *, copies: bool) -> Any:
        """As `Queues.mark`."""
        import torch

        event = torch.cuda.Event(enable_timing=True)
        event.record(self._streams[copies])
        return event

    def wait(self, event: Any, *, copies: bool) -> None:
        """As `Queues.wait`."""
        self._streams[copies].wait_event(event)

    def milliseconds(self, first: Any, second: Any) -> float:
        """As `Queues.milliseconds`."""
        second.synchronize()
        return float(first.elapsed_time(second))


@dataclass
class Copies:
    """What one call copied from the host, and how long its products waited: events, read when somebody asks."""

    queues: Queues | None = None
    copied_bytes: int = 0
    copying: list[tuple[Any, Any]] = field(default_factory=list)
    waiting: list[tuple[Any, Any]] = field(default_factory=list)

    def figures(self) -> dict[str, float] | None:
        """Bytes, milliseconds of copying and of waiting, ``overlap``: the share of the copying that nobody waited for.

        None where nothing was copied. Waits until the call's work is done.
        """
        if self.queues is None or not self.copying:
            return None
        copy_ms = sum(self.queues.milliseconds(*span) for span in self.copying)
        waited_ms = sum(self.queues.milliseconds(*span) for span in self.waiting)
        overlap = max(0.0, 1 - waited_ms / copy_ms) if copy_ms else 1.0
        return {"copied_bytes": self.copied_bytes, "copy_ms": copy_ms, "waited_ms": waited_ms, "overlap": overlap}


@dataclass(frozen=True)
class Streamed:
    """Each layer's columns in pinned host memory, in the layers' order; ``slots`` of them at a time on the device."""

    layers: tuple[Held, ...]
    device: torch.device
    slots: int

    @property
    def n_in(self) -> int:
        """How many features they take."""
        return self.layers[0].n_in

    @property
    def slot_bytes(self) -> int:
        """A slot holds the largest layer."""
        return max(held_bytes(held) for held in self.layers)

    def columns(self, wanted: Sequence[int], copies: Copies) -> Iterator[torch.Tensor]:
        """The columns of each of the ``wanted`` layers (numbers in the order they are held), one after the other.

        What was yielded is good for work queued before the next is asked for. Slots and events belong to this call.
        """
        import torch

        queues = copies.queues = queues_of(self.device)
        count = min(self.slots, len(wanted))
        slots = [torch.empty(self.slot_bytes, dtype=torch.uint8, device=self.device) for _ in range(count)]
        # The allocator hands out memory that work queued before still reads.
        free = [queues.mark(copies=False)] * count
        ready: list[Any] = [None] * count
        fetched = [self.layers[number] for number in wanted]  # on the host, until each has its turn

        def fetch(turn: int) -> None:
            slot, held, at = turn % count, self.layers[wanted[turn]], 0
            queues.wait(free[slot], copies=True)
            began = queues.mark(copies=True)
            tensors = []
            for tensor in held.tensors:
                to = slots[slot][at : at + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
                queues.copy(to, tensor)
                tensors.append(to)
                at += _aligned(tensor.nbytes)
            ready[slot] = queues.mark(copies=True)
            fetched[turn] = held.of(tensors)
            copies.copied_bytes += at
            copies.copying.append((began, ready[slot]))

        for turn in range(count):
            fetch(turn)
        for turn in range(len(wanted)):
            slot = turn % count
            asked = queues.mark(copies=False)
            queues.wait(ready[slot], copies=False)
            copies.waiting.append((asked, queues.mark(copies=False)))
            yield fetched[turn].columns(0, fetched[turn].n_out)
            free[slot] = queues.mark(copies=False)  # behind all that reads this slot
            if turn + count < len(wanted):
                fetch(turn + count)


def queues_of(device: torch.device) -> Queues:
    """New queues of a device."""
    return CudaQueues(device)


# --- the choice -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Holding:
    """How fused maps are to be held.

    Attributes:
        int8: as codes. On a CPU, which gains nothing from making columns again for every prompt, they are dequantised
            once: the same numbers, in the bytes of the model's dtype.
        slots: to how many slots on the device layers are streamed from pinned host memory; 0: all stay on the device.
        by_kernel: columns are made by a kernel, else by torch.
    """

    int8: bool = False
    slots: int = 0
    by_kernel: bool = False

    def layer(self, weight: torch.Tensor, dtype: torch.dtype) -> Held:
        """One layer's float32 weight ``[n_in, n_out]``, in the form in which it is kept."""
        held: Held = Dense(weight.to(dtype))
        if self.int8:
            held = Int8(*quantised(weight), dtype, self.by_kernel)
            if weight.device.type == "cpu" and not self.by_kernel:
                held = Dense(dequantised(held.codes, held.scales, dtype))
        if self.slots:
            if isinstance(held, Dense):
                held = Dense(laid_out(held.weight))
            pinned = queues_of(weight.device).pinned
            held = held.of([pinned(tensor) for tensor in held.tensors])
        return held

    def together(self, layers: Sequence[Held], device: torch.device) -> Held | Streamed:
        """All layers', side by side."""
        import torch

        if self.slots:
            return Streamed(tuple(layers), device, self.slots)
        first, parts = layers[0], zip(*(held.tensors for held in layers), strict=True)
        if isinstance(first, Dense):
            return Dense(laid_out(torch.cat([held.tensors[0].t() for held in layers], dim=1)))
        return first.of([torch.cat(part, dim=1) for part in parts])


def host_obstacle(device: torch.device) -> str | None:
    """Why maps cannot be streamed from the host to this device, or None."""
    if device.type == "cuda":
        return None
    return f"the late layers are on {device}, and streams of pinned memory need a CUDA device"
