"""Features, ranks and gains, chosen by how far held-out prompts move; each is kept only where its effect is certain."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from ridgefill.errors import UnsupportedModelError
from ridgefill.evaluate.filled import BulkPrefill
from ridgefill.evaluate.quality import Score, prefill_logits
from ridgefill.evaluate.stats import mean_interval
from ridgefill.maps import RidgeMaps, SplitMaps, basis_dtype
from ridgefill.options import DEFAULT_SHARE
from ridgefill.scorers import AttentionScorer
from ridgefill.state_fit import LEAST_CHUNK_ENDS, StateErrors, corrections

if TYPE_CHECKING:
    from torch import nn

    from ridgefill.agreement import Agreements
    from ridgefill.capture import Window
    from ridgefill.rows import SelectionSettings
    from ridgefill.spectrum import ScaleSpectrum

    Spectra = dict[int, ScaleSpectrum]

# Rows of a held-out prompt whose logits are compared: a quarter of it, at most as many as issue 4's figures take.
_TAIL_ROWS = 256
_MIN_ROWS = 64
# Fewer prompts give no interval worth the name.
_MIN_PROMPTS = 4
_EVERY = slice(None)
# Ranks of the fused form's row scale, and how far it may move the mean loss, in nats a token (issue 4).
SCALE_RANKS = (64, 128, 256)
DEFAULT_RANK = 128
MOST_FUSED_DNLL = 1e-3
# How far a smaller rank may raise the KL to stock, in nats a token: the upper end of the change's interval.
MOST_RANK_KL = 1e-3


def choose(
    model: nn.Module,
    maps: RidgeMaps,
    candidates: dict[int, list[SplitMaps]],
    agreements: Agreements,
    windows: Sequence[Window],
    *,
    head: int,
    gains: str,
    spectra: Callable[[SplitMaps], Spectra],
    states: Callable[[SplitMaps, Sequence[Window]], list[StateErrors]],
    report: Callable[[str, int, int | None], None],
) -> RidgeMaps:
    """Return ``maps`` with each split's best candidate, gains, state corrections, and its fused form's scale basis.

    For each split, in this order: a candidate with more features replaces the one before it, the smallest rank is taken
    that is good enough, key gains are applied, value gains are applied, recurrent states are corrected; each step only
    if the 95% interval of the change in KL to stock, paired by held-out prompt, lies below 0, and a rank if it lies
    below ``MOST_RANK_KL``. (Half of the prompts are scored with corrections from the other half, and the file gets
    those from all.) Then the smallest rank of ``SCALE_RANKS`` is taken whose fused form moves the loss by less than
    ``MOST_FUSED_DNLL``. Whether tier quality reads predicted queries too is decided where one of both is certainly
    better. The figures go into the split's ``choice``. With too few held-out
    prompts, nothing is chosen: the first candidate, no gains where they are ``auto``, no corrections,
    ``DEFAULT_RANK``; the file and a warning say so.

    Args:
        maps: what all candidates share; its splits are replaced.
        candidates: by split, maps over more and more features, each with those of smaller ranks behind it, if there are
            any, the smallest first.
        agreements: their held-out comparison, from which gains are computed.
        windows: held-out prompts.
        head: exact first rows.
        gains: ``none``, ``norm`` or ``lsq`` for all, or ``auto``.
        spectra: the directions of a split's predictions (`ridgefill.spectrum.scale_spectrum`), by late layer.
        states: what windows say of the states behind a bulk (`ridgefill.state_fit.state_errors`); of each, or nothing.
        report: progress, phase ``choose``.

    Memory: the stock logits of all prompts' tails, and one split's bulk of each.
    """
    windows = [window for window in windows if len(window.ids) >= max(_MIN_ROWS, 2 * head)]
    prompts = [torch.tensor([window.ids], device=model.device) for window in windows]
    tails = [min(_TAIL_ROWS, prompt.shape[1] // 4) for prompt in prompts]
    enough = len(prompts) >= _MIN_PROMPTS
    reason = f"{len(prompts)} held-out prompts of {_MIN_ROWS} rows or more; {_MIN_PROMPTS} are needed to choose"
    if not enough and (gains == "auto" or any(len(of_split) > 1 for of_split in candidates.values())):
        warnings.warn(f"features and gains are not chosen: {reason}", UserWarning, stacklevel=3)
    stock = [prefill_logits(model, prompt, tail) for prompt, tail in zip(prompts, tails, strict=True) if enough]
    chosen = {}
    for done, (split, of_split) in enumerate(candidates.items()):
        report("choose", done, len(candidates))
        if not of_split[0].layers:  # the last layer as split has no map, so there is nothing to choose
            chosen[split] = of_split[0]
        elif enough:
            shared = replace(maps, splits={split: of_split[0]}, default_split=split)
            bulks = [
                BulkPrefill(model, shared, prompt, split=split, tail=tail, head=head)
                for prompt, tail in zip(prompts, tails, strict=True)
            ]
            choice = _Choice(shared, split, bulks, stock)
            chosen[split] = choice.run(of_split, agreements, gains, spectra, lambda best: states(best, windows))
        else:
            kind = "none" if gains == "auto" else gains
            plain = with_gains(of_split[0], agreements, (split, 0), key=kind, value=kind)
            plain = with_scale(plain, spectra(plain), DEFAULT_RANK)
            chosen[split] = replace(plain, choice={"reason": reason, "scale_rank": DEFAULT_RANK})
    report("choose", len(candidates), len(candidates))
    return replace(maps, splits=chosen)


class _Choice:
    """One split's choice among candidates, by their KL to stock on every prompt."""

    def __init__(
        self, shared: RidgeMaps, split: int, bulks: Sequence[BulkPrefill], stock: Sequence[torch.Tensor]
    ) -> None:
        self._shared, self._split, self._bulks, self._stock = shared, split, bulks, stock
        self._steps: list[dict[str, Any]] = []

    def run(
        self,
        of_split: Sequence[SplitMaps],
        agreements: Agreements,
        gains: str,
        spectra: Callable[[SplitMaps], Spectra],
        states: Callable[[SplitMaps], list[StateErrors]],
    ) -> SplitMaps:
        """The maps that are left when every step has been tried."""
        fixed = "none" if gains == "auto" else gains
        number, kept = 0, {"key": fixed, "value": fixed}
        best = with_gains(of_split[0], agreements, (self._split, 0), **kept)
        best_scores = self._scores(best)
        self._note(" + ".join(best.features), best_scores)
        # Of the candidates over the same features the first has whole weights, the others smaller ranks.
        by_features: dict[tuple[str, ...], list[int]] = {}
        for other, candidate in enumerate(of_split):
            by_features.setdefault(candidate.features, []).append(other)
        for other, *_ in list(by_features.values())[1:]:
            trial = with_gains(of_split[other], agreements, (self._split, other), **kept)
            scores = self._scores(trial)
            if self._note(" + ".join(trial.features), scores, best_scores):
                number, best, best_scores = other, trial, scores
        for other in by_features[best.features][1:]:
            trial = with_gains(of_split[other], agreements, (self._split, other), **kept)
            scores = self._scores(trial)
            if self._note(f"rank {trial.rank}", scores, best_scores, most=MOST_RANK_KL):
                number, best, best_scores = other, trial, scores
                break
        for component in ("key", "value") if gains == "auto" else ():
            trials = {}
            for kind in ("norm", "lsq"):
                trial = with_gains(of_split[number], agreements, (self._split, number), **{**kept, component: kind})
                trials[kind] = (trial, self._scores(trial))
            kind = min(trials, key=lambda kind: _mean(s.kl for s in trials[kind][1]))
            for other_kind, (trial, scores) in trials.items():
                if self._note(f"{component} gain {other_kind}", scores, best_scores, eligible=other_kind == kind):
                    best, best_scores, kept[component] = trial, scores, kind
        best, best_scores = self._with_states(best, best_scores, states(best))
        best, rank = self._with_scale(best, best_scores, spectra(best))
        choice = {"gains": kept, "prompts": len(self._bulks), "scale_rank": rank, "steps": self._steps}
        predicted_queries = self._predicted_queries(best)
        if predicted_queries is not None:
            choice["predicted_queries"] = predicted_queries
        return replace(best, choice=choice)

    def _with_states(
        self, maps: SplitMaps, scores: list[Score], errors: Sequence[StateErrors]
    ) -> tuple[SplitMaps, list[Score]]:
        """With corrected states, where that helps prompts from which the corrections do not come."""
        if sum(window.chunk_ends for window in errors) < LEAST_CHUNK_ENDS or not any(w.sums for w in errors):
            return maps, scores
        corrected = list(scores)
        for half in (0, 1):
            others = with_states(maps, corrections(errors[1 - half :: 2]))
            corrected[half::2] = self._scores(others, slice(half, None, 2))
        if self._note("state corrections", corrected, scores):
            return with_states(maps, corrections(errors)), corrected
        return maps, scores

    def _with_scale(self, maps: SplitMaps, two_step: Sequence[Score], spectra: Spectra) -> tuple[SplitMaps, int]:
        """The smallest rank whose fused form loses nothing that matters; the largest where none does."""
        for rank in SCALE_RANKS:
            fused = with_scale(maps, spectra, rank)
            scores = self._scores(fused)
            moved = _mean(s.dnll for s in scores) - _mean(s.dnll for s in two_step)
            kl = round(_mean(s.kl for s in scores), 6)
            fits = abs(moved) < MOST_FUSED_DNLL
            self._steps.append({"tried": f"fused, rank {rank}", "kl": kl, "dnll_moved": round(moved, 6), "kept": fits})
            if fits:
                break
        return fused, rank

    def _predicted_queries(self, maps: SplitMaps) -> bool | None:
        """Whether tier quality's rows are better chosen by the late layers' predicted queries too.

        None where neither is certain, and where this model lets no rows be selected.
        """
        loaded = replace(self._shared, splits={self._split: maps})
        try:
            choice = self._bulks[0].choice(loaded, share=DEFAULT_SHARE)
        except UnsupportedModelError:
            return None
        if max(choice.readers) <= self._split:
            return None  # no late layer has queries to predict
        exact, both = (
            self._scores(maps, choice=replace(choice, gates=(replace(choice.gates[0], scorer=scorer),)))
            for scorer in (AttentionScorer(predicted=False), AttentionScorer(predicted=True))
        )
        better = self._note("rows by predicted queries too", both, exact)
        worse = self._note("rows by exact queries alone", exact, both)
        return better if better or worse else None

    def _scores(self, maps: SplitMaps, prompts: slice = _EVERY, choice: SelectionSettings | None = None) -> list[Score]:
        """Scores against stock, by prompt, with the rows that ``choice`` selects exact."""
        loaded = replace(self._shared, splits={self._split: maps})
        pairs = zip(self._bulks[prompts], self._stock[prompts], strict=True)
        return [bulk.score(loaded, logits, choice=choice) for bulk, logits in pairs]

    def _note(
        self,
        tried: str,
        scores: Sequence[Score],
        best: Sequence[Score] | None = None,
        *,
        eligible: bool = True,
        most: float = 0.0,
    ) -> bool:
        """Note one step, and whether it is kept: the paired 95% interval of its change must lie below ``most``."""
        step: dict[str, Any] = {"tried": tried, "kl": round(_mean(s.kl for s in scores), 6), "kept": best is None}
        if best is not None:
            change = mean_interval([new.kl - old.kl for new, old in zip(scores, best, strict=True)])
            step["change"] = [round(value, 6) for value in (change.estimate, change.low, change.high)]
            step["kept"] = eligible and change.high < most
        self._steps.append(step)
        return bool(step["kept"])


