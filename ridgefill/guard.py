"""The guard: predicted and exact keys are compared on a few rows that run exactly anyway (design section 4).

Maps are right for the model and the kind of text that they were fitted on. Nothing in a filled answer says that either
is another one now, but the rows after the head do: they run through every layer, and their predicted keys must be as
close to their exact ones as those of the fit's held-out rows were. (Head rows would say nothing: they are attention
sinks, which no map has seen.) The figure is a row's rank: the share of held-out rows whose cosine between predicted and
exact keys is lower, read off the quantiles in the file. Whatever a layer's cosines are, at home the mean rank is 0.5.

Rows are compared twice: those after the head before the fill, which is where it can still be left undone, and the first
rows of the tail behind it, which a prompt that begins like every other one (a system prompt) may not resemble.
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
    from ridgefill.prefill import Bulk, Capture, FillSettings, Step

MODES = ("off", "warn", "exact")
# Rows after the head that are compared. Keys of one row say little: its cosines differ by layer and token.
PROBE_ROWS = 32
# The mean rank, over probe rows and late layers, below which a fill is out of range. On SmolLM2-135M, split 20, maps of
# the demo's three kinds of text: held-out documentation and code .23 to .61 (72 windows), but licence texts among the
# prose down to .06; random tokens .07 to .17, French and Chinese .01 to .02, changed attention weights .002.
_LEAST_RANK = 0.2


class OutOfRange(Exception):
    """Ends a fill that the guard does not let through, in its mode ``exact``; never seen outside this package."""


@dataclass(frozen=True)
class Guard:
    """What an attachment's guard compares with.

    Attributes:
        mode: ``warn``: fill and say so; ``exact``: run stock.
        quantiles: by late layer, of held-out rows' cosines of predicted and exact keys, at ``KEY_COSINE_PERCENTS``.
        rotary: the rotary modules' frequencies and scalings when the maps were attached.
    """

    mode: str
    quantiles: dict[int, list[float]]
    rotary: dict[str, Any]

    @staticmethod
    def of(split_maps: SplitMaps, layout: DecoderLayout, mode: str) -> Guard:
        """The guard of one split's maps.

        Raises:
            AttachError: the file holds no quantiles to compare with.
        """
        found = {layer_idx: m.metrics.get("key_cosine_quantiles") for layer_idx, m in split_maps.layers.items()}
        quantiles = {layer_idx: figures for layer_idx, figures in found.items() if isinstance(figures, list)}
        if not quantiles:
            raise AttachError(
                f"guard={mode!r} compares keys with those of the fit's held-out rows, and the maps of split "
                f"{split_maps.split} hold none (key_cosine_quantiles): fit them with held-out rows, on a model whose "
                "layers have a k_proj, or attach with guard='off'"
            )
        return Guard(mode, quantiles, _rotary_tables(layout))

    def check(self, settings: FillSettings, step: Step, capture: Capture, cache: Cache) -> None:
        """Compare the step's probe rows, which ``capture`` saw run into ``cache``; the finding goes to the step.

        Raises:
            OutOfRange: they are out of range and the mode is ``exact``.
        """
        from ridgefill.prefill import Bulk

        if _same(_rotary_tables(settings.layout), self.rotary):
            assert capture.stream is not None  # the pass went through the split layer
            first_row = step.fill_start - capture.stream.shape[1]
            rows = Bulk(first_row, capture.stream, capture.layer_kwargs, capture.rotary_outputs, None, None)
            probe = replace(step, fill_start=step.fill_start - step.probe_rows, fill_end=step.fill_start)
            step.probe_rank = self.mean_rank(settings, probe, rows, cache)
            step.alarm = self._alarm(step.probe_rank, f"the {step.probe_rows} rows after the head")
        else:
            step.alarm = "the model's rotary frequencies are not those that it had when the maps were attached"
        if step.alarm and self.mode == "exact":
            raise OutOfRange(step.alarm)

    def check_tail(self, settings: FillSettings, step: Step, tail: Bulk, rows_behind: int) -> None:
        """Compare the tail's first rows, once the stock forward has run all of it; the finding goes to the step.

        Nothing is refused: the call is done. ``tail``: these rows; ``rows_behind``: rows of the cache behind them.
        """
        count = tail.stream.shape[1]
        rows = replace(step, fill_start=tail.first_row, fill_end=tail.first_row + count)
        step.tail_rank = self.mean_rank(settings, rows, tail, step.cache, rows_behind)
        step.tail_alarm = self._alarm(step.tail_rank, f"the tail's first {count} rows")

    def _alarm(self, rank: float | None, which: str) -> str:
        """The finding in words, or nothing where all is well, or nothing could be compared."""
        if rank is None or rank >= _LEAST_RANK:  # NaN is neither
            return ""
        return (
            f"keys of {which} are predicted as well as the worst of the fit's held-out rows (mean rank {rank:.2f}, at "
            f"home 0.5, at least {_LEAST_RANK}): another kind of text, or another model than the maps were fitted on"
        )

    def mean_rank(
        self, settings: FillSettings, step: Step, rows: Bulk, cache: Cache, rows_behind: int = 0
    ) -> float | None:
        """The mean rank of exact rows' cosines among held-out rows, over all late layers; the least of any sequence.

        Args:
            settings: the attachment's choices.
            step: its fill span is the rows to compare.
            rows: what they are predicted from.
            cache: holds them, exact, in the late layers.
            rows_behind: rows of the cache behind them.

        Returns:
            None where no late layer's cache, because all of them slide, holds any of the rows.
        """
        import torch
        from torch.nn.functional import cosine_similarity
        from transformers import DynamicCache

        from ridgefill.agreement import KEY_COSINE_PERCENTS
        from ridgefill.prefill import predict_late_layers

        if settings.layout.recurrent:  # whose layers scan rows into the cache that they are given
            step = replace(step, cache=DynamicCache(config=settings.layout.config))
        edges = torch.tensor([0, *KEY_COSINE_PERCENTS, 100]) / 100
        middles = (edges[1:] + edges[:-1]) / 2  # the rank of a cosine between two quantiles
        cosines: list[tuple[int, torch.Tensor]] = []
        # By torch: a kernel would write into the cache.
        for layer_idx, blocks in predict_late_layers(replace(settings, epilogues=None), step, rows):
            if layer_idx not in self.quantiles or isinstance(blocks, caches.Room):
                continue
            predicted = torch.cat([keys for keys, _ in blocks], dim=-2)  # [batch, kv_heads, rows, head_dim]
            exact, _ = caches.kept_rows(cache, layer_idx)
            exact = exact[..., : max(0, exact.shape[-2] - rows_behind), :]
            count = min(predicted.shape[-2], exact.shape[-2])  # a sliding cache may keep fewer, or none
            if count:
                predicted, exact = (keys[..., keys.shape[-2] - count :, :].float() for keys in (predicted, exact))
                # Over heads, as the fit does: [batch, rows].
                cosines.append((layer_idx, cosine_similarity(predicted, exact, dim=-1).mean(1)))
        ranks = []
        for layer_idx, found in cosines:  # only now, with all layers' work queued, is the device waited for
            cosine = found.cpu()
            between = torch.bucketize(cosine, torch.tensor(self.quantiles[layer_idx]))
            ranks.append(torch.where(cosine.isnan(), 0.0, middles[between]).mean(1))  # [batch]
        return float(torch.stack(ranks).mean(0).min()) if ranks else None


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
