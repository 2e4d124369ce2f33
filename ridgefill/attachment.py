"""Attach maps to a model: life cycle, what each call does, and the status that tells."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import json
import logging
import os
import re
import sys
import threading
import time
import uuid
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from ridgefill import _core, caches, prefill, provenance, rows, turns
from ridgefill.eligibility import FillRule, Signature, given_cache, prepare, step_rows
from ridgefill.epilogue import EpilogueLayer, epilogue_layers
from ridgefill.errors import AlreadyAttachedError, AttachError, FitError, UnsupportedModelError
from ridgefill.features import STREAM, Features, FeatureState
from ridgefill.fused import FusedMaps, fused_maps
from ridgefill.guard import MODES, PROBE_ROWS, Guard, OutOfRange
from ridgefill.kernels import BACKENDS, choose_backend
from ridgefill.layout import DecoderLayout, causal_lm, compiled_forward, decoder_layout, fingerprint, model_shape
from ridgefill.maps import RidgeMaps, SplitMaps
from ridgefill.prefill import Bulk, FillSettings, Step
from ridgefill.provenance import Provenance
from ridgefill.residency import MAP_DTYPES, RESIDENCIES, Copies, Holding, host_obstacle
from ridgefill.scorers import AttentionScorer, RowScorer
from ridgefill.synth import ResidentMap, misplaced, resident_maps
from ridgefill.verdict import gate_word
from ridgefill.writers import LayerWriter, late_layer_writers, probe_layers

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.utils.hooks import RemovableHandle
    from transformers import Cache

TIERS = ("auto", "exact", "quality", "speed", "plumb")
FORMS = ("auto", "fused", "two-step")
_HISTORY_CALLS = 256
# The part of the bulk that runs exactly in tier quality (design section 3).
_DEFAULT_SHARE = 0.1
# Speculative decoding verifies a few tokens at once: so many rows or fewer on a cache are a decode step, not a prefill.
_VERIFY_ROWS = 16
_log = logging.getLogger("ridgefill")

# An attachment lives as long as its model, whether or not the caller keeps it.
_ATTACHED: weakref.WeakKeyDictionary[nn.Module, Attachment] = weakref.WeakKeyDictionary()
_ATTACH_LOCK = threading.Lock()


@dataclass(frozen=True)
class _Request:
    """What the calls inside one ``with attachment.request(...)`` block ask for."""

    tier: str
    tail: int
    exact_spans: tuple[tuple[int, int], ...] = ()


# By the attachment's id: of a thread, and of an asyncio task, its own.
_REQUESTS: contextvars.ContextVar[Mapping[int, _Request]] = contextvars.ContextVar(
    "ridgefill_requests", default=MappingProxyType({})
)


@dataclass
class _Call:
    """A filled call between its pre-hook and its end."""

    step: Step
    step_end: int
    tier: str
    reason: str
    restore: Callable[[], None]
    started: float
    error_at_entry: BaseException | None
    tail_started: float = 0.0
    selection: rows.Selection | str = ""  # or, in words, why no row is selected
    again: bool = False  # nothing was filled: rows that an earlier call filled are selected
    tail_from: int | None = None  # then: from here on, all of them
    features: FeatureState | None = None  # of a fill with a guard: goes on to those of the tail's rows


class _Calls(threading.local):
    current: _Call | None = None
    turn: turns.Turn | None = None  # the forward of a cache that was filled, current or not


@dataclass
class Attachment:
    """Maps attached to one model; made by `attach`, ended by `detach` or by leaving the ``with`` block."""

    tier: str
    rule: FillRule
    settings: FillSettings
    warnings: list[str]
    tokenizer: str
    maps_path: str | None
    resident: list[dict[int, ResidentMap]]  # the maps of every gate, on the model's devices
    signature: Signature
    model: weakref.ref[nn.Module]
    form_reason: str = ""
    gate: str = ""
    backend_reason: str = ""
    map_dtype: str = "model"
    residency: str = "device"
    stream: str = "device"
    selection: rows.SelectionSettings | None = None
    planner: _core.Planner | None = None
    history: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=_HISTORY_CALLS))
    counters: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._calls = _Calls()
        self._plain_request = _Request(self.tier, self.rule.tail)  # made once: most calls are in no request
        self._handles: list[RemovableHandle] = []
        self._copies = Copies()  # of the last filled call
        self._token = uuid.uuid4().hex  # says in a cache's record who filled it
        provenance.OWNERS[self._token] = self

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
        with self._lock:
            last = self.history[-1] if self.history else _record("no prefill has been seen yet")
            writers = self.settings.writers.items()
            return {
                "attached": bool(self._handles),
                "tier": self.tier,
                "split": self.settings.split,
                "tail": self.rule.tail,
                "head": self.rule.head,
                "min_bulk": self.rule.min_bulk,
                **last,
                "maps": self.maps_path,
                "gate": self.gate,
                "form": "two-step" if self.settings.fused is None else "fused",
                "form_reason": self.form_reason,
                "backend": "torch" if self.settings.epilogues is None else "cuda",
                "backend_reason": self.backend_reason,
                "guard": "off" if self.settings.guard is None else self.settings.guard.mode,
                "features": list(self.settings.features.names),
                "map_dtype": self.map_dtype,
                "residency": self.residency,
                "stream": self.stream,
                "map_bytes": self._map_bytes(),
                "host_map_bytes": 0 if self.settings.fused is None else self.settings.fused.host_bytes,
                "map_copies": None if last["spans"] is None else self._copies.figures(),
                "tokenizer": self.tokenizer,
                "writers": {i: w.name for i, w in writers},
                "writer_reasons": sorted({w.reason for _, w in writers if w.name != "direct"}),
                "warnings": list(self.warnings),
                "counters": dict(self.counters),
            }

    def _map_bytes(self) -> int:
        fused = self.settings.fused
        two_step = sum(m.nbytes for maps in self.resident for m in maps.values())
        return two_step + (0 if fused is None else fused.nbytes)

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
        known = {"exact", self.tier} | ({"speed"} if self.tier in ("auto", "quality") else set())
        if tier is not None and tier not in known:
            raise AttachError(
                f"request(tier={tier!r}): this attachment has tier {self.tier!r} and can run {sorted(known)}; attach "
                f"with tier={tier!r}"
            )
        if tail is not None and (isinstance(tail, bool) or not isinstance(tail, int) or tail < 1):
            raise AttachError(f"request: tail must be an integer of at least 1, found {tail!r}")
        spans = tuple((start, end) for start, end in exact_spans)
        if wrong := [span for span in spans if not 0 <= span[0] < span[1]]:
            raise AttachError(f"request: exact_spans are (from, to) with 0 <= from < to, found {wrong[0]}")
        if spans:
            rows.check_masks(self.settings.layout)
            _check_hooks_see_tail(self.model())
        asked = _Request(tier or self.tier, tail or self.rule.tail, spans)
        # A tier that selects rows has these hooks on all the time.
        waits = spans and self.selection is None
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
        if isinstance(n_ahead, bool) or not isinstance(n_ahead, int) or n_ahead < 0:
            raise AttachError(f"prefill: n_ahead must be an integer of at least 0, found {n_ahead!r}")
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
                self._run_exact(reason)
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
        if rows is not None and (wrong := [span for span in rows if not 0 <= span[0] < span[1]]):
            raise AttachError(f"repair: rows are (from, to) with 0 <= from < to, found {wrong[0]}")
        count = turns.repair(self.settings, self._token, cache, rows)
        self._count("repaired" if rows is None else "repaired in part")
        return count

    # What the hooks call.

    def _count(self, event: str) -> None:
        with self._lock:
            self.counters[event] += 1

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
            if tail_from is not None:
                self._in_tail(found)
            if selects:
                self._run_exact(f"rows that are filled were not selected again: {found}")
            return
        if self.selection is None:
            for handle in wanted.hook(self.settings.layout):
                turn.hooks.callback(handle.remove)
        reason = f"filled rows of earlier calls {'were selected again' if selects else 'lay in the tail'}"
        call = self._enter(found.step, turn.start + count, request, reason, started)
        call.again, call.tail_from, call.selection, call.tail_started = True, tail_from, found, time.perf_counter()
        rows.WAITING.selection = found

    def _in_tail(self, why: str) -> None:
        with self._lock:
            first = not self.counters["filled rows in a tail"]
            self.counters["filled rows in a tail"] += 1
        if first:
            _log.warning("rows that are filled lie in the tail of a call on a cropped cache, and stay filled: %s", why)

    def _request(self) -> _Request:
        """What this thread's calls ask for now."""
        return _REQUESTS.get().get(id(self), self._plain_request)

    def _prepare(
        self, model: nn.Module, arguments: dict[str, Any], request: _Request, n_ahead: int = 0
    ) -> tuple[Step | None, str]:
        """The step to fill as a request wants it, or None and why the call runs stock."""
        rule = self.rule if request.tail == self.rule.tail else replace(self.rule, tail=request.tail)
        step, reason = prepare(model, self.settings.layout, rule, self.signature, arguments, n_ahead)
        if step is not None and (moved := misplaced(self.resident, self.settings.fused, self.settings.layout)):
            return None, moved
        return step, reason

    def _enter(self, step: Step, step_end: int, request: _Request, reason: str, started: float) -> _Call:
        """Begin a call that can be undone."""
        tier = "speed" if request.tier == "auto" else request.tier
        call = _Call(step, step_end, tier, reason, provenance.entry_state(step.cache), started, sys.exc_info()[1])
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
            with self._lock:
                self.counters["decode"] += 1
            return None
        if count <= _VERIFY_ROWS and caches.cached_tokens(given_cache(kwargs)):
            with self._lock:
                self.counters["decode of several rows"] += 1
            return None
        request = self._request()
        if count < request.tail + self.rule.min_bulk:
            self._run_exact(f"{count} rows are fewer than tail={request.tail} and min_bulk={self.rule.min_bulk}")
            return None
        if request.tier == "exact":
            self._run_exact("the tier is exact")
            return None
        started = time.perf_counter()
        arguments = self.signature.bind(args, kwargs)
        fills, planned = self._plan(request, given_cache(arguments), count)
        if not fills:
            self._run_exact(planned)
            return None
        step, reason = self._prepare(model, arguments, request)
        if step is None:
            self._run_exact(reason, log=True)
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

    def _filled(self, call: _Call, settings: FillSettings) -> Bulk | None:
        """Fill a call's step; or undo it, and run it stock, where the guard does not let it through."""
        try:
            bulk = prefill.fill(settings, call.step)
        except OutOfRange as alarm:
            self._calls.current = None
            call.restore()
            self._alarm(str(alarm))
            self._run_exact(f"the guard: {alarm}")
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
        if not alarm:
            return
        with self._lock:
            first = not self.counters[event]
            self.counters[event] += 1
        if first:
            _log.warning("the guard: %s (guard=%r)", alarm, self.settings.guard and self.settings.guard.mode)

    def _check_tail(self, call: _Call, turn: turns.Turn) -> None:
        """Let the guard compare the tail's first rows, where it is on and they were seen."""
        guard, step = self.settings.guard, call.step
        if guard is None or call.features is None or (tail := turn.first_rows(PROBE_ROWS)) is None:
            return
        started = time.perf_counter()
        tail.tail_features = call.features
        guard.check_tail(self.settings, step, tail, call.step_end - tail.first_row - tail.stream.shape[1])
        self._alarm(step.tail_alarm, "guard alarms in tails")
        step.timings["tail_check_ms"] = 1e3 * (time.perf_counter() - started)

    def _plan(self, request: _Request, cache: Any, rows: int) -> tuple[bool, str]:
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
        step, now, selection = call.step, time.perf_counter(), call.selection
        if turn is not None:
            self._check_tail(call, turn)
        kept = provenance.of(step.cache)
        selected, again, gates, mass = 0, 0, dict[int, int](), None
        if isinstance(selection, rows.Selection):
            gates = {split: chosen.shape[1] for split, chosen in selection.chosen.items()}
            if selection.rows is None:
                selection = f"the tail's forward passed gates {sorted(gates)} only"
            else:
                if kept is not None:
                    let_through = selection.chosen[selection.choice.gates[0].split]
                    kept.ran(let_through, selection.rows, tail_from=call.tail_from)
                # The last group is the call's own bulk, where it has one.
                selected = 0 if call.again else selection.counts[-1]
                again, mass = sum(selection.counts) - selected, selection.attention_mass
                nothing = (
                    "no filled row is left" if mass is None else "no row's attention reaches the least probability"
                )
                selection = "" if selected + again else nothing
        record = _record(
            call.reason,
            ran=call.tier,
            spans=None
            if call.again
            else {
                "head": [step.cached_tokens, step.fill_start],
                "fill": [step.fill_start, step.fill_end],
                "tail": [step.fill_end, call.step_end],
            },
            rows_filled=0 if call.again else step.fill_end - step.fill_start - selected,
            rows_selected=selected,
            rows_selected_again=again,
            gates=gates,
            attention_mass=mass,
            selection=selection,
            probe_outliers=step.probe_outliers,
            probe_likeliness=step.probe_likeliness,
            tail_outliers=step.tail_outliers,
            alarm=step.alarm,
            tail_alarm=step.tail_alarm,
            stream_bytes=0 if kept is None else kept.stream_bytes,
            timings={
                **step.timings,
                "tail_ms": 1e3 * (now - call.tail_started),
                "total_ms": 1e3 * (now - call.started),
            },
        )
        with self._lock:
            self.history.append(record)
            self._copies = step.copies
            self.counters["selected again" if call.again else "filled"] += 1

    def _abandon(self) -> None:
        """Give the caller's cache its rows at entry back."""
        call, self._calls.current, rows.WAITING.selection = self._calls.current, None, None
        turn, self._calls.turn = self._calls.turn, None
        if turn is not None:
            turn.close(ran=False)
        if call is not None:
            call.restore()
            with self._lock:
                self.counters["undone after an exception"] += 1
                self.history.append(_record("the call ended with an exception; its fill was undone"))

    def _run_exact(self, reason: str, *, log: bool = False) -> None:
        kind = _kind(reason)
        with self._lock:
            first = kind not in self.counters
            self.counters[kind] += 1
            self.history.append(_record(reason))
        if log and first:
            _log.warning("a long prefill runs stock: %s", reason)


