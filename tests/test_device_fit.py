"""Sums and systems of a fit on a GPU, without one: kernels through g++, library calls through a stand-in."""

from __future__ import annotations

import contextlib
import ctypes
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from kernel_host import HostKernels
from tiny import NUM_LAYERS, tiny_model
from tiny_tokenizer import byte_tokenizer, random_text

from ridgefill import device_fit, kernels
from ridgefill.agreement import feature_rows, target_rows
from ridgefill.capture import BlockInputs
from ridgefill.device_fit import CudaLibrary, DeviceMoments, RidgeSystem, TorchLibrary, error_bound
from ridgefill.errors import FitError, KernelError
from ridgefill.features import Features
from ridgefill.kernels import Launch
from ridgefill.layout import decoder_layout
from ridgefill.maps import SplitMaps
from ridgefill.matrices import dense
from ridgefill.moments import ERROR_BOUND, Moments, reference_moments
from ridgefill.ridge import solve_ridge, squared_error
from ridgefill.solve import fit, fit_backend


@pytest.fixture(autouse=True)
def _on_host(host: HostKernels, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Launch, "run", lambda launch, _: host.run(launch))


def device_moments(n_in: int, n_out: int, products: str = "float32") -> DeviceMoments:
    return DeviceMoments(n_in, n_out, "cpu", products=products, library=TorchLibrary())


