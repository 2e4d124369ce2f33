"""Prompts of held-out text: what calibration never sees, in windows of one length."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ridgefill.capture import special_prefix
from ridgefill.demo import KINDS, standard_texts
from ridgefill.errors import RidgeFillError

if TYPE_CHECKING:
    from ridgefill.maps import RidgeMaps


@dataclass(frozen=True)
class Window:
    """One prompt of held-out text: ``ids`` is ``[1, tokens]`` int64."""

    kind: str
    name: str
    ids: torch.Tensor


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
