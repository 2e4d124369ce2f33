"""How far filled prefills are from stock: KL, loss and top-1 on the exact tail, beside controls that must fail."""

from __future__ import annotations

import copy
import functools
import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import log_softmax

from ridgefill.attachment import attach
from ridgefill.capture import special_prefix
from ridgefill.demo import KINDS, standard_texts
from ridgefill.errors import RidgeFillError
from ridgefill.evaluate.known import KnownLayers
from ridgefill.features import Features
from ridgefill.fused import fused_maps, is_rms_norm
from ridgefill.layout import cache_argument_name, decoder_layout, input_norm
from ridgefill.maps import LayerMap, RidgeMaps, SplitMaps
from ridgefill.prefill import Bulk, FillSettings, Step, run_bulk, write_late_layers
from ridgefill.rows import (
    WAITING,
    Gate,
    Selection,
    SelectionSettings,
    attention_scorer,
    await_tail,
    selection_settings,
)
from ridgefill.scorers import RandomScorer, RowScorer
from ridgefill.synth import resident_maps
from ridgefill.writers import LayerWriter, rotary_modules

if TYPE_CHECKING:
    from torch import nn

    from ridgefill.layout import DecoderLayout

# Rows whose logits are compared at once: 128 rows of 50,000 words take 25 MB in float32, 100 MB with what is derived.
_SCORE_ROWS = 128
SELECTING_VARIANTS = ("quality", "random rows", "drop")
VARIANTS = ("fill", *SELECTING_VARIANTS, "no bulk", "identity", "direct", "head=0", "swapped")
# The part of the bulk that selecting variants run exactly.
SHARE = 0.1


@dataclass(frozen=True)
class Window:
    """One prompt of held-out text: ``ids`` is ``[1, tokens]`` int64."""

    kind: str
    name: str
    ids: torch.Tensor


@dataclass(frozen=True)
class Score:
    """One variant against stock on one window's tail; losses and KL are means in nats per token.

    Attributes:
        kl: KL(stock || variant) over all tail positions.
        dnll: loss minus stock's over the whole tail (its last position has no next token and is left out).
        dnll_end: the same over the last ``end_tokens`` positions.
        top1: share of tail positions where both name the same most likely token.
        rows_filled: rows of each late layer that were predicted; 0 for the control that fills nothing.
    """

    kl: float
    dnll: float
    dnll_end: float
    end_tokens: int
    top1: float
    rows_filled: int


@dataclass(frozen=True)
class Result:
    """One line of an evaluation: which window, split and variant, and its score."""

    kind: str
    window: str
    split: int
    variant: str
    score: Score


# --- prompts -------------------------------------------------------------------------------------------------------


def unseen_texts(maps: RidgeMaps) -> list[tuple[str, str]]:
    """Return every held-out standard text ``(name, text)``.

    Raises:
        RidgeFillError: one of them took part in the fit of these maps, by its name or by its bytes.
    """
    fitted = {entry[field] for entry in maps.fit["texts"] for field in ("name", "sha256")}
    texts = [text for kind in KINDS for text in standard_texts(kind, "held-out")]
    for name, text in texts:
        if name in fitted or hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest() in fitted:
            raise RidgeFillError(f"the maps were fitted on {name}, which is held out; fit them on other text")
    return texts