@functools.lru_cache(maxsize=256)
def _kind(reason: str) -> str:
    """The reason without its numbers: 159 and 160 rows are one kind. Most calls give the same reason as the last."""
    return re.sub(r"\d+", "#", reason)


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
    if tier not in TIERS:
        raise AttachError(f"unknown tier {tier!r}; known: {', '.join(TIERS)}")
    counts = (
        ("tail", tail, 1),
        ("head", head, 0),
        ("min_bulk", min_bulk, 1),
        ("min_rows", min_rows, 0),
        ("tile", tile, 1),
    )
    for name, value, least in counts:
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise AttachError(f"{name} must be an integer of at least {least}, found {value!r}")
    if isinstance(state_correction, bool) or not 0 <= state_correction <= 2:
        raise AttachError(f"state_correction must be a number from 0 to 2, found {state_correction!r}")
    if tier not in ("quality", "plumb") and not (share is None and gates is None and scorer is None and not min_rows):
        raise AttachError(f"tier {tier!r} selects no rows; share, min_rows, gates and scorer belong to tier 'quality'")
    if share == "auto" and not (scorer is None or isinstance(scorer, AttentionScorer)):
        raise AttachError("share 'auto' compares scores with a probability; the scorer must be an AttentionScorer")
    if gates is not None and (share is not None or not gates or split not in (None, min(gates))):
        raise AttachError(
            f"gates={dict(gates)}, share={share}, split={split} do not fit: gates name every share, and the lowest of "
            "them is the split"
        )
    if form not in FORMS:
        raise AttachError(f"unknown form {form!r}; known: {', '.join(FORMS)}")
    selects = tier == "quality" or share is not None or gates is not None
    if stream is None:
        stream = "device" if selects else "none"
    for name, word, known in (
        ("backend", backend, BACKENDS),
        ("map_dtype", map_dtype, MAP_DTYPES),
        ("residency", residency, RESIDENCIES),
        ("stream", stream, provenance.STREAMS),
        ("guard", guard, MODES),
    ):
        if word not in known:
            raise AttachError(f"unknown {name} {word!r}; known: {', '.join(known)}")
    if isinstance(slots, bool) or slots not in (1, 2):
        raise AttachError(f"slots must be 1 or 2, found {slots!r}")
    if residency == "host" and tier == "quality":
        raise AttachError("residency 'host' streams fused maps; tier 'quality' reads two-step maps on the device too")
    if stream == "none" and selects:
        raise AttachError("stream 'none' keeps nothing that selected rows could run from; it leaves tier 'speed'")
    if guard != "off" and tier == "plumb":
        raise AttachError("tier 'plumb' predicts nothing that a guard could compare; attach it with guard='off'")
    if tier == "quality" and gates is None and share is None:
        share = _DEFAULT_SHARE
    model = causal_lm(model)
    with _ATTACH_LOCK:
        if model in _ATTACHED:
            raise AlreadyAttachedError(f"{type(model).__name__} already has maps attached; call detach() first")
        layout = decoder_layout(model)
        if selects:
            _check_hooks_see_tail(model)
        if stream == "host" and (reason := host_obstacle(next(layout.layers[-1].parameters()).device)):
            raise AttachError(f"stream 'host' cannot run: {reason}; stream='device' keeps streams where they are made")
        loaded = maps if isinstance(maps, RidgeMaps) else RidgeMaps.load(maps)
        found = fingerprint(model, tokenizer)
        warnings = [
            message for _, message in _core.compare_fingerprints(json.dumps(loaded.fingerprint), json.dumps(found))
        ]
        split_maps = loaded.at(min(gates) if gates else split)
        gate, gate_warning = gate_word(
            loaded.gate,
            split=split_maps.split,
            tier=tier,
            tail=tail,
            head=head,
            share=None if isinstance(share, str) else share,
            chosen_otherwise=gates is not None or scorer is not None or share == "auto",
        )
        warnings += [gate_warning] if gate_warning else []
        gate_maps = [loaded.at(gate) for gate in sorted(gates)] if gates else [split_maps]
        features = [_check_usable(checked, layout) for checked in gate_maps]
        for later, read in zip(gate_maps[1:], features[1:], strict=True):
            if not read.stream_only:
                raise AttachError(
                    f"gate {later.split}: its maps read {list(read.names)}, and of rows that stop at a gate only their "
                    "own stream is known; fit this split with the stream alone"
                )
        writers, rotary_modules = late_layer_writers(layout, split_maps.split)
        _check_states(split_maps, writers)
        fused, form_reason = None, f"form={form!r} was asked for"
        if tier == "plumb":
            form_reason = "tier plumb writes the true block inputs"
        elif form != "two-step":
            holding = _holding(layout, backend, map_dtype, residency, slots)
            fused, form_reason = fused_maps(split_maps, layout, writers, holding)
            if form == "fused" and fused is None:
                raise AttachError(f"split {split_maps.split} has no fused form: {form_reason}")
        if fused is None and (map_dtype, residency) != ("model", "device"):
            raise AttachError(
                f"map_dtype {map_dtype!r}, residency {residency!r}: only fused maps are held so, and split "
                f"{split_maps.split} runs two-step: {form_reason}"
            )
        epilogues, backend_reason = _epilogues(backend, layout, fused)
        resident = [{} if tier == "plumb" else resident_maps(at_gate, layout) for at_gate in gate_maps]
        if fused is not None and not (tier == "quality" or gates):
            resident = [{}]  # nothing reads the two-step maps
        selection = None
        probability = rows.AUTO_PROBABILITY if share == "auto" else None
        one_gate = {} if share is None else {split_maps.split: share if probability is None else rows.AUTO_SHARE}
        if shares := dict[int, Any](gates or one_gate):
            chosen = [
                rows.Gate(
                    at, shares[at], maps_there, scorer or rows.attention_scorer(layout, at), probability, min_rows
                )
                for at, maps_there in zip(sorted(shares), resident, strict=True)
            ]
            selection = rows.selection_settings(layout, chosen)
        guarded = None if guard == "off" else Guard.of(split_maps, layout, guard, _output_embeddings(model))
        rule = FillRule(
            tail=tail,
            head=head,
            min_bulk=min_bulk,
            reach=features[0].reach,
            probe_rows=0 if guarded is None else PROBE_ROWS,
            tile=tile,
        )
        settings = prefill.FillSettings(
            layout=layout,
            split=split_maps.split,
            maps=resident[0],
            features=features[0] if tier != "plumb" else STREAM,
            fused=fused,
            epilogues=epilogues,
            writers=writers,
            rotary_modules=rotary_modules,
            true_inputs=tier == "plumb",
            selects_rows=selection is not None,
            guard=guarded,
            state_alpha=float(state_correction),
        )
        attachment = Attachment(
            tier=tier,
            rule=rule,
            settings=settings,
            warnings=warnings,
            tokenizer=_tokenizer_word(tokenizer, loaded),
            maps_path=loaded.path,
            resident=resident,
            signature=Signature.of(model),
            model=weakref.ref(model),
            form_reason=form_reason,
            gate=gate,
            backend_reason=backend_reason,
            map_dtype=map_dtype,
            residency=residency,
            stream=stream,
            selection=selection,
            planner=_planner(model, loaded, settings, rule, loss_budget) if tier == "auto" else None,
        )
        _ATTACHED[model] = attachment
        _register(model, attachment)
    for message in warnings:
        _log.warning("%s", message)
    return attachment


