"""From a model, its maps and what was asked for to what an attachment decides once; or why it cannot be."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ridgefill import _core, rows
from ridgefill.eligibility import FillRule, Signature
from ridgefill.epilogue import EpilogueLayer, epilogue_layers
from ridgefill.errors import AttachError, FitError, UnsupportedModelError
from ridgefill.features import STREAM, Features
from ridgefill.fused import FusedMaps, fused_maps
from ridgefill.guard import PROBE_ROWS, Guard
from ridgefill.kernels import choose_backend
from ridgefill.layout import DecoderLayout, compiled_forward, decoder_layout, fingerprint, model_shape
from ridgefill.maps import RidgeMaps, SplitMaps
from ridgefill.prefill import FillSettings
from ridgefill.residency import Holding, host_obstacle
from ridgefill.synth import ResidentMap, resident_maps
from ridgefill.verdict import gate_word
from ridgefill.writers import LayerWriter, late_layer_writers, probe_layers

if TYPE_CHECKING:
    import torch
    from torch import nn

    from ridgefill.options import Options


@dataclass(frozen=True)
class Assembly:
    """All that `assemble` decides: what calls need and, from ``maps_path`` on, what `Attachment.status` alone tells."""

    rule: FillRule
    settings: FillSettings
    signature: Signature
    resident: list[dict[int, ResidentMap]]  # the maps of every gate, on the model's devices
    selection: rows.SelectionSettings | None
    planner: _core.Planner | None
    maps_path: str | None
    gate: str
    form_reason: str
    backend_reason: str
    tokenizer: str
    warnings: list[str]


def assemble(model: nn.Module, maps: RidgeMaps | str | os.PathLike[str], tokenizer: Any, options: Options) -> Assembly:
    """Read the model and the maps, and decide how calls are filled. Nothing of the model changes.

    Raises:
        What `ridgefill.attach` raises, but for `AlreadyAttachedError`.
    """
    layout = decoder_layout(model)
    if options.selects:
        check_hooks_see_tail(model)
    if options.kept_stream == "host" and (reason := host_obstacle(_device(layout))):
        raise AttachError(f"stream 'host' cannot run: {reason}; stream='device' keeps streams where they are made")
    loaded = maps if isinstance(maps, RidgeMaps) else RidgeMaps.load(maps)
    found = json.dumps(fingerprint(model, tokenizer))
    warnings = [message for _, message in _core.compare_fingerprints(json.dumps(loaded.fingerprint), found)]
    gate_maps = [loaded.at(split) for split in options.gate_splits]
    features = _features_read(gate_maps, layout)
    split_maps = gate_maps[0]
    gate, gate_warning = _gate_word(loaded, split_maps.split, options)
    warnings += [gate_warning] if gate_warning else []
    writers, rotary_modules = late_layer_writers(layout, split_maps.split)
    _check_states(split_maps, writers)
    fused, form_reason = _fused(options, layout, split_maps, writers)
    epilogues, backend_reason = _epilogues(options.backend, layout, fused)
    # Plumb writes the truth, and where maps are fused only gates read the two-step ones.
    unread = options.tier == "plumb" or (fused is not None and not options.selects)
    resident = [{} if unread else resident_maps(at_gate, layout) for at_gate in gate_maps]
    selection = _selection(options, layout, gate_maps, resident)
    guard = None
    if options.guard != "off":
        guard = Guard.of(split_maps, layout, options.guard, _output_embeddings(model))
    rule = FillRule(
        tail=options.tail,
        head=options.head,
        min_bulk=options.min_bulk,
        reach=features.reach,
        probe_rows=0 if guard is None else PROBE_ROWS,
        tile=options.tile,
    )
    settings = FillSettings(
        layout=layout,
        split=split_maps.split,
        maps=resident[0],
        features=features if options.tier != "plumb" else STREAM,
        fused=fused,
        epilogues=epilogues,
        writers=writers,
        rotary_modules=rotary_modules,
        true_inputs=options.tier == "plumb",
        selects_rows=selection is not None,
        guard=guard,
        state_alpha=float(options.state_correction),
    )
    return Assembly(
        rule=rule,
        settings=settings,
        signature=Signature.of(model),
        resident=resident,
        selection=selection,
        planner=_planner(model, loaded, settings, rule, options.loss_budget) if options.tier == "auto" else None,
        maps_path=loaded.path,
        gate=gate,
        form_reason=form_reason,
        backend_reason=backend_reason,
        tokenizer=_tokenizer_word(tokenizer, loaded),
        warnings=warnings,
    )


def check_hooks_see_tail(model: nn.Module | None) -> None:
    """Refuse to select rows inside a tail that no hook sees.

    Raises:
        UnsupportedModelError: the model's forward is compiled.
    """
    if compiled_forward(model):
        raise UnsupportedModelError(
            f"{type(model).__name__}.forward is compiled, which hides the tail from the hooks that select rows; attach "
            "with tier='speed', or let generate(compile_config=...) compile its decode steps alone"
        )


# --- the maps --------------------------------------------------------------------------------------------------------


def _features_read(gate_maps: list[SplitMaps], layout: DecoderLayout) -> Features:
    """What the first gate's maps read, once those of every gate are known to be usable.

    Raises:
        AttachError: some are not, or a later gate's read more than the stream.
    """
    features = [_check_usable(checked, layout) for checked in gate_maps]
    for later, read in zip(gate_maps[1:], features[1:], strict=True):
        if not read.stream_only:
            raise AttachError(
                f"gate {later.split}: its maps read {list(read.names)}, and of rows that stop at a gate only their own "
                "stream is known; fit this split with the stream alone"
            )
    return features[0]


def _check_usable(split_maps: SplitMaps, layout: DecoderLayout) -> Features:
    """Refuse maps that a valid file may hold and a fill cannot apply; anything less would fill wrongly in silence.

    Returns:
        What they read.

    Raises:
        AttachError: a late layer has no map, or one of another width, or the maps' features or target are not what the
            model's layers need.
    """
    late = range(split_maps.split + 1, layout.num_layers)
    if missing := sorted(set(late) - set(split_maps.layers)):
        raise AttachError(f"split {split_maps.split}: the maps lack late layers {missing}; fit them again")
    try:
        features = Features.of(split_maps.features)
    except FitError as error:
        raise AttachError(f"split {split_maps.split}: this version cannot apply its maps: {error}") from error
    expected = (features.width(layout.hidden_size), layout.hidden_size)
    for layer in late:
        if (found := tuple(split_maps.layers[layer].weight.shape)) != expected:
            raise AttachError(
                f"split {split_maps.split}: layer {layer} has a weight {list(found)}; maps that read "
                f"{' + '.join(features.names)} have {list(expected)}"
            )
    for layer in late:  # a raw block input serves every layer; a normalised one only a layer that normalises it anyway
        if split_maps.target not in ("raw", layout.target(layer)):
            raise AttachError(
                f"split {split_maps.split}: the maps predict a {split_maps.target} block input, layer {layer} needs a "
                f"{layout.target(layer)} one; fit them again"
            )
    return features


def _check_states(split_maps: SplitMaps, writers: Mapping[int, LayerWriter]) -> None:
    """Refuse corrections of states that the model's layers do not have.

    Raises:
        AttachError: a correction is shaped unlike its layer's state.
    """
    for layer, layer_map in split_maps.layers.items():
        correction, state = layer_map.state_correction, writers[layer].state_shape
        if correction is not None and tuple(correction.shape) != state:
            raise AttachError(
                f"split {split_maps.split}: layer {layer} has a state_correction {list(correction.shape)}, and its "
                f"state is {'none' if state is None else list(state)}; fit the maps again"
            )


def _gate_word(maps: RidgeMaps, split: int, options: Options) -> tuple[str, str | None]:
    """What the file's gate says of these options, and a warning where that is not that they have passed."""
    share = options.shares[0] if options.shares else None
    return gate_word(
        maps.gate,
        split=split,
        tier=options.tier,
        tail=options.tail,
        head=options.head,
        share=None if isinstance(share, str) else share,
        chosen_otherwise=options.gates is not None or options.scorer is not None or share == "auto",
    )


