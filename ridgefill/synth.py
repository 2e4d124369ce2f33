"""From the split layer's stream to a late layer's predicted block input, on the device where that layer lives."""

from __future__ import annotations

from collections.abc import Iterable
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

    @property
    def nbytes(self) -> int:
        """Bytes it takes on its device."""
        return self.weight.nbytes + self.bias.nbytes

    def predict(self, features: torch.Tensor) -> torch.Tensor:
        """The predicted block input ``x W + b`` (design section 2): ``[batch, rows, n_in] -> [batch, rows, d]``."""
        import torch

        rows = features.to(self.weight.device).flatten(0, 1)  # [batch * rows, n_in]
        return torch.addmm(self.bias, rows, self.weight).view(*features.shape[:2], -1)


def resident_maps(split_maps: SplitMaps, layout: DecoderLayout) -> dict[int, ResidentMap]:
    """Each late layer's map, moved to that layer's device and to the residual stream's dtype."""
    resident = {}
    for layer, layer_map in split_maps.layers.items():
        device, dtype = _place(layout, layer)
        resident[layer] = ResidentMap(layer_map.weight.to(device, dtype), layer_map.bias.to(device, dtype))
    return resident


def misplaced(maps: Iterable[dict[int, ResidentMap]], layout: DecoderLayout) -> str | None:
    """Why maps no longer fit the model (it was moved or cast after they were attached), or None."""
    for layer, resident in (item for of_one_split in maps for item in of_one_split.items()):
        found = (resident.weight.device, resident.weight.dtype)
        if found != (wanted := _place(layout, layer)):
            return (
                f"layer {layer} is now on {wanted[0]} in {wanted[1]}, its map on {found[0]} in {found[1]}; attach again"
            )
    return None


def _place(layout: DecoderLayout, layer: int) -> tuple[torch.device, torch.dtype]:
    # The embeddings' dtype is the stream's; a layer's own weights may be packed.
    return next(layout.layers[layer].parameters()).device, layout.embeddings.dtype
