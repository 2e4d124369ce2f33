"""Attach maps to a model: life cycle, what each call does, and the status that tells."""

from __future__ import annotations

import contextlib
import contextvars
import json
import logging
import os
import sys
import threading
import time
import uuid
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from ridgefill import caches, prefill, provenance, rows, turns
from ridgefill.assembly import Assembly, assemble, check_hooks_see_tail
from ridgefill.calls import Call, Ledger, Record
from ridgefill.eligibility import given_cache, prepare, step_rows
from ridgefill.errors import AlreadyAttachedError, AttachError
from ridgefill.guard import PROBE_ROWS, OutOfRange
from ridgefill.layout import causal_lm
from ridgefill.maps import RidgeMaps
from ridgefill.options import Options, Request, check_count, checked_spans
from ridgefill.prefill import Bulk, FillSettings, Step
from ridgefill.provenance import Provenance
from ridgefill.scorers import RowScorer
from ridgefill.synth import misplaced

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.utils.hooks import RemovableHandle
    from transformers import Cache

# Speculative decoding verifies a few tokens at once: so many rows or fewer on a cache are a decode step, not a prefill.
_VERIFY_ROWS = 16
_log = logging.getLogger("ridgefill")

# An attachment lives as long as its model, whether or not the caller keeps it.
_ATTACHED: weakref.WeakKeyDictionary[nn.Module, Attachment] = weakref.WeakKeyDictionary()
_ATTACH_LOCK = threading.Lock()

# By the attachment's id: of a thread, and of an asyncio task, its own.
_REQUESTS: contextvars.ContextVar[Mapping[int, Request]] = contextvars.ContextVar(
    "ridgefill_requests", default=MappingProxyType({})
)


class _Calls(threading.local):
    current: Call | None = None
    turn: turns.Turn | None = None  # the forward of a cache that was filled, current or not