def with_gains(
    maps: SplitMaps, agreements: Agreements, candidate: tuple[int, int], *, key: str, value: str
) -> SplitMaps:
    """Return maps with gains of these kinds from their held-out comparison; layers that were not compared have none."""
    layers = {}
    for layer, layer_map in maps.layers.items():
        agreement = agreements.get((*candidate, layer))
        sums = (agreement.keys, agreement.values) if agreement is not None and agreement.has_keys else (None, None)
        key_gain, value_gain = (
            None if of is None or kind == "none" else of.gain(kind) for of, kind in zip(sums, (key, value), strict=True)
        )
        layers[layer] = replace(layer_map, key_gain=key_gain, value_gain=value_gain)
    return replace(maps, layers=layers)


def with_states(maps: SplitMaps, found: dict[int, torch.Tensor]) -> SplitMaps:
    """Return maps with these corrections of the states behind a bulk, by late layer."""
    layers = {layer: replace(m, state_correction=found.get(layer)) for layer, m in maps.layers.items()}
    return replace(maps, layers=layers)


def with_scale(maps: SplitMaps, spectra: Spectra, rank: int) -> SplitMaps:
    """Return maps with a scale basis of this rank, at most the width, for each layer that has a spectrum."""
    layers = dict(maps.layers)
    for layer, spectrum in spectra.items():
        basis, residual = spectrum.basis(rank, basis_dtype(maps.layers[layer].weight.dtype))
        layers[layer] = replace(maps.layers[layer], scale_basis=basis, scale_residual=residual)
    return replace(maps, layers=layers)


def _mean(values: Iterable[float]) -> float:
    listed = list(values)
    return sum(listed) / len(listed)
