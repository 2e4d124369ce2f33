"""Streaming sums for ridge maps: one row of x, many targets, float64 totals from float32 products."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from ridgefill.errors import FitError
from ridgefill.matrices import exact_float32_products

# A float32 product sums at most this many rows before it meets a float64 total: the error stays below
# gamma(1024) = 6.2e-5 of sqrt(sum x_i^2 * sum y_j^2) in the worst case, and about 2e-7 of it in practice.
BLOCK_ROWS = 1024
# gamma(n) = n u / (1 - n u) for products and sums, and 3u for the two subtractions of the shift.
ERROR_BOUND = (BLOCK_ROWS + 3) * 2.0**-24 / (1 - (BLOCK_ROWS + 3) * 2.0**-24)
_SUMS = ("x_sum", "y_sum", "xx", "xy", "yy")


@dataclass(frozen=True)
class CentredMoments:
    """Sums about the means, all float64: what a ridge solve needs and what a held-out error needs.

    Attributes:
        n: the number of rows.
        x_mean: ``[n_in]``.
        y_mean: ``[n_out]``, the targets of all late layers side by side.
        sxx: ``[n_in, n_in]``, sum of ``(x - x_mean)(x - x_mean)^T``.
        sxy: ``[n_in, n_out]``, sum of ``(x - x_mean)(y - y_mean)^T``.
        syy: ``[n_out]``, the diagonal of sum ``(y - y_mean)(y - y_mean)^T``.
    """

    n: int
    x_mean: torch.Tensor
    y_mean: torch.Tensor
    sxx: torch.Tensor
    sxy: torch.Tensor
    syy: torch.Tensor

    def of_columns(self, columns: Sequence[int]) -> CentredMoments:
        """The moments of some of x's columns: what a pass over these alone would have given."""
        if len(columns) == len(self.x_mean) and list(columns) == list(range(len(columns))):
            return self
        index = torch.tensor(columns, device=self.sxx.device)
        return replace(self, x_mean=self.x_mean[index], sxx=self.sxx[index][:, index], sxy=self.sxy[index])