class Attachment:
    """Maps attached to one model; made by `attach`, ended by `detach` or by leaving the ``with`` block."""

    def __init__(self, model: nn.Module, options: Options, parts: Assembly) -> None:
        self.model = weakref.ref(model)
        self.tier, self.stream = options.tier, options.kept_stream
        self.map_dtype, self.residency = options.map_dtype, options.residency
        self.rule, self.settings, self.signature = parts.rule, parts.settings, parts.signature
        self.resident, self.selection, self.planner = parts.resident, parts.selection, parts.planner
        self.maps_path, self.gate, self.tokenizer = parts.maps_path, parts.gate, parts.tokenizer
        self.form_reason, self.backend_reason, self.warnings = parts.form_reason, parts.backend_reason, parts.warnings
        self._options = options
        self._ledger = Ledger()
        self.history, self.counters = self._ledger.history, self._ledger.counters
        self._calls = _Calls()
        self._plain_request = options.request()  # made once: most calls are in no request
        self._handles: list[RemovableHandle] = []
        self._token = uuid.uuid4().hex  # says in a cache's record who filled it
        provenance.OWNERS[self._token] = self._ledger

    def __enter__(self) -> Attachment:
        return self

    def __exit__(self, *_: object) -> None:
        self.detach()

    def detach(self) -> None:
        """Remove every hook; the model is bit for bit what it was. Detaching twice does nothing.

        A call of this thread that an interrupt cut short is undone: its cache has its rows at entry again.
        """
        self._abandon()
        while self._handles:
            self._handles.pop().remove()
        model = self.model()
        if model is not None and _ATTACHED.get(model) is self:
            del _ATTACHED[model]

    def status(self) -> dict[str, Any]:
        """What is attached and what the last prefill did, ready for JSON.

        ``rows_filled`` is 0 and ``spans`` None when the last prefill ran stock; ``reason`` says why in words. ``ran``
        is the tier that it ran in, which ``auto`` chooses at each call and a `request` may name. ``rows_selected`` rows
        of the fill span ran exactly through every layer (``gates``: how many ran on at each gate; with share ``auto``,
        ``attention_mass``: what part of the tail's attention to the bulk they carry); when none did, ``selection`` says
        why. ``gate`` is the map file's acceptance gate on these settings, in words (`ridgefill gate`). With a guard,
        ``probe_outliers`` and ``probe_likeliness`` are its figures before the fill, ``tail_outliers`` is that behind it
        (`ridgefill.guard`), ``alarm`` and ``tail_alarm`` are what it makes of them, empty where that is nothing. Decode
        steps are counted in ``counters``, and do not replace the prefill before them. ``rows_selected_again`` are rows
        that an earlier call on the same cache had filled; where a call is not filled and only selects such rows, that
        is its record. ``stream`` says where the streams of filled rows are kept, and ``stream_bytes`` what the last
        filled cache keeps. ``timings`` are wall times of the calling thread; on a GPU, which works behind it, they are
        the times to launch. ``map_bytes`` lie on the model's devices, ``host_map_bytes`` in pinned host memory; of the
        last prefill's copies from there, ``map_copies`` has bytes, device times, and the share of copying that no
        product waited for (asking waits for that prefill's end).
        """
        last, copies, counters = self._ledger.now()
        settings, fused, writers = self.settings, self.settings.fused, self.settings.writers.items()
        two_step_bytes = sum(resident.nbytes for maps in self.resident for resident in maps.values())
        return {
            "attached": bool(self._handles),
            "tier": self.tier,
            "split": settings.split,
            "tail": self.rule.tail,
            "head": self.rule.head,
            "min_bulk": self.rule.min_bulk,
            **last,
            "maps": self.maps_path,
            "gate": self.gate,
            "form": "two-step" if fused is None else "fused",
            "form_reason": self.form_reason,
            "backend": "torch" if settings.epilogues is None else "cuda",
            "backend_reason": self.backend_reason,
            "guard": "off" if settings.guard is None else settings.guard.mode,
            "features": list(settings.features.names),
            "map_dtype": self.map_dtype,
            "residency": self.residency,
            "stream": self.stream,
            "map_bytes": two_step_bytes + (0 if fused is None else fused.nbytes),
            "host_map_bytes": 0 if fused is None else fused.host_bytes,
            "map_copies": None if last["spans"] is None else copies.figures(),
            "tokenizer": self.tokenizer,
            "writers": {i: w.name for i, w in writers},
            "writer_reasons": sorted({w.reason for _, w in writers if w.name != "direct"}),
            "warnings": list(self.warnings),
            "counters": counters,
        }

    @contextlib.contextmanager
    def request(
        self, *, tier: str | None = None, tail: int | None = None, exact_spans: Sequence[tuple[int, int]] = ()
    ) -> Iterator[None]:
        """Other settings for the calls that this thread (or asyncio task) makes inside the ``with`` block.

        Args:
            tier: instead of the attachment's: ``exact`` always; ``speed`` where it fills at all; ``quality`` and
                ``auto`` where it was attached with them.
            tail: the last rows of a prompt that stay exact, in tokens.
            exact_spans: absolute positions ``[from, to)``, pads counted, of rows that run exactly through every layer
                whatever the tier selects: a system prompt, the signature of a function.

        Raises:
            AttachError: the attachment cannot run this tier, or a number is out of range.
            UnsupportedModelError: exact_spans with an attention implementation that takes no mask for single rows, or
                with a compiled forward.
        """
        asked = self._options.request(tier, tail, exact_spans)
        if asked.exact_spans:
            rows.check_masks(self.settings.layout)
            check_hooks_see_tail(self.model())
        # A tier that selects rows has these hooks on all the time.
        waits = asked.exact_spans and self.selection is None
        handles = rows.spans_only(self.settings.split).hook(self.settings.layout) if waits else []
        token = _REQUESTS.set({**_REQUESTS.get(), id(self): asked})
        try:
            yield
        finally:
            _REQUESTS.reset(token)
            for handle in handles:
                handle.remove()

    def prefill(
        self,
        input_ids: torch.Tensor,
        *,
        n_ahead: int,
        cache: Cache | None = None,
        attention_mask: torch.Tensor | None = None,
    ) -> Cache:
        """Write the next rows of a prompt that comes in pieces to its cache, and return the cache: no logits.

        A forward call must take its last rows for the prompt's last and keeps ``tail`` of them exact; here ``n_ahead``
        says how many rows are still to come, so that a piece may be filled to its end. Give the last piece to the model
        or to ``generate``, with the cache, as usual. Of the rows in these pieces none is selected (tier ``quality``):
        their prompt's tail has not been seen.

        Args:
            input_ids: ``[batch, rows]``, the rows after those in the cache.
            n_ahead: the prompt's rows after these.
            cache: what the pieces before these rows are in; None begins a prompt.
            attention_mask: ``[batch, cached + rows]`` where there is left padding.

        Returns:
            The cache, longer by these rows.

        Raises:
            AttachError: the attachment is detached, n_ahead is no count, or the request names exact_spans.
        """
        import torch
        from transformers import DynamicCache

        model, request = self.model(), self._request()
        if model is None or not self._handles:
            raise AttachError("prefill() needs the model, and this attachment was detached from it; attach again")
        check_count("prefill: n_ahead", n_ahead, 0)
        if request.exact_spans:
            raise AttachError("prefill: exact_spans are run when the prompt's tail is; name them for the last piece")
        self._abandon()
        started = time.perf_counter()
        cache = DynamicCache(config=self.settings.layout.config) if cache is None else cache
        cached = caches.cached_tokens(cache)
        arguments = {"input_ids": input_ids, "attention_mask": attention_mask, "use_cache": True, "logits_to_keep": 1}
        arguments[self.signature.cache_argument] = cache
        step_end = cached + input_ids.shape[1]
        with torch.no_grad():
            step: Step | None = None
            # The plan of the whole prompt: what is filled now has to be worth it in the end.
            fills, planned = self._plan(request, cache, input_ids.shape[1] + n_ahead)
            reason = planned if not fills else "the tier is exact"
            if fills and request.tier != "exact":
                step, reason = self._prepare(model, arguments, request, n_ahead)
            if step is None:
                self._ledger.add_stock(reason)
                exact = Step({"input_ids": input_ids}, attention_mask, None, cache, cached, cached, cached)
                with self._noting(cache, step_end - cached, attention_mask):
                    prefill.run_base(self.settings, exact, cached, step_end, cache)
                return cache
            call = self._enter(step, step_end, request, reason + planned, started)
            call.selection = "rows of a piece are not selected: the prompt's tail is still to come"
            done = step.fill_end if self._filled(call, replace(self.settings, selects_rows=False)) else cached
            try:
                if done < step_end:
                    with self._noting(cache, step_end - done):
                        prefill.run_base(self.settings, step, done, step_end, cache)
            except BaseException:
                self._abandon()
                raise
            self._end(cache)
        return cache

    def repair(self, cache: Cache, *, rows: Sequence[tuple[int, int]] | None = None) -> int:
        """Run filled rows of a cache exactly, from the streams that it keeps.

        Every row from the first filled one to the end runs, in ascending order, those of tails and decode steps among
        them: the cache then equals stock's, fed the same tokens, up to rounding. (Where late layers' caches slide, the
        rows before run too.) The streams are dropped with that: nothing is filled any more.

        Args:
            cache: one that this attachment filled.
            rows: repair only filled rows of these positions ``[from, to)``, pads counted. That is an approximation:
                they see other filled rows as they are, and rows behind them keep what they have seen.

        Returns:
            How many rows of each sequence ran; 0 where none is filled.

        Raises:
            AttachError: the attachment is detached, or the streams are not kept (``stream="none"``, sequences that were
                exchanged, compiled decode steps, which pass by the hooks); or ``rows`` of a cache that slides.
            UnsupportedModelError: the attention implementation takes no mask for single rows.
        """
        if self.model() is None or not self._handles:
            raise AttachError("repair() needs the model, and this attachment was detached from it; attach again")
        spans = None if rows is None else checked_spans("repair: rows", rows)
        count = turns.repair(self.settings, self._token, cache, spans)
        self._ledger.count("repaired" if rows is None else "repaired in part")
        return count

    # What the hooks call.

    def _noting(self, cache: Cache, count: int, mask: Any = None) -> contextlib.AbstractContextManager[Any]:
        """Note ``count`` rows that run inside the block, if the cache has a record to note them in."""
        record = provenance.of(cache)
        return (
            contextlib.nullcontext()
            if record is None
            else turns.Turn(self.settings, self._token, cache, record, count, mask)
        )

    def _go_on(self, args: tuple[Any, ...], kwargs: dict[str, Any], cache: Cache, record: Provenance) -> None:
        """A call on a cache that was filled: note its rows; where that is due, let them choose among filled ones."""
        if (call := self._calls.current) is not None:  # this call fills: what is left of it is the tail
            count, watched = call.step_end - call.step.fill_end, call.features is not None
            self._calls.turn = turns.Turn(self.settings, self._token, cache, record, count, watched=watched)
            return
        count = step_rows(self.signature, args, kwargs)
        if count == 1 and not (record.keeps or record.cropped):
            return  # a decode step of which nothing is kept, behind the last turn's own tail
        arguments = self.signature.bind(args, kwargs)
        turn = turns.Turn(self.settings, self._token, cache, record, count, arguments.get("attention_mask"))
        self._calls.turn = turn
        if count < turns.LEAST_TURN_ROWS and not record.cropped:
            return
        started, request = time.perf_counter(), self._request()
        # A draft to verify is as short as a question, but all its rows' logits are asked for.
        keep = arguments.get("logits_to_keep")
        asks = keep == 1 or (count > _VERIFY_ROWS and keep != count)
        choice = self.selection if asks and request.tier in ("quality", "plumb") else None
        selects, tail_from = turn.due(record, request.tail, choice)
        if not selects and tail_from is None:
            return
        wanted = choice if selects and choice is not None else rows.spans_only(self.settings.split)
        found = turns.select_again(self.settings, wanted, cache, record, turn, tail_from)
        if isinstance(found, str):
            if tail_from is not None and self._ledger.count("filled rows in a tail"):
                _log.warning(
                    "rows that are filled lie in the tail of a call on a cropped cache, and stay filled: %s", found
                )
            if selects:
                self._ledger.add_stock(f"rows that are filled were not selected again: {found}")
            return
        if self.selection is None:
            for handle in wanted.hook(self.settings.layout):
                turn.hooks.callback(handle.remove)
        reason = f"filled rows of earlier calls {'were selected again' if selects else 'lay in the tail'}"
        call = self._enter(found.step, turn.start + count, request, reason, started)
        call.again, call.tail_from, call.selection, call.tail_started = True, tail_from, found, time.perf_counter()
        rows.WAITING.selection = found

    def _request(self) -> Request:
        """What this thread's calls ask for now."""
        return _REQUESTS.get().get(id(self), self._plain_request)

    def _prepare(
        self, model: nn.Module, arguments: dict[str, Any], request: Request, n_ahead: int = 0
    ) -> tuple[Step | None, str]:
        """The step to fill as a request wants it, or None and why the call runs stock."""
        rule = self.rule if request.tail == self.rule.tail else replace(self.rule, tail=request.tail)
        step, reason = prepare(model, self.settings.layout, rule, self.signature, arguments, n_ahead)
        if step is not None and (moved := misplaced(self.resident, self.settings.fused, self.settings.layout)):
            return None, moved
        return step, reason

    def _enter(self, step: Step, step_end: int, request: Request, reason: str, started: float) -> Call:
        """Begin a call that can be undone."""
        tier = "speed" if request.tier == "auto" else request.tier
        call = Call(step, step_end, tier, reason, provenance.entry_state(step.cache), started, sys.exc_info()[1])
        self._calls.current = call
        return call

    def _begin(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Fill an eligible call and return the arguments with which the stock forward does the tail."""
        if self._calls.current is not None or self._calls.turn is not None:
            self._abandon()  # an interrupt ended the last call without its forward hook
        count = step_rows(self.signature, args, kwargs)
        if count == 1:
            self._ledger.count("decode")
            return None
        if count <= _VERIFY_ROWS and caches.cached_tokens(given_cache(kwargs)):
            self._ledger.count("decode of several rows")
            return None
        request = self._request()
        if count < request.tail + self.rule.min_bulk:
            self._ledger.add_stock(f"{count} rows are fewer than tail={request.tail} and min_bulk={self.rule.min_bulk}")
            return None
        if request.tier == "exact":
            self._ledger.add_stock("the tier is exact")
            return None
        started = time.perf_counter()
        arguments = self.signature.bind(args, kwargs)
        fills, planned = self._plan(request, given_cache(arguments), count)
        if not fills:
            self._ledger.add_stock(planned)
            return None
        step, reason = self._prepare(model, arguments, request)
        if step is None:
            if self._ledger.add_stock(reason):
                _log.warning("a long prefill runs stock: %s", reason)
            return None
        reason += planned
        call = self._enter(step, step.cached_tokens + count, request, reason, started)
        choice = self.selection if request.tier in ("quality", "plumb") else None
        if request.exact_spans and choice is None:
            choice = rows.spans_only(self.settings.split)
        settings = self.settings
        if settings.selects_rows is not (choice is not None):
            settings = replace(settings, selects_rows=choice is not None)
        if (bulk := self._filled(call, settings)) is None:
            return None
        if settings.guard is not None:
            call.features = bulk.tail_features
        if choice is not None:
            wide_step, wide_bulk, groups = turns.with_earlier(settings, step, bulk)
            call.selection = rows.await_tail(settings, choice, wide_step, wide_bulk, request.exact_spans, groups)
        return (), self._tail_arguments(arguments, step)

    def _filled(self, call: Call, settings: FillSettings) -> Bulk | None:
        """Fill a call's step; or undo it, and run it stock, where the guard does not let it through."""
        try:
            bulk = prefill.fill(settings, call.step)
        except OutOfRange as alarm:
            self._calls.current = None
            call.restore()
            self._alarm(str(alarm))
            self._ledger.add_stock(f"the guard: {alarm}")
            return None
        except BaseException:
            self._abandon()
            raise
        self._alarm(call.step.alarm)
        argument = settings.layout.cache_argument
        provenance.remember_fill(call.step, bulk, owner=self._token, stream=self.stream, cache_argument=argument)
        call.tail_started = time.perf_counter()
        return bulk

    def _alarm(self, alarm: str, event: str = "guard alarms") -> None:
        """Count what the guard found, where it found something, and log it once for each event."""
        if alarm and self._ledger.count(event):
            _log.warning("the guard: %s (guard=%r)", alarm, self.settings.guard and self.settings.guard.mode)

    def _check_tail(self, call: Call, turn: turns.Turn) -> None:
        """Let the guard compare the tail's first rows, where it is on and they were seen."""
        guard, step = self.settings.guard, call.step
        if guard is None or call.features is None or (tail := turn.first_rows(PROBE_ROWS)) is None:
            return
        started = time.perf_counter()
        tail.tail_features = call.features
        guard.check_tail(self.settings, step, tail, call.step_end - tail.first_row - tail.stream.shape[1])
        self._alarm(step.tail_alarm, "guard alarms in tails")
        step.timings["tail_check_ms"] = 1e3 * (time.perf_counter() - started)

    def _plan(self, request: Request, cache: Any, rows: int) -> tuple[bool, str]:
        """Whether a prefill of ``rows`` more rows may be filled, and why in the planner's words (tier auto alone)."""
        if request.tier != "auto" or self.planner is None:
            return True, ""
        cached_tokens = caches.cached_tokens(cache)
        wanted = {"prompt_tokens": cached_tokens + rows, "cached_tokens": cached_tokens, "sensitivity": "latency"}
        plan: dict[str, Any] = json.loads(self.planner.plan(json.dumps(wanted)))
        if plan["tier"] == "exact":
            return False, "; ".join((*plan["reasons"], *(other["reason"] for other in plan["rejected"])))
        return True, "".join(f"; {reason}" for reason in plan["reasons"])

    def _tail_arguments(self, arguments: dict[str, Any], step: Step) -> dict[str, Any]:
        cut = step.fill_end - step.cached_tokens
        tail = {name: value for name, value in arguments.items() if name not in ("cache", "past_key_values")}
        tail.update({name: tensor[:, cut:] for name, tensor in step.inputs.items()})
        if step.position_ids is not None:
            tail["position_ids"] = step.position_ids[..., cut:]
        tail["attention_mask"] = step.padding
        tail[self.signature.cache_argument] = step.cache
        return tail

    def _end(self, output: Any) -> None:
        """Record a filled call, or undo it when its forward or another hook raised."""
        call, turn = self._calls.current, self._calls.turn
        failed = output is None or (call is not None and sys.exc_info()[1] is not call.error_at_entry)
        if turn is not None:
            self._calls.turn = None
            turn.close(ran=not failed)
        if call is None:
            return
        if failed:
            self._abandon()
            return
        self._calls.current, rows.WAITING.selection = None, None
        ended = time.perf_counter()
        if turn is not None:
            self._check_tail(call, turn)
        call.note_selected()
        self._ledger.add("selected again" if call.again else "filled", call.record(ended), call.step.copies)

    def _abandon(self) -> None:
        """Give the caller's cache its rows at entry back."""
        call, self._calls.current, rows.WAITING.selection = self._calls.current, None, None
        turn, self._calls.turn = self._calls.turn, None
        if turn is not None:
            turn.close(ran=False)
        if call is not None:
            call.restore()
            record = Record("the call ended with an exception; its fill was undone")
            self._ledger.add("undone after an exception", record)


def is_attached(model: nn.Module) -> bool:
    """Whether maps are attached to this very module."""
    return causal_lm(model) in _ATTACHED


def attach(
    model: nn.Module,
    maps: RidgeMaps | str | os.PathLike[str],
    *,
    split: int | None = None,
    tier: str = "speed",
    tail: int = 512,
    head: int = 4,
    min_bulk: int = 256,
    loss_budget: float = 0.05,
    tokenizer: Any = None,
    share: float | str | None = None,
    min_rows: int = 0,
    gates: Mapping[int, float] | None = None,
    scorer: RowScorer | None = None,
    form: str = "auto",
    backend: str = "auto",
    map_dtype: str = "model",
    residency: str = "device",
    slots: int = 2,
    stream: str | None = None,
    guard: str = "off",
    tile: int = 1,
    state_correction: float = 1.0,
) -> Attachment:
    """Attach ridge maps to a Hugging Face causal language model, so that long prefills fill their late layers.

    Every later ``model(...)`` or ``model.generate(...)`` works unchanged. Calls that cannot be filled run stock, and
    ``status()`` says why. The attachment lives until `Attachment.detach`, the end of its ``with`` block, or the
    model's own end.

    Args:
        model: the model, on its devices, in any floating dtype; of a PEFT model the one inside, which ``generate``
            calls (PEFT's own forward passes by its hooks and runs stock).
        maps: a map file's path, or maps already loaded or fitted.
        split: the first late layer; None takes the file's default.
        tier: ``speed`` fills; ``quality`` fills and runs the rows that the tail's queries look at; ``exact`` never
            fills; ``auto`` asks the planner at each call, which fills where that takes fewer operations and the file
            holds a gate result within ``loss_budget``; ``plumb`` fills with the true block inputs (the oracle: slower
            than stock, equal to it).
        tail: the last rows of a prompt that stay exact, in tokens.
        head: the first rows that stay exact. They are attention sinks: 0 is a control that ruins the answer.
        min_bulk: fewer bulk rows than this are not worth a fill.
        loss_budget: for ``auto``: the most measured loss, in nats a token, that a fill may add.
        tokenizer: checked against the file's tokenizer hash when given.
        share: the part of the bulk that runs exactly (tiers ``quality``, where None is 0.1, and ``plumb``); ``auto``:
            rows that the tail pays attention to, as many as there are, up to three tenths (`ridgefill.rows`);
            ``status()["attention_mass"]`` is the part of the tail's attention to the bulk that they carry.
        min_rows: of each bulk so many rows run exactly at least.
        gates: instead of ``share``, several layers at which the tail chooses anew which part of the bulk runs on,
            ``{10: 0.3, 15: 0.1}``: the lowest is the split, and the file has maps for each.
        scorer: what ranks the bulk's rows; None: the tail's attention (`ridgefill.scorers.AttentionScorer`).
        form: how maps are applied. ``two-step`` predicts block inputs and lets each layer project them; ``fused`` takes
            one product straight to keys and values (`ridgefill.fused`), where the model and the file allow it;
            ``auto`` takes the fused form where it exists. ``status()`` says which runs, and why.
        backend: what does the fused form's epilogue: ``torch``, or one CUDA kernel for all late layers of a block
            (``cuda``: an NVIDIA GPU and CuPy); ``auto`` takes the kernel where it can run. ``status()`` says why.
        map_dtype: what fused maps are held in: the ``model``'s own dtype, or ``int8`` with a scale for 128 inputs of a
            column, half the bytes (`ridgefill.residency`). On a CPU, int8 gives its numbers and saves no bytes.
        residency: where fused maps lie: on the ``device``, or on the ``host``, pinned, from where each prefill of tier
            ``speed`` or ``auto`` copies them layer by layer on a stream of its own.
        slots: how many layers' maps are on the device at a time when they lie on the host: 1, or 2, whose copies run
            beside the products of the layer before.
        stream: where a filled cache keeps the split layer's block input of its rows, from which later calls run filled
            rows exactly and `Attachment.repair` all of them: on the ``device``, d values a row; on the ``host``, pinned
            (the rows of fills; those of tails and decode steps stay on the device); or nowhere, ``none``. None: on the
            device in tiers that select rows, which need it, nowhere in the others.
        guard: whether each fill first compares predicted and exact keys of the 32 rows after the head, which then run
            exactly, with the file's held-out figures (`ridgefill.guard`): where they are worse, ``warn`` fills, counts
            and logs it, and ``exact`` runs the call stock. The tail's first 32 rows are compared behind the fill, and
            only counted and logged.
        tile: a fill has a multiple of this many rows. Transformers' own scans of recurrent layers are exact at any
            length; 1 leaves it at that. Kernels that are not declare their chunk here, 64 for example.
        state_correction: how much of the file's corrections the recurrent states of late layers get behind a bulk
            (`ridgefill.states`): 1 all, 0 nothing.

    Raises:
        MapFormatError, MapSchemaError: the file is not a valid map file, or has no maps for this split.
        MapMismatchError: the maps were fitted for another model, by name of what differs.
        UnsupportedModelError: this model can never be filled.
        AlreadyAttachedError: the model has an attachment; detach it first.
        AttachError: a parameter is out of range, or the maps are of a kind that this version cannot apply, or hold
            nothing that a guard could compare with.
        KernelError: ``backend="cuda"`` where kernels cannot run.
    """
    options = Options(
        split=split,
        tier=tier,
        tail=tail,
        head=head,
        min_bulk=min_bulk,
        loss_budget=loss_budget,
        share=share,
        min_rows=min_rows,
        gates=gates,
        scorer=scorer,
        form=form,
        backend=backend,
        map_dtype=map_dtype,
        residency=residency,
        slots=slots,
        stream=stream,
        guard=guard,
        tile=tile,
        state_correction=state_correction,
    )
    model = causal_lm(model)
    with _ATTACH_LOCK:
        if model in _ATTACHED:
            raise AlreadyAttachedError(f"{type(model).__name__} already has maps attached; call detach() first")
        attachment = Attachment(model, options, assemble(model, maps, tokenizer, options))
        _ATTACHED[model] = attachment
        _register(model, attachment)
    for message in attachment.warnings:
        _log.warning("%s", message)
    return attachment


def _register(model: nn.Module, attachment: Attachment) -> None:
    """Hook the model; the hooks hold the attachment weakly and do nothing on a copy of the model.

    Every call pays for these two, so that layers are hooked only while a fill runs them (`prefill.Capture`), or where
    rows are to be selected.
    """
    from torch.compiler import is_compiling

    reference = weakref.ref(attachment)

    def owner(module: nn.Module) -> Attachment | None:
        if is_compiling():
            return None
        attached = reference()
        return attached if attached is not None and attached.model() is module else None

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        attached = owner(module)
        if attached is None:
            return None
        replaced = attached._begin(module, args, kwargs)
        cache = given_cache(kwargs if replaced is None else replaced[1])
        if cache is not None and (record := provenance.of(cache)) is not None:
            attached._go_on(args, kwargs, cache, record)
        return replaced

    def after(module: nn.Module, _: tuple[Any, ...], __: dict[str, Any], output: Any) -> None:
        attached = owner(module)
        if attached is not None:
            attached._end(output)

    handles = attachment._handles
    try:
        handles.append(model.register_forward_pre_hook(before, with_kwargs=True))
        handles.append(model.register_forward_hook(after, with_kwargs=True, always_call=True))
        if attachment.selection is not None:
            handles.extend(attachment.selection.hook(attachment.settings.layout))
    except BaseException:
        attachment.detach()
        raise
