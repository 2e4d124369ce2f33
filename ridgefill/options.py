"""What a caller asks for, at attach and for single calls: checked before anything looks at the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ridgefill.errors import AttachError
from ridgefill.guard import MODES
from ridgefill.kernels import BACKENDS
from ridgefill.provenance import STREAMS
from ridgefill.residency import MAP_DTYPES, RESIDENCIES
from ridgefill.scorers import AttentionScorer, RowScorer

TIERS = ("auto", "exact", "quality", "speed", "plumb")
FORMS = ("auto", "fused", "two-step")
# The part of the bulk that runs exactly in tier quality (design section 3).
DEFAULT_SHARE = 0.1


@dataclass(frozen=True)
class Request:
    """What the calls inside one ``with attachment.request(...)`` block ask for."""

    tier: str
    tail: int
    exact_spans: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class Options:
    """The settings among the arguments of `ridgefill.attach`, which says what each is.

    Raises:
        AttachError: one is unknown or out of range, or two do not fit each other.
    """

    split: int | None
    tier: str
    tail: int
    head: int
    min_bulk: int
    loss_budget: float
    share: float | str | None
    min_rows: int
    gates: Mapping[int, float] | None
    scorer: RowScorer | None
    form: str
    backend: str
    map_dtype: str
    residency: str
    slots: int
    stream: str | None
    guard: str
    tile: int
    state_correction: float

    def __post_init__(self) -> None:
        words = (
            ("tier", self.tier, TIERS),
            ("form", self.form, FORMS),
            ("backend", self.backend, BACKENDS),
            ("map_dtype", self.map_dtype, MAP_DTYPES),
            ("residency", self.residency, RESIDENCIES),
            ("stream", self.kept_stream, STREAMS),
            ("guard", self.guard, MODES),
        )
        for name, word, known in words:
            if word not in known:
                raise AttachError(f"unknown {name} {word!r}; known: {', '.join(known)}")
        check_count("tail", self.tail, 1)
        check_count("head", self.head, 0)
        check_count("min_bulk", self.min_bulk, 1)
        check_count("min_rows", self.min_rows, 0)
        check_count("tile", self.tile, 1)
        if isinstance(self.state_correction, bool) or not 0 <= self.state_correction <= 2:
            raise AttachError(f"state_correction must be a number from 0 to 2, found {self.state_correction!r}")
        if isinstance(self.slots, bool) or self.slots not in (1, 2):
            raise AttachError(f"slots must be 1 or 2, found {self.slots!r}")
        if self.tier not in ("quality", "plumb") and (self.selects or self.scorer is not None or self.min_rows):
            raise AttachError(
                f"tier {self.tier!r} selects no rows; share, min_rows, gates and scorer belong to tier 'quality'"
            )
        if self.share == "auto" and not (self.scorer is None or isinstance(self.scorer, AttentionScorer)):
            raise AttachError("share 'auto' compares scores with a probability; the scorer must be an AttentionScorer")
        if self.gates is not None and (
            self.share is not None or not self.gates or self.split not in (None, min(self.gates))
        ):
            raise AttachError(
                f"gates={dict(self.gates)}, share={self.share}, split={self.split} do not fit: gates name every share, "
                "and the lowest of them is the split"
            )
        if self.residency == "host" and self.tier == "quality":
            raise AttachError(
                "residency 'host' streams fused maps; tier 'quality' reads two-step maps on the device too"
            )
        if self.kept_stream == "none" and self.selects:
            raise AttachError("stream 'none' keeps nothing that selected rows could run from; it leaves tier 'speed'")
        if self.guard != "off" and self.tier == "plumb":
            raise AttachError("tier 'plumb' predicts nothing that a guard could compare; attach it with guard='off'")

    @property
    def selects(self) -> bool:
        """Whether rows of the bulk are selected to run exactly."""
        return self.tier == "quality" or self.share is not None or self.gates is not None

    @property
    def kept_stream(self) -> str:
        """Where a filled cache keeps its rows' stream, also where that is left open."""
        if self.stream is not None:
            return self.stream
        return "device" if self.selects else "none"

    @property
    def gate_splits(self) -> list[int | None]:
        """The splits whose maps are read, the lowest first; None is the file's default."""
        return [*sorted(self.gates)] if self.gates else [self.split]

    @property
    def shares(self) -> list[float | str]:
        """What part of the bulk runs on at each of them; empty where no row is selected."""
        if self.gates:
            return [self.gates[split] for split in sorted(self.gates)]
        if self.tier == "quality" and self.share is None:
            return [DEFAULT_SHARE]
        return [] if self.share is None else [self.share]

    def request(
        self, tier: str | None = None, tail: int | None = None, exact_spans: Sequence[tuple[int, int]] = ()
    ) -> Request:
        """What calls ask for that name these, and leave the rest as it was attached.

        Raises:
            AttachError: an attachment with these options cannot run this tier, or a number is out of range.
        """
        known = {"exact", self.tier} | ({"speed"} if self.tier in ("auto", "quality") else set())
        if tier is not None and tier not in known:
            raise AttachError(
                f"request(tier={tier!r}): this attachment has tier {self.tier!r} and can run {sorted(known)}; attach "
                f"with tier={tier!r}"
            )
        if tail is not None:
            check_count("request: tail", tail, 1)
        return Request(tier or self.tier, tail or self.tail, checked_spans("request: exact_spans", exact_spans))


def check_count(name: str, value: object, least: int) -> None:
    """Refuse what is no whole number from ``least`` on.

    Raises:
        AttachError: with the value's name.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise AttachError(f"{name} must be an integer of at least {least}, found {value!r}")


def checked_spans(name: str, spans: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Spans of positions ``[from, to)``, none of them empty.

    Raises:
        AttachError: with the spans' name and the first that is not.
    """
    found = tuple((start, end) for start, end in spans)
    if wrong := [span for span in found if not 0 <= span[0] < span[1]]:
        raise AttachError(f"{name} are (from, to) with 0 <= from < to, found {wrong[0]}")
    return found
