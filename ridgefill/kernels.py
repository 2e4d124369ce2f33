"""CUDA kernels: their sources, one module for each device architecture, and launches that were checked before.

The sources travel in the extension (`_core.device_sources`); CuPy compiles them once for each architecture and keeps
the result in its cache. Nothing is copied: kernels get the addresses of torch's tensors and run on torch's current
stream. cupy is imported where it is used, so that everything else works without it.
"""

from __future__ import annotations

import functools
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ridgefill.errors import KernelError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

BACKENDS = ("auto", "torch", "cuda")
# What NVRTC is told besides the architecture. No fast math: kernels round as their oracles say.
OPTIONS = ("-std=c++17",)
# Turing: the oldest architecture that CuPy 14 and torch 2.6 both build for.
LEAST_CAPABILITY = (7, 5)
_MAX_GRID_Y = 65535
# The kernels of each file. `_any` takes one element at a time, the others 16 bytes, where all is aligned to that.
_ELEMENTS = ("bf16", "bf16_any", "f16", "f16_any", "f32", "f32_any")
KERNELS: dict[str, tuple[str, ...]] = {
    "gram": ("add_products", *(f"centre_rows_{x}_{out}" for x in ("bf16", "f16", "f32") for out in ("bf16", "f32"))),
    "ridge_solve": ("ridge_matrix", "ridge_targets", "squared_errors"),
    "synth_kv": tuple(f"{kernel}_{elements}" for kernel in ("synth_kv", "dequantise") for elements in _ELEMENTS),
}
_build_lock = threading.Lock()


def source(name: str) -> str:
    """The text of one kernel file as it is compiled: common.cuh, then the file. RawModule takes no include folder.

    Raises:
        KernelError: there is no such file.
    """
    from ridgefill import _core

    if name not in KERNELS:
        raise KernelError(f"no kernel file {name!r}; known: {', '.join(KERNELS)}")
    files = _core.device_sources()
    return f"{files['common.cuh']}\n{files[f'{name}.cu']}"


def unavailable(device: torch.device | str) -> str | None:
    """Why kernels cannot run on this device, or None when they can."""
    import torch

    device = torch.device(device)
    if device.type != "cuda":
        return f"the model is on {device.type}; kernels need an NVIDIA GPU"
    if torch.version.cuda is None:
        return "this torch was built without CUDA"
    capability = torch.cuda.get_device_capability(device)
    if capability < LEAST_CAPABILITY:
        return f"compute capability {capability[0]}.{capability[1]} is older than 7.5"
    try:
        import cupy  # noqa: F401
    except ImportError as error:
        return (
            f"cupy cannot be imported ({error}); install ridgefill[cuda] for CUDA 12 or ridgefill[cuda13] for CUDA 13"
        )
    return None


def choose_backend(backend: str, device: torch.device | str) -> tuple[str, str]:
    """The backend that runs, ``torch`` or ``cuda``, and why.

    Raises:
        KernelError: ``backend`` is unknown, or is ``cuda`` where kernels cannot run.
    """
    if backend not in BACKENDS:
        raise KernelError(f"unknown backend {backend!r}; known: {', '.join(BACKENDS)}")
    if backend == "torch":
        return "torch", "backend='torch' was asked for"
    reason = unavailable(device)
    if reason is None:
        return "cuda", f"kernels run on {device}"
    if backend == "cuda":
        raise KernelError(f"backend 'cuda' cannot run: {reason}; backend='auto' takes torch instead")
    return "torch", reason


# --- arguments --------------------------------------------------------------------------------------------------------


