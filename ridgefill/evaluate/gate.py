"""The acceptance gate: three detection lines, controls that must fail, and what it costs, in one verdict (issue 7)."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ridgefill.demo import KINDS, standard_texts
from ridgefill.errors import RidgeFillError, UnsupportedModelError
from ridgefill.evaluate.answers import (
    Answer,
    Setting,
    ask_in_turns,
    cell,
    disagreements,
    heat_map,
)
from ridgefill.evaluate.controls import direct_obstacle
from ridgefill.evaluate.cost import measure_costs
from ridgefill.evaluate.distance import (
    GROUPS,
    FarSettings,
    GroupScore,
    differences,
    score_document,
    summarise,
)
from ridgefill.evaluate.needle import Filler, Item, build_items
from ridgefill.evaluate.paired import Variants
from ridgefill.evaluate.report import machine
from ridgefill.evaluate.splice import attribution, study_splices
from ridgefill.evaluate.stats import (
    mean_interval,
    minimum_detectable_effect,
    minimum_detectable_losses,
    scipy_stats,
    sign_test,
)
from ridgefill.evaluate.windows import Window, held_out_windows, unseen_texts
from ridgefill.maps import RidgeMaps
from ridgefill.options import DEFAULT_SHARE

if TYPE_CHECKING:
    from torch import nn

VARIANT_OF = {"speed": "fill", "quality": "quality"}
# What must be worse than which tier: a gate that cannot tell them apart could not tell a broken fill either.
CONTROLS = {"swapped": "speed", "head=0": "speed", "random rows": "quality"}
# What a fill should beat, beside it in the report: the stream handed on, keys and values predicted without a norm, no
# bulk at all, unselected rows dropped.
BASELINES = ("identity", "direct", "no bulk", "drop")
# Parts of the budget at which a line ends, once it has its least number of prompts.
_NEEDLES_UNTIL, _DISTANCE_UNTIL, _SPLICE_UNTIL = 0.7, 0.78, 0.95
_LEAST_ITEMS, _LEAST_DOCUMENTS = 8, 3
# Splices cost their tails' logits: 32 rows of 262,144 words, 64 of half as many or fewer.
_SPLICE_PROMPTS, _SPLICE_TAIL, _SPLICE_LOGITS = 2, 64, 1 << 23


@dataclass(frozen=True)
class Limits:
    """What a fill may lose and still pass; losses and KL in nats a token, needles as a share of all."""

    needles: float = 0.05
    dnll: float = 0.05
    far_dnll: float = 0.25
    kl: float = 0.1


@dataclass(frozen=True)
class GateSettings:
    """What is tried, and how long it may take.

    Attributes:
        splits: split layers, each with maps in the file.
        tiers: of ``speed`` and ``quality``.
        lengths: prompt lengths in tokens.
        needles: how many needles a prompt holds, one of them asked for. Lengths and numbers are used at which the stock
            model answers 90%: small models mix up several.
        tail, head, min_bulk, share: as `attach` takes them.
        items: prompts of each length and number of needles, and an eighth more as controls outside the bulk.
        documents: texts of the distance line.
        budget_seconds: about the time it may take; fewer prompts are run where they do not fit.
    """

    splits: tuple[int, ...]
    tiers: tuple[str, ...] = ("speed", "quality")
    lengths: tuple[int, ...] = (1024, 2048)
    needles: tuple[int, ...] = (1, 4)
    tail: int = 512
    head: int = 4
    min_bulk: int = 256
    share: float = DEFAULT_SHARE
    items: int = 96
    documents: int = 12
    budget_seconds: float = 1200.0
    far: FarSettings = field(default_factory=FarSettings)
    limits: Limits = field(default_factory=Limits)


@dataclass(frozen=True)
class Material:
    """The prompts of a gate, by their length in tokens: needle items, and texts."""

    items: Callable[[int], Sequence[Item]]
    documents: Callable[[int], Sequence[Window]]


@dataclass
class GateRun:
    """What a gate found: the document of gate.json, and every answer and score that it was computed from."""

    document: dict[str, Any]
    answers: list[Answer]
    scores: list[GroupScore]


def standard_material(tokenizer: Any, maps: RidgeMaps, settings: GateSettings) -> Material:
    """Return prompts from the standard texts that calibration never sees.

    Raises:
        RidgeFillError: the maps were fitted on one of these texts.
    """
    filler = Filler(tokenizer, unseen_texts(maps))

    def items(tokens: int) -> list[Item]:
        count = settings.items * len(settings.needles)
        options: dict[str, Any] = {"tail": settings.tail, "head": settings.head, "needles": settings.needles}
        return build_items(tokenizer, filler, tokens=tokens, count=count, controls=count // 8, seed=tokens, **options)

    def documents(tokens: int) -> list[Window]:
        found: list[Window] = []
        each = -(-settings.documents // len(KINDS))
        for kind in KINDS:
            length = sum(len(text) for _, text in standard_texts(kind, "held-out")) // 4  # about so many tokens
            if per_kind := min(each, length // (2 * tokens)):
                found += held_out_windows(tokenizer, tokens=tokens, per_kind=per_kind, kinds=(kind,))
        # Kinds take turns, so that a budget that ends early has seen all of them.
        return sorted(found, key=lambda window: [w.name for w in found if w.kind == window.kind].index(window.name))

    return Material(items, documents)


def run_gate(
    model: nn.Module,
    tokenizer: Any,
    maps: RidgeMaps,
    settings: GateSettings,
    material: Material | None = None,
    *,
    progress: Callable[[str, int, int | None], None] = lambda phase, done, total: None,
    clock: Callable[[], float] = time.monotonic,
) -> GateRun:
    """Return a verdict for each split and tier, with all that led to it.

    A line passes when its interval lies within the limits, fails when it lies outside, and is undecided in between. A
    split and tier passes when every line does; it fails too when its controls do not come out worse, or when a prompt
    of the longest length filled no row. Tier ``quality`` is not judged where this model refuses it; the reason is among
    ``refused``.

    Raises:
        RidgeFillError: settings that make no sense; no length at which the stock model itself answers; a variant that
            was to be measured filled nothing.
        MapSchemaError: the maps lack a split.
        UnsupportedModelError: the model refuses every tier that was to be tried.
    """
    if not settings.splits or not settings.tiers or not set(settings.tiers) <= set(VARIANT_OF):
        raise RidgeFillError(f"splits {settings.splits}, tiers {settings.tiers}: expected splits, and {[*VARIANT_OF]}")
    for split in settings.splits:
        maps.at(split)
    scipy_stats()  # missing, it would be missed only at the end
    started = clock()

    def spent() -> float:
        return (clock() - started) / settings.budget_seconds

    material = material or standard_material(tokenizer, maps, settings)
    variants = Variants(model, maps)
    unselectable = _unselectable(variants, settings)
    asked_for = [(split, tier) for split in settings.splits for tier in settings.tiers]
    tried = [(split, tier) for split, tier in asked_for if tier != "quality" or split not in unselectable]
    tiers = {split: [tier for at, tier in tried if at == split] for split, _ in tried}
    if not tried:
        raise UnsupportedModelError(f"there is no tier to judge: {next(iter(unselectable.values()))}")
    # Needles: depths are spread, and lengths take turns, so that a budget that ends early has seen all of both.
    groups: dict[tuple[int, int], list[Item]] = {}
    for length in settings.lengths:
        for item in material.items(length):
            groups.setdefault((length, item.needles), []).append(item)
    groups = {group: _spread(items) for group, items in groups.items()}
    columns = [Setting(split, VARIANT_OF[tier], _share(settings, tier)) for split, tier in tried]

    def enough(asked: int, groups_left: int) -> bool:
        progress("needles", asked, sum(len(items) for items in groups.values()))
        return asked >= _LEAST_ITEMS * groups_left and spent() > _NEEDLES_UNTIL

    answers, usable = ask_in_turns(variants, tokenizer, groups, columns, tail=settings.tail, enough=enough)
    # Distance, and the controls on the same texts.
    longest = max(group.tokens for group in usable)
    documents = list(material.documents(longest))
    if len(documents) < _LEAST_DOCUMENTS:
        raise RidgeFillError(
            f"{len(documents)} texts hold {longest:,} tokens, intervals need {_LEAST_DOCUMENTS}; name shorter lengths"
        )
    # Where keys are not linear in what the maps predict, nothing can be said of a direct ridge.
    left_out = {"direct"} if any(direct_obstacle(variants.layout, maps.at(split)) for split in tiers) else set()
    left_out |= {"drop"} if unselectable else set()
    baselines = [name for name in BASELINES if name not in left_out]
    pairs = [(split, variant) for split in tiers for variant in _scored_variants(tiers[split], baselines)]
    scores: list[GroupScore] = []
    for number, text in enumerate(documents):
        if number >= _LEAST_DOCUMENTS and spent() > _DISTANCE_UNTIL:
            break
        progress("distance", number, len(documents))
        options: dict[str, Any] = {"tail": settings.tail, "head": settings.head, "share": settings.share}
        scores += score_document(variants, tokenizer, text, pairs, far=settings.far, **options)
    splices = {}
    for number, split in enumerate(tiers):
        if spent() > _SPLICE_UNTIL:
            break
        progress("splice", number, len(tiers))
        splices[split] = _splice(variants, documents, split, settings, longest, selectable=split not in unselectable)
    progress("cost", 0, None)
    rule = {"tail": settings.tail, "head": settings.head, "min_bulk": settings.min_bulk}
    cost = measure_costs(model, maps, documents[0].ids, tried, share=settings.share, **rule)
    controls = [control for split in tiers for control in _controls(scores, split, tiers[split])]
    results = [_result(answers, scores, cost, controls, split, tier, settings) for split, tier in tried]
    document = {
        "verdict": _overall(results),
        "results": results,
        "refused": [
            {"split": split, "tier": tier, "reason": unselectable[split]}
            for split, tier in asked_for
            if (split, tier) not in tried
        ],
        "controls": controls,
        "baselines": [_baseline(scores, split, name) for split in tiers for name in baselines],
        "splices": splices,
        "cost": cost,
        "stock_accuracy": [asdict(group) for group in usable],
        "needle_items": len({answer.item for answer in answers}),
        "least_lost_needles": minimum_detectable_losses(),
        "documents": len({score.document for score in scores}),
        "settings": asdict(settings),
        "model": maps.fingerprint["name"],
        "dtype": str(variants.layout.embeddings.dtype).removeprefix("torch."),
        "maps": {"path": maps.path and Path(maps.path).name, "rows": maps.fit["rows"]},
        "machine": machine(),
        "seconds": clock() - started,
    }
    return GateRun(document, answers, scores)


def _share(settings: GateSettings, tier: str) -> float:
    return settings.share if tier == "quality" else 0.0


def _spread(items: Sequence[Item]) -> list[Item]:
    """The items in an order whose every beginning is spread over the depths of each kind, and kinds take turns.

    By the bits of their number among those of their kind, reversed.
    """
    kinds: dict[str, list[Item]] = {}
    for item in items:
        kinds.setdefault(item.kind, []).append(item)
    ordered = []
    for of_kind in kinds.values():
        width = max(1, (len(of_kind) - 1).bit_length())
        reversed_bits = [int(f"{i:0{width}b}"[::-1], 2) for i in range(len(of_kind))]
        ordered.append([of_kind[i] for i in sorted(range(len(of_kind)), key=reversed_bits.__getitem__)])
    return [item for turn in zip_longest(*ordered) for item in turn if item is not None]


def _unselectable(variants: Variants, settings: GateSettings) -> dict[int, str]:
    """Splits at which this model lets no rows be selected, and why."""
    found = {}
    for split in settings.splits:
        variants.settings(split)  # whatever does not even fill is an error
        try:
            variants.choice(split, share=settings.share)
        except UnsupportedModelError as error:
            found[split] = str(error)
    return found


def _control_names(tiers: Sequence[str]) -> list[str]:
    """Controls of the fill itself always; of the choice of rows where rows are chosen."""
    return [control for control, tier in CONTROLS.items() if tier == "speed" or tier in tiers]


def _scored_variants(tiers: Sequence[str], baselines: Sequence[str]) -> list[str]:
    """Every variant whose loss is measured; the controls are compared with the plain fill, whatever is tried."""
    tried = (VARIANT_OF[tier] for tier in tiers)
    return list(dict.fromkeys(["fill", *tried, *_control_names(tiers), *baselines]))


def _splice(
    variants: Variants,
    documents: Sequence[Window],
    split: int,
    settings: GateSettings,
    longest: int,
    *,
    selectable: bool,
) -> dict[str, Any]:
    """One split's splices, on short tails: what they cost is the tail's passes."""
    tail = min(settings.tail, _SPLICE_TAIL, max(2, _SPLICE_LOGITS // variants.layout.embeddings.shape[0]))
    rows = min(longest, 1024)
    prompts = [document.ids[:, :rows] for document in documents[:_SPLICE_PROMPTS]]
    study = study_splices(variants, prompts, split, tail=tail, head=settings.head)
    if study is None:
        return {"component": None, "recommendations": [], "recovered": {}}
    return {
        **attribution(study, selectable=selectable, features=variants.maps.at(split).features),
        "kl": study.kl,
        "prompts": study.prompts,
        "tokens": rows,
        "tail": tail,
        "layers": [
            {"component": r.splice.component, "layer": r.splice.layers[0], "share": r.share} for r in study.layers
        ],
        "upwards": [{"layer": r.splice.layers[-1], "share": r.share} for r in study.upwards],
        "downwards": [{"layer": r.splice.layers[0], "share": r.share} for r in study.downwards],
        "heads": [{"layer": r.splice.layers[0], "head": r.splice.head, "share": r.share} for r in study.heads],
    }


# --- the verdict ---------------------------------------------------------------------------------------------------


def verdict_of(low: float, high: float, limit: float) -> str:
    """Return ``pass`` if a loss is certainly within ``limit``, ``fail`` if certainly beyond it, else ``undecided``."""
    return "pass" if high <= limit else "fail" if low > limit else "undecided"


def _controls(scores: Sequence[GroupScore], split: int, tiers: Sequence[str]) -> list[dict[str, Any]]:
    """Whether each control came out worse than its tier, by KL over the whole tail, paired by document."""
    found = []
    for control in _control_names(tiers):
        tier = CONTROLS[control]
        excess = differences(scores, split, control, VARIANT_OF[tier], "whole tail")
        interval = mean_interval(excess)
        entry = {"split": split, "control": control, "tier": tier, "excess_kl": asdict(interval)}
        found.append({**entry, "p": sign_test(excess), "failed": interval.low > 0})
    return found


def _baseline(scores: Sequence[GroupScore], split: int, name: str) -> dict[str, Any]:
    """A baseline's whole tail and far-dependent tokens; None where there is no such token."""
    found = {group: summarise(scores, split, name, group) for group in ("whole tail", "far-dependent")}
    return {"split": split, "name": name, **{group: of and asdict(of) for group, of in found.items()}}


