"""The fit's sums and systems on a GPU: library products between the kernels of cuda/gram.cu and cuda/ridge_solve.cu.

`ridgefill.moments.Moments` and `ridgefill.ridge` are what this means. Two things differ: rows may be rounded to bf16
once, for tensor cores, and a system is built, factored and solved in place, so that a fit needs one copy of its sums.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from ridgefill.errors import FitError, KernelError
from ridgefill.kernels import Launch, blocks, check_tensor, current_stream, rows_grid
from ridgefill.matrices import exact_float32_products
from ridgefill.moments import BLOCK_ROWS, CentredMoments, Moments

# Products of this many blocks meet in float32 before float64: each adds one rounding of a partial sum, and a float64
# total is read and written once for all of them. (At one block, that takes twice as long as a bf16 product on an H200.)
BLOCKS_PER_TOTAL = 8
_U32, _UBF16 = 2.0**-24, 2.0**-8
_GRAM_THREADS = 128
_CUDA_R_16BF, _CUDA_R_32F, _CUBLAS_COMPUTE_32F, _CUBLAS_GEMM_DEFAULT = 14, 0, 68, -1
_OP_N, _OP_T, _SIDE_RIGHT, _UPPER, _NON_UNIT = 0, 1, 1, 1, 0


def error_bound(products: str) -> float:
    """The most that an entry of the sums about the shift may be off, relative to ``sqrt(A_ii * A_jj)``.

    ``A`` holds the sums of squares about the shift. An entry is a float32 sum of at most ``BLOCK_ROWS`` products and of
    ``BLOCKS_PER_TOTAL`` such sums, of factors rounded once (to float32 in the subtraction, then to bf16 if asked):
    ``gamma(k) = k u / (1 - k u)`` by Higham, section 3.1, with ``(1 + u)^2 - 1`` for the factors, and Cauchy-Schwarz.
    """
    k = BLOCK_ROWS + BLOCKS_PER_TOTAL + 1
    summed = k * _U32 / (1 - k * _U32)
    factor = 1 + _U32 if products == "float32" else (1 + _U32) * (1 + _UBF16)
    return factor**2 * (1 + summed) - 1


class Library(Protocol):
    """The products and solves that kernels leave to a library; every matrix is row-major and contiguous in its rows."""

    def add_products(self, out: torch.Tensor, left: torch.Tensor, right: torch.Tensor, *, clear: bool) -> None:
        """``out [m, n] = left^T right`` in fp32, of ``[rows, m]`` and ``[rows, n]``; added to it unless ``clear``."""

    def factor(self, matrix: torch.Tensor) -> int:
        """Cholesky of float64 ``[n, n]`` in place, for `solve`; 0, or the first column that is not positive."""

    def solve(self, factor: torch.Tensor, targets: torch.Tensor) -> None:
        """``targets [n, width]`` become ``A^-1 targets``, in place."""


class TorchLibrary:
    """The same by torch, on any device."""

    def add_products(self, out: torch.Tensor, left: torch.Tensor, right: torch.Tensor, *, clear: bool) -> None:
        """A product of bf16 numbers is exact in float32, so converting them first changes nothing."""
        with exact_float32_products():
            torch.addmm(out, left.float().T, right.float(), beta=0 if clear else 1, out=out)

    def factor(self, matrix: torch.Tensor) -> int:
        """The lower factor in place."""
        found, info = torch.linalg.cholesky_ex(matrix)
        matrix.copy_(found)
        return int(info)

    def solve(self, factor: torch.Tensor, targets: torch.Tensor) -> None:
        """Two triangular solves."""
        targets.copy_(torch.cholesky_solve(targets, factor))


@dataclass
class CudaLibrary:
    """The same by cuBLAS and cuSOLVER through CuPy's bindings, in place, on torch's current stream.

    These libraries read matrices by columns, so they see each of ours as its transpose:
    ``out^T = right^T left``, ``A = U^T U`` with U upper, and ``X^T U^T U = B^T``.
    """

    device: torch.device

    def _bindings(self) -> tuple[Any, Any, Any]:
        import cupy
        from cupy_backends.cuda.libs import cublas, cusolver

        return cupy, cublas, cusolver

    def add_products(self, out: torch.Tensor, left: torch.Tensor, right: torch.Tensor, *, clear: bool) -> None:
        """cublasGemmEx, accumulating in float32 (never TF32)."""
        import numpy as np

        cupy, cublas, _ = self._bindings()
        kind = _CUDA_R_16BF if left.dtype == torch.bfloat16 else _CUDA_R_32F
        one, beta = np.array(1, np.float32), np.array(0 if clear else 1, np.float32)
        (rows, m), n = left.shape, right.shape[1]
        with cupy.cuda.Device(self.device.index), current_stream(self.device.index):
            handle = cupy.cuda.device.get_cublas_handle()
            mode = cublas.getMathMode(handle)
            cublas.setMathMode(handle, 0)  # CUBLAS_DEFAULT_MATH: float32 products in float32
            try:
                cublas.gemmEx(
                    *(handle, _OP_N, _OP_T, n, m, rows, one.ctypes.data),
                    *(right.data_ptr(), kind, right.stride(0), left.data_ptr(), kind, left.stride(0)),
                    *(beta.ctypes.data, out.data_ptr(), _CUDA_R_32F, out.stride(0)),
                    *(_CUBLAS_COMPUTE_32F, _CUBLAS_GEMM_DEFAULT),
                )
            finally:
                cublas.setMathMode(handle, mode)

    def factor(self, matrix: torch.Tensor) -> int:
        """cusolverDnDpotrf."""
        cupy, _, cusolver = self._bindings()
        n = len(matrix)
        with cupy.cuda.Device(self.device.index), current_stream(self.device.index):
            handle = cupy.cuda.device.get_cusolver_handle()
            size = cusolver.dpotrf_bufferSize(handle, _UPPER, n, matrix.data_ptr(), n)
            workspace = torch.empty(size, dtype=torch.float64, device=matrix.device)
            info = torch.zeros(1, dtype=torch.int32, device=matrix.device)
            cusolver.dpotrf(handle, _UPPER, n, matrix.data_ptr(), n, workspace.data_ptr(), size, info.data_ptr())
            return int(info)

    def solve(self, factor: torch.Tensor, targets: torch.Tensor) -> None:
        """Two cublasDtrsm from the right."""
        import numpy as np

        cupy, cublas, _ = self._bindings()
        (n, width), one = targets.shape, np.array(1, np.float64)
        with cupy.cuda.Device(self.device.index), current_stream(self.device.index):
            handle = cupy.cuda.device.get_cublas_handle()
            for operation in (_OP_N, _OP_T):
                cublas.dtrsm(
                    *(handle, _SIDE_RIGHT, _UPPER, operation, _NON_UNIT, width, n, one.ctypes.data),
                    *(factor.data_ptr(), n, targets.data_ptr(), width),
                )


class DeviceMoments(Moments):
    """`Moments` whose products run on tensor cores: rows about the shift, rounded to bf16 once, summed in float32.

    Sums and squares are those of the rounded rows, in float64, so that centring stays consistent. ``products``
    ``float32`` rounds to float32 instead (TF32 off): slower, within `moments.ERROR_BOUND`'s size. Two of these may be
    merged, and ``centred()`` read, as with `Moments`; both first flush what float32 still holds.

    Memory: ``12 n_in (n_in + n_out)`` bytes, and ``BLOCK_ROWS (n_in + n_out)`` elements.
    """

    def __init__(
        self,
        n_in: int,
        n_out: int,
        device: torch.device | str,
        *,
        products: str = "bfloat16",
        library: Library | None = None,
    ) -> None:
        """Zero sums.

        Raises:
            FitError: ``products`` is unknown.
            KernelError: the device has no room for them.
        """
        if products not in ("bfloat16", "float32"):
            raise FitError(f"products {products!r}: expected bfloat16 or float32")
        dtype = torch.bfloat16 if products == "bfloat16" else torch.float32
        try:
            super().__init__(n_in, n_out, device)
            self._rows = torch.empty(BLOCK_ROWS, n_in + n_out, dtype=dtype, device=device)
            self._part_xx = torch.empty(n_in, n_in, dtype=torch.float32, device=device)
            self._part_xy = torch.empty(n_in, n_out, dtype=torch.float32, device=device)
            self._squares = torch.zeros(n_in, dtype=torch.float64, device=device)  # of x; its matrix has them too
        except torch.OutOfMemoryError as error:
            needed = 12 * n_in * (n_in + n_out) / 1e9
            raise KernelError(
                f"moments: the sums of {n_in:,} inputs and {n_out:,} targets take {needed:.1f} GB, and {device} has no "
                "room for them: fit fewer splits or features at once, or on the host (device 'cpu')"
            ) from error
        self._library: Library = library or CudaLibrary(self.device)
        self._suffix = "bf16" if products == "bfloat16" else "f32"
        self._blocks = 0

    def add(self, x: torch.Tensor, y: torch.Tensor) -> None:
        """Add rows: ``x`` ``[rows, n_in]`` and ``y`` ``[rows, n_out]`` on the device, bf16, fp16 or fp32, finite.

        Raises:
            FitError: the shapes do not fit these sums.
            KernelError: dtype, device or layout are not what the kernels read.
        """
        if x.ndim != 2 or y.ndim != 2 or len(x) != len(y) or (x.shape[1], y.shape[1]) != (self.n_in, self.n_out):
            raise FitError(
                f"moments: expected x [rows, {self.n_in}] and y [rows, {self.n_out}], "
                f"found {list(x.shape)} and {list(y.shape)}"
            )
        for start in range(0, len(x), BLOCK_ROWS):
            self._add_block(x[start : start + BLOCK_ROWS], y[start : start + BLOCK_ROWS])

    def _add_block(self, x: torch.Tensor, y: torch.Tensor) -> None:
        x_shift, y_shift = self.begin(x, y)
        rows = len(x)
        self._centre(x, x_shift, self._rows[:, : self.n_in], self._x_sum, self._squares)
        left = self._rows[:rows, : self.n_in]
        clear = self._blocks == 0
        self._library.add_products(self._part_xx, left, left, clear=clear)
        if self.n_out:
            right = self._rows[:, self.n_in :]
            self._centre(y, y_shift, right, self._y_sum, self._yy)
            self._library.add_products(self._part_xy, left, right[:rows], clear=clear)
        self.n += rows
        self._blocks += 1
        if self._blocks == BLOCKS_PER_TOTAL:
            self.flush()

    def _centre(
        self, rows: torch.Tensor, shift: torch.Tensor, out: torch.Tensor, sums: torch.Tensor, squares: torch.Tensor
    ) -> None:
        names = {torch.bfloat16: "bf16", torch.float16: "f16", torch.float32: "f32"}
        if rows.dtype not in names:
            raise KernelError(
                f"centre_rows: argument 'x' has dtype {rows.dtype}, expected bfloat16, float16 or float32"
            )
        count, n = rows.shape
        address = check_tensor(
            "centre_rows", "x", rows, dtype=rows.dtype, shape=(None, n), device=self._rows.device, contiguous=False
        )
        Launch(
            "gram",
            f"centre_rows_{names[rows.dtype]}_{self._suffix}",
            (blocks(n, _GRAM_THREADS), 1),
            _GRAM_THREADS,
            (
                *(address, rows.stride(0), count, n, shift.data_ptr(), out.data_ptr(), out.stride(0)),
                *(sums.data_ptr(), squares.data_ptr()),
            ),
            (rows, shift, out, sums, squares),
        ).run(self.device)

    def flush(self) -> None:
        """Float32's part into the float64 totals."""
        if self._blocks == 0:
            return
        for total, part in ((self._xx, self._part_xx), (self._xy, self._part_xy)):
            if part.numel():
                grid = (min(blocks(part.numel(), 256), 65536), 1)
                arguments = (total.data_ptr(), part.data_ptr(), part.numel())
                Launch("gram", "add_products", grid, 256, arguments, (total, part)).run(self.device)
        self._blocks = 0

    def tensors(self) -> dict[str, torch.Tensor]:
        """As `Moments.tensors`, with what float32 still holds: a flush out of its turn would round otherwise."""
        found = super().tensors()
        if self._blocks:
            blocks_held = torch.tensor([self._blocks])
            found |= {"blocks": blocks_held, "part_xx": self._part_xx, "part_xy": self._part_xy}
        return found

    def restore(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """As `Moments.restore`."""
        super().restore(tensors)
        if "blocks" in tensors:
            self._blocks = int(tensors["blocks"])
            self._part_xx.copy_(tensors["part_xx"])
            self._part_xy.copy_(tensors["part_xy"])

    def centred(self) -> CentredMoments:
        """As `Moments.centred`."""
        self.flush()
        return super().centred()


class RidgeSystem:
    """One split's ridge systems, from its sums where they lie: built, factored and solved without another copy.

    Args:
        moments: the sums.
        columns: the input columns that take part; None: all.
        features: how many equal parts they are, each penalised by its own mean diagonal.
    """

    def __init__(
        self,
        moments: DeviceMoments,
        *,
        columns: Sequence[int] | None = None,
        features: int = 1,
    ) -> None:
        moments.flush()
        if moments.n == 0:
            raise FitError("moments: no rows were added; the texts are too short or there are none")
        self._moments, self._library = moments, moments._library
        self.device = moments.device
        self.n_in = moments.n_in if columns is None else len(columns)
        self._columns = None if columns is None else torch.tensor(list(columns), device=self.device)
        self._dx, self._dy = moments._x_sum / moments.n, moments._y_sum / moments.n
        self.x_mean = self._of_columns(moments._x_shift.double() + self._dx)  # type: ignore[union-attr]
        self.y_mean = moments._y_shift.double() + self._dy  # type: ignore[union-attr]
        self.syy = moments._yy - moments.n * self._dy.square()
        self._features = features
        self._factor: torch.Tensor | None = None

    def _of_columns(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if self._columns is None else tensor[self._columns]

    def bytes_needed(self, width: int) -> int:
        """Device memory that a solve of ``width`` targets at once takes beside the sums: the factor and the targets."""
        return 8 * self.n_in * (self.n_in + width)

    def check_memory(self, width: int, free_bytes: int) -> None:
        """Refuse a solve that the device cannot hold.

        Raises:
            KernelError: with the bytes needed and free, and the host path.
        """
        needed = self.bytes_needed(width)
        if needed > free_bytes:
            raise KernelError(
                f"ridge_solve: {self.n_in} inputs and {width} targets at once need {needed / 1e9:.1f} GB of device "
                f"memory, {free_bytes / 1e9:.1f} GB are free: solve fewer targets at once, or on the host "
                "(ridge.solve_ridge with moments.centred() moved to the CPU)"
            )

    def _check_free(self, width: int) -> None:
        if self.device.type == "cuda":
            free, _ = torch.cuda.mem_get_info(self.device)
            held = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
            there = 0 if self._factor is None else self._factor.nbytes
            self.check_memory(width, free + held + there)

    def inputs(self) -> CentredMoments:
        """The sums of the inputs alone about their mean, without a target."""
        none = self.y_mean[:0]
        return CentredMoments(self._moments.n, self.x_mean, none, self.covariance(), none.new_empty(self.n_in, 0), none)

    def covariance(self) -> torch.Tensor:
        """Sxx ``[n_in, n_in]`` about the mean, float64, of the columns that take part."""
        return self._matrix(None)

    def _matrix(self, penalty: torch.Tensor | None) -> torch.Tensor:
        out = torch.empty(self.n_in, self.n_in, dtype=torch.float64, device=self.device)
        arguments = (
            *(out.data_ptr(), self._moments._xx.data_ptr(), self._moments.n_in, self._dx.data_ptr()),
            *(float(self._moments.n), self.n_in, 0 if self._columns is None else self._columns.data_ptr()),
            *(0 if penalty is None else penalty.data_ptr(), self.n_in // self._features),
        )
        held = tuple(t for t in (out, self._moments._xx, self._dx, self._columns, penalty) if t is not None)
        grid = (blocks(self.n_in, 256), rows_grid(self.n_in))
        Launch("ridge_solve", "ridge_matrix", grid, 256, arguments, held).run(self.device)
        return out

    def factor(self, ridge_lambda: float) -> None:
        """Cholesky of ``Sxx + lambda mean(diag Sxx) I``, kept for `solve`; the sums stay, for the next lambda.

        Raises:
            FitError: it is not positive definite.
        """
        self._factor = None  # its memory serves the next one
        self._check_free(0)
        diagonal = self._of_columns(self._moments._xx.diagonal() - self._moments.n * self._dx.square())
        penalty = ridge_lambda * diagonal.view(self._features, -1).mean(1)
        matrix = self._matrix(penalty)
        if column := self._library.factor(matrix):
            raise FitError(
                f"Sxx + lambda is not positive definite at column {column} of {self.n_in} (lambda {ridge_lambda:g}, "
                f"{self._moments.n} rows): use a larger lambda (1e-3) or more varied text"
            )
        self._factor = matrix

    def targets(self, first: int, width: int) -> torch.Tensor:
        """Sxy ``[n_in, width]`` of targets ``[first, first + width)``, float64."""
        out = torch.empty(self.n_in, width, dtype=torch.float64, device=self.device)
        held = tuple(t for t in (out, self._moments._xy, self._dx, self._dy, self._columns) if t is not None)
        arguments = (
            *(out.data_ptr(), self._moments._xy.data_ptr(), self._moments.n_out, self._dx.data_ptr()),
            *(self._dy.data_ptr(), float(self._moments.n), self.n_in),
            *(0 if self._columns is None else self._columns.data_ptr(), first, width),
        )
        grid = (blocks(width, 256), rows_grid(self.n_in))
        Launch("ridge_solve", "ridge_targets", grid, 256, arguments, held).run(self.device)
        return out

    def solve(self, first: int = 0, width: int | None = None) -> torch.Tensor:
        """The ridge weights ``[n_in, width]`` of targets ``[first, first + width)``, float64; None: all of them.

        One factor serves all targets: layer by layer, or all late layers as one right-hand side.

        Raises:
            FitError: nothing was factored.
            KernelError: the device cannot hold it.
        """
        if self._factor is None:
            raise FitError("ridge: solve() before factor(lambda)")
        width = self._moments.n_out - first if width is None else width
        self._check_free(width)
        weight = self.targets(first, width)
        self._library.solve(self._factor, weight)
        return weight

    def squared_errors(self, weight: torch.Tensor, bias: torch.Tensor, first: int = 0) -> torch.Tensor:
        """The sum over these rows of ``(y - x W - b)^2`` for targets from ``first`` on: ``[width]`` float64.

        What a map of other rows leaves on these: the held-out error, read from the held-out sums.
        """
        weight, width = weight.double().contiguous(), weight.shape[1]
        targets, product = self.targets(first, width), self.covariance() @ weight
        syy = self.syy[first : first + width].contiguous()
        offset = self.y_mean[first : first + width] - self.x_mean @ weight - bias.double()
        errors = torch.empty(width, dtype=torch.float64, device=self.device)
        tensors = (errors, weight, product, targets, syy, offset)
        arguments = (*(tensor.data_ptr() for tensor in tensors), float(self._moments.n), self.n_in, width)
        Launch("ridge_solve", "squared_errors", (blocks(width, 256), 1), 256, arguments, tensors).run(self.device)
        return errors
