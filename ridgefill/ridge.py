"""One split's ridge systems: weights from centred sums by one Cholesky, their residuals, and the penalty."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from ridgefill.device_fit import RidgeSystem
from ridgefill.errors import FitError
from ridgefill.moments import CentredMoments

# Penalties that ``ridge_lambda="auto"`` tries, relative to the mean diagonal of Sxx.
LAMBDA_GRID = (1e-6, 1e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 1.0)


def solve_ridge(moments: CentredMoments, ridge_lambda: float, *, features: int = 1) -> torch.Tensor:
    """The ridge weights ``(Sxx + lambda mean(diag Sxx) I)^-1 Sxy``: ``[n_in, n_out]`` float64, one Cholesky.

    Each of x's ``features`` equal parts is penalised by its own mean diagonal: a mean of normalised rows is a hundred
    times smaller than the stream beside it.

    Raises:
        FitError: the penalised Sxx is not positive definite.
    """
    penalised = moments.sxx.clone()
    parts = moments.sxx.diagonal().view(features, -1)
    penalised.diagonal().add_((ridge_lambda * parts.mean(1, keepdim=True)).expand_as(parts).reshape(-1))
    factor, info = torch.linalg.cholesky_ex(penalised)
    if int(info) != 0:
        raise FitError(
            f"Sxx + lambda is not positive definite at column {int(info)} of {len(penalised)} "
            f"(lambda {ridge_lambda:g}, {moments.n} rows): use a larger lambda (1e-3) or more varied text"
        )
    return torch.cholesky_solve(moments.sxy, factor)


def squared_error(moments: CentredMoments, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """The sum over rows of ``(y - x W - b)^2`` for each output column, from the rows' moments: ``[n_out]`` float64."""
    weight = weight.double()
    spread = moments.syy - 2 * (weight * moments.sxy).sum(0) + (weight * (moments.sxx @ weight)).sum(0)
    offset = moments.y_mean - moments.x_mean @ weight - bias.double()
    return spread.clamp_min(0) + moments.n * offset.square()


class PlainSystem:
    """One split's ridge systems from its centred sums, in torch; `device_fit.RidgeSystem` is the same by kernels."""

    def __init__(self, moments: CentredMoments, *, features: int = 1) -> None:
        self._moments, self._features = moments, features
        self.x_mean, self.y_mean, self.syy = moments.x_mean, moments.y_mean, moments.syy
        self._weight: torch.Tensor | None = None

    def inputs(self) -> CentredMoments:
        """The inputs' sums about their mean."""
        return self._moments

    def factor(self, ridge_lambda: float) -> None:
        """Solve for all targets, as one right-hand side.

        Raises:
            FitError: the system is not positive definite.
        """
        self._weight = None  # its memory serves the next one
        self._weight = solve_ridge(self._moments, ridge_lambda, features=self._features)

    def solve(self, first: int, width: int) -> torch.Tensor:
        """The ridge weights ``[n_in, width]`` of targets ``[first, first + width)``, float64.

        Raises:
            FitError: nothing was factored.
        """
        if self._weight is None:
            raise FitError("ridge: solve() before factor(lambda)")
        return self._weight[:, first : first + width]

    def squared_errors(self, weight: torch.Tensor, bias: torch.Tensor, first: int) -> torch.Tensor:
        """`squared_error` of these rows for targets from ``first`` on."""
        found, of = self._moments, slice(first, first + weight.shape[1])
        targets = replace(found, y_mean=found.y_mean[of], sxy=found.sxy[:, of], syy=found.syy[of])
        return squared_error(targets, weight, bias)


System = PlainSystem | RidgeSystem


def choose_lambda(fitted: System, held_out: System, width: int, grid: Sequence[float] = LAMBDA_GRID) -> float:
    """The grid's value with the least held-out squared error, each column relative to its own held-out variance.

    Values whose system is singular are passed over. ``width`` columns, a layer's, are looked at together.

    Raises:
        FitError: every value's system is singular.
    """
    variance = held_out.syy.clamp_min(torch.finfo(torch.float64).tiny)
    best: tuple[float, float] | None = None
    failure: FitError | None = None
    for ridge_lambda in grid:
        try:
            fitted.factor(ridge_lambda)
        except FitError as error:
            failure = error
            continue
        shares = []
        for first in range(0, len(variance), width):
            weight = fitted.solve(first, width)
            errors = held_out.squared_errors(weight, ridge_bias(fitted, weight, first), first)
            shares.append(errors / variance[first : first + width])
        error_share = float(torch.cat(shares).mean())
        if best is None or error_share < best[0]:
            best = (error_share, ridge_lambda)
    if best is None:
        raise failure or FitError("lambda: the grid is empty")
    return best[1]


def ridge_bias(system: System, weight: torch.Tensor, first: int) -> torch.Tensor:
    """``my - mx W`` of a weight ``[n_in, width]`` for targets from ``first`` on, float64."""
    return system.y_mean[first : first + weight.shape[1]] - system.x_mean @ weight.double()