def check_tensor(
    kernel: str,
    argument: str,
    tensor: torch.Tensor,
    *,
    dtype: torch.dtype,
    shape: Sequence[int | None],
    device: torch.device,
    contiguous: bool = True,
    aligned_bytes: int = 1,
) -> int:
    """Refuse what a kernel would misread, and return the tensor's address.

    Args:
        shape: expected sizes, None for any.
        contiguous: else only the last dimension must be dense.
        aligned_bytes: what the address and every row's address must be a multiple of.

    Raises:
        KernelError: naming kernel and argument, what was found and what was expected.
    """

    def refuse(what: str, found: object, expected: object) -> KernelError:
        return KernelError(f"{kernel}: argument {argument!r} has {what} {found}, expected {expected}")

    if tensor.device != device:
        raise refuse("device", tensor.device, device)
    if tensor.dtype != dtype:
        raise refuse("dtype", tensor.dtype, dtype)
    found = tuple(tensor.shape)
    if len(found) != len(shape) or any(e is not None and f != e for f, e in zip(found, shape, strict=True)):
        raise refuse("shape", list(found), [("any" if e is None else e) for e in shape])
    dense = tensor.is_contiguous() if contiguous else tensor.ndim == 0 or tensor.stride(-1) == 1 or tensor.shape[-1] < 2
    if not dense:
        raise refuse("strides", tensor.stride(), "a contiguous tensor" if contiguous else "a dense last dimension")
    size = tensor.element_size()
    strides = [stride for stride, length in zip(tensor.stride()[:-1], found[:-1], strict=True) if length > 1]
    if tensor.data_ptr() % aligned_bytes or any(stride * size % aligned_bytes for stride in strides):
        address = f"address {tensor.data_ptr():#x} and strides {tensor.stride()}"
        raise refuse("an alignment", address, f"multiples of {aligned_bytes} bytes")
    check_range(kernel, argument, sum((n - 1) * s for n, s in zip(found, tensor.stride(), strict=True) if n > 1) * size)
    return tensor.data_ptr()


def check_range(kernel: str, argument: str, value: int, least: int = 0, most: int = 2**63 - 1) -> int:
    """``value`` again, if a kernel's 64-bit integer (or what else ``most`` says) can hold it.

    Raises:
        KernelError: it cannot.
    """
    if not least <= value <= most:
        raise KernelError(f"{kernel}: argument {argument!r} is {value}, expected {least} to {most}")
    return value


# --- launches ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Launch:
    """One kernel with its grid and typed arguments: integers are 64-bit, floats are double, addresses are pointers."""

    file: str
    kernel: str
    grid: tuple[int, int]
    threads: int
    arguments: tuple[int | float, ...]
    keeps: tuple[torch.Tensor, ...] = ()  # what addresses belong to; alive until the launch is queued
    descriptors: torch.Tensor | None = None  # a table on the device that holds addresses itself

    def __post_init__(self) -> None:
        if self.kernel not in KERNELS.get(self.file, ()):
            known = ", ".join(KERNELS.get(self.file, ()))
            raise KernelError(f"no kernel {self.kernel!r} in {self.file}.cu; known: {known}")
        check_range(self.kernel, "grid.x", self.grid[0], 1, 2**31 - 1)
        check_range(self.kernel, "grid.y", self.grid[1], 1, _MAX_GRID_Y)

    def run(self, device: torch.device) -> None:
        """Queue it on torch's current stream of ``device``."""
        import cupy
        import numpy as np
        import torch

        index = device.index
        typed = tuple(np.float64(a) if isinstance(a, float) else np.int64(a) for a in self.arguments)
        with cupy.cuda.Device(index), current_stream(index):
            function = _module(self.file, torch.cuda.get_device_capability(index)).get_function(self.kernel)
            function(self.grid, (self.threads, 1, 1), typed)


def current_stream(index: int | None) -> Any:
    """Torch's current stream of device ``index`` (None: the current device), as a cupy stream."""
    import cupy
    import torch

    stream = torch.cuda.current_stream(index)
    if hasattr(cupy.cuda.Stream, "from_external") and hasattr(stream, "__cuda_stream__"):
        return cupy.cuda.Stream.from_external(stream)
    if hasattr(cupy.cuda.Stream, "from_external"):
        return cupy.cuda.Stream.from_external(_StreamProtocol(stream.cuda_stream))
    return cupy.cuda.ExternalStream(stream.cuda_stream, index)  # cupy 13


@dataclass(frozen=True)
class _StreamProtocol:
    address: int

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.address


def _module(file: str, capability: tuple[int, int]) -> Any:
    with _build_lock:
        return _build(file, capability)


@functools.cache
def _build(file: str, capability: tuple[int, int]) -> Any:
    """One file compiled for the current device's architecture; CuPy keeps a copy for each device of it."""
    import cupy

    module = cupy.RawModule(code=source(file), options=OPTIONS)
    try:
        module.compile()
    except Exception as error:
        raise KernelError(f"{file}.cu does not compile for sm_{capability[0]}{capability[1]}: {error}") from error
    return module


def blocks(count: int, per_block: int) -> int:
    """How many blocks cover ``count`` items; at least one."""
    return max(1, -(-count // per_block))


def rows_grid(rows: int) -> int:
    """A grid's second dimension for ``rows`` that kernels step through."""
    return max(1, min(rows, _MAX_GRID_Y))