def _check_hooks_see_tail(model: nn.Module | None) -> None:
    """Refuse to select rows inside a tail that no hook sees.

    Raises:
        UnsupportedModelError: the model's forward is compiled.
    """
    if compiled_forward(model):
        raise UnsupportedModelError(
            f"{type(model).__name__}.forward is compiled, which hides the tail from the hooks that select rows; attach "
            "with tier='speed', or let generate(compile_config=...) compile its decode steps alone"
        )


def _output_embeddings(model: nn.Module) -> nn.Module | None:
    """What makes logits of the base model's output, where the model has it."""
    found = getattr(model, "get_output_embeddings", lambda: None)()
    return found if callable(found) else None


def _holding(layout: DecoderLayout, backend: str, map_dtype: str, residency: str, slots: int) -> Holding:
    """How fused maps are held; refuses a device to which they cannot be streamed."""
    device = next(layout.layers[-1].parameters()).device
    if residency == "host" and (reason := host_obstacle(device)):
        raise AttachError(f"residency 'host' cannot run: {reason}; residency='device' keeps maps where they are used")
    by_kernel = map_dtype == "int8" and choose_backend(backend, device)[0] == "cuda"
    return Holding(map_dtype == "int8", slots if residency == "host" else 0, by_kernel)


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


def _planner(
    model: nn.Module, maps: RidgeMaps, settings: prefill.FillSettings, rule: FillRule, loss_budget: float
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


def _tokenizer_word(tokenizer: Any, maps: RidgeMaps) -> str:
    if tokenizer is None:
        return "unchecked: no tokenizer was given"
    if maps.fingerprint.get("tokenizer") is None:
        return "unchecked: the maps hold no tokenizer hash"
    return "equal"


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


def _record(
    reason: str,
    *,
    ran: str = "exact",
    spans: dict[str, list[int]] | None = None,
    rows_filled: int = 0,
    rows_selected: int = 0,
    rows_selected_again: int = 0,
    gates: dict[int, int] | None = None,
    attention_mass: float | None = None,
    selection: str = "",
    probe_outliers: float | None = None,
    probe_likeliness: float | None = None,
    tail_outliers: float | None = None,
    alarm: str = "",
    tail_alarm: str = "",
    stream_bytes: int = 0,
    timings: dict[str, float] | None = None,
) -> dict[str, Any]:
    return {
        "reason": reason,
        "ran": ran,
        "spans": spans,
        "rows_filled": rows_filled,
        "rows_selected": rows_selected,
        "rows_selected_again": rows_selected_again,
        "gates": gates or {},
        "attention_mass": attention_mass,
        "selection": selection,
        "probe_outliers": probe_outliers,
        "probe_likeliness": probe_likeliness,
        "tail_outliers": tail_outliers,
        "alarm": alarm,
        "tail_alarm": tail_alarm,
        "stream_bytes": stream_bytes,
        "timings": timings or {},
    }
