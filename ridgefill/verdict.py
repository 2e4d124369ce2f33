"""What a map file's gate says of the settings that maps are attached with (issue 7)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def gate_word(
    gate: Mapping[str, Any] | None,
    *,
    split: int,
    tier: str,
    tail: int,
    head: int,
    share: float | None,
    chosen_otherwise: bool,
) -> tuple[str, str | None]:
    """Return the gate's verdict on these settings in words, and a warning where they have not passed it.

    A longer tail, or a larger share of exact rows, than the gate's lose no more. ``chosen_otherwise`` says that rows
    are selected by several gates or by the caller's own scorer, which no gate has tried. A file whose gate has not run,
    or that keeps measured losses only, is no reason to warn.
    """
    if tier in ("exact", "plumb"):
        return f"none needed: tier {tier} changes no answer", None
    verdicts = (gate or {}).get("verdicts")
    if not isinstance(verdicts, list):
        return "no gate has run on these maps", None
    wanted = "speed" if tier == "auto" else tier
    entry = next((v for v in verdicts if (v.get("split"), v.get("tier")) == (split, wanted)), None)
    if entry is None:
        tried = sorted({(v.get("split"), v.get("tier")) for v in verdicts}, key=str)
        shown = ", ".join(f"{at} {of}" for at, of in tried)
        return _warned(f"not run on split {split}, tier {wanted}; its verdicts are on {shown}")
    if entry.get("verdict") != "pass":
        return _warned(f"{entry.get('verdict')}: " + "; ".join(entry.get("reasons", [])))
    settings = (gate or {}).get("settings", {})
    others = []
    if tail < settings.get("tail", tail):
        others.append(f"tail {settings['tail']}, here {tail}")
    if head != settings.get("head", head):
        others.append(f"head {settings['head']}, here {head}")
    if wanted == "quality" and chosen_otherwise:
        others.append("the default choice of rows, here another")
    elif wanted == "quality" and share is not None and share < settings.get("share", share):
        others.append(f"share {settings['share']:g}, here {share:g}")
    if others:
        return _warned(f"pass, but run on other settings: {'; '.join(others)}")
    return "pass", None


def _warned(word: str) -> tuple[str, str]:
    return word, f"the maps' gate: {word}"
