"""Principal directions of predictions, from the sums of the rows that they are of.

The fused form's row scale is the length of a prediction within a few of them (`ridgefill.fused`), and a weight of low
rank predicts within as many as its rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ridgefill.matrices import dense, stored

if TYPE_CHECKING:
    from ridgefill.maps import LayerMap
    from ridgefill.matrices import Matrix
    from ridgefill.moments import CentredMoments

# The largest rank of a scale basis, and how its directions are found.
_RANK, _SPARE_DIRECTIONS, _SUBSPACE_STEPS = 256, 64, 12


@dataclass(frozen=True)
class ScaleSpectrum:
    """Where the energy of one layer's predictions lies: principal directions, their mean energies, and that of all.

    ``directions`` ``[d, r]`` float64, orthonormal, by falling ``energies`` ``[r]``; ``total`` is the mean of ``|p|^2``.
    """

    directions: torch.Tensor
    energies: torch.Tensor
    total: float

    def basis(self, rank: int, dtype: torch.dtype = torch.bfloat16) -> tuple[Matrix, torch.Tensor]:
        """The first directions ``[d, rank]``, as stored in ``dtype``, and the mean energy outside, ``[1]`` float32."""
        rank = min(rank, self.directions.shape[1])
        outside = max(0.0, self.total - float(self.energies[:rank].sum()))
        return stored(self.directions[:, :rank], dtype), torch.tensor([outside])


def scale_spectrum(layer_map: LayerMap, moments: CentredMoments, rank: int = _RANK) -> ScaleSpectrum:
    """The principal directions of a map's predictions ``p = x W + b`` over the rows of ``moments``.

    Eigenvectors of ``E[p p^T] = W^T (Sxx / n) W + E[p] E[p]^T``, the largest ``rank`` of them.
    """
    weight = dense(layer_map.weight, torch.float32, moments.sxx.device).double()
    mean = moments.x_mean @ weight + layer_map.bias.to(weight)
    second = torch.addr(weight.T @ (moments.sxx / moments.n) @ weight, mean, mean)  # [d, d]
    return ScaleSpectrum(*principal_directions(second, rank), float(second.diagonal().sum()))


def principal_directions(second: torch.Tensor, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The principal directions ``[d, rank]`` of second moments ``[d, d]`` and their energies, the largest first.

    By subspace iteration with as many spare directions as these converge by (all of them where d is small: then they
    are exact).
    """
    d = len(second)
    generator = torch.Generator().manual_seed(0)
    found = torch.randn(d, min(d, rank + _SPARE_DIRECTIONS), generator=generator, dtype=torch.float64).to(second)
    for _ in range(_SUBSPACE_STEPS):
        found, _ = torch.linalg.qr(second @ found)
    energies, rotation = torch.linalg.eigh(found.T @ second @ found)  # ascending
    order = torch.arange(len(energies) - 1, max(-1, len(energies) - 1 - rank), -1, device=energies.device)
    return found @ rotation[:, order], energies[order].clamp_min(0)
