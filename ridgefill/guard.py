"""The guard: predicted and exact keys are compared on a few rows that run exactly anyway (design section 4).

Maps are right for the model and the kind of text that they were fitted on. Nothing in a filled answer says that either
is another one now, but the rows after the head do: they run through every layer, and their predicted keys must be as
close to their exact ones as those of the fit's held-out rows were. (Head rows would say nothing: they are attention
sinks, which no map has seen.) The figure is the share of outliers: cosines between predicted and exact keys, of a row
in a layer, that only one in a hundred of the fit's held-out rows falls below. Whatever a layer's cosines are, at home
it is 0.01. A mean of cosines or of their ranks serves less well: text that a model knows by heart (licences) is
predicted a little worse in every row, another language or other weights much worse in many.

What no cosine tells from such text is noise. There the model itself is asked: among all tokens of its vocabulary, those
that follow the compared rows are no likelier than others.

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
    import torch
    from torch import nn
    from transformers import Cache

    from ridgefill.layout import DecoderLayout
    from ridgefill.maps import SplitMaps
    from ridgefill.prefill import Bulk, Capture, FillSettings, Step

MODES = ("off", "warn", "exact")
# Rows after the head that are compared. Keys of one row say little: its cosines differ by layer and token.
PROBE_ROWS = 32
# The share of outliers above which a fill is out of range. SmolLM2-135M, maps of the demo's three kinds of text, splits
# 15, 18 and 20: of 432 held-out windows 0, 1 and 4 have more, all of them licences; the least that a
# window of Chinese, French, German or Russian has is .33, .47 and .42, of weights changed by half their norm .82, .61
# and .64. Random tokens have .01 to .17.
_MOST_OUTLIERS = 0.3
# The share of the vocabulary that next tokens must be likelier than, on average over the rows. Of tokens drawn at
# random it is .5, whatever the model, give or take .05 over 32 rows.
_LEAST_LIKELINESS = 0.75


class OutOfRange(Exception):
    """Ends a fill that the guard does not let through, in its mode ``exact``; never seen outside this package."""


@dataclass(frozen=True)
class Guard:
    """What an attachment's guard compares with.

    Attributes:
        mode: ``warn``: fill and say so; ``exact``: run stock.
        least_cosines: by late layer, the cosine of predicted and exact keys that 1% of held-out rows fall below.
        output_embeddings: from what the base model makes of a row to logits, or None.
        rotary: the rotary modules' frequencies and scalings when the maps were attached.
    """

    mode: str
    least_cosines: dict[int, float]
    output_embeddings: nn.Module | None
    rotary: dict[str, Any]

    @staticmethod
    def of(split_maps: SplitMaps, layout: DecoderLayout, mode: str, output_embeddings: nn.Module | None) -> Guard:
        """The guard of one split's maps.

        Raises:
            AttachError: the file holds no quantiles to compare with.
        """
        found = {layer_idx: m.metrics.get("key_cosine_quantiles") for layer_idx, m in split_maps.layers.items()}
        # The first of KEY_COSINE_PERCENTS.
        least = {layer_idx: figures[0] for layer_idx, figures in found.items() if isinstance(figures, list)}
        if not least:
            raise AttachError(
                f"guard={mode!r} compares keys with those of the fit's held-out rows, and the maps of split "
                f"{split_maps.split} hold none (key_cosine_quantiles): fit them with held-out rows, on a model whose "
                "layers have a k_proj, or attach with guard='off'"
            )
        return Guard(mode, least, output_embeddings, _rotary_tables(layout))

    def check(self, settings: FillSettings, step: Step, capture: Capture, cache: Cache, hidden: torch.Tensor) -> None:
        """Compare the step's probe rows, which ``capture`` saw run into ``cache``; the finding goes to the step.

        ``hidden``: ``[batch, rows, d]``, what the base model made of the rows up to the bulk.

        Raises:
            OutOfRange: they are out of range and the mode is ``exact``.
        """
        from ridgefill.prefill import Bulk

        if _same(_rotary_tables(settings.layout), self.rotary):
            assert capture.stream is not None  # the pass went through the split layer
            first_row = step.fill_start - capture.stream.shape[1]
            rows = Bulk(first_row, capture.stream, capture.layer_kwargs, capture.rotary_outputs, None, None)
            probe = replace(step, fill_start=step.fill_start - step.probe_rows, fill_end=step.fill_start)
            step.probe_outliers = self.outliers(settings, probe, rows, cache)
            step.alarm = _alarm(step.probe_outliers, f"the {step.probe_rows} rows after the head")
            step.probe_likeliness = self.likeliness(step, hidden)
            if not step.alarm and step.probe_likeliness is not None and step.probe_likeliness < _LEAST_LIKELINESS:
                step.alarm = (
                    f"the tokens that follow the {step.probe_rows} rows after the head are to the model likelier than "
                    f"{step.probe_likeliness:.0%} of its vocabulary on average (at random 50%, at least "
                    f"{_LEAST_LIKELINESS:.0%}): no text"
                )
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
        step.tail_outliers = self.outliers(settings, rows, tail, step.cache, rows_behind)
        step.tail_alarm = _alarm(step.tail_outliers, f"the tail's first {count} rows")

    def likeliness(self, step: Step, hidden: torch.Tensor) -> float | None:
        """The mean share of the vocabulary with a lower logit than the probe rows' next tokens; the least of a batch.

        Scales and caps of logits, which differ by model, do not change it. ``hidden``: ``[batch, rows, d]``, what the
        base model makes of the rows up to the bulk. None where there are no ids, or no output embeddings.
        """
        ids = step.inputs.get("input_ids")
        if self.output_embeddings is None or ids is None:
            return None
        logits: torch.Tensor = self.output_embeddings(hidden[:, -step.probe_rows :])  # [batch, probe rows, vocabulary]
        end = step.fill_start - step.cached_tokens  # in rows of this call; the bulk's first row is there
        following = ids[:, end - step.probe_rows + 1 : end + 1].to(logits.device)
        own = logits.gather(-1, following.unsqueeze(-1))
        return float((logits < own).float().mean((1, 2)).min())

    def outliers(
        self, settings: FillSettings, step: Step, rows: Bulk, cache: Cache, rows_behind: int = 0
    ) -> float | None:
        """The share of exact rows' cosines, over all late layers, that are outliers; the most of any sequence.

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

        from ridgefill.prefill import predict_late_layers

        if settings.layout.recurrent:  # whose layers scan rows into the cache that they are given
            step = replace(step, cache=DynamicCache(config=settings.layout.config))
        found: list[torch.Tensor] = []
        # By torch: a kernel would write into the cache.
        for layer_idx, blocks in predict_late_layers(replace(settings, epilogues=None), step, rows):
            if layer_idx not in self.least_cosines or isinstance(blocks, caches.Room):
                continue
            predicted = torch.cat([keys for keys, _ in blocks], dim=-2)  # [batch, kv_heads, rows, head_dim]
            exact, _ = caches.kept_rows(cache, layer_idx)
            exact = exact[..., : max(0, exact.shape[-2] - rows_behind), :]
            count = min(predicted.shape[-2], exact.shape[-2])  # a sliding cache may keep fewer, or none
            if count:
                predicted, exact = (keys[..., keys.shape[-2] - count :, :].float() for keys in (predicted, exact))
                # [batch, rows]: the mean over heads, as the fit takes it.
                cosine = cosine_similarity(predicted, exact, dim=-1).mean(1)
                found.append((~(cosine >= self.least_cosines[layer_idx])).float().mean(1))  # NaN is an outlier
        # Only now, with all layers' work queued, is a device waited for.
        return float(torch.stack([share.cpu() for share in found]).mean(0).max()) if found else None


def _alarm(outliers: float | None, which: str) -> str:
    """The finding in words, or nothing where all is well, or nothing could be compared."""
    if outliers is None or outliers <= _MOST_OUTLIERS:
        return ""
    return (
        f"keys of {which}: {outliers:.0%} are predicted worse than 99% of the fit's held-out rows (at home 1%, at most "
        f"{_MOST_OUTLIERS:.0%}): another kind of text, or another model than the maps were fitted on"
    )


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
