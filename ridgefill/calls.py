"""What is known of an attached model's calls: of one that is filled now, and of all before, in records and counters."""

from __future__ import annotations

import functools
import re
import threading
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ridgefill import provenance
from ridgefill.residency import Copies
from ridgefill.rows import Selection

if TYPE_CHECKING:
    from ridgefill.features import FeatureState
    from ridgefill.prefill import Step

_HISTORY_CALLS = 256


@dataclass
class Record:
    """What one prefill did, by the names of `Attachment.status`; the defaults are those of a call that ran stock."""

    reason: str
    ran: str = "exact"
    spans: dict[str, list[int]] | None = None
    rows_filled: int = 0
    rows_selected: int = 0
    rows_selected_again: int = 0
    gates: dict[int, int] = field(default_factory=dict)
    attention_mass: float | None = None
    selection: str = ""
    probe_outliers: float | None = None
    probe_likeliness: float | None = None
    tail_outliers: float | None = None
    alarm: str = ""
    tail_alarm: str = ""
    stream_bytes: int = 0
    timings: dict[str, float] = field(default_factory=dict)


@dataclass
class Call:
    """A filled call between its pre-hook and its end."""

    step: Step
    step_end: int
    tier: str
    reason: str
    restore: Callable[[], None]
    started: float
    error_at_entry: BaseException | None
    tail_started: float = 0.0
    selection: Selection | str = ""  # or, in words, why no row is selected
    again: bool = False  # nothing was filled: rows that an earlier call filled are selected
    tail_from: int | None = None  # then: from here on, all of them
    features: FeatureState | None = None  # of a fill with a guard: goes on to those of the tail's rows

    def note_selected(self) -> None:
        """Tell the cache's record which of its rows ran exactly."""
        kept, selection = provenance.of(self.step.cache), self.selection
        if kept is not None and isinstance(selection, Selection) and selection.rows is not None:
            let_through = selection.chosen[selection.choice.gates[0].split]
            kept.ran(let_through, selection.rows, tail_from=self.tail_from)

    def record(self, ended: float) -> Record:
        """What the call did, whose forward ended at this time."""
        step, selection, kept = self.step, self.selection, provenance.of(self.step.cache)
        record = Record(
            self.reason,
            ran=self.tier,
            probe_outliers=step.probe_outliers,
            probe_likeliness=step.probe_likeliness,
            tail_outliers=step.tail_outliers,
            alarm=step.alarm,
            tail_alarm=step.tail_alarm,
            stream_bytes=0 if kept is None else kept.stream_bytes,
            timings={
                **step.timings,
                "tail_ms": 1e3 * (ended - self.tail_started),
                "total_ms": 1e3 * (ended - self.started),
            },
        )
        if not self.again:
            record.rows_filled = step.fill_end - step.fill_start
            record.spans = {
                "head": [step.cached_tokens, step.fill_start],
                "fill": [step.fill_start, step.fill_end],
                "tail": [step.fill_end, self.step_end],
            }
        if isinstance(selection, str):
            record.selection = selection
            return record
        record.gates = {split: chosen.shape[1] for split, chosen in selection.chosen.items()}
        if selection.rows is None:
            record.selection = f"the tail's forward passed gates {sorted(record.gates)} only"
            return record
        # The last group is the call's own bulk, where it has one.
        record.rows_selected = 0 if self.again else selection.counts[-1]
        record.rows_selected_again = sum(selection.counts) - record.rows_selected
        record.rows_filled -= record.rows_selected
        record.attention_mass = selection.attention_mass
        if not sum(selection.counts):
            by_attention = selection.attention_mass is not None
            record.selection = (
                "no row's attention reaches the least probability" if by_attention else "no filled row is left"
            )
        return record


class Ledger:
    """What came of an attachment's calls, from any thread: records of the last prefills, and counts of everything."""

    def __init__(self) -> None:
        self.history: deque[dict[str, Any]] = deque(maxlen=_HISTORY_CALLS)
        self.counters: Counter[str] = Counter()
        self._copies = Copies()  # of the last fill
        self._lock = threading.RLock()

    def count(self, event: str) -> bool:
        """Count an event; returns whether it is the first of its name."""
        with self._lock:
            self.counters[event] += 1
            return self.counters[event] == 1

    def add(self, event: str, record: Record, copies: Copies | None = None) -> bool:
        """Count a prefill as an event, and keep its record; ``copies`` are those of a fill's maps."""
        with self._lock:
            self.history.append(vars(record))
            self._copies = self._copies if copies is None else copies
            return self.count(event)

    def add_stock(self, reason: str) -> bool:
        """The same of a prefill that ran stock, for a reason: reasons that differ in numbers alone are one event."""
        return self.add(_kind(reason), Record(reason))

    def now(self) -> tuple[dict[str, Any], Copies, dict[str, int]]:
        """The last prefill's record, the last fill's copies, and all counts, of one moment."""
        with self._lock:
            last = self.history[-1] if self.history else vars(Record("no prefill has been seen yet"))
            return last, self._copies, dict(self.counters)


@functools.lru_cache(maxsize=256)
def _kind(reason: str) -> str:
    """The reason without its numbers. Most calls give the same one as the last."""
    return re.sub(r"\d+", "#", reason)
