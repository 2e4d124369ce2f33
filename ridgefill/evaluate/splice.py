"""Which part of a fill does the damage: exact values put back into the filled cache, and what recovers (design 2.5)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from ridgefill.errors import RidgeFillError
from ridgefill.evaluate.paired import KeptFill, PairedPrompt, Variants
from ridgefill.evaluate.quality import token_scores

if TYPE_CHECKING:
    from ridgefill.layout import DecoderLayout

COMPONENTS = ("keys", "key norms", "key directions", "values", "value norms", "both")
# Of a layer that keeps one: its recurrent state, with the convolution's last rows.
STATE = "recurrent state"
EVERYTHING = "everything"
# What a late layer may lose by itself; scale and direction are parts of these.
PARTS = ("keys", "values", STATE)
# Components that are put back layer by layer; the others, in all late layers at once.
_BY_LAYER = ("keys", "key norms", "key directions", "values", STATE)
_WORST_LAYERS = 3
# A fill whose KL to stock, in nats a token, is below this is exact but for rounding.
_LEAST_KL = 1e-6
# What a recommendation needs: so much of the damage in one place, and a split raised by at most so much of the rest.
_SCALE_SHARE, _MOST_SHARE, _MOST_RAISED = 0.2, 0.75, 1 / 3


@dataclass(frozen=True)
class Splice:
    """What is made exact in the filled rows: a component of some layers, of one key-value head or of all (None)."""

    component: str
    layers: tuple[int, ...]
    head: int | None = None


@dataclass(frozen=True)
class Recovered:
    """What a splice gives back.

    Attributes:
        kl: to stock over the tail, nats a token, mean over the prompts.
        share: of the fill's KL that is gone: 1, all of it; below 0, worse than the fill.
    """

    splice: Splice
    kl: float
    share: float


@dataclass(frozen=True)
class SpliceStudy:
    """One split's splices: all late layers at once, one at a time, up from the split, down from the last layer."""

    split: int
    prompts: int
    kl: float  # the fill's own
    whole: list[Recovered]
    layers: list[Recovered]
    upwards: list[Recovered]
    downwards: list[Recovered]
    heads: list[Recovered]

    def share(self, component: str) -> float:
        """What a component of all late layers recovers: nothing, where none of them keeps it."""
        return next((r.share for r in self.whole if r.splice.component == component), 0.0)


def study_splices(
    variants: Variants,
    prompts: Sequence[torch.Tensor],
    split: int,
    *,
    tail: int,
    head: int = 4,
) -> SpliceStudy | None:
    """Return what each splice recovers, over prompts ``[1, rows]``, or None where there is nothing to recover.

    Each prompt is prefilled once by the stock model, which leaves the exact rows and what the layers below the split
    give, and filled once; a splice costs the tail's pass from its first layer on, together with others (`KeptFill`).
    About seven splices a late layer, and one for each key-value head of the three layers that keys alone recover most.
    What is put back from either end is all that the layers keep: keys and values, and states.

    Nothing is lost where no layer is predicted, or where the fill is exact.

    Raises:
        RidgeFillError: there is no prompt.
    """
    late = tuple(range(split + 1, variants.layout.num_layers))  # the split layer's rows are exact
    if not prompts:
        raise RidgeFillError(f"split {split}: 0 prompts to splice, expected at least one")
    layout, device = variants.layout, variants.layout.embeddings.device
    if not late:
        return None
    pairs = [PairedPrompt(variants, ids.to(device), tail=tail, head=head, splits=(split,)) for ids in prompts]
    fills = [KeptFill(pair, split) for pair in pairs]
    filled = sum(_kl(pair, fill.logits) for pair, fill in zip(pairs, fills, strict=True)) / len(pairs)
    if filled < _LEAST_KL:
        return None

    def recover(splices: Sequence[Splice]) -> dict[Splice, Recovered]:
        """Those that begin at the same layer together."""
        found = {}
        for first_layer in sorted({splice.layers[0] for splice in splices}):
            of_layer = list(dict.fromkeys(splice for splice in splices if splice.layers[0] == first_layer))
            kls = [_spliced_kls(pair, fill, of_layer) for pair, fill in zip(pairs, fills, strict=True)]
            for splice, of_prompts in zip(of_layer, zip(*kls, strict=True), strict=True):
                kl = sum(of_prompts) / len(pairs)
                found[splice] = Recovered(splice, kl, 1 - kl / filled)
        return found

    components = _kept(layout, late)
    everything = components[-1]
    whole = [Splice(component, late) for component in components]
    layers = [Splice(name, (layer,)) for name in _BY_LAYER for layer in late if name in _kept(layout, [layer])]
    upwards = [Splice(everything, late[: number + 1]) for number in range(len(late))]
    downwards = [Splice(everything, late[number:]) for number in reversed(range(len(late)))]
    found = recover([*whole, *layers, *upwards, *downwards])
    by_keys = sorted((s for s in layers if s.component == "keys"), key=lambda s: -found[s].share)[:_WORST_LAYERS]
    heads = [
        Splice("keys", splice.layers, kv_head)
        for splice in by_keys
        for kv_head in range(pairs[0].exact_rows(splice.layers[0])[0].shape[1])
    ]
    found |= recover(heads)

    def of(splices: Sequence[Splice]) -> list[Recovered]:
        return [found[splice] for splice in splices]

    return SpliceStudy(split, len(pairs), filled, of(whole), of(layers), of(upwards), of(downwards), of(heads))