def _tokenizer_word(tokenizer: Any, maps: RidgeMaps) -> str:
    if tokenizer is None:
        return "unchecked: no tokenizer was given"
    if maps.fingerprint.get("tokenizer") is None:
        return "unchecked: the maps hold no tokenizer hash"
    return "equal"


# --- how they are applied --------------------------------------------------------------------------------------------


def _fused(
    options: Options, layout: DecoderLayout, split_maps: SplitMaps, writers: dict[int, LayerWriter]
) -> tuple[FusedMaps | None, str]:
    """The fused form, or None where maps run two-step; and why.

    Raises:
        AttachError: it was asked for, or a way to hold fused maps, and does not exist.
    """
    fused: FusedMaps | None = None
    if options.tier == "plumb":
        reason = "tier plumb writes the true block inputs"
    elif options.form == "two-step":
        reason = "form='two-step' was asked for"
    else:
        fused, reason = fused_maps(split_maps, layout, writers, _holding(layout, options))
        if options.form == "fused" and fused is None:
            raise AttachError(f"split {split_maps.split} has no fused form: {reason}")
    if fused is None and (options.map_dtype, options.residency) != ("model", "device"):
        raise AttachError(
            f"map_dtype {options.map_dtype!r}, residency {options.residency!r}: only fused maps are held so, and split "
            f"{split_maps.split} runs two-step: {reason}"
        )
    return fused, reason


