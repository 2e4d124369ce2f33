"""The state behind a filled bulk, corrected by what scanning predicted inputs leaves out of it (design section 2.3).

A fill adds ``alpha rho C`` to a late layer's recurrent state at the bulk's end, before the first exact row behind it is
scanned; ``C`` is the file's (`ridgefill.state_fit`), ``alpha`` the attachment's, and ``rho`` is 1, or less behind less
than a chunk of filled rows, whose error has not built up. Where the next bulk goes on right there (a prompt in pieces),
the correction is taken off first: C is what the error comes to at an end, not what each piece adds. So the cache
remembers what was added and where, and so does a copy of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

# Rows between the ends over which the fit takes the mean.
CHUNK_ROWS = 64
# The attribute under which a cache's layer remembers.
APPLIED = "ridgefill_correction"


@dataclass(frozen=True)
class Applied:
    """What was added to a layer's state: ``scale * correction``, behind ``rows`` filled rows, up to ``position``.

    It holds the correction itself, so that other maps may be attached when it is taken off.
    """

    position: int
    rows: int
    scale: float
    correction: torch.Tensor

    def __deepcopy__(self, _: dict[int, Any]) -> Applied:
        return self  # never written to, so that copies of a cache share it


def take_off(layer: Any, position: int) -> int:
    """Undo the correction of a cache layer whose next bulk goes on at ``position``; returns the filled rows before it.

    Rows that ran since have carried the corrected state on: then it stays as it is, and no filled row is right before.
    """
    applied: Applied | None = vars(layer).pop(APPLIED, None)
    if applied is None or applied.position != position or not layer.has_previous_state[0]:
        return 0
    layer.recurrent_states[0].sub_(applied.correction, alpha=applied.scale)
    return applied.rows


def put_on(layer: Any, correction: torch.Tensor, *, alpha: float, position: int, rows: int) -> None:
    """Correct the state of a cache layer behind ``rows`` filled rows that end at ``position``, and remember it."""
    scale = alpha * min(1.0, rows / CHUNK_ROWS)
    layer.recurrent_states[0].add_(correction, alpha=scale)
    setattr(layer, APPLIED, Applied(position, rows, scale, correction))
