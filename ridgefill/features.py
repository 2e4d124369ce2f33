"""What a map reads: the split layer's stream, the rows before it, and causal means of it (design section 2.4)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ridgefill.errors import FitError

if TYPE_CHECKING:
    import torch

# Rows whose means are computed by one product with a triangular matrix of decays.
_MEAN_BLOCK_ROWS = 128


@dataclass(frozen=True)
class Features:
    """The input x of a split's maps, by the names in the file, in their order.

    ``stream``: the split layer's block input; ``previous:k``: that of k rows before; ``mean:a``: the causal exponential
    mean ``m_t = a m_{t-1} + (1 - a) s_t / rms(s_t)``. What lies before the sequence's first row counts as zero.
    """

    names: tuple[str, ...] = ("stream",)

    @staticmethod
    def of(names: Sequence[str]) -> Features:
        """The features of these names.

        Raises:
            FitError: a name is unknown or given twice, or ``stream`` is not the first.
        """
        if not names or names[0] != "stream" or len(set(names)) != len(names):
            raise FitError(f"features {list(names)}: expected 'stream' first, and none twice")
        for name in names[1:]:
            kind, _, number = name.partition(":")
            whole = kind == "previous" and number.isascii() and number.isdigit() and not number.startswith("0")
            part = kind == "mean" and number[:2] == "0." and number[2:].isascii() and number[2:].isdigit()
            if not whole and not (part and not number.endswith("0")):
                raise FitError(f"unknown feature {name!r}; known: stream, previous:<k>, mean:<0.x>")
        return Features(tuple(names))

    @property
    def reach(self) -> int:
        """How many rows before a row its features read by position."""
        return max((int(name.partition(":")[2]) for name in self.names if name.startswith("previous")), default=0)

    @property
    def stream_only(self) -> bool:
        """Whether a row's features are its own stream."""
        return len(self.names) == 1

    def width(self, hidden_size: int) -> int:
        """Columns of x."""
        return len(self.names) * hidden_size

    def columns(self, names: Sequence[str], hidden_size: int) -> list[int]:
        """Where the features ``names``, some of these, lie among x's columns, in their own order."""
        starts = [self.names.index(name) * hidden_size for name in names]
        return [column for start in starts for column in range(start, start + hidden_size)]


STREAM = Features()


class FeatureState:
    """Makes x for consecutive rows, in any pieces: keeps the last ``reach`` rows and the means, whatever the length."""

    def __init__(self, features: Features, before: torch.Tensor | None = None) -> None:
        """Start at a sequence's first row, or after the rows ``before`` ``[batch, >= reach, d]`` (means begin at 0)."""
        self._features = features
        self._before = before
        self._means: dict[str, torch.Tensor] = {}  # [batch, d], float32

    def copy(self) -> FeatureState:
        """A state that goes on from the same row."""
        other = FeatureState(self._features, self._before)
        other._means = dict(self._means)
        return other

    def extend(self, stream: torch.Tensor, visible: torch.Tensor | None = None) -> torch.Tensor:
        """The features of the next rows.

        Args:
            stream: ``[batch, rows, d]``, the split layer's block input.
            visible: ``[batch, rows]`` bool, False at pads, which count as zero for the rows after them.

        Returns:
            ``[batch, rows, n_in]`` in the stream's dtype; the stream itself where nothing else is read.
        """
        import torch

        if self._features.stream_only:
            return stream
        batch, rows, d = stream.shape
        known = stream if visible is None else stream * visible.unsqueeze(-1).to(stream)
        reach = self._features.reach
        before = stream.new_zeros(batch, reach, d) if self._before is None else self._before[:, -reach:]
        joined = torch.cat([before, known], dim=1) if reach else known
        parts = []
        for name in self._features.names:
            kind, _, number = name.partition(":")
            if kind == "stream":
                parts.append(stream)
            elif kind == "previous":
                parts.append(joined[:, reach - int(number) : reach - int(number) + rows])
            else:
                parts.append(self._mean(name, float(number), known))
        if reach:
            self._before = joined[:, -reach:].clone()  # a view would keep the whole stream
        return torch.cat(parts, dim=-1)

    def _mean(self, name: str, decay: float, known: torch.Tensor) -> torch.Tensor:
        """``m_t`` of the next rows, a block of rows at a time: decays within the block, the mean before it decayed."""
        import torch

        steps = torch.arange(_MEAN_BLOCK_ROWS, device=known.device, dtype=torch.float32)
        powers = decay ** (steps[:, None] - steps).clamp_min(0)
        weights = ((1 - decay) * powers).tril()  # [row, row before or itself]
        carried = decay ** (steps + 1)
        mean = self._means.get(name)
        if mean is None:
            mean = known.new_zeros(known.shape[0], known.shape[2], dtype=torch.float32)
        blocks = []
        for block in torch.split(known, _MEAN_BLOCK_ROWS, dim=1):
            rows = block.shape[1]
            means = weights[:rows, :rows] @ unit_rms(block) + carried[:rows, None] * mean.unsqueeze(1)
            mean = means[:, -1]
            blocks.append(means.to(known.dtype))
        self._means[name] = mean
        return torch.cat(blocks, dim=1)


def unit_rms(rows: torch.Tensor) -> torch.Tensor:
    """Rows over their own root mean square, in float32; a row of zeros stays zero."""
    import torch

    rows = rows.float()
    mean_square = rows.square().mean(-1, keepdim=True)
    return rows * mean_square.clamp_min(torch.finfo(torch.float32).tiny).rsqrt()
