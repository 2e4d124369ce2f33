"""From the split layer's stream to a late layer's predicted block input, on the device where that layer lives."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ridgefill.matrices import dense

if TYPE_CHECKING:
    import torch

    from ridgefill.fused import FusedMaps
    from ridgefill.layout import DecoderLayout
    from ridgefill.maps import LayerMap, SplitMaps


@dataclass(frozen=True)
class ResidentMap:
    """One late layer's map in its layer's device and dtype: weight ``[n_in, d]``, bias ``[d]``, gains or None.

    Gains are ``[kv_heads, 1, 1]``. They multiply keys after their rotation, which is the same as before it. The state's
    correction is float32 like the state, or None.
    """

    weight: torch.Tensor
    bias: torch.Tensor
    key_gain: torch.Tensor | None = None
    value_gain: torch.Tensor | None = None
    state_correction: torch.Tensor | None = None

    @staticmethod
    def of(layer_map: LayerMap, device: torch.device, dtype: torch.dtype) -> ResidentMap:
        """A map moved to this device and dtype."""
        return ResidentMap(
            laid_out(dense(layer_map.weight, dtype, device)),
            layer_map.bias.to(device, dtype),
            resident_gain(layer_map.key_gain, device, dtype),
            resident_gain(layer_map.value_gain, device, dtype),
            None if layer_map.state_correction is None else layer_map.state_correction.to(device),
        )

    @property
    def nbytes(self) -> int:
        """Bytes it takes on its device."""
        tensors = (self.weight, self.bias, self.key_gain, self.value_gain, self.state_correction)
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)

    def scaled(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Predicted keys and values ``[batch, kv_heads, rows, head_dim]`` times their gains (design section 2.2)."""
        return (
            keys if self.key_gain is None else keys * self.key_gain,
            values if self.value_gain is None else values * self.value_gain,
        )

    def predict(self, features: torch.Tensor) -> torch.Tensor:
        """The predicted block input ``x W + b`` (design section 2): ``[batch, rows, n_in] -> [batch, rows, d]``."""
        import torch

        rows = features.to(self.weight.device).flatten(0, 1)  # [batch * rows, n_in]
        return torch.addmm(self.bias, rows, self.weight).view(*features.shape[:2], -1)


def laid_out(weight: torch.Tensor) -> torch.Tensor:
    """The same matrix ``[n_in, n_out]``, in memory like a linear layer's weight: its columns are dense.

    A CPU without bfloat16 instructions multiplies by it 14 times as fast as by dense rows; float32 does not care.
    """
    return weight.t().contiguous().t()


def resident_gain(gain: torch.Tensor | None, device: torch.device, dtype: torch.dtype) -> torch.Tensor | None:
    """A gain ``[kv_heads]`` moved to this device and dtype, ``[kv_heads, 1, 1]``; None stays None."""
    return None if gain is None else gain.view(-1, 1, 1).to(device, dtype)


def resident_maps(split_maps: SplitMaps, layout: DecoderLayout) -> dict[int, ResidentMap]:
    """Each late layer's map, moved to that layer's device and to the residual stream's dtype."""
    return {layer: ResidentMap.of(layer_map, *_place(layout, layer)) for layer, layer_map in split_maps.layers.items()}


def misplaced(maps: Iterable[dict[int, ResidentMap]], fused: FusedMaps | None, layout: DecoderLayout) -> str | None:
    """Why maps no longer fit the model (it was moved or cast after they were attached), or None."""
    placed = [(layer, resident.weight) for of_one_split in maps for layer, resident in of_one_split.items()]
    if fused is not None:
        placed += [(layer, fused.bias) for layer in fused.layers]  # in the dtype of products, where they run
    for layer, weight in placed:
        found = (weight.device, weight.dtype)
        if found != (wanted := _place(layout, layer)):
            return (
                f"layer {layer} is now on {wanted[0]} in {wanted[1]}, its map on {found[0]} in {found[1]}; attach again"
            )
    return None


def _place(layout: DecoderLayout, layer: int) -> tuple[torch.device, torch.dtype]:
    # The embeddings' dtype is the stream's; a layer's own weights may be packed.
    return next(layout.layers[layer].parameters()).device, layout.embeddings.dtype