def _holding(layout: DecoderLayout, options: Options) -> Holding:
    """How fused maps are held; refuses a device to which they cannot be streamed."""
    device, int8, streamed = _device(layout), options.map_dtype == "int8", options.residency == "host"
    if streamed and (reason := host_obstacle(device)):
        raise AttachError(f"residency 'host' cannot run: {reason}; residency='device' keeps maps where they are used")
    by_kernel = int8 and choose_backend(options.backend, device)[0] == "cuda"
    return Holding(int8, options.slots if streamed else 0, by_kernel)


def _epilogues(
    backend: str, layout: DecoderLayout, fused: FusedMaps | None
) -> tuple[dict[int, EpilogueLayer] | None, str]:
    """The fused layers' constants for the kernel, or None where torch does the epilogue; and why."""
    chosen, reason = choose_backend(backend, layout.embeddings.device if fused is None else fused.bias.device)
    epilogues = None
    if chosen == "cuda":
        if fused is None:
            reason = "the two-step form has no epilogue"
        else:
            calls, _, _ = probe_layers(layout)
            tables = {layer_idx: calls[layer_idx]["position_embeddings"] for layer_idx in fused.layers}
            epilogues, reason = epilogue_layers(fused, tables)
        if epilogues is None and backend == "cuda":
            raise AttachError(f"backend 'cuda' cannot run: {reason}; backend='auto' takes torch instead")
    return epilogues, reason


def _device(layout: DecoderLayout) -> torch.device:
    """Where the late layers run."""
    return next(layout.layers[-1].parameters()).device


# --- selected rows, guard, planner -----------------------------------------------------------------------------------


def _selection(
    options: Options, layout: DecoderLayout, gate_maps: list[SplitMaps], resident: list[dict[int, ResidentMap]]
) -> rows.SelectionSettings | None:
    """The gates at which the tail selects rows, or None where it selects none."""
    if not options.selects:
        return None
    auto = options.share == "auto"
    gates = []
    for split_maps, maps, share in zip(gate_maps, resident, options.shares, strict=True):
        scorer = options.scorer or rows.attention_scorer(layout, split_maps)
        most: Any = rows.AUTO_SHARE if auto else share  # what else is no number, `selection_settings` refuses
        least = rows.AUTO_PROBABILITY if auto else None
        gates.append(rows.Gate(split_maps.split, most, maps, scorer, least, options.min_rows))
    return rows.selection_settings(layout, gates)


def _output_embeddings(model: nn.Module) -> nn.Module | None:
    """What makes logits of the base model's output, where the model has it."""
    found = getattr(model, "get_output_embeddings", lambda: None)()
    return found if callable(found) else None


def _planner(
    model: nn.Module, maps: RidgeMaps, settings: FillSettings, rule: FillRule, loss_budget: float
) -> _core.Planner:
    """The planner of the auto tier: exact against speed at one split, by operations and by what the gate measured."""
    results = (maps.gate or {}).get("results", [])
    gates = [
        {"tier": "speed", "dnll": result["dnll"]}
        for result in results
        if (result["split"], result["tier"]) == (settings.split, "speed")
        and (result.get("tail") or rule.tail) <= rule.tail  # a longer tail than the gate's loses no more
    ]
    policy = {
        "maps": [{"split": settings.split, **settings.cost_terms, "gates": gates}],
        "loss_budget_nats": loss_budget,
        "tail": rule.tail,
        "head": rule.head + rule.probe_rows,
        "min_bulk": rule.min_bulk,
        "tile": rule.tile,
    }
    if settings.layout.recurrent:  # a shape counts attention layers; the family table knows states
        return _core.Planner(_core.describe_model(settings.layout.config.to_json_string()), json.dumps(policy))
    return _core.Planner.from_shape(json.dumps(model_shape(model)), json.dumps(policy))