def _result(
    answers: Sequence[Answer],
    scores: Sequence[GroupScore],
    cost: Sequence[dict[str, Any]],
    controls: Sequence[dict[str, Any]],
    split: int,
    tier: str,
    settings: GateSettings,
) -> dict[str, Any]:
    """One split and tier: its lines, and the verdict with its reasons."""
    needles, lost = _needle_line(answers, Setting(split, VARIANT_OF[tier], _share(settings, tier)), settings.limits)
    distance, moved = _distance_line(scores, split, VARIANT_OF[tier], settings.limits)
    timed = next(entry for entry in cost if (entry["split"], entry["tier"]) == (split, tier))
    verdicts, reasons = [needles["verdict"], distance["verdict"]], [*lost, *moved]
    if not timed["rows_filled"]:
        verdicts.append("fail")
        reasons.append(f"attached, it filled no row of {timed['tokens']:,} tokens: {timed['reason']}")
    for control in controls:
        if control["split"] == split and CONTROLS[control["control"]] in ("speed", tier) and not control["failed"]:
            verdicts.append("fail")
            reasons.append(f"the control {control['control']!r} is not certainly worse, so this gate saw too little")
    worst = next(verdict for verdict in ("fail", "undecided", "pass") if verdict in verdicts)
    return {
        "split": split,
        "tier": tier,
        "verdict": worst,
        "reasons": reasons,
        "rows_filled": timed["rows_filled"],
        "needles": needles,
        "distance": distance,
    }