class Moments:
    """Running sums over rows for one split; ``add`` rows in any pieces, then read ``centred()``.

    Products run in float32 over blocks of at most ``BLOCK_ROWS`` rows, about a fixed shift (the first block's mean,
    which the residual stream's outlier dimensions need), and are summed in float64. Each entry of the sums about the
    shift is within ``ERROR_BOUND * sqrt(A_ii * A_jj)`` of the exact sum, where ``A`` holds the sums of squares about
    the shift (Higham, Accuracy and Stability of Numerical Algorithms, 2002, section 3.1, with Cauchy-Schwarz).

    Memory: ``8 * n_in * (n_in + n_out)`` bytes, whatever the number of rows.
    """

    def __init__(self, n_in: int, n_out: int, device: torch.device | str = "cpu") -> None:
        self.n = 0
        self.n_in = n_in
        self.n_out = n_out
        self.device = torch.device(device)
        self._x_shift: torch.Tensor | None = None  # float32, so that x - shift rounds once
        self._y_shift: torch.Tensor | None = None
        self._x_sum = torch.zeros(n_in, dtype=torch.float64, device=device)
        self._y_sum = torch.zeros(n_out, dtype=torch.float64, device=device)
        self._xx = torch.zeros(n_in, n_in, dtype=torch.float64, device=device)
        self._xy = torch.zeros(n_in, n_out, dtype=torch.float64, device=device)
        self._yy = torch.zeros(n_out, dtype=torch.float64, device=device)

    def add(self, x: torch.Tensor, y: torch.Tensor) -> None:
        """Add rows: ``x`` ``[rows, n_in]`` and ``y`` ``[rows, n_out]``, float32 or narrower, finite.

        Raises:
            FitError: the shapes do not fit these sums.
        """
        if (
            x.ndim != 2
            or y.ndim != 2
            or x.shape[0] != y.shape[0]
            or (x.shape[1], y.shape[1]) != (self.n_in, self.n_out)
        ):
            raise FitError(
                f"moments: expected x [rows, {self.n_in}] and y [rows, {self.n_out}], "
                f"found {list(x.shape)} and {list(y.shape)}"
            )
        with exact_float32_products():
            for start in range(0, x.shape[0], BLOCK_ROWS):
                self._add_block(x[start : start + BLOCK_ROWS].float(), y[start : start + BLOCK_ROWS].float())

    def begin(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Take the shift, the means of the first block of these rows, unless there is one; returns it.

        `add` does so itself. Sums that begin with the same rows have the same float32 products, whoever adds them.
        """
        if self._x_shift is None or self._y_shift is None:
            self._x_shift, self._y_shift = x[:BLOCK_ROWS].float().mean(0), y[:BLOCK_ROWS].float().mean(0)
        return self._x_shift, self._y_shift

    @property
    def begun(self) -> bool:
        """Whether there is a shift."""
        return self._x_shift is not None

    def _add_block(self, x: torch.Tensor, y: torch.Tensor) -> None:
        x_shift, y_shift = self.begin(x, y)
        x = x - x_shift  # [rows, n_in]
        y = y - y_shift  # [rows, n_out]
        self.n += x.shape[0]
        self._x_sum += x.sum(0, dtype=torch.float64)
        self._y_sum += y.sum(0, dtype=torch.float64)
        self._xx += x.T @ x
        self._xy += x.T @ y
        self._yy += y.square_().sum(0)

    def merge(self, other: Moments) -> None:
        """Add another's rows to these sums, exactly but for float64 rounding; the shifts may differ.

        Raises:
            FitError: the other's widths differ.
        """
        if (other.n_in, other.n_out) != (self.n_in, self.n_out):
            raise FitError(f"moments: cannot merge widths {(other.n_in, other.n_out)} into {(self.n_in, self.n_out)}")
        self.flush()
        other.flush()
        if other._x_shift is None or other._y_shift is None:
            return
        if self._x_shift is None or self._y_shift is None:
            self._x_shift, self._y_shift = (s.to(self.device, copy=True) for s in (other._x_shift, other._y_shift))
        moved = other._sums_about(self._x_shift, self._y_shift)
        for mine, theirs in zip(self._sums(), moved, strict=True):
            mine += theirs.to(self.device)
        self.n += other.n

    def all_reduce(self) -> None:
        """Make these the sums over the rows of all processes of torch.distributed's default group, in each of them.

        Every process calls this, and in each the sums have begun, or in none. They meet about the first one's shift.
        """
        import torch.distributed as dist

        self.flush()
        if self._x_shift is None or self._y_shift is None:
            return
        x_shift, y_shift = self._x_shift.clone(), self._y_shift.clone()
        for shift in (x_shift, y_shift):
            if shift.numel():
                dist.broadcast(shift, src=0)
        count, moved = torch.tensor([self.n], device=self.device), self._sums_about(x_shift, y_shift)
        for total in (count, *moved):
            if total.numel():
                dist.all_reduce(total)
        for mine, total in zip(self._sums(), moved, strict=True):
            mine.copy_(total)
        self.n, self._x_shift, self._y_shift = int(count), x_shift, y_shift

    def tensors(self) -> dict[str, torch.Tensor]:
        """These sums by name, for a file: `restore` goes on from them to the last bit."""
        found = {"n": torch.tensor([self.n]), **dict(zip(_SUMS, self._sums(), strict=True))}
        if self._x_shift is not None and self._y_shift is not None:
            found |= {"x_shift": self._x_shift, "y_shift": self._y_shift}
        return found

    def restore(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Become the sums that `tensors` gave, of these widths, to the last bit.

        Raises:
            FitError: one is missing or has another shape.
        """
        shapes = {"n": (1,), **{name: tuple(mine.shape) for name, mine in zip(_SUMS, self._sums(), strict=True)}}
        if "x_shift" in tensors:
            shapes |= {"x_shift": (self.n_in,), "y_shift": (self.n_out,)}
        for name, shape in shapes.items():
            if name not in tensors or tuple(tensors[name].shape) != shape:
                found = list(tensors[name].shape) if name in tensors else "none"
                raise FitError(f"moments: expected a tensor {name} {list(shape)}, found {found}")
        self.n = int(tensors["n"])
        for name, mine in zip(_SUMS, self._sums(), strict=True):
            mine.copy_(tensors[name])
        if "x_shift" in tensors:
            self._x_shift, self._y_shift = (tensors[name].to(self.device, copy=True) for name in ("x_shift", "y_shift"))

    def _sums(self) -> tuple[torch.Tensor, ...]:
        """The totals themselves, in the order of ``_SUMS``."""
        return self._x_sum, self._y_sum, self._xx, self._xy, self._yy

    def _sums_about(self, x_shift: torch.Tensor, y_shift: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """What the totals would be about another shift: new tensors, equal to these where the shifts are."""
        if self._x_shift is None or self._y_shift is None:
            return tuple(total.clone() for total in self._sums())
        # With rows at u = x - our shift: x - their shift = u + dx, where dx = our shift - theirs.
        dx = self._x_shift.double() - x_shift.to(self.device).double()
        dy = self._y_shift.double() - y_shift.to(self.device).double()
        x_moved = torch.outer(self._x_sum, dx)
        return (
            self._x_sum + self.n * dx,
            self._y_sum + self.n * dy,
            self._xx + x_moved + x_moved.T + self.n * torch.outer(dx, dx),
            self._xy + torch.outer(self._x_sum, dy) + torch.outer(dx, self._y_sum + self.n * dy),
            self._yy + 2 * dy * self._y_sum + self.n * dy.square(),
        )

    def flush(self) -> None:
        """Bring what a subclass still holds elsewhere into the totals."""

    def centred(self) -> CentredMoments:
        """The sums about the means.

        Raises:
            FitError: no row was added.
        """
        if self.n == 0 or self._x_shift is None or self._y_shift is None:
            raise FitError("moments: no rows were added; the texts are too short or there are none")
        dx, dy = self._x_sum / self.n, self._y_sum / self.n  # means about the shift
        return CentredMoments(
            n=self.n,
            x_mean=self._x_shift.double() + dx,
            y_mean=self._y_shift.double() + dy,
            sxx=torch.addr(self._xx, dx, dx, alpha=-self.n),
            sxy=torch.addr(self._xy, dx, dy, alpha=-self.n),
            syy=self._yy - self.n * dy.square(),
        )


def reference_moments(x: torch.Tensor, y: torch.Tensor) -> CentredMoments:
    """The same sums from all rows at once in pure float64: the readable oracle of ``Moments``.

    Args:
        x: ``[rows, n_in]``.
        y: ``[rows, n_out]``.
    """
    x, y = x.double(), y.double()
    x_mean, y_mean = x.mean(0), y.mean(0)
    dx, dy = x - x_mean, y - y_mean
    return CentredMoments(len(x), x_mean, y_mean, dx.T @ dx, dx.T @ dy, dy.square().sum(0))
