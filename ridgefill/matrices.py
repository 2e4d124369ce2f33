"""How a map's matrices are kept: as they are, as int8 codes with a scale for 128 inputs, or as two factors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    import torch

Matrix: TypeAlias = "torch.Tensor | Codes | Factors"
INT8_GROUP = 128  # inputs that share a scale (docs/map-format.md)


@dataclass(frozen=True)
class Codes:
    """A matrix ``[n_in, n_out]`` as `quantised` gives it."""

    codes: torch.Tensor
    scales: torch.Tensor

    @property
    def shape(self) -> torch.Size:
        """That of the matrix."""
        return self.codes.shape

    @property
    def dtype(self) -> torch.dtype:
        """int8."""
        return self.codes.dtype


@dataclass(frozen=True)
class Factors:
    """A matrix ``[n_in, n_out]`` of low rank r: ``left`` ``[n_in, r]`` times ``right`` ``[r, n_out]``."""

    left: torch.Tensor | Codes
    right: torch.Tensor | Codes

    @property
    def shape(self) -> torch.Size:
        """That of the matrix."""
        import torch

        return torch.Size((self.left.shape[0], self.right.shape[1]))

    @property
    def rank(self) -> int:
        """r."""
        return int(self.left.shape[1])

    @property
    def dtype(self) -> torch.dtype:
        """That of both factors."""
        return self.left.dtype


def quantised(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Int8 codes ``[n_in, n_out]`` and bf16 scales ``[ceil(n_in / 128), n_out]`` of a weight ``[n_in, n_out]``.

    A scale is absmax / 127 of 128 inputs of a column (fewer in the last group), rounded to bf16; codes are rounded
    against the rounded scale, so that ``codes * scales`` is off by half a scale at most (design section 5). What
    `dequantised` makes of them in float32 has the same codes and scales: whichever way a scale was rounded, its absmax
    lies between 127 / (1 + 2^-8) > 126.5 and 127 (1 + 2^-8) < 127.5 of it, so that the largest code is 127. (Scales
    below 1e-38 have fewer bits, and less holds.)
    """
    import torch

    n_in, n_out = weight.shape
    padded = torch.nn.functional.pad(weight.float(), (0, 0, 0, -n_in % INT8_GROUP))
    groups = padded.reshape(-1, INT8_GROUP, n_out)
    scales = (groups.abs().amax(1) / 127).to(torch.bfloat16).contiguous()
    divisors = scales.float().masked_fill(scales == 0, 1).unsqueeze(1)
    codes = (groups / divisors).round().clamp(-127, 127).to(torch.int8)
    return codes.reshape(-1, n_out)[:n_in].contiguous(), scales


def dequantised(codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The weight ``codes * scales`` ``[n_in, n_out]``, rounded once: what the kernel of the same name gives.

    In float32 it is exact: a code has 7 bits and a scale 8.
    """
    return (codes.float() * scales.float().repeat_interleave(INT8_GROUP, 0)[: len(codes)]).to(dtype)


def stored(matrix: torch.Tensor, dtype: torch.dtype) -> torch.Tensor | Codes:
    """A dense matrix as a file keeps it, on the CPU: rounded to a floating-point dtype, or as int8 codes."""
    import torch

    if dtype != torch.int8:
        return matrix.to(dtype).contiguous().cpu()
    codes, scales = quantised(matrix)
    return Codes(codes.cpu(), scales.cpu())


def dense(matrix: Matrix, dtype: torch.dtype, device: torch.device | str = "cpu") -> torch.Tensor:
    """The matrix ``[n_in, n_out]`` itself on a device, rounded to ``dtype`` once.

    Codes are multiplied by their scales in float32, which is exact; factors are made float32 and multiplied in float32.
    """
    import torch

    if isinstance(matrix, Codes):
        return dequantised(matrix.codes.to(device), matrix.scales.to(device), dtype)
    if isinstance(matrix, Factors):
        left, right = (dense(factor, torch.float32, device) for factor in (matrix.left, matrix.right))
        with exact_float32_products():
            return (left @ right).to(dtype)
    return matrix.to(device, dtype)


@contextmanager
def exact_float32_products() -> Iterator[None]:
    """Float32 matmuls in float32, whatever precision the caller allowed (TF32 and bf16 lose 13 bits)."""
    import torch

    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def converted(matrix: Matrix, dtype: torch.dtype) -> Matrix:
    """The matrix kept in another dtype, factor by factor; codes made codes are the same codes."""
    import torch

    if isinstance(matrix, Factors):
        left, right = (stored(dense(factor, torch.float32), dtype) for factor in (matrix.left, matrix.right))
        return Factors(left, right)
    return stored(dense(matrix, torch.float32), dtype)


def file_tensors(name: str, matrix: Matrix) -> dict[str, torch.Tensor]:
    """A matrix's tensors by their names in a map file (docs/map-format.md), where the matrix is called ``name``."""
    if isinstance(matrix, Codes):
        return {name: matrix.codes, f"{name}_scales": matrix.scales}
    if isinstance(matrix, Factors):
        return {**file_tensors(f"{name}_in", matrix.left), **file_tensors(f"{name}_out", matrix.right)}
    return {name: matrix}


def from_file(tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """A layer's tensors by name, matrices put together again as `file_tensors` took them apart.

    A valid file has all the parts (rust/src/schema.rs).
    """
    found: dict[str, Any] = {}
    for name, tensor in tensors.items():
        if not name.endswith("_scales"):
            scales = tensors.get(f"{name}_scales")
            found[name] = tensor if scales is None else Codes(tensor, scales)
    if "weight_in" in found:
        found["weight"] = Factors(found.pop("weight_in"), found.pop("weight_out"))
    return found