def _needle_line(answers: Sequence[Answer], setting: Setting, limits: Limits) -> tuple[dict[str, Any], list[str]]:
    """Needles in the fill against stock, those outside it beside them, and why the line does not pass."""
    counts = cell(answers, setting, lambda a: a.label == "filled")
    outside = [a for a in answers if (a.split, a.variant) == (setting.split, setting.variant) and a.label == "exact"]
    change = counts.test.change
    verdict = verdict_of(-change.high, -change.low, limits.needles)
    if counts.test.p < 0.05 and counts.test.lost > counts.test.gained:
        verdict = "fail"
    reasons = []
    if verdict != "pass":
        reasons.append(
            f"needles: {counts.right} of {counts.items} found where stock finds {counts.stock}; the change is between "
            f"{100 * change.low:+.1f} and {100 * change.high:+.1f} points, {-100 * limits.needles:g} are allowed"
        )
    line = {
        "verdict": verdict,
        **asdict(counts),
        "outside": {"items": len(outside), "right": sum(a.right for a in outside)},
        "heat_map": heat_map(answers, setting),
        "disagreements": disagreements(answers, setting),
    }
    return line, reasons


def _distance_line(
    scores: Sequence[GroupScore], split: int, variant: str, limits: Limits
) -> tuple[dict[str, Any], list[str]]:
    """Every group's figures, and why the line does not pass."""
    names = sorted({s.group for s in scores} - set(GROUPS), key=lambda name: int(name.split("[")[1].split(",")[0]))
    groups = {name: summarise(scores, split, variant, name) for name in (*GROUPS, *names)}
    verdicts, reasons = [], []
    for group, figure, limit in (
        ("whole tail", "kl", limits.kl),
        ("whole tail", "dnll", limits.dnll),
        ("far-dependent", "dnll", limits.far_dnll),
    ):
        summary = groups[group]
        if summary is None:
            verdicts.append("undecided")
            reasons.append(f"{group}: fewer than two texts have such a token")
            continue
        interval = getattr(summary, figure)
        verdicts.append(verdict_of(interval.low, interval.high, limit))
        if verdicts[-1] != "pass":
            reasons.append(
                f"{group}: {figure} {interval.estimate:+.3f} [{interval.low:+.3f}, {interval.high:+.3f}], "
                f"{limit:g} is allowed"
            )
    worst = next(verdict for verdict in ("fail", "undecided", "pass") if verdict in verdicts)
    per_document = [
        s.dnll / s.tokens for s in scores if (s.split, s.variant, s.group) == (split, variant, "whole tail")
    ]
    shown = {name: None if group is None else asdict(group) for name, group in groups.items()}
    return {"verdict": worst, "groups": shown, "least_dnll": minimum_detectable_effect(per_document)}, reasons


def _overall(results: Sequence[dict[str, Any]]) -> str:
    """``pass`` if any split and tier may be turned on, else the best that there is."""
    found = {result["verdict"] for result in results}
    return next(verdict for verdict in ("pass", "undecided", "fail") if verdict in found)


def map_file_entry(document: dict[str, Any]) -> dict[str, Any]:
    """Return what a map file keeps of a gate: verdicts and settings, and the losses that the planner may count on.

    Only what passed is among the losses: a small average loss must not turn on a fill that forgets.
    """
    settings = document["settings"]
    passed = [result for result in document["results"] if result["verdict"] == "pass"]
    return {
        "verdicts": [{name: r[name] for name in ("split", "tier", "verdict", "reasons")} for r in document["results"]],
        "settings": {name: settings[name] for name in ("tail", "head", "share", "limits")},
        "lengths": sorted({group["tokens"] for group in document["stock_accuracy"]}),
        "dtype": document["dtype"],
        "results": [
            {
                "split": result["split"],
                "tier": result["tier"],
                "dnll": result["distance"]["groups"]["whole tail"]["dnll"]["estimate"],
                "tail": settings["tail"],
                **({"share": settings["share"]} if result["tier"] == "quality" else {}),
            }
            for result in passed
        ],
    }
