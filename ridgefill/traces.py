"""A whole trace planned in one call: columns in, columns out. Loads no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ridgefill.errors import PlanError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import ArrayLike, NDArray

    from ridgefill import _core

SENSITIVITIES = ("latency", "balanced", "accuracy")
_COUNTS = ("prompt_tokens", "cached_tokens", "output_tokens")
_COLUMNS = (*_COUNTS, "sensitivity", "ttft_target_s")


def plan_trace(planner: _core.Planner, trace: Mapping[str, ArrayLike] | NDArray[np.void]) -> dict[str, NDArray[Any]]:
    """Return the choice for every request of a trace, a column each.

    A million requests take a fraction of a second: nothing here is a loop in Python.

    Args:
        planner: a model and a policy, made ready.
        trace: columns of one length by name, in a mapping or a structured array: ``prompt_tokens``, and if wanted
            ``cached_tokens`` and ``output_tokens`` (whole numbers), ``sensitivity`` (0 latency, 1 balanced, 2 accuracy,
            or those words), ``ttft_target_s`` (seconds, NaN for none), and ``id``, which is not read.

    Returns:
        ``candidate`` (int32, an index into ``planner.candidates``; -1 where no plan fits the memory budget), ``split``
        (int32, -1 for exact), ``tail_tokens`` (int64, 0 where no plan fits), ``loss_nats``, ``ttft_s`` and
        ``exact_ttft_s`` (float64, NaN where no plan fits).

    Raises:
        PlanError: a column is missing, unknown, of another length, of numbers that are not whole, or a request makes no
            sense; the message names the column or the request.
    """
    import numpy as np

    names = trace.dtype.names or () if isinstance(trace, np.ndarray) else tuple(trace)
    if "prompt_tokens" not in names:
        found = ", ".join(map(str, names)) or "no columns"
        raise PlanError(f"trace: expected a column prompt_tokens, found {found}")
    if unknown := sorted(set(names) - {*_COLUMNS, "id"}):
        raise PlanError(f"trace: unknown column {unknown[0]!r}; known: {', '.join(_COLUMNS)} and id")
    given = {name: np.asarray(trace[name]) for name in _COLUMNS if name in names}
    for name, column in given.items():
        if column.ndim != 1:
            raise PlanError(f"trace: {name} has shape {column.shape}; expected one dimension")
    columns: dict[str, Any] = {name: _whole(name, given[name]) for name in _COUNTS if name in given}
    if "sensitivity" in given:
        columns["sensitivity"] = _codes(given["sensitivity"])
    if "ttft_target_s" in given:
        try:
            columns["ttft_target_s"] = np.ascontiguousarray(given["ttft_target_s"], dtype=np.float64)
        except (TypeError, ValueError):
            raise PlanError(f"trace: ttft_target_s is {given['ttft_target_s'].dtype}; expected seconds") from None
    chosen, ttft, exact = planner.plan_trace(columns.pop("prompt_tokens"), **columns)
    # One entry more, which the index -1 finds: what a request without a plan gets.
    candidates = planner.candidates
    splits = np.array([*(-1 if split is None else split for _, split, _, _ in candidates), -1], dtype=np.int32)
    tails = np.array([*(tail for _, _, tail, _ in candidates), 0], dtype=np.int64)
    losses = np.array([*(np.nan if loss is None else loss for _, _, _, loss in candidates), np.nan])
    return {
        "candidate": chosen,
        "split": splits[chosen],
        "tail_tokens": tails[chosen],
        "loss_nats": losses[chosen],
        "ttft_s": ttft,
        "exact_ttft_s": exact,
    }


def _whole(name: str, column: NDArray[Any]) -> NDArray[np.int64]:
    """A column of counts as contiguous int64; what would lose its value on the way is refused."""
    import numpy as np

    if column.dtype.kind not in "iu" and column.size:
        raise PlanError(f"trace: {name} is {column.dtype}; expected whole numbers")
    if column.dtype.kind == "u" and column.size and int(column.max()) > np.iinfo(np.int64).max:
        raise PlanError(f"trace: {name} holds {int(column.max())}; expected numbers below 2^63")
    return np.ascontiguousarray(column, dtype=np.int64)


def _codes(column: NDArray[Any]) -> NDArray[np.uint8]:
    """A column of sensitivities, in numbers or in words, as the planner's codes."""
    import numpy as np

    if not column.size:
        return np.zeros(0, dtype=np.uint8)
    if column.dtype.kind in "iu":
        known = np.isin(column, range(len(SENSITIVITIES)))
        codes = column.astype(np.uint8)
    else:
        words = column.astype(str)
        known = np.isin(words, SENSITIVITIES)
        codes = np.zeros(len(words), dtype=np.uint8)
        for code, word in enumerate(SENSITIVITIES):
            codes[words == word] = code
    if not known.all():
        index = int(np.flatnonzero(~known)[0])
        raise PlanError(
            f"trace: request {index}: sensitivity is {column[index]}; expected {', '.join(SENSITIVITIES)} or 0 to 2"
        )
    return np.ascontiguousarray(codes)