def _kept(layout: DecoderLayout, layers: Sequence[int]) -> tuple[str, ...]:
    """The components that these layers keep, between them; the last one is all that they keep."""
    keys = COMPONENTS if any(map(layout.keeps_keys, layers)) else ()
    states = (STATE,) if any(map(layout.keeps_state, layers)) else ()
    return (*keys, *states, *((EVERYTHING,) if keys and states else ()))


def _kl(pair: PairedPrompt, logits: torch.Tensor) -> float:
    """The KL to stock of one prompt's tail, nats a token."""
    return float(token_scores(pair.stock, logits, pair.ids).kl.mean())


def _spliced_kls(pair: PairedPrompt, fill: KeptFill, splices: Sequence[Splice]) -> list[float]:
    """The same over each spliced cache; the splices begin at one layer."""
    edits = [partial(put_back, pair, splice) for splice in splices]
    return [_kl(pair, logits) for logits in fill.edited(edits, splices[0].layers[0])]


def put_back(pair: PairedPrompt, splice: Splice, cache: Any) -> None:
    """Make a component of the bulk's filled rows exact in ``cache``, in place, in those layers that keep it."""
    rows = slice(pair.head, pair.fill_end)
    heads = slice(None) if splice.head is None else slice(splice.head, splice.head + 1)
    for layer_idx in splice.layers:
        if splice.component in (STATE, EVERYTHING):
            pair.restore_state(cache, layer_idx)
        if not pair.layout.keeps_keys(layer_idx):
            continue
        filled = (cache.layers[layer_idx].keys, cache.layers[layer_idx].values)
        for name, ours, exact in zip(("key", "value"), filled, pair.exact_rows(layer_idx), strict=True):
            if splice.component in ("both", EVERYTHING) or splice.component.startswith(name):
                ours[:, heads, rows] = mixed(ours[:, heads, rows], exact[:, heads, rows], splice.component)


def mixed(filled: torch.Tensor, exact: torch.Tensor, component: str) -> torch.Tensor:
    """Return filled vectors ``[..., head_dim]`` with their norms, their directions or all of them exact.

    A rotation keeps norms, so keys may be compared after their rotary embedding.
    """
    if not component.endswith(("norms", "directions")):
        return exact
    tiny = torch.finfo(torch.float32).tiny
    filled_norm, exact_norm = (t.float().norm(dim=-1, keepdim=True).clamp_min(tiny) for t in (filled, exact))
    source, given, wanted = (filled, filled_norm, exact_norm)
    if component.endswith("directions"):
        source, given, wanted = (exact, exact_norm, filled_norm)
    scaled: torch.Tensor = source.float() * wanted / given
    return scaled.to(filled.dtype)


def attribution(
    study: SpliceStudy, *, selectable: bool = True, features: Sequence[str] = ("stream",)
) -> dict[str, Any]:
    """Return in words and numbers which component does the damage, in which layers, and how much of it is scale.

    ``selectable``: whether this model's rows can run exactly among filled ones, which is then recommended.
    ``features``: what the maps read already.
    """
    recovered = {r.splice.component: r.share for r in study.whole}
    component = max((part for part in PARTS if part in recovered), key=recovered.__getitem__)
    alone = {r.splice.layers[0]: r.share for r in study.layers if r.splice.component == component}
    worst = sorted(alone, key=lambda layer: -alone[layer])[:_WORST_LAYERS]
    return {
        "component": component,
        "recovered": recovered,
        "worst_layers": {layer: alone[layer] for layer in worst},
        "scale": max(study.share("key norms"), study.share("value norms")),
        "directions": study.share("key directions"),
        "recommendations": list(_recommendations(study, component, selectable, features)),
    }


def _recommendations(study: SpliceStudy, component: str, selectable: bool, features: Sequence[str]) -> Iterator[str]:
    """What to try, the cheapest first."""
    scale = {name: study.share(f"{name} norms") for name in ("key", "value")}
    for name, share in scale.items():
        if share >= _SCALE_SHARE:
            yield f"enable {name} gains: exact {name} norms alone recover {share:.0%}"
    if study.share(STATE) >= _SCALE_SHARE:
        yield (
            f"correct recurrent states: exact ones alone recover {study.share(STATE):.0%}; `ridgefill inspect` shows "
            "whether the fit kept corrections (a short convolution has none), which more held-out text makes better"
        )
    for number, recovered in enumerate(study.upwards, start=1):
        if recovered.share >= _MOST_SHARE:
            if number <= _MOST_RAISED * len(study.upwards):
                last = recovered.splice.layers[-1]
                yield f"raise the split to {last}: layers up to it hold {recovered.share:.0%} of the damage"
            break
    directions = study.share("key directions") > max(_SCALE_SHARE, scale["key"])
    if component == "keys" and directions and "previous:1" not in features:
        yield (
            f"add a feature (previous:1): exact key directions recover {study.share('key directions'):.0%}, and keys "
            "that look at the row before are what the stream alone predicts worst"
        )
    if selectable:
        yield "select rows (tier quality): rows that the tail looks at run exactly, whatever their maps lose"
