"""The streaming sums stay within their stated bound of pure float64, however rows arrive."""

from __future__ import annotations

import pytest
import torch

from ridgefill.errors import FitError
from ridgefill.moments import BLOCK_ROWS, ERROR_BOUND, CentredMoments, Moments, reference_moments

N_IN, N_OUT = 24, 40


def _rows(count: int, *, outliers: bool, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Correlated rows; with outliers, dimensions of size 1e3 and with means far from zero, as residual streams have."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, N_IN, generator=generator)
    y = x @ torch.randn(N_IN, N_OUT, generator=generator) + torch.randn(count, N_OUT, generator=generator)
    if outliers:
        x[:, 3] = 1000 * x[:, 3] + 4000
        x[:, 7] += 500
        y[:, 5] = 1000 * y[:, 5] - 2000
    return x, y


def _streamed(x: torch.Tensor, y: torch.Tensor, pieces: list[int]) -> Moments:
    moments = Moments(x.shape[1], y.shape[1])
    for x_piece, y_piece in zip(x.split(pieces), y.split(pieces), strict=True):
        moments.add(x_piece, y_piece)
    return moments


def _worst_share_of_bound(found: CentredMoments, x: torch.Tensor, y: torch.Tensor, shift_rows: int) -> float:
    """The largest error of Sxx, Sxy and Syy over its bound; at most 1 when the bound holds."""
    exact = reference_moments(x, y)
    # The bound speaks of sums of squares about the shift, the mean of the first block.
    about_x = (x.double() - x[:shift_rows].mean(0).double()).square().sum(0)
    about_y = (y.double() - y[:shift_rows].mean(0).double()).square().sum(0)
    shares = (
        (found.sxx - exact.sxx).abs() / torch.outer(about_x, about_x).sqrt(),
        (found.sxy - exact.sxy).abs() / torch.outer(about_x, about_y).sqrt(),
        (found.syy - exact.syy).abs() / about_y,
    )
    return max(float(share.max()) for share in shares) / ERROR_BOUND


@pytest.mark.parametrize("outliers", [False, True])
@pytest.mark.parametrize("pieces", [[5000], [1, 999, 1024, 2976], [17] * 294 + [2]])
def test_sums_stay_within_the_stated_bound(pieces: list[int], outliers: bool) -> None:
    x, y = _rows(sum(pieces), outliers=outliers)
    found = _streamed(x, y, pieces).centred()
    exact = reference_moments(x, y)
    assert found.n == exact.n == sum(pieces)
    assert _worst_share_of_bound(found, x, y, min(pieces[0], BLOCK_ROWS)) < 1
    torch.testing.assert_close(found.x_mean, exact.x_mean, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(found.y_mean, exact.y_mean, rtol=1e-6, atol=1e-6)


def test_the_bound_is_tight_enough_to_catch_narrow_products() -> None:
    x, y = _rows(5000, outliers=True)
    narrow = _streamed(x.bfloat16(), y.bfloat16(), [5000]).centred()
    assert _worst_share_of_bound(narrow, x, y, BLOCK_ROWS) > 1


def test_practical_error_is_far_below_the_bound() -> None:
    x, y = _rows(20_000, outliers=True)
    assert _worst_share_of_bound(_streamed(x, y, [20_000]).centred(), x, y, BLOCK_ROWS) < 0.02


def test_a_caller_who_allows_narrow_matmuls_does_not_change_the_sums() -> None:
    x, y = _rows(3000, outliers=True)
    expected = _streamed(x, y, [3000]).centred()
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        found = _streamed(x, y, [3000]).centred()
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision(before)
    assert torch.equal(found.sxy, expected.sxy)


def test_merge_equals_one_pass() -> None:
    x, y = _rows(4000, outliers=True)
    x[1500:] += 3  # so that the two shifts differ
    merged = _streamed(x[:1500], y[:1500], [1500])
    merged.merge(_streamed(x[1500:], y[1500:], [2500]))
    found, exact = merged.centred(), reference_moments(x, y)
    assert found.n == 4000
    assert _worst_share_of_bound(found, x, y, BLOCK_ROWS) < 1
    torch.testing.assert_close(found.x_mean, exact.x_mean, rtol=1e-7, atol=1e-7)
    torch.testing.assert_close(found.y_mean, exact.y_mean, rtol=1e-7, atol=1e-7)


def test_merge_of_far_shifts_is_exact_where_float32_is() -> None:
    # Small integers, one row a shift: every product is exact, so only the merge's own arithmetic could differ.
    generator = torch.Generator().manual_seed(1)
    x = torch.randint(-8, 9, (64, N_IN), generator=generator).float()
    y = torch.randint(-8, 9, (64, N_OUT), generator=generator).float()
    merged = Moments(N_IN, N_OUT)
    for row in range(64):
        merged.merge(_streamed(x[row : row + 1] + 100 * row, y[row : row + 1], [1]))
    exact = reference_moments(x + 100 * torch.arange(64.0)[:, None], y)
    torch.testing.assert_close(merged.centred().sxx, exact.sxx, rtol=1e-12, atol=1e-6)
    torch.testing.assert_close(merged.centred().sxy, exact.sxy, rtol=1e-12, atol=1e-6)
    torch.testing.assert_close(merged.centred().syy, exact.syy, rtol=1e-12, atol=1e-6)


def test_merge_with_empty_sums_changes_nothing() -> None:
    x, y = _rows(500, outliers=False)
    full = _streamed(x, y, [500])
    expected = full.centred()
    full.merge(Moments(N_IN, N_OUT))
    empty = Moments(N_IN, N_OUT)
    empty.merge(full)
    for found in (full.centred(), empty.centred()):
        assert torch.equal(found.sxx, expected.sxx)
        assert torch.equal(found.sxy, expected.sxy)
        assert torch.equal(found.y_mean, expected.y_mean)


def test_sums_that_begin_with_the_same_rows_meet_without_rounding() -> None:
    # Integers far from the shift: float32 products are exact about one shift, and would not be about each one's own.
    generator = torch.Generator().manual_seed(2)
    x = torch.randint(-64, 65, (64, N_IN), generator=generator).float()
    y = torch.randint(-64, 65, (64, N_OUT), generator=generator).float()
    whole, parts = Moments(N_IN, N_OUT), [Moments(N_IN, N_OUT) for _ in range(2)]
    for moments in (whole, *parts):
        assert not moments.begun
        moments.begin(x[:1], y[:1])
        assert moments.begun
        assert moments.n == 0
    for row in range(64):
        whole.add(x[row : row + 1], y[row : row + 1])
        parts[row % 2].add(x[row : row + 1], y[row : row + 1])
    parts[0].merge(parts[1])
    for name, tensor in whole.tensors().items():
        assert torch.equal(parts[0].tensors()[name], tensor), name


def test_restored_sums_are_those_that_were_kept() -> None:
    x, y = _rows(3000, outliers=True)
    first, second = _streamed(x[:2000], y[:2000], [2000]), Moments(N_IN, N_OUT)
    second.restore(first.tensors())
    first.add(x[2000:], y[2000:])
    second.add(x[2000:], y[2000:])
    for name, tensor in first.tensors().items():
        assert torch.equal(second.tensors()[name], tensor), name
    untouched = Moments(N_IN, N_OUT)
    untouched.restore(Moments(N_IN, N_OUT).tensors())
    assert not untouched.begun
    with pytest.raises(FitError, match=r"expected a tensor xx \[24, 24\], found \[23, 23\]"):
        second.restore({**first.tensors(), "xx": torch.zeros(23, 23)})
    with pytest.raises(FitError, match=r"expected a tensor yy \[40\], found none"):
        second.restore({name: tensor for name, tensor in first.tensors().items() if name != "yy"})


def test_wrong_shapes_and_no_rows_are_refused() -> None:
    moments = Moments(3, 2)
    with pytest.raises(FitError, match=r"expected x \[rows, 3\] and y \[rows, 2\], found \[5, 4\] and \[5, 2\]"):
        moments.add(torch.zeros(5, 4), torch.zeros(5, 2))
    with pytest.raises(FitError, match=r"found \[5, 3\] and \[4, 2\]"):
        moments.add(torch.zeros(5, 3), torch.zeros(4, 2))
    with pytest.raises(FitError, match="no rows were added"):
        moments.centred()
    with pytest.raises(FitError, match=r"cannot merge widths \(4, 2\) into \(3, 2\)"):
        moments.merge(Moments(4, 2))
