"""The guard: before a fill, predicted and exact keys are compared on a few rows that run anyway (design section 4).

Maps are right for the model and the kind of text that they were fitted on. Nothing in a filled answer says that either
is another one now, but the rows after the head do: they run through every layer, and their predicted keys must be as
close to their exact ones as those of the fit's held-out rows were. (Head rows would say nothing: they are attention
sinks, which no map has seen.) Held-out rows are compared by their quantiles, because a mean hides what a tail shows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ridgefill import caches
from ridgefill.errors import AttachError
from ridgefill.writers import rotary_modules

if TYPE_CHECKING:
    from transformers import Cache

    from ridgefill.layout import DecoderLayout
    from ridgefill.maps import SplitMaps
    from ridgefill.prefill import Capture, FillSettings, Step

MODES = ("off", "warn", "exact")
# Rows after the head that are compared. Keys of one row say little: its cosines differ by layer and token.
PROBE_ROWS = 32
# A probe row is low where its cosine lies below what 95 of 100 held-out rows reach, so 5 of 100 are at home.
_LOW_PERCENT = 5
# The share of low rows, over all late layers, that text of the fit's own kind does not reach (tests/test_guard.py).
_MOST_LOW = 0.3


class OutOfRange(Exception):
    """Ends a fill that the guard does not let through, in its mode ``exact``; never seen outside this package."""


@dataclass(frozen=True)
class Guard:
    """What an attachment's guard compares with.

    Attributes:
        mode: ``warn``: fill and say so; ``exact``: run stock.
        floors: by late layer, the cosine between predicted and exact keys that 95 of 100 held-out rows reach.
        rotary: the rotary modules' frequencies and scalings when the maps were attached.
    """

    mode: str
    floors: dict[int, float]
    rotary: dict[str, Any]

    @staticmethod
    def of(split_maps: SplitMaps, layout: DecoderLayout, mode: str) -> Guard:
        """The guard of one split's maps.

        Raises:
            AttachError: the file holds no quantiles to compare with.
        """
        from ridgefill.agreement import KEY_COSINE_PERCENTS

        floors = {}
        for layer_idx, layer_map in split_maps.layers.items():
            quantiles = layer_map.metrics.get("key_cosine_quantiles")
            if isinstance(quantiles, list):
                floors[layer_idx] = quantiles[KEY_COSINE_PERCENTS.index(_LOW_PERCENT)]
        if not floors:
            raise AttachError(
                f"guard={mode!r} compares keys with those of the fit's held-out rows, and the maps of split "
                f"{split_maps.split} hold none (key_cosine_quantiles): fit them with held-out rows, on a model whose "
                "layers have a k_proj, or attach with guard='off'"
            )
        return Guard(mode, floors, _rotary_tables(layout))

    def check(self, settings: FillSettings, step: Step, capture: Capture, cache: Cache) -> None:
        """Compare the step's probe rows, which ``capture`` saw run into ``cache``; the finding goes to ``step.alarm``.

        Raises:
            OutOfRange: they are out of range and the mode is ``exact``.
        """
        if _same(_rotary_tables(settings.layout), self.rotary):
            low = self.low_share(settings, step, capture, cache)
            if not low <= _MOST_LOW:  # NaN too
                step.alarm = (
                    f"the keys of {low:.0%} of the {step.probe_rows} rows after the head are predicted worse than 95% "
                    f"of the fit's held-out rows, more than the {_MOST_LOW:.0%} that are let through: another kind of "
                    "text, or another model than the maps were fitted on"
                )
        else:
            step.alarm = "the model's rotary frequencies are not those that it had when the maps were attached"
        if step.alarm and self.mode == "exact":
            raise OutOfRange(step.alarm)

    def low_share(self, settings: FillSettings, step: Step, capture: Capture, cache: Cache) -> float:
        """The share of probe rows whose cosine is below their layer's floor, over all late layers and sequences."""
        import torch
        from torch.nn.functional import cosine_similarity

        from ridgefill.prefill import Bulk, predict_late_layers

        assert capture.stream is not None  # the pass went through the split layer
        first_row = step.fill_start - capture.stream.shape[1]
        probe = replace(step, fill_start=step.fill_start - step.probe_rows, fill_end=step.fill_start)
        rows = Bulk(first_row, capture.stream, capture.layer_kwargs, capture.rotary_outputs, None, None)
        low = []
        for layer_idx, blocks in predict_late_layers(settings, probe, rows):
            if layer_idx not in self.floors:
                continue
            predicted = torch.cat([keys for keys, _ in blocks], dim=-2)  # [batch, kv_heads, probe rows, head_dim]
            exact, _ = caches.kept_rows(cache, layer_idx)
            count = min(predicted.shape[-2], exact.shape[-2])  # a sliding cache may keep fewer
            cosine = cosine_similarity(predicted[..., -count:, :].float(), exact[..., -count:, :].float(), dim=-1)
            cosine = cosine.mean(1)  # over heads, as the fit does: [batch, probe rows]
            low.append(torch.where(cosine.isnan(), 1.0, (cosine < self.floors[layer_idx]).float()).mean().cpu())
        return float(torch.stack(low).mean())


def _rotary_tables(layout: DecoderLayout) -> dict[str, Any]:
    """The rotary modules' frequencies and scalings, by name; where they follow a call's length, the original ones."""
    found: dict[str, Any] = {}
    for number, module in enumerate(rotary_modules(layout)):
        for name, buffer in module.named_buffers():
            if layout.rope_switch is None or "original" in name:
                found[f"{number}.{name}"] = buffer.clone()
        found |= {f"{number}.{name}": value for name, value in vars(module).items() if name.endswith("scaling")}
    return found


def _same(found: dict[str, Any], expected: dict[str, Any]) -> bool:
    import torch

    def equal(ours: Any, theirs: Any) -> bool:
        if isinstance(ours, torch.Tensor) and isinstance(theirs, torch.Tensor):
            return ours.shape == theirs.shape and torch.equal(ours, theirs.to(ours.device))
        return bool(ours == theirs)

    return found.keys() == expected.keys() and all(equal(found[name], expected[name]) for name in found)
