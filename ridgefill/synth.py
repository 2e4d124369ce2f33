"""From the split layer's stream to a late layer's predicted block input, on the device where that layer lives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from ridgefill.layout import DecoderLayout
    from ridgefill.maps import SplitMaps


@dataclass(frozen=True)
class ResidentMap:
    """One late layer's map in its layer's device and dtype: weight ``[n_in, d]``, bias ``[d]``."""

    weight: torch.Tensor
    bias: torch.Tensor

    def predict(self, features: torch.Tensor) -> torch.Tensor:
        """The predicted block input ``x W + b`` (design section 2): ``[batch, rows, n_in] -> [batch, rows, d]``."""
        import torch

        rows = features.to(self.weight.device).flatten(0, 1)  # [batch * rows, n_in]
        return torch.addmm(self.bias, rows, self.weight).view(*features.shape[:2], -1)


def resident_maps(split_maps: SplitMaps, layout: DecoderLayout) -> dict[int, ResidentMap]:
    """Each late layer's map, moved to the device and dtype of that layer's first floating-point weight."""
    resident = {}
    for layer, layer_map in split_maps.layers.items():
        like = next(p for p in layout.layers[layer].parameters() if p.is_floating_point())
        resident[layer] = ResidentMap(
            layer_map.weight.to(device=like.device, dtype=like.dtype),
            layer_map.bias.to(device=like.device, dtype=like.dtype),
        )
    return resident