def sample(rows: int, n_in: int, n_out: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows with large means and scales a hundred times apart, as a residual stream has them."""
    x = torch.randn(rows, n_in) * torch.logspace(-1, 1, n_in) + torch.linspace(-20, 20, n_in)
    y = 0.3 * x @ torch.randn(n_in, n_out) / n_in + torch.randn(rows, n_out) + 1
    return x.to(dtype), y.to(dtype)


# --- moments ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("products", ["bfloat16", "float32"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(("rows", "n_in", "n_out"), [(17, 7, 13), (129, 130, 3), (9000, 5, 4)])
def test_sums_are_within_the_stated_bound(rows: int, n_in: int, n_out: int, dtype: torch.dtype, products: str) -> None:
    x, y = sample(rows, n_in, n_out, dtype)
    moments = device_moments(n_in, n_out, products)
    for piece in range(0, rows, 3000):
        moments.add(x[piece : piece + 3000], y[piece : piece + 3000])
    moments.flush()
    assert moments.n == rows
    assert moments._x_shift is not None
    assert moments._y_shift is not None
    u, v = x.double() - moments._x_shift.double(), y.double() - moments._y_shift.double()
    uu, vv = u.square().sum(0), v.square().sum(0)
    bound = error_bound(products)
    worst = 0.0
    for found, exact, least in (
        (moments._xx, u.T @ u, torch.outer(uu, uu)),
        (moments._xy, u.T @ v, torch.outer(uu, vv)),
        (moments._yy, vv, vv.square()),
    ):
        relative = (found - exact).abs() / least.sqrt()
        worst = max(worst, float(relative.max()))
    assert 0 < worst <= bound
    expected, centred = reference_moments(x, y), moments.centred()
    spread = expected.sxx.diagonal().sqrt()
    assert float(((centred.sxx - expected.sxx) / torch.outer(spread, spread)).abs().max()) < 2 * bound
    torch.testing.assert_close(centred.x_mean, expected.x_mean, rtol=0, atol=0.05 if products == "bfloat16" else 1e-5)


def test_merged_sums_are_those_of_one_pass() -> None:
    x, y = sample(300, 6, 4)
    whole, first, second = (device_moments(6, 4) for _ in range(3))
    whole.add(x, y)
    first.add(x[:100], y[:100])
    second.add(x[100:], y[100:])
    first.merge(second)
    for found, expected in zip(vars(first.centred()).values(), vars(whole.centred()).values(), strict=True):
        torch.testing.assert_close(torch.as_tensor(found), torch.as_tensor(expected), rtol=1e-5, atol=1e-2)


@pytest.mark.parametrize("kept_after", [1, 5, 8, 11])  # pieces of one block each; eight blocks meet in float64
def test_sums_go_on_from_a_file_as_if_never_stopped(kept_after: int) -> None:
    x, y = sample(12 * 64, 6, 4)
    pieces = list(zip(x.split(64), y.split(64), strict=True))
    whole, first, second = (device_moments(6, 4, "bfloat16") for _ in range(3))
    for piece in pieces:
        whole.add(*piece)
    for piece in pieces[:kept_after]:
        first.add(*piece)
    kept = first.tensors()
    assert ("part_xx" in kept) == (kept_after % 8 > 0)
    second.restore(kept)
    for piece in pieces[kept_after:]:
        second.add(*piece)
    for found, expected in zip(vars(second.centred()).values(), vars(whole.centred()).values(), strict=True):
        assert torch.equal(torch.as_tensor(found), torch.as_tensor(expected))
    # The host's sums take what is whole.
    whole.flush()
    plain = Moments(6, 4)
    plain.restore(whole.tensors())
    assert torch.equal(plain.centred().sxx, whole.centred().sxx)


def test_a_split_without_late_layers_has_no_targets() -> None:
    x, _ = sample(40, 6, 4)
    moments = device_moments(6, 0)
    moments.add(x, x[:, :0])
    assert moments.centred().sxy.shape == (6, 0)


def test_rows_that_do_not_fit_are_refused() -> None:
    x, y = sample(40, 6, 4)
    with pytest.raises(FitError, match=r"expected x \[rows, 6\] and y \[rows, 4\], found \[40, 4\]"):
        device_moments(6, 4).add(y, x)
    with pytest.raises(KernelError, match=r"centre_rows: argument 'x' has dtype torch\.float64"):
        device_moments(6, 4).add(x.double(), y.double())
    with pytest.raises(FitError, match="products 'int8': expected bfloat16 or float32"):
        device_moments(6, 4, "int8")


# --- the ridge system -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("columns", "features"), [(None, 1), (None, 2), ([0, 1, 2, 3, 4, 8], 1)])
def test_one_factor_serves_every_target_and_lambda(columns: list[int] | None, features: int) -> None:
    x, y = sample(500, 10, 33)
    held_x, held_y = sample(60, 10, 33)
    moments, held_out, plain, plain_held_out = (
        device_moments(10, 33),
        device_moments(10, 33),
        Moments(10, 33),
        Moments(10, 33),
    )
    for sums, rows in (
        (moments, (x, y)),
        (plain, (x, y)),
        (held_out, (held_x, held_y)),
        (plain_held_out, (held_x, held_y)),
    ):
        sums.add(*rows)
    system = RidgeSystem(moments, columns=columns, features=features)
    elsewhere = RidgeSystem(held_out, columns=columns, features=features)
    fitted = plain.centred().of_columns(columns or range(10))
    held = plain_held_out.centred().of_columns(columns or range(10))
    for ridge_lambda in (1e-3, 0.3, 1e-6):
        system.factor(ridge_lambda)
        expected = solve_ridge(fitted, ridge_lambda, features=features)
        weight = system.solve()
        torch.testing.assert_close(weight, expected, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(system.solve(3, 7), weight[:, 3:10], rtol=1e-12, atol=0)
        bias = system.y_mean - system.x_mean @ weight
        errors = squared_error(held, expected, bias)
        torch.testing.assert_close(elsewhere.squared_errors(weight, bias), errors, rtol=1e-4, atol=0)
        torch.testing.assert_close(elsewhere.squared_errors(weight[:, 5:], bias[5:], 5), errors[5:], rtol=1e-4, atol=0)


def test_what_cannot_be_solved_says_so() -> None:
    with pytest.raises(FitError, match="no rows were added"):
        RidgeSystem(device_moments(4, 2))
    moments = device_moments(4, 2)
    x = torch.ones(10, 4) * torch.arange(10.0).unsqueeze(1)  # four equal columns
    moments.add(x, torch.randn(10, 2))
    system = RidgeSystem(moments)
    with pytest.raises(FitError, match=r"solve\(\) before factor"):
        system.solve()
    with pytest.raises(FitError, match=r"not positive definite at column \d of 4 \(lambda -1, 10 rows\)"):
        system.factor(-1.0)


def test_sums_that_do_not_fit_name_the_host_path(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch, "empty", full)
    with pytest.raises(KernelError, match=r"2,000 inputs and 3,000 targets take 0\.1 GB.* on the host"):
        DeviceMoments(2000, 3000, "cpu")


def test_memory_that_will_not_do_names_the_host_path() -> None:
    moments = device_moments(4, 2)
    moments.add(torch.randn(10, 4), torch.randn(10, 2))
    system = RidgeSystem(moments)
    assert system.bytes_needed(2) == 8 * 4 * (4 + 2)
    system.check_memory(2, 192)
    with pytest.raises(KernelError, match=r"4 inputs and 2 targets at once need 0.0 GB .* on the host \(ridge\."):
        system.check_memory(2, 191)


# --- library calls ----------------------------------------------------------------------------------------------------


def column_major(address: int, rows: int, columns: int, ld: int, kind: Any) -> np.ndarray:
    """A matrix as BLAS reads it: element (i, j) at ``address[i + ld j]``."""
    count = ld * (columns - 1) + rows
    memory = np.ctypeslib.as_array((ctypes.c_char * (count * np.dtype(kind).itemsize)).from_address(address))
    flat = memory.view(kind)
    return np.lib.stride_tricks.as_strided(flat, (rows, columns), (flat.itemsize, ld * flat.itemsize))


class Blas:
    """cuBLAS's and cuSOLVER's own definitions, on host memory."""

    def __init__(self) -> None:
        self.modes: list[int] = []

    def getMathMode(self, _: int) -> int:
        return 3

    def setMathMode(self, _: int, mode: int) -> None:
        self.modes.append(mode)

    def gemmEx(
        self, _: int, ta: int, tb: int, m: int, n: int, k: int, alpha: int, a: int, a_kind: int, lda: int,
        b: int, b_kind: int, ldb: int, beta: int, c: int, c_kind: int, ldc: int, compute: int, algorithm: int,
    ) -> None:  # fmt: skip
        assert (c_kind, compute, algorithm, a_kind) == (0, 68, -1, b_kind)  # float32, CUBLAS_COMPUTE_32F, default

        def operand(address: int, transposed: int, rows: int, columns: int, ld: int) -> np.ndarray:
            shape = (columns, rows) if transposed else (rows, columns)
            found = column_major(address, *shape, ld, {14: np.uint16, 0: np.float32}[a_kind])
            if a_kind == 14:
                found = (found.astype(np.uint32) << 16).view(np.float32)
            return found.T if transposed else found

        out = column_major(c, m, n, ldc, np.float32)
        scalars = [ctypes.c_float.from_address(address).value for address in (alpha, beta)]
        product = operand(a, ta, m, k, lda) @ operand(b, tb, k, n, ldb)
        out[:] = scalars[0] * product + (scalars[1] * out if scalars[1] else 0)

    def dtrsm(
        self, _: int, side: int, uplo: int, trans: int, diag: int, m: int, n: int, alpha: int, a: int, lda: int,
        b: int, ldb: int,
    ) -> None:  # fmt: skip
        assert (side, uplo, diag) == (1, 1, 0)  # right, upper, non-unit
        assert ctypes.c_double.from_address(alpha).value == 1
        factor = np.triu(column_major(a, n, n, lda, np.float64))
        right = column_major(b, m, n, ldb, np.float64)
        right[:] = right @ np.linalg.inv(factor.T if trans else factor)

    def dpotrf_bufferSize(self, _: int, uplo: int, n: int, a: int, lda: int) -> int:
        return n

    def dpotrf(self, _: int, uplo: int, n: int, a: int, lda: int, work: int, size: int, info: int) -> None:
        assert uplo == 1
        matrix = column_major(a, n, n, lda, np.float64)
        lower = np.tril(matrix, -1).copy()  # LAPACK leaves the other triangle alone
        matrix[:] = np.linalg.cholesky(np.triu(matrix) + np.triu(matrix, 1).T).T + lower


@pytest.fixture
def cuda_library(monkeypatch: pytest.MonkeyPatch) -> tuple[CudaLibrary, Blas]:
    blas = Blas()
    device = SimpleNamespace(get_cublas_handle=lambda: 1, get_cusolver_handle=lambda: 2)
    cuda = SimpleNamespace(Device=lambda _: contextlib.nullcontext(), device=device)
    monkeypatch.setattr(CudaLibrary, "_bindings", lambda _: (SimpleNamespace(cuda=cuda), blas, blas))
    monkeypatch.setattr(device_fit, "current_stream", lambda _: contextlib.nullcontext())
    return CudaLibrary(torch.device("cpu")), blas


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_products_are_asked_for_in_the_library_s_terms(
    cuda_library: tuple[CudaLibrary, Blas], dtype: torch.dtype
) -> None:
    rows = torch.randn(20, 12).to(dtype)
    found, expected = torch.full((5, 7), torch.nan), torch.full((5, 7), torch.nan)
    for clear in (True, False):
        for library, out in ((cuda_library[0], found), (TorchLibrary(), expected)):
            library.add_products(out, rows[:17, :5], rows[:17, 5:], clear=clear)  # type: ignore[attr-defined]
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert cuda_library[1].modes == [0, 3, 0, 3]  # TF32 off, and the caller's mode back


def test_systems_are_solved_in_the_library_s_terms(cuda_library: tuple[CudaLibrary, Blas]) -> None:
    square = torch.randn(9, 6, dtype=torch.float64)
    matrix, targets = square.T @ square, torch.randn(6, 11, dtype=torch.float64)
    expected = torch.linalg.solve(matrix, targets)
    for library in (cuda_library[0], TorchLibrary()):
        factor, found = matrix.clone(), targets.clone()
        assert library.factor(factor) == 0  # type: ignore[attr-defined]
        library.solve(factor, found)  # type: ignore[attr-defined]
        torch.testing.assert_close(found, expected)


# --- a whole fit ------------------------------------------------------------------------------------------------------

D, WINDOW, HEAD = 32, 96, 4
# One window each, the second held out: 1,380 rows, which are enough for two features of 32 columns.
TEXTS = [random_text(WINDOW, seed) for seed in range(16)]


@pytest.fixture
def as_if_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels run on the host (as above), and a stand-in does what is left to the libraries."""
    monkeypatch.setattr(kernels, "unavailable", lambda _: None)
    monkeypatch.setattr(device_fit, "CudaLibrary", lambda _: TorchLibrary())


def fitted(model: Any, splits: tuple[int, ...], backend: str, **settings: Any) -> dict[int, SplitMaps]:
    settings = {"features": ("stream",), "gains": "none", "dtype": torch.float32, "window_tokens": WINDOW, **settings}
    return fit(model, byte_tokenizer(), TEXTS, splits, backend=backend, **settings).splits


def stacked(maps: SplitMaps) -> tuple[torch.Tensor, torch.Tensor]:
    layers = maps.layers.values()
    return torch.cat([m.weight for m in layers], 1).double(), torch.cat([m.bias for m in layers]).double()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("names", [("stream",), ("stream", "previous:1")])
def test_a_fit_by_kernels_solves_the_exact_sums_within_the_stated_bound(
    names: tuple[str, ...], dtype: torch.dtype, as_if_on_a_device: None
) -> None:
    """Both backends' maps in the normal equations of the exact rows: what is left is what the sums' bound allows.

    ``(A + E + P) W = B + F`` with ``|E_ij| <= 2 bound a_i a_j`` and ``|F_ij| <= 2 bound a_i c_j``: once for sums about
    the shift and once for centring, where ``a`` and ``c`` are the root sums of squares about the shift.
    """
    model: Any = tiny_model("llama", hidden_size=D).to(dtype)
    splits, ridge_lambda = (2, 4), 1e-2
    found = {b: fitted(model, splits, b, features=names, ridge_lambda=ridge_lambda) for b in ("torch", "cuda")}
    bounds = {"torch": ERROR_BOUND, "cuda": error_bound("float32" if dtype == torch.float32 else "bfloat16")}
    layout = decoder_layout(model)
    with BlockInputs(layout, range(2, NUM_LAYERS)) as block_inputs:
        inputs = [block_inputs.run(byte_tokenizer()(t)["input_ids"]) for n, t in enumerate(TEXTS) if n != 1]
    for split in splits:
        x = [feature_rows(Features.of(names), of_window[split])[HEAD:] for of_window in inputs]
        y = [
            torch.cat([target_rows("normalized", of_window[late][HEAD:]) for late in range(split + 1, NUM_LAYERS)], 1)
            for of_window in inputs
        ]
        rows, targets = torch.cat(x).double(), torch.cat(y).double()
        exact = reference_moments(rows, targets)
        a = (rows - x[0].float().mean(0).double()).square().sum(0).sqrt()
        c = (targets - y[0].mean(0).double()).square().sum(0).sqrt()

        def penalty(diagonal: torch.Tensor) -> torch.Tensor:
            means = diagonal.view(len(names), D).mean(1, keepdim=True)
            return ridge_lambda * means.expand(-1, D).reshape(-1, 1)

        for backend, bound in bounds.items():
            weight, bias = stacked(found[backend][split])
            residual = exact.sxx @ weight + penalty(exact.sxx.diagonal()) * weight - exact.sxy
            allowed = a.unsqueeze(1) * (c + a @ weight.abs()) + penalty(a.square()) * weight.abs()
            assert float((residual.abs() / allowed).max()) <= 2 * bound
            # The means' own bound is the rows' rounding: at most the shift sums' root mean square times the factor's.
            offset = (exact.y_mean - exact.x_mean @ weight - bias).abs()
            assert bool((offset <= bound * (c + a @ weight.abs()) / exact.n**0.5 + 1e-5).all())
        (ours, _), (plain, _) = stacked(found["cuda"][split]), stacked(found["torch"][split])
        assert float((ours - plain).norm() / plain.norm()) < (1e-3 if dtype == torch.float32 else 0.1)
        for layer, layer_map in found["cuda"][split].layers.items():
            expected = found["torch"][split].layers[layer].metrics
            for name in ("input_cosine", "key_relative_error", "scale_error"):
                assert layer_map.metrics[name] == pytest.approx(expected[name], rel=0.02, abs=1e-3)


def test_a_fit_by_kernels_chooses_lambda_and_features_as_the_plain_one_does(as_if_on_a_device: None) -> None:
    """One pass over two features, of which the stream's columns are solved alone, and held-out sums for the grid."""
    model: Any = tiny_model("llama", hidden_size=D)
    found = []
    for backend in ("torch", "cuda"):
        with pytest.warns(UserWarning, match="held-out prompts"):
            found.append(fitted(model, (4,), backend, features="auto", ridge_lambda="auto")[4])
    plain, ours = found
    assert ours.features == plain.features == ("stream",)
    assert ours.ridge_lambda == plain.ridge_lambda
    for layer, layer_map in plain.layers.items():
        torch.testing.assert_close(ours.layers[layer].weight, layer_map.weight, rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(ours.layers[layer].scale_residual, layer_map.scale_residual, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(("dtype", "rank", "most"), [(torch.float32, 6, 1e-3), (torch.int8, None, 0.02)], ids=str)
def test_a_fit_by_kernels_stores_factors_and_codes_as_the_plain_one_does(
    dtype: torch.dtype, rank: int | None, most: float, as_if_on_a_device: None
) -> None:
    model: Any = tiny_model("llama", hidden_size=D)
    plain, ours = (fitted(model, (3,), backend, dtype=dtype, rank=rank)[3] for backend in ("torch", "cuda"))
    assert ours.rank == plain.rank == rank
    for layer, layer_map in plain.layers.items():
        assert ours.layers[layer].tensors.keys() == layer_map.tensors.keys()
        expected, found = (dense(m.weight, torch.float32) for m in (layer_map, ours.layers[layer]))
        assert float((found - expected).norm() / expected.norm()) < most  # a code may round the other way
        torch.testing.assert_close(ours.layers[layer].bias, layer_map.bias, rtol=0, atol=most)


def test_a_fit_takes_what_it_says(as_if_on_a_device: None, monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = tiny_model("llama", hidden_size=D)
    assert fit_backend(model) == ("cuda", "kernels run on cpu; products in float32")
    assert fit_backend(tiny_model("llama").to(torch.bfloat16))[1].endswith("products in bfloat16")
    launched: set[str] = set()
    on_host = Launch.run

    def run(launch: Launch, device: torch.device) -> None:
        launched.add(launch.kernel)
        on_host(launch, device)

    monkeypatch.setattr(Launch, "run", run)
    # A split without late layers needs no map, but sums all the same.
    fitted(model, (4, NUM_LAYERS - 1), "cuda")
    assert launched == {"centre_rows_f32_f32", "add_products", "ridge_matrix", "ridge_targets"}
    launched.clear()
    fitted(model, (4, NUM_LAYERS - 1), "torch")
    assert not launched


def test_a_fit_without_a_device_says_so() -> None:
    model: Any = tiny_model("llama", hidden_size=D)
    assert fit_backend(model) == ("torch", "the model is on cpu; kernels need an NVIDIA GPU")
    with pytest.raises(KernelError, match="backend 'cuda' cannot run: the model is on cpu"):
        fitted(model, (4,), "cuda")
    with pytest.raises(KernelError, match="unknown backend 'fast'"):
        fitted(model, (4,), "fast")
