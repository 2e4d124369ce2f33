"""What a printed figure must say about where it was measured, and a gate's page."""

from __future__ import annotations

import importlib.metadata
import itertools
import json
import os
import platform
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ridgefill.evaluate.gate import GateRun


def machine() -> dict[str, Any]:
    """Return the processor, its cores, torch's threads and the versions that a measured figure depends on."""
    import torch

    import ridgefill

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": gpu,
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in ("torch", "transformers")},
        "ridgefill": ridgefill.__version__,  # a source checkout has no metadata
    }


def machine_line() -> str:
    """Return `machine` as one line."""
    found = machine()
    where = f"{found['cpu']}, {found['cores']} cores, {found['threads']} threads"
    if found["gpu"]:
        where += f", {found['gpu']}"
    versions = (f"{name} {found[name]}" for name in ("python", "torch", "transformers", "ridgefill"))
    return f"{where}; {', '.join(versions)}"


def _cpu_name() -> str:
    information = Path("/proc/cpuinfo")
    if information.is_file():
        for line in information.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


# --- the gate's page -----------------------------------------------------------------------------------------------

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 68rem; margin: 2rem auto; padding: 0 1rem; color: #222; }
table { border-collapse: collapse; margin: .5rem 1.5rem .5rem 0; } .row { display: flex; flex-wrap: wrap; }
td, th { padding: .2rem .6rem; border-bottom: 1px solid #ddd; text-align: right; vertical-align: top; }
th:first-child, td:first-child { text-align: left; } caption { text-align: left; font-weight: 600; }
.pass { color: #17693a; } .fail { color: #a3211c; } .undecided { color: #8a5a00; } .verdict { font-weight: 700; }
.maps table { margin-right: .8rem; } .maps td, .maps th { padding: .1rem .2rem; font-size: 12px; }
.nowrap td, .nowrap th { white-space: nowrap; padding: .2rem .4rem; font-size: 13px; }
svg text { font: 12px system-ui, sans-serif; fill: #222; } details { margin: .5rem 0; } pre { white-space: pre-wrap; }
"""
_COLOURS = ("#1f5fa8", "#c2571a", "#3a7d44", "#7b4a9e", "#a33b5c", "#5c6b73")
# What a splice's bars show of each layer, where it keeps that.
_BARS = ("keys", "values", "recurrent state")
_MEANING = {
    "pass": "turn it on, with these settings",
    "undecided": "not enough was seen to say: give it more prompts or a larger budget",
    "fail": "leave it off",
}
_LIMITS = (
    "The needles are short facts in held-out text of this machine's Python library; other texts may lose more or less.",
    "A pass holds for this model, these maps, this tail and at least this share of exact rows, at these lengths.",
    "Times and memory are those of one machine, with whatever else it was doing.",
    "Splices are read on short tails of few texts: they point at a cause, they do not measure one.",
)


def write_report(folder: Path, run: GateRun) -> None:
    """Write a gate's index.html, gate.json, config.json and results.jsonl (every answer and score) into ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    # First what all else was computed from: it took the time.
    lines = [{"line": "needles", **asdict(answer)} for answer in run.answers]
    lines += [{"line": "distance", **asdict(score)} for score in run.scores]
    (folder / "results.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    document = json.loads(json.dumps(run.document, allow_nan=False))  # names become strings, as a reader will find them
    (folder / "gate.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    config = {name: document[name] for name in ("settings", "model", "dtype", "maps", "machine")}
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
    (folder / "index.html").write_text(page(document), encoding="utf-8")


def page(document: dict[str, Any]) -> str:
    """Return a gate's document as one HTML page that needs nothing else: no script, no font, no network.

    Every number that stands in gate.json carries its path there in ``data-figure``.
    """
    show = _Figures(document)
    results = document["results"]
    names = [f"S={result['split']}, {result['tier']}" for result in results]
    verdict = document["verdict"]
    parts = [
        f"<h1>RidgeFill gate: {escape(document['model'])}</h1>",
        f'<p class="verdict {verdict}">{escape(_headline(results, names))}</p>',
        f"<p>{show('needle_items')} prompts with needles, {show('documents')} texts, {show('seconds', '.0f')} s. Stock "
        "finds "
        + ", ".join(
            f"{show(f'stock_accuracy.{number}.right', '.0%')} of {group['tokens']:,} tokens with "
            f"{group['needles']} needle{'s' if group['needles'] > 1 else ''}"
            for number, group in enumerate(document["stock_accuracy"])
        )
        + f". Fewer than {show('least_lost_needles')} lost needles of a cell cannot be told from chance.</p>",
        "<h2>Verdict</h2>",
        _verdicts(document, show, names),
        *(f"<p>S={e['split']}, {e['tier']}: not judged: {escape(e['reason'])}</p>" for e in document["refused"]),
        '<div class="row">',
        _pareto(document, names),
        _loss_by_distance(document, names),
        "</div>",
        "<h2>Needles</h2><p>Right answers by length and depth in the bulk.</p>",
        *(_heat_maps(document, show, number, name) for number, name in enumerate(names)),
        "<h2>Splices</h2><p>The share of the fill's KL that is gone when a part of the filled cache is made exact.</p>",
        *(_splices(document, show, split) for split in document["splices"]),
        "<h2>Controls</h2><p>Each must be worse than its tier: KL to stock above the tier's, nats a token.</p>",
        _controls(document, show),
        "<h2>Baselines</h2><p>What the fill should beat, on the same texts.</p>",
        _baselines(document, show),
        "<h2>Cost</h2>",
        _cost(document, show),
        "<h2>Limits</h2><ul>" + "".join(f"<li>{escape(line)}</li>" for line in _LIMITS) + "</ul>",
        "<h2>Configuration</h2>",
        f"<details><summary>settings and machine</summary><pre>{escape(_configuration(document))}</pre></details>",
    ]
    head = f'<meta charset="utf-8"><title>RidgeFill gate: {escape(document["model"])}</title><style>{_STYLE}</style>'
    return f'<!doctype html>\n<html lang="en"><head>{head}</head><body>\n' + "\n".join(parts) + "\n</body></html>\n"


def _headline(results: Sequence[dict[str, Any]], names: Sequence[str]) -> str:
    by_verdict = {
        verdict: [name for name, result in zip(names, results, strict=True) if result["verdict"] == verdict]
        for verdict in _MEANING
    }
    found = [f"{verdict} ({_MEANING[verdict]}): {'; '.join(of)}" for verdict, of in by_verdict.items() if of]
    return ". ".join(found) + "."


class _Figures:
    """Shows numbers of a document by their path in it."""

    def __init__(self, document: dict[str, Any]) -> None:
        self._document = document

    def __call__(self, path: str, form: str = "") -> str:
        """The number at a path such as ``results.0.needles.right``, marked with it; a dash where it is null."""
        value: Any = self._document
        for part in path.split("."):
            value = value[int(part)] if isinstance(value, list) else value[part]
        return "–" if value is None else f'<span data-figure="{path}">{format(value, form)}</span>'

    def interval(self, path: str, form: str) -> str:
        """An estimate with its bounds."""
        estimate, low, high = (self(f"{path}.{bound}", form) for bound in ("estimate", "low", "high"))
        return f"{estimate} [{low}, {high}]"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]], caption: str = "") -> str:
    title = f"<caption>{caption}</caption>" if caption else ""
    top = "".join(f"<th>{name}</th>" for name in head)
    body = "".join("<tr>" + "".join(f"<td>{value}</td>" for value in row) + "</tr>" for row in rows)
    return f"<table>{title}<tr>{top}</tr>{body}</table>"


def _verdicts(document: dict[str, Any], show: _Figures, names: Sequence[str]) -> str:
    rows, reasons = [], list[str]()
    for number, (name, result) in enumerate(zip(names, document["results"], strict=True)):
        at, verdict = f"results.{number}", result["verdict"]
        groups = f"{at}.distance.groups"
        far = result["distance"]["groups"]["far-dependent"]
        reasons += [f"<li>{escape(name)}: {escape(reason)}</li>" for reason in result["reasons"]]
        rows.append(
            (
                name,
                f'<span class="verdict {verdict}">{verdict}</span>',
                show(f"{at}.rows_filled", ","),
                f"{show(f'{at}.needles.right')} of {show(f'{at}.needles.items')}, stock {show(f'{at}.needles.stock')}"
                f"<br>{show.interval(f'{at}.needles.test.change', '+.1%')}"
                f"<br>p = {show(f'{at}.needles.test.p', '.2g')}",
                show.interval(f"{groups}.whole tail.kl", ".3f"),
                show.interval(f"{groups}.whole tail.dnll", "+.3f"),
                "–" if far is None else show.interval(f"{groups}.far-dependent.dnll", "+.3f"),
                show(f"cost.{number}.ttft_ratio", ".2f"),
            )
        )
    head = ("", "verdict", "rows filled", "needles in the fill", "KL", "dNLL", "dNLL, far-dependent", "TTFT ratio")
    why_not = f"<h3>Why not</h3><ul>{''.join(reasons)}</ul>" if reasons else ""
    return f'<div class="nowrap">{_table(head, rows)}</div>{why_not}'


def _svg(width: int, height: int, body: str, label: str) -> str:
    size = f'width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
    return f'<svg {size} role="img" aria-label="{escape(label)}">{body}</svg>'


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _axes(title: str, bottom: str, top_value: float, unit: str) -> str:
    lines = '<path d="M60 20V220H440" stroke="#999" fill="none"/>'
    return (
        lines + _text(60, 14, title) + _text(440, 250, bottom, "end") + _text(55, 30, f"{top_value:.3g}{unit}", "end")
    )


# About the width of a letter and the height of a line of the charts' text.
_LETTER, _LINE = 6.8, 13


def _free_place(
    taken: Sequence[tuple[float, float, float]], begins: Sequence[float], width: float, foot: float
) -> tuple[float, float, float]:
    """The nearest place inside the axes for a text that begins at one of ``begins`` and hides nothing, or ``foot``'s.

    Places are: from, width, foot.
    """

    def hides(begin: float, foot: float) -> bool:
        return any(begin < b + w and b < begin + width and abs(foot - f) < _LINE for b, w, f in taken)

    for moved in itertools.chain.from_iterable((-step, step) for step in range(0, 200, 6)):
        for begin in begins:
            if 14 + _LINE <= foot + moved <= 218 and not hides(begin, foot + moved):
                return begin, width, foot + moved
    return begins[0], width, foot


def _pareto(document: dict[str, Any], names: Sequence[str]) -> str:
    """Speed-up against loss: the lower right is better."""
    points = [
        (cost["ttft_ratio"], result["distance"]["groups"]["whole tail"]["kl"]["estimate"], result["verdict"])
        for cost, result in zip(document["cost"], document["results"], strict=True)
    ]
    left, right = min(1.0, *(x for x, _, _ in points)) - 0.05, max(x for x, _, _ in points) + 0.05
    most = max(max(y for _, y, _ in points), 1e-9)
    body = _axes("KL to stock, nats a token", "time to first token, exact / filled", most, "")
    body += _text(60, 235, f"{left:.2f}") + _text(440, 235, f"{right:.2f}", "end")
    placed = [
        (60 + 380 * (x - left) / (right - left), 220 - 190 * max(0.0, y) / most, verdict) for x, y, verdict in points
    ]
    taken = [(x - 6, 12.0, y + 4) for x, y, _ in placed]  # a name must hide no point, nor another name
    labels = ""
    for number in sorted(range(len(placed)), key=lambda number: points[number][1]):
        x, y, verdict = placed[number]
        colour = {"pass": "#17693a", "fail": "#a3211c"}.get(verdict, "#8a5a00")
        body += f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" fill="{colour}" data-point="{number}"/>'
        width = _LETTER * len(names[number])
        inside = [begin for begin in (x + 8, x - 8 - width) if 60 < begin < 440 - width]
        place = _free_place(taken, inside or [x + 8], width, y + 4)
        taken.append(place)
        if abs(place[2] - y) > _LINE:  # too far away to tell whose it is
            nearer = place[0] if place[0] > x else place[0] + width
            body += f'<path d="M{x:.1f} {y:.1f}L{nearer:.1f} {place[2]:.1f}" stroke="#bbb"/>'
        labels += _text(place[0], place[2], names[number])
    body += labels
    return _svg(470, 260, body, "speed-up against loss")


def _loss_by_distance(document: dict[str, Any], names: Sequence[str]) -> str:
    """KL by distance from the bulk's end, one line for each split and tier."""
    lines = []
    for result in document["results"]:
        groups = result["distance"]["groups"]
        bins = [name for name, group in groups.items() if name.startswith("distance") and group is not None]
        lines.append([(name.removeprefix("distance "), groups[name]["kl"]["estimate"]) for name in bins])
    most = max((y for line in lines for _, y in line), default=0.0) or 1e-9
    body = _axes("KL to stock, nats a token", "tokens behind the bulk's end", most, "")
    for number, line in enumerate(lines):
        step = 380 / max(1, len(line))
        points = [(60 + step * (i + 0.5), 220 - 190 * max(0.0, y) / most) for i, (_, y) in enumerate(line)]
        colour = _COLOURS[number % len(_COLOURS)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        body += f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>'
        body += f'<text x="300" y="{34 + 16 * number}" style="fill: {colour}">{escape(names[number])}</text>'
        if number == 0:
            body += "".join(_text(x, 235, name, "middle") for (x, _), (name, _) in zip(points, line, strict=True))
    return _svg(470, 60 + max(200, 16 * len(lines)), body, "loss by distance")


def _heat_maps(document: dict[str, Any], show: _Figures, number: int, name: str) -> str:
    """Stock, filled and their difference, and the answers that differ."""
    line = document["results"][number]["needles"]
    tables = []
    for title, key in (("stock", "stock"), ("filled", "right"), ("difference", "")):
        rows = []
        for tokens in sorted({entry["tokens"] for entry in line["heat_map"]}):
            cells = [f"{tokens:,}"]
            for index, entry in enumerate(line["heat_map"]):
                if entry["tokens"] == tokens:
                    part = (entry[key] if key else entry["stock"] - entry["right"]) / entry["items"]
                    shade = (1 - part) if key else part
                    at = f"results.{number}.needles.heat_map.{index}"
                    text = f"{show(f'{at}.{key}')}/{show(f'{at}.items')}" if key else f"{0.0 - part:+.0%}"
                    colour = f"rgb(255, {255 - 130 * max(0.0, shade):.0f}, {255 - 150 * max(0.0, shade):.0f})"
                    cells.append(f'<span style="background: {colour}; padding: 0 .4rem">{text}</span>')
            rows.append(cells)
        depths = sorted({tuple(entry["depth"]) for entry in line["heat_map"]})
        head = ["tokens", *(f"{100 * low:.0f}–{high:.0%}" for low, high in depths)]
        tables.append(_table(head, rows, title))
    differing = [
        [escape(str(entry[key])) for key in ("item", "question", "expected", "stock", "filled")]
        for entry in line["disagreements"]
    ]
    listed = _table(("prompt", "question", "expected", "stock says", "filled says"), differing)
    outside = f"{show(f'results.{number}.needles.outside.right')} of {show(f'results.{number}.needles.outside.items')}"
    more = f"<details><summary>{len(differing)} answers differ; {outside} outside the fill are right</summary>{listed}"
    return f'<h3>{escape(name)}</h3><div class="row maps">{"".join(tables)}</div>{more}</details>'


def _splices(document: dict[str, Any], show: _Figures, split: str) -> str:
    """Shares by component, bars by layer for keys, values and states, and what to try."""
    found = document["splices"][split]
    if not found["recovered"]:
        return f"<h3>S={split}</h3><p>The fill of these texts is exact: there is nothing to recover.</p>"
    rows = [(name, show(f"splices.{split}.recovered.{name}", ".0%")) for name in found["recovered"]]
    body = ""
    layers = sorted({entry["layer"] for entry in found["layers"]})
    width = 400 / len(layers)
    parts = [part for part in _BARS if any(entry["component"] == part for entry in found["layers"])]
    bar = width / (len(parts) + 0.5)
    for number, component in enumerate(parts):
        colour = _COLOURS[number]
        for entry in found["layers"]:
            if entry["component"] == component:
                height = 150 * min(1.0, max(0.0, entry["share"]))
                x = 40 + width * layers.index(entry["layer"]) + number * bar
                body += (
                    f'<rect x="{x:.1f}" y="{180 - height:.1f}" width="{bar:.1f}" height="{height:.1f}" '
                    f'fill="{colour}"><title>layer {entry["layer"]}, {component}: {entry["share"]:.1%}</title></rect>'
                )
        body += f'<text x="{60 + 90 * number}" y="14" style="fill: {colour}">{component}</text>'
    body += '<path d="M36 180H445" stroke="#999"/>' + _text(34, 36, "100%", "end")
    body += "".join(_text(40 + width * (i + 0.4), 196, str(layer), "middle") for i, layer in enumerate(layers))
    advice = "".join(f"<li>{escape(line)}</li>" for line in found["recommendations"])
    table = _table(
        ("made exact, all late layers", "recovered"), rows, f"S={split}, KL {show(f'splices.{split}.kl', '.4f')}"
    )
    chart = _svg(470, 205, body, f"recovered by layer at split {split}")
    return f'<div class="row">{table}{chart}</div><p>What to try:</p><ul>{advice}</ul>'


def _controls(document: dict[str, Any], show: _Figures) -> str:
    rows = [
        (
            f"S={entry['split']}, {entry['control']} against {entry['tier']}",
            show.interval(f"controls.{number}.excess_kl", "+.4f"),
            show(f"controls.{number}.p", ".2g"),
            '<span class="pass">worse, as it must be</span>'
            if entry["failed"]
            else '<span class="fail verdict">not certainly worse</span>',
        )
        for number, entry in enumerate(document["controls"])
    ]
    return _table(("control", "KL above the tier's", "sign test p", ""), rows)


def _baselines(document: dict[str, Any], show: _Figures) -> str:
    rows = []
    for number, entry in enumerate(document["baselines"]):
        far = "–"
        if entry["far-dependent"] is not None:
            far = show.interval(f"baselines.{number}.far-dependent.dnll", "+.3f")
        whole = (show.interval(f"baselines.{number}.whole tail.{name}", "+.4f") for name in ("kl", "dnll"))
        rows.append((f"S={entry['split']}, {entry['name']}", *whole, far))
    return _table(("baseline", "KL", "dNLL", "dNLL, far-dependent"), rows)


def _cost(document: dict[str, Any], show: _Figures) -> str:
    rows = []
    for number, entry in enumerate(document["cost"]):
        at = f"cost.{number}"
        rows.append(
            (
                f"S={entry['split']}, {entry['tier']}, {entry['tokens']:,} tokens",
                f"{show(f'{at}.rows_filled', ',')} + {show(f'{at}.rows_selected', ',')}",
                *(show(f"{at}.ttft_ms_{side}", ",.0f") for side in ("exact", "filled")),
                show(f"{at}.ttft_ratio", ".2f"),
                *(show(f"{at}.decode_tokens_per_s_{side}", ".1f") for side in ("exact", "filled")),
                show(f"{at}.short_ratio", ".2f"),
                *(show(f"{at}.peak_mib_{side}", ",.0f") for side in ("exact", "filled")),
            )
        )
    head = (
        "",
        "rows filled + selected",
        "TTFT exact, ms",
        "filled, ms",
        "ratio",
        "decode exact, tokens/s",
        "filled",
        "short prompt, filled / exact",
        "peak exact, MiB",
        "filled",
    )
    return _table(head, rows)


def _configuration(document: dict[str, Any]) -> str:
    return json.dumps({name: document[name] for name in ("settings", "dtype", "maps", "machine")}, indent=1)
