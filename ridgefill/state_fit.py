"""What recurrent states lack behind a bulk of predicted inputs: its mean over held-out windows (design section 2.3).

Scanned from predicted inputs, a late layer's recurrent state ends beside the true one, by an amount of which a part
does not depend on the text: the mean over many chunk ends, one matrix for each head, summed in float64,

    C = mean(S_exact - S_predicted)

`ridgefill.tune` keeps it where it lowers the KL of prompts that it was not taken from, `ridgefill.states` applies it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ridgefill.agreement import feature_rows
from ridgefill.capture import BlockInputs
from ridgefill.features import Features
from ridgefill.states import CHUNK_ROWS
from ridgefill.synth import ResidentMap
from ridgefill.writers import probe_layers, recurrent_writer

if TYPE_CHECKING:
    from ridgefill.capture import Window
    from ridgefill.layout import DecoderLayout
    from ridgefill.maps import SplitMaps

# A mean over fewer chunk ends says more of their texts than of the maps (design section 2.3).
LEAST_CHUNK_ENDS = 50


@dataclass(frozen=True)
class StateErrors:
    """What one window says of C: the sum of ``S_exact - S_predicted`` over its chunk ends, by late layer, float64."""

    chunk_ends: int
    sums: dict[int, torch.Tensor]  # [heads, .., ..], as the layer's state without its batch


def state_errors(layout: DecoderLayout, maps: SplitMaps, windows: Sequence[Window], head: int) -> list[StateErrors]:
    """Scan each window's true and predicted inputs through the late layers; nothing where no late layer is recurrent.

    Both scans begin at the state behind the window's first ``head`` rows, which are exact in a fill.

    Memory: the late layers' inputs of one window.
    """
    late = [layer for layer in maps.layers if layout.keeps_state(layer)]
    if not late:
        return []
    calls, _, _ = probe_layers(layout)
    found = []
    with BlockInputs(layout, {maps.split, *maps.layers}) as block_inputs, torch.no_grad():
        for window in windows:
            inputs = block_inputs.run(window.ids)
            x = feature_rows(Features.of(maps.features), inputs[maps.split]).unsqueeze(0)
            chunk_ends = (len(window.ids) - head) // CHUNK_ROWS
            sums: dict[int, torch.Tensor] = {}
            for layer in late:
                exact = inputs[layer].unsqueeze(0)  # [1, rows, d]
                predicted = ResidentMap.of(maps.layers[layer], exact.device, exact.dtype).predict(x)
                scans = [
                    _scan(layout, layer, calls[layer], exact[:, :head], rows[:, head:], chunk_ends)
                    for rows in (exact, predicted)
                ]
                if scans[0] is not None and scans[1] is not None:
                    sums[layer] = scans[0] - scans[1]
            found.append(StateErrors(chunk_ends, sums))
    return found


def _scan(
    layout: DecoderLayout, layer: int, call: dict[str, Any], head: torch.Tensor, rows: torch.Tensor, chunk_ends: int
) -> torch.Tensor | None:
    """The sum of a layer's states at the chunk ends of ``rows`` ``[1, .., d]`` behind ``head``; None: it has none."""
    from transformers import DynamicCache

    write, cache = recurrent_writer(layout, layer, "recurrent"), DynamicCache(config=layout.config)
    # Of a probe's call nothing is read before the state is known: attention, if any, comes after.
    kwargs = {name: value for name, value in call.items() if name != "hidden_states"}
    kwargs[layout.cache_argument] = cache
    state: Any = cache.layers[layer]
    total: torch.Tensor | None = None
    if head.shape[1]:
        write(head, kwargs)
    for number in range(chunk_ends):
        write(rows[:, number * CHUNK_ROWS : (number + 1) * CHUNK_ROWS], kwargs)
        if state.recurrent_states[0] is None:
            return None  # a short convolution
        now = state.recurrent_states[0][0].double()
        total = now if total is None else total + now
    return total


def corrections(errors: Sequence[StateErrors]) -> dict[int, torch.Tensor]:
    """C by late layer over these windows: ``[heads, .., ..]`` float32, as a map file holds it."""
    chunk_ends = sum(window.chunk_ends for window in errors)
    found: dict[int, torch.Tensor] = {}
    for window in errors:
        for layer, total in window.sums.items():
            found[layer] = found[layer] + total if layer in found else total
    return {layer: (total / chunk_ends).float().cpu() for layer, total in sorted(found.items())}