def held_out_windows(tokenizer: Any, *, tokens: int, per_kind: int, kinds: Sequence[str] = KINDS) -> list[Window]:
    """Return ``per_kind`` prompts of ``tokens`` ids for each kind, from standard texts that calibration never sees.

    A kind's texts are joined in their order, each cut at four windows' length so that no module dominates, tokenised,
    and cut into windows that do not overlap; the chosen ones are evenly spaced. A window starts with whatever the
    tokenizer puts before a text.

    Raises:
        RidgeFillError: a kind holds fewer windows of this length.
    """
    prefix = special_prefix(tokenizer)
    room = tokens - len(prefix)
    if room < 1 or per_kind < 1:
        raise RidgeFillError(f"windows of {tokens} tokens, {per_kind} per kind: both must hold at least one")
    windows = []
    for kind in kinds:
        ids: list[int] = []
        starts: list[tuple[int, str]] = []
        for name, text in standard_texts(kind, "held-out"):
            starts.append((len(ids), name))
            ids += tokenizer(text, add_special_tokens=False)["input_ids"][: 4 * tokens]
        count = len(ids) // room
        if count < per_kind:
            raise RidgeFillError(
                f"the held-out {kind} texts hold {count} windows of {tokens} tokens, {per_kind} were asked for; "
                "ask for fewer or shorter windows"
            )
        for number in range(per_kind):
            at = (number * count // per_kind) * room
            name = next(name for start, name in reversed(starts) if start <= at)
            windows.append(Window(kind, f"{name}@{at}", torch.tensor([prefix + ids[at : at + room]])))
    return windows


# --- scores --------------------------------------------------------------------------------------------------------


@torch.no_grad()
def prefill_logits(model: nn.Module, ids: torch.Tensor, tail: int, cache: Any = None) -> torch.Tensor:
    """Return the logits of the last ``tail`` positions, ``[tail, vocab]``, of one prefill of ``ids`` ``[1, rows]``."""
    arguments = {} if cache is None else {str(cache_argument_name(model.forward)): cache}
    logits: torch.Tensor = model(ids, use_cache=True, logits_to_keep=tail, **arguments).logits[0]
    return logits


@dataclass(frozen=True)
class TokenScores:
    """Two sides of one tail, token by token, float64 on the CPU; the tail's last position has no next token.

    Attributes:
        kl: KL(stock || other) at each position, nats, ``[tail]``.
        dnll: loss minus stock's of each next token, nats, ``[tail - 1]``.
        agree: 1 where both name the same most likely token, ``[tail]``.
    """

    kl: torch.Tensor
    dnll: torch.Tensor
    agree: torch.Tensor


def token_scores(stock: torch.Tensor, other: torch.Tensor, ids: torch.Tensor) -> TokenScores:
    """Compare two sets of tail logits, ``[tail, vocab]`` in any float dtype, computed in float32.

    ``ids`` is the whole prompt ``[1, rows]``; its last ``tail`` positions belong to the logits.

    Raises:
        RidgeFillError: the shapes do not match, or a logit is not finite.
    """
    tail = stock.shape[0]
    if stock.shape != other.shape or ids.shape[1] < tail or tail < 2:
        raise RidgeFillError(
            f"tail logits {tuple(stock.shape)} and {tuple(other.shape)} of a prompt {tuple(ids.shape)} do not match"
        )
    labels = ids[0, -tail:].roll(-1)  # the last one wraps round; its loss is left out below
    kl, loss_difference, agree = [], [], []
    for start in range(0, tail, _SCORE_ROWS):
        rows = slice(start, start + _SCORE_ROWS)
        p, q = log_softmax(stock[rows].float(), -1), log_softmax(other[rows].float(), -1)  # [rows, vocab]
        kl.append((p.exp() * (p - q)).sum(-1))
        label = labels[rows].to(p.device).unsqueeze(1)
        loss_difference.append((p.gather(1, label) - q.gather(1, label)).squeeze(1))
        agree.append(p.argmax(-1) == q.argmax(-1))
    kl_rows, dnll_rows = torch.cat(kl).double().cpu(), torch.cat(loss_difference).double()[:-1].cpu()
    if not (bool(torch.isfinite(kl_rows).all()) and bool(torch.isfinite(dnll_rows).all())):
        raise RidgeFillError("a logit is not finite; use float32 or bfloat16 and check the model's weights")
    return TokenScores(kl_rows, dnll_rows, torch.cat(agree).double().cpu())


def score_tail(stock: torch.Tensor, other: torch.Tensor, ids: torch.Tensor, *, rows_filled: int) -> Score:
    """Return the means of `token_scores`.

    The end window is the last 512 tokens of a tail of 1,024 or more, else the last half of the tail.

    Raises:
        RidgeFillError: the shapes do not match, or a logit is not finite.
    """
    found, end_tokens = token_scores(stock, other, ids), min(512, stock.shape[0] // 2)
    return Score(
        kl=float(found.kl.mean()),
        dnll=float(found.dnll.mean()),
        dnll_end=float(found.dnll[-end_tokens:].mean()),
        end_tokens=end_tokens,
        top1=float(found.agree.mean()),
        rows_filled=rows_filled,
    )


def score_fill(
    model: nn.Module,
    maps: RidgeMaps,
    ids: torch.Tensor,
    stock: torch.Tensor,
    *,
    split: int,
    tail: int,
    head: int = 4,
    min_bulk: int = 256,
) -> Score:
    """Attach ``maps``, prefill ``ids`` ``[1, rows]`` and compare with ``stock`` logits ``[tail, vocab]``.

    Raises:
        RidgeFillError: no row was filled. A run that filled nothing is an error, never a pass.
    """
    with attach(model, maps, split=split, tier="speed", tail=tail, head=head, min_bulk=min_bulk) as attachment:
        logits = prefill_logits(model, ids, tail)
        status = attachment.status()
    if not status["rows_filled"]:
        raise RidgeFillError(f"nothing was filled, so there is nothing to score: {status['reason']}")
    return score_tail(stock, logits, ids, rows_filled=int(status["rows_filled"]))


# --- controls ------------------------------------------------------------------------------------------------------


def identity_maps(maps: RidgeMaps) -> RidgeMaps:
    """Return maps that hand the stream on as it is: ``W`` = identity (other features ignored), ``b`` = 0, no gains."""

    def identity(layer_map: LayerMap) -> LayerMap:
        weight = torch.zeros(layer_map.weight.shape)
        weight.fill_diagonal_(1)
        return LayerMap(layer_map.layer, weight, torch.zeros_like(layer_map.bias))

    splits = {
        split: replace(maps_, layers={layer: identity(m) for layer, m in maps_.layers.items()})
        for split, maps_ in maps.splits.items()
    }
    return replace(maps, splits=splits)


def swapped_maps(maps: RidgeMaps, split: int, a: int, b: int) -> RidgeMaps:
    """Return ``maps`` with the maps of late layers ``a`` and ``b`` of one split exchanged.

    Raises:
        RidgeFillError: one of them has no map, or both are the same layer.
    """
    chosen: SplitMaps = maps.at(split)
    if a == b or a not in chosen.layers or b not in chosen.layers:
        raise RidgeFillError(f"cannot swap the maps of layers {a} and {b}: split {split} maps {sorted(chosen.layers)}")
    layers = dict(chosen.layers)
    layers[a] = replace(chosen.layers[b], layer=a)
    layers[b] = replace(chosen.layers[a], layer=b)
    return replace(maps, splits={**maps.splits, split: replace(chosen, layers=layers)})


def direct_obstacle(layout: DecoderLayout, maps: SplitMaps) -> str | None:
    """Why no ridge straight to keys and values follows from a split's maps, in words; None where it does."""
    for layer in maps.layers:
        norm = input_norm(layout.layers[layer])
        if norm is not None and not (maps.target == "normalized" and is_rms_norm(norm)):
            return f"layer {layer}: a {type(norm).__name__} of {maps.target} block inputs is not linear in them"
    return None


def direct_ridge(settings: FillSettings, maps: SplitMaps) -> FillSettings:
    """Return settings under which late layers get keys and values as a ridge predicts them, without a norm.

    The baseline that fits un-normalised keys and values (before k_norm and RoPE) instead of block inputs. It needs no
    fit of its own: ridge is linear in its target, and over block inputs of length 1 keys and values are linear too, so
    its solution is this one, ``(x W_l + b_l) diag(g) [Wk | Wv]`` (design section 2.1). A fill multiplies that by the
    row scale ``1 / rms(x W_l + b_l)`` and by gains, and this does not.

    Raises:
        RidgeFillError: the maps predict something in which keys and values are not linear.
    """
    if reason := direct_obstacle(settings.layout, maps):
        raise RidgeFillError(f"split {maps.split} has no direct ridge: {reason}")
    writers = dict(settings.writers)
    for layer in settings.maps:
        if (norm := input_norm(settings.layout.layers[layer])) is not None:
            writers[layer] = _without_row_scale(writers[layer], norm)
    bare = {layer: replace(m, key_gain=None, value_gain=None) for layer, m in settings.maps.items()}
    return replace(settings, maps=bare, writers=writers, fused=None, epilogues=None)


def _without_row_scale(writer: LayerWriter, norm: nn.Module) -> LayerWriter:
    """The same writer, its layer's RMS norm taken for its gain alone."""

    def undo(_: nn.Module, args: tuple[Any, ...], normed: torch.Tensor) -> torch.Tensor:
        length: torch.Tensor = args[0].float().square().mean(-1, keepdim=True).sqrt()  # [batch, rows, 1]
        return normed * length.to(normed.dtype)

    def write(block_input: torch.Tensor, layer_kwargs: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
        handle = norm.register_forward_hook(undo)
        try:
            return writer.write(block_input, layer_kwargs)
        finally:
            handle.remove()

    return replace(writer, write=write)


@contextmanager
def late_layers_without_bulk(
    model: nn.Module, *, split: int, head: int, tail: int, rows: int, selection: Selection | None = None
) -> Iterator[None]:
    """Hide the bulk from layers ``split`` and later while a prompt's tail, and decode steps after it, run over a cache.

    Columns of absolute positions ``[head, rows - tail)`` are masked, but for the rows that ``selection`` has chosen
    when the tail reaches the split; everything else stays the model's own. A fill that does not beat this control is
    worth nothing.

    Raises:
        RidgeFillError: (inside) a late layer got no 4-D mask, so that nothing could be hidden from it.
    """
    layout = decoder_layout(model)

    def hide(
        layer_idx: int, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, dict[str, Any]]:
        mask = kwargs.get("attention_mask")
        hidden_states = args[0] if args else kwargs["hidden_states"]
        kept = kwargs.get(layout.cache_argument)
        kept = None if kept is None or len(kept.layers) <= layer_idx else kept.layers[layer_idx]
        if mask is None and hidden_states.shape[1] == 1 and kept is not None:  # a decode step sees all rows unmasked
            mask = torch.ones(1, 1, 1, kept.keys.shape[-2] + 1, dtype=torch.bool, device=hidden_states.device)
        if not isinstance(mask, torch.Tensor) or mask.ndim != 4:
            found = f"{mask.ndim}-D" if isinstance(mask, torch.Tensor) else type(mask).__name__
            raise RidgeFillError(f"cannot hide the bulk: {type(module).__name__} got a mask that is {found}, not 4-D")
        # A sliding layer's cache ends at the same row but may begin later: column j is position end - columns + j.
        end = rows if kept is None else int(kept.get_seq_length()) + hidden_states.shape[1]
        positions = torch.arange(end - mask.shape[-1], end, device=mask.device)
        hidden = (positions >= head) & (positions < rows - tail)
        if selection is not None and selection.rows is not None:
            hidden &= ~torch.isin(positions, selection.rows[0])
        mask = mask.masked_fill(hidden, False if mask.dtype == torch.bool else torch.finfo(mask.dtype).min)
        return args, {**kwargs, "attention_mask": mask}

    handles = []
    try:
        for layer_idx in range(split, layout.num_layers):
            hook = functools.partial(hide, layer_idx)
            handles.append(layout.layers[layer_idx].register_forward_pre_hook(hook, with_kwargs=True))
        yield
    finally:
        for handle in handles:
            handle.remove()


@dataclass(frozen=True)
class FilledTail:
    """A prompt whose tail the stock forward has just run over a filled cache: to be scored, or decoded from.

    Attributes:
        logits: of the tail's last rows, all of them unless told otherwise, ``[rows, vocab]``.
        cache: all rows of the prompt.
        fill: the fill span ``[from, to)``, absolute positions, as `Attachment.status` has it.
        selected: positions of bulk rows that ran exactly through every layer, ``[count]``.
        rows_filled: rows of each late layer that were predicted and seen; 0 for controls that fill nothing.
    """

    logits: torch.Tensor
    cache: Any
    fill: tuple[int, int]
    selected: torch.Tensor
    rows_filled: int


@contextmanager
def filled_tail(
    model: nn.Module,
    settings: FillSettings,
    step: Step,
    bulk: Bulk,
    ids: torch.Tensor,
    choice: SelectionSettings | None = None,
    edit: Callable[[Any], None] | None = None,
    logits_to_keep: int | None = None,
    shortcut: AbstractContextManager[None] | None = None,
) -> Iterator[FilledTail]:
    """Fill ``step``'s cache and run the tail of ``ids`` ``[1, rows]`` over it; decode steps belong inside.

    ``choice`` says which rows are selected, ``edit`` changes the filled cache before the tail sees it,
    ``logits_to_keep`` of how many last rows logits are made (None: the tail's). The tail runs inside ``shortcut``.

    Raises:
        RidgeFillError: rows were to be selected and none was.
    """
    with torch.no_grad():
        write_late_layers(settings, step, bulk)
        if edit is not None:
            edit(step.cache)
        tail, rows_filled = ids.shape[1] - step.fill_end, step.fill_end - step.fill_start
        selected = torch.empty(0, dtype=torch.int64, device=ids.device)
        with ExitStack() as undo:
            selection: Selection | None = None
            if choice is not None:
                undo.callback(setattr, WAITING, "selection", None)
                for handle in choice.hook(settings.layout):
                    undo.callback(handle.remove)
                awaited = await_tail(settings, choice, step, bulk)
                if isinstance(awaited, str):
                    raise RidgeFillError(f"no row is selected, so there is nothing to score: {awaited}")
                selection = awaited
                if choice.drop_unselected:
                    spans = {"head": step.fill_start, "tail": tail, "rows": ids.shape[1]}
                    hidden = late_layers_without_bulk(model, split=settings.split, selection=selection, **spans)
                    undo.enter_context(hidden)
            with shortcut or nullcontext():
                logits = prefill_logits(model, ids[:, step.fill_end :], logits_to_keep or tail, step.cache)
            if selection is not None:
                if selection.rows is None:
                    raise RidgeFillError(
                        "the tail passed no gate, so no row was selected and there is nothing to score"
                    )
                selected = selection.rows[0]
                rows_filled = 0 if selection.choice.drop_unselected else rows_filled - len(selected)
            yield FilledTail(logits, step.cache, (step.fill_start, step.fill_end), selected, rows_filled)


class ExactPrefill:
    """One stock prefill of a prompt, kept: its tail logits, and the cache of its rows before the tail.

    The control that hides the bulk starts from a copy of that cache.
    """

    def __init__(self, model: nn.Module, ids: torch.Tensor, tail: int) -> None:
        from transformers import DynamicCache

        self._model, self._ids, self._tail = model, ids, tail
        # Without a config every layer keeps every row, so that the tail can be cropped off a sliding layer too.
        self._cache = DynamicCache()
        self.logits = prefill_logits(model, ids, tail, self._cache)  # [tail, vocab]
        self._cache.crop(-tail)

    def tail_logits(self) -> torch.Tensor:
        """Stock's tail logits ``[tail, vocab]`` over a copy of the cache."""
        return prefill_logits(self._model, self._ids[:, -self._tail :], self._tail, copy.deepcopy(self._cache))

    def score_without_bulk(self, *, split: int, head: int = 4) -> Score:
        """The score of late layers that see no bulk row at all."""
        rows = self._ids.shape[1]
        with late_layers_without_bulk(self._model, split=split, head=head, tail=self._tail, rows=rows):
            logits = self.tail_logits()
        return score_tail(self.logits, logits, self._ids, rows_filled=0)


class BulkPrefill:
    """Head and bulk of one prompt, run once by the product's own functions below a split; scored under many maps.

    `score` writes the late layers of a copy of the cache and lets the stock forward do the tail: what `score_fill` does
    in one call, bit for bit, without running the layers below the split again for each control.
    """

    def __init__(
        self,
        model: nn.Module,
        maps: RidgeMaps,
        ids: torch.Tensor,
        *,
        split: int,
        tail: int,
        head: int = 4,
        form: str = "auto",
    ) -> None:
        from transformers import DynamicCache

        self._model, self._ids, self._tail, self._form = model, ids, tail, form
        if ids.shape[1] <= head + tail:
            raise RidgeFillError(f"a prompt of {ids.shape[1]} rows has no bulk between head={head} and tail={tail}")
        with attach(model, maps, split=split, tail=tail, head=head, form=form) as attachment, torch.no_grad():
            layout = attachment.settings.layout
            # A fused fill keeps no two-step maps, which scores from predicted queries read.
            self._settings = replace(attachment.settings, maps=resident_maps(maps.at(split), layout))
            self._step = Step(
                inputs={"input_ids": ids},
                padding=None,
                position_ids=None,
                cache=DynamicCache(config=model.config),
                cached_tokens=0,
                fill_start=head,
                fill_end=ids.shape[1] - tail,
            )
            self._bulk = run_bulk(self._settings, self._step)

    def score(
        self, maps: RidgeMaps, stock: torch.Tensor, *, fill_head: bool = False, choice: SelectionSettings | None = None
    ) -> Score:
        """The score of a fill from these maps, with the rows that ``choice`` selects exact.

        ``fill_head`` is the control whose head rows are not exact.
        """
        chosen = maps.at(self._settings.split)
        resident = resident_maps(chosen, self._settings.layout)
        fused = None
        if self._form != "two-step":
            fused, _ = fused_maps(chosen, self._settings.layout, self._settings.writers)
        settings = replace(
            self._settings,
            maps=resident,
            features=Features.of(chosen.features),
            fused=fused,
            selects_rows=choice is not None,
        )
        step, bulk = replace(self._step, cache=copy.deepcopy(self._step.cache)), replace(self._bulk)
        if fill_head:
            step, bulk = replace(step, fill_start=0), replace(bulk, head_cache=None)
        with filled_tail(self._model, settings, step, bulk, self._ids, choice) as filled:
            return score_tail(stock, filled.logits, self._ids, rows_filled=filled.rows_filled)

    def choice(self, *, share: float, scorer: RowScorer | None = None, drop: bool = False) -> SelectionSettings:
        """How to select rows of this prompt: by the tail's attention unless a scorer is given.

        With ``drop``, the control that lacks the fill: late layers do not see unselected rows (arXiv 2502.01068).
        """
        layout, split = self._settings.layout, self._settings.split
        gate = Gate(split, share, self._settings.maps, scorer or attention_scorer(layout, split))
        return replace(selection_settings(layout, [gate]), drop_unselected=drop)


class Variants:
    """What the variants of a fill need of a model and its maps, made once for any number of prompts."""

    def __init__(self, model: nn.Module, maps: RidgeMaps, *, form: str = "auto") -> None:
        self.model, self.maps, self.layout = model, replace(maps, gate=None), decoder_layout(model)
        self._form = form
        self._settings: dict[tuple[int, str], FillSettings] = {}
        self._choices: dict[int, SelectionSettings] = {}

    def settings(self, split: int, variant: str = "fill") -> FillSettings:
        """The product's own settings of a split; ``identity``, ``swapped`` and ``direct`` have theirs."""
        kind = variant if variant in ("identity", "swapped", "direct") else "fill"
        if (split, kind) not in self._settings:
            maps = self.maps
            if kind == "identity":
                maps = identity_maps(maps)
            elif kind == "swapped":
                maps = swapped_maps(maps, split, *_swapped_layers(maps.at(split)))
            with attach(self.model, maps, split=split, form=self._form) as attachment:
                settings = attachment.settings
            # A fused fill keeps no two-step maps, which scores from predicted queries read.
            settings = replace(settings, maps=resident_maps(maps.at(split), self.layout))
            self._settings[split, kind] = direct_ridge(settings, maps.at(split)) if kind == "direct" else settings
        return self._settings[split, kind]

    def choice(
        self, split: int, *, share: float, scorer: RowScorer | None = None, drop: bool = False
    ) -> SelectionSettings:
        """How rows are selected at a split: by the tail's attention unless a scorer is given."""
        gate = Gate(split, share, self.settings(split).maps, scorer or attention_scorer(self.layout, split))
        if split not in self._choices:
            self._choices[split] = selection_settings(self.layout, [gate])
        return replace(self._choices[split], gates=(gate,), drop_unselected=drop)


class PairedPrompt:
    """One prompt, prefilled once by the stock model; every variant of a fill at every split starts from that pass.

    The layers below a split are the same in both, and the stock pass goes through every split's stream, so that a
    variant costs what its late layers write and the tail's pass through them (`KnownLayers`). `Attachment` gives the
    same to rounding: its head runs by itself, and its bulk without the tail behind it.

    ``logits_to_keep``: of how many last rows logits are made; None: the tail's.

    Attributes:
        stock: the stock model's logits of those rows, ``[rows, vocab]``.
    """

    def __init__(
        self,
        variants: Variants,
        ids: torch.Tensor,
        *,
        tail: int,
        head: int = 4,
        splits: Sequence[int],
        logits_to_keep: int | None = None,
    ) -> None:
        from transformers import DynamicCache

        if not head < ids.shape[1] - tail:
            raise RidgeFillError(f"a prompt of {ids.shape[1]} rows has no bulk between head={head} and tail={tail}")
        self._variants, self.ids, self.tail, self.head = variants, ids, tail, head
        self._logits_to_keep = logits_to_keep or tail
        # Without a config every layer keeps every row, also where attention slides.
        self._cache: Any = DynamicCache()
        self._streams: dict[int, tuple[torch.Tensor, dict[str, Any]]] = {}
        self._rotary_outputs: list[Any] = []
        layout = variants.layout
        self._known = KnownLayers(layout, max(splits, default=0), self.fill_end)
        with ExitStack() as undo:
            for split in splits:
                note = functools.partial(self._note_stream, split)
                undo.callback(layout.layers[split].register_forward_pre_hook(note, with_kwargs=True).remove)
            undo.enter_context(self._known.note())
            for module in rotary_modules(layout):
                undo.callback(module.register_forward_hook(self._note_tables).remove)
            self.stock = prefill_logits(variants.model, ids, self._logits_to_keep, self._cache)

    @property
    def fill_end(self) -> int:
        """The bulk's end, the position of the tail's first row."""
        return int(self.ids.shape[1]) - self.tail

    def _note_stream(self, split: int, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        layer_kwargs = {
            name: self._cut(value, -1 if name == "position_ids" else -2)
            for name, value in kwargs.items()
            if name not in ("hidden_states", "attention_mask", self._variants.layout.cache_argument)
        }
        hidden_states = args[0] if args else kwargs["hidden_states"]  # [1, rows, d]
        self._streams[split] = hidden_states[:, : self.fill_end], layer_kwargs

    def _note_tables(self, _: nn.Module, __: tuple[Any, ...], output: Any) -> None:
        self._rotary_outputs.append(self._cut(output, -2))

    def _cut(self, value: Any, dim: int) -> Any:
        """Position ids and rotary tables of the rows before the tail; anything else as it is."""
        if isinstance(value, tuple):
            return tuple(self._cut(part, dim) for part in value)
        whole = isinstance(value, torch.Tensor) and value.ndim >= -dim and value.shape[dim] == self.ids.shape[1]
        return value.narrow(dim, 0, self.fill_end) if whole else value

    def exact_rows(self, layer_idx: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Stock's keys and values of a layer, ``[1, kv_heads, rows, head_dim]``."""
        layer = self._cache.layers[layer_idx]
        return layer.keys, layer.values

    def _first_rows(self, rows: int, layers: int) -> Any:
        """A new cache of stock's first rows in its first layers."""
        from transformers import DynamicCache

        cache = DynamicCache()
        for layer_idx in range(layers):
            keys, values = self.exact_rows(layer_idx)
            cache.update(keys[..., :rows, :], values[..., :rows, :], layer_idx)
        return cache

    @contextmanager
    def variant(
        self,
        split: int,
        variant: str,
        *,
        share: float = SHARE,
        scorer: RowScorer | None = None,
        edit: Callable[[Any], None] | None = None,
    ) -> Iterator[FilledTail]:
        """The tail under one of `VARIANTS`, or ``stock``; decode steps from it belong inside.

        ``share`` and ``scorer`` belong to `SELECTING_VARIANTS`, ``edit`` (of the filled cache) to those that fill.
        """
        layout, rows = self._variants.layout, int(self.ids.shape[1])
        span, nothing = (self.head, self.fill_end), torch.empty(0, dtype=torch.int64, device=self.ids.device)
        if variant == "stock":
            yield FilledTail(self.stock, self._first_rows(rows, layout.num_layers), span, nothing, 0)
            return
        if variant == "no bulk":
            cache, model = self._first_rows(self.fill_end, layout.num_layers), self._variants.model
            with late_layers_without_bulk(model, split=split, head=self.head, tail=self.tail, rows=rows):
                with self._known.hand_back(split, self.exact_rows):
                    logits = prefill_logits(model, self.ids[:, self.fill_end :], self._logits_to_keep, cache)
                yield FilledTail(logits, cache, span, nothing, 0)
            return
        stream, layer_kwargs = self._streams[split]
        head = 0 if variant == "head=0" else self.head
        step = Step(
            inputs={"input_ids": self.ids},
            padding=None,
            position_ids=None,
            cache=self._first_rows(self.fill_end, split),
            cached_tokens=0,
            fill_start=head,
            fill_end=self.fill_end,
        )
        head_cache = self._first_rows(head, layout.num_layers) if head else None
        bulk = Bulk(0, stream, layer_kwargs, self._rotary_outputs, head_cache, None)
        settings, choice = self._variants.settings(split, variant), None
        if variant in SELECTING_VARIANTS:
            if variant == "random rows":
                scorer = RandomScorer()
            choice = self._variants.choice(split, share=share, scorer=scorer, drop=variant == "drop")
            settings = replace(settings, selects_rows=True)
        keep, shortcut = self._logits_to_keep, self._known.hand_back(split, self.exact_rows)
        with filled_tail(self._variants.model, settings, step, bulk, self.ids, choice, edit, keep, shortcut) as filled:
            yield filled

    def score(self, split: int, variant: str) -> Score:
        """A variant's tail against stock's."""
        with self.variant(split, variant) as filled:
            return score_tail(self.stock, filled.logits, self.ids, rows_filled=filled.rows_filled)


# --- the whole table -----------------------------------------------------------------------------------------------


def evaluate(
    model: nn.Module,
    maps: RidgeMaps,
    windows: Sequence[Window],
    *,
    splits: Sequence[int],
    tail: int,
    head: int = 4,
    variants: Sequence[str] = VARIANTS,
    progress: Callable[[int, int], None] | None = None,
) -> list[Result]:
    """Score every variant at every split on every window, all against the same one-shot stock prefill.

    Variants: ``fill`` (tier speed), ``quality`` (a tenth of the bulk exact, by the tail's attention), and controls:
    ``random rows`` (as many, drawn at random), ``drop`` (quality's rows, the others hidden from the late layers instead
    of filled), ``no bulk`` (late layers that see no bulk row), ``identity`` (the stream handed on), ``direct``
    (`direct_ridge`: keys and values themselves predicted), ``head=0`` (no exact head rows), ``swapped`` (the maps of
    the first and the last mapped layer exchanged).
    ``progress(done, total)`` counts windows. Cost of a window: one stock prefill, and what each scored variant's late
    layers write, and its tail.

    Raises:
        RidgeFillError: an unknown variant; a split the maps lack; a window without bulk rows; ``direct`` where
            `direct_obstacle` has a reason against it.
    """
    if unknown := set(variants) - set(VARIANTS):
        raise RidgeFillError(f"unknown variants {sorted(unknown)}; known: {VARIANTS}")
    prepared, results = Variants(model, maps), []
    for done, window in enumerate(windows):
        if progress is not None:
            progress(done, len(windows))
        prompt = PairedPrompt(prepared, window.ids, tail=tail, head=head, splits=splits)
        for split in splits:
            scores = ((variant, prompt.score(split, variant)) for variant in variants)
            results += [Result(window.kind, window.name, split, *scored) for scored in scores]
    if progress is not None:
        progress(len(windows), len(windows))
    return results


def _swapped_layers(split_maps: SplitMaps) -> tuple[int, int]:
    layers = sorted(split_maps.layers)
    if len(layers) < 2:
        raise RidgeFillError(f"split {split_maps.split} maps {len(layers)} layers; swapping needs two")
    return layers[0], layers[-1]
