"""What else a closed form could use: rows that count more than others, and MLP activations beside the stream.

    python benches/closed_form.py MAPS [--splits 15,20] [--weights plain,attention,rarity] [--json closed_form.json]

One pass over calibration text gives the sums of every fit, over the same rows; features and lambda are those of MAPS.
Each is compared with ``plain`` on the same held-out prompts and needles, in the two-step form and without gains;
``file`` is MAPS itself, with its own rows and gains. KL and dNLL to stock are in nats a token on the exact tail;
changes are paired by prompt; intervals are 95%.

**Rows** count in the sums by a weight. ``attention``: the mean probability that the queries of a window's last quarter
give the row, over heads and the layers from the split on; that quarter's own rows count as the others' mean.
``rarity``: one over how often the row's token is in the calibration text. ``NAME^0.5``: the square root of that.

**Columns**, at the lowest split, which are asked for no needles. ``below``: the MLP activations (gate times up) of the
layer below the split, the last that bulk rows run through. ``own``: the split layer's MLP fed with the stream itself;
the attention between them, which a bulk row does not run, is left out. ``below:256``: no projection to so few columns
loses less of the regression on the targets. ``own:256``: the units that each by itself explain most of what the
features leave, so that no others need be computed.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click
import common
import torch
from rich.console import Console
from rich.table import Table

from ridgefill.agreement import feature_rows, target_rows
from ridgefill.capture import BlockInputs, text_windows
from ridgefill.demo import calibration_texts
from ridgefill.evaluate.answers import Answer, Setting, answer_item
from ridgefill.evaluate.distance import GroupScore, differences, score_document, summarise
from ridgefill.evaluate.needle import Filler, build_items
from ridgefill.evaluate.paired import Variants
from ridgefill.evaluate.report import machine, machine_line
from ridgefill.evaluate.stats import exact_mcnemar, mean_interval
from ridgefill.evaluate.windows import held_out_windows, unseen_texts
from ridgefill.features import Features
from ridgefill.layout import DecoderLayout
from ridgefill.maps import RidgeMaps
from ridgefill.moments import BLOCK_ROWS, CentredMoments
from ridgefill.prefill import FILL_BLOCK_ROWS, FillSettings
from ridgefill.ridge import solve_ridge
from ridgefill.synth import ResidentMap, laid_out

PLAIN, FILE = "plain", "file"
COLUMNS = ("below", "below:256", "own", "own:256")
_LATE_PART = 4  # the last quarter of a window's queries
_LEAST_TOKENS = 64  # of a calibration window

# --- rows ----------------------------------------------------------------------------------------------------------


class WeightedSums:
    """Sums of weighted rows about their weighted mean: those of `Moments` where every weight is 1."""

    def __init__(self, n_in: int, n_out: int) -> None:
        self.n_in, self.rows = n_in, 0
        self._weight, self._square = 0.0, 0.0
        self._shift: torch.Tensor | None = None
        self._first = torch.zeros(n_in + n_out, dtype=torch.float64)
        self._second = torch.zeros(n_in, n_in + n_out, dtype=torch.float64)

    def add(self, x: torch.Tensor, y: torch.Tensor, weights: torch.Tensor) -> None:
        """Add a window's rows ``[rows, n_in]`` and ``[rows, n_out]`` with their weights ``[rows]``, all float32.

        As in `Moments`, products are in float32 about a fixed shift, over so few rows, and totals in float64.
        """
        z = torch.cat([x, y], dim=1)
        if self._shift is None:
            self._shift = z.mean(0)
        z -= self._shift
        weighted = z * weights.unsqueeze(1)
        self._first += weighted.sum(0, dtype=torch.float64)
        self._second += z[:, : self.n_in].T @ weighted
        self._weight += float(weights.sum(dtype=torch.float64))
        self._square += float(weights.square().sum(dtype=torch.float64))
        self.rows += len(z)

    @property
    def effective_rows(self) -> float:
        """How many rows of equal weight would vary as much: ``(sum w)^2 / sum w^2`` (Kish)."""
        return self._weight**2 / self._square

    def centred(self) -> CentredMoments:
        """The sums about the weighted mean, as if weights were 1 on average; ``syy`` is empty: no solution reads it."""
        assert self._shift is not None
        mean = self._first / self._weight
        second = torch.outer(self._first[: self.n_in], mean).neg_().add_(self._second).mul_(self.rows / self._weight)
        mean += self._shift
        parts = (mean[: self.n_in], mean[self.n_in :], second[:, : self.n_in], second[:, self.n_in :])
        return CentredMoments(self.rows, *parts, syy=mean[:0])


def row_weights(name: str, ids: Sequence[int], mass: torch.Tensor, counts: Counter[int], head: int) -> torch.Tensor:
    """A window's weights ``[rows - head]`` by their name; ``mass`` ``[rows]`` is the late queries' attention."""
    kind, _, power = name.partition("^")
    if kind == PLAIN:
        return torch.ones(len(ids) - head)
    if kind == "rarity":
        return torch.tensor([1 / counts[token] for token in ids[head:]]) ** float(power or 1)
    weights, late = mass[head:] ** float(power or 1), len(ids) // _LATE_PART
    weights[-late:] = weights[:-late].mean()  # nobody in this window looks at them from far
    return weights / weights.mean()


@contextmanager
def late_attention(model: Any, layout: DecoderLayout, split: int) -> Iterator[dict[int, torch.Tensor]]:
    """Give, by layer from ``split`` on, the mean probability of each row ``[rows]`` in the last pass inside the block.

    Over heads and the last quarter of the queries. Attention is eager inside the block, which has the probabilities.
    """
    found: dict[int, torch.Tensor] = {}

    def note(layer_idx: int, _: Any, __: Any, output: Any) -> None:
        probabilities = output[1][0]  # [heads, queries, rows]
        found[layer_idx] = probabilities[:, -(probabilities.shape[1] // _LATE_PART) :].mean((0, 1))

    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    handles = [
        layout.layers[i].self_attn.register_forward_hook(functools.partial(note, i))
        for i in range(split, layout.num_layers)
    ]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()
        model.set_attn_implementation(before)


# --- columns -------------------------------------------------------------------------------------------------------


@contextmanager
def activations_below(layout: DecoderLayout, split: int) -> Iterator[dict[int, torch.Tensor]]:
    """Give what the MLP below the split hands to its down projection, ``[batch, rows, width]``, by a pass's rows.

    By their number, the last such pass: short contexts and decode steps do not replace a whole prompt's.
    """
    found: dict[int, torch.Tensor] = {}

    def note(_: Any, args: tuple[torch.Tensor]) -> None:
        found[args[0].shape[1]] = args[0]

    handle = layout.layers[split - 1].mlp.down_proj.register_forward_pre_hook(note)
    try:
        yield found
    finally:
        handle.remove()


@torch.no_grad()
def own_activations(layer: Any, stream: torch.Tensor) -> torch.Tensor:
    """What a layer's MLP makes of its block input ``[..., d]`` without the attention between them, ``[..., width]``."""
    rows, mlp = layer.post_attention_layernorm(stream), layer.mlp
    activations: torch.Tensor = mlp.act_fn(mlp.gate_proj(rows)) * mlp.up_proj(rows)
    return activations


class Regression:
    """A split's ridge regression on features and activations, of which the activations can be left out or narrowed.

    ``parts`` are the widths of the features and, last, of the activations. Each is scaled to a mean diagonal of 1, so
    that it is penalised by its own, as in `solve_ridge`.
    """

    def __init__(self, moments: CentredMoments, parts: Sequence[int], ridge_lambda: float) -> None:
        diagonals = moments.sxx.diagonal().split(list(parts))
        self._scale = torch.cat([diagonal.mean().rsqrt().expand(len(diagonal)) for diagonal in diagonals])
        sxx, sxy = moments.sxx * self._scale * self._scale[:, None], moments.sxy * self._scale[:, None]
        sxx.diagonal().add_(ridge_lambda)
        f = sum(parts[:-1])
        solved = torch.cholesky_solve(torch.cat([sxy[:f], sxx[:f, f:]], dim=1), torch.linalg.cholesky(sxx[:f, :f]))
        # What the features alone say of the targets, and of the activations.
        self._targets, self._activations = solved.split([sxy.shape[1], parts[-1]], dim=1)
        # What they leave of the activations, [width, width], and of these with the targets, [width, n_out].
        self._left = sxx[f:, f:] - sxx[f:, :f] @ self._activations
        self._cross = sxy[f:] - sxx[f:, :f] @ self._targets

    def weight(self, directions: torch.Tensor | None = None) -> torch.Tensor:
        """The weights ``[n_in, n_out]`` that read activations along ``directions`` ``[width, r]`` only; None: all."""
        if directions is None:
            directions = torch.eye(len(self._left), dtype=torch.float64)
        narrowed = torch.linalg.solve(directions.T @ self._left @ directions, directions.T @ self._cross)
        of_activations = directions @ narrowed
        return torch.cat([self._targets - self._activations @ of_activations, of_activations]) * self._scale[:, None]

    def directions(self, rank: int) -> torch.Tensor:
        """The ``[width, rank]`` directions with the least penalised error of all: reduced-rank regression.

        With ``L L^T`` what the features leave of the activations and ``R`` of their products with the targets, these
        are ``L^-T U``, ``U`` the first left singular vectors of ``L^-1 R``.
        """
        factor = torch.linalg.cholesky(self._left)
        whitened = torch.linalg.solve_triangular(factor, self._cross, upper=False)
        _, vectors = torch.linalg.eigh(whitened @ whitened.T)  # ascending
        return torch.linalg.solve_triangular(factor.T, vectors[:, -rank:], upper=True)

    def units(self, count: int) -> torch.Tensor:
        """The activations that explain most, each by itself, as directions ``[width, count]``."""
        explained = self._cross.square().sum(1) / self._left.diagonal()
        return torch.eye(len(explained), dtype=torch.float64)[:, explained.topk(count).indices]


@dataclass(frozen=True)
class WithActivations(ResidentMap):
    """A map that reads activations behind the features of a block; ``activations`` makes them of these."""

    activations: Callable[[torch.Tensor], torch.Tensor] = torch.zeros_like

    def predict(self, features: torch.Tensor) -> torch.Tensor:
        """``[batch, rows, n_features] -> [batch, rows, d]``."""
        return super().predict(torch.cat([features, self.activations(features)], dim=-1))


# --- fits ----------------------------------------------------------------------------------------------------------


class Fits(Variants):
    """Fits of one model as variants, by name; ``file`` are the maps that it was made with."""

    def __init__(self, model: Any, maps: RidgeMaps) -> None:
        super().__init__(model, maps, form="two-step")
        self.fits: dict[tuple[int, str], dict[int, ResidentMap]] = {}

    def settings(self, split: int, variant: str = "fill") -> FillSettings:
        """The file's settings of a split, with a fit's maps."""
        settings = super().settings(split)
        return settings if variant in ("fill", FILE) else replace(settings, maps=self.fits[split, variant])

    def add(
        self,
        split: int,
        name: str,
        moments: CentredMoments,
        weight: torch.Tensor,
        activations: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> None:
        """Add a solution ``[n_in, n_out]`` of ``moments``, whose late layers lie side by side."""
        bias, d = moments.y_mean - moments.x_mean @ weight, self.layout.hidden_size
        parts = zip(weight.float().split(d, dim=1), bias.float().split(d), strict=True)
        made = ((laid_out(of_layer), of_bias) for of_layer, of_bias in parts)
        self.fits[split, name] = {
            layer: ResidentMap(*tensors) if activations is None else WithActivations(*tensors, activations=activations)
            for layer, tensors in enumerate(made, start=split + 1)
        }


def sum_rows(
    fits: Fits, tokenizer: Any, splits: Sequence[int], names: Sequence[str], tokens: int
) -> dict[tuple[int, str], WeightedSums]:
    """The sums of each split and weighting, from one pass; the lowest split's plain ones have activations behind x."""
    maps, layout, lowest = fits.maps, fits.layout, min(splits)
    head, late, d = int(maps.fit["head"]), range(lowest + 1, layout.num_layers), layout.hidden_size
    limits = {"window_tokens": BLOCK_ROWS, "min_tokens": _LEAST_TOKENS, "max_tokens": tokens}
    windows = list(text_windows(tokenizer, calibration_texts(5 * tokens), **limits))
    counts = Counter(token for window in windows for token in window.ids)
    sums: dict[tuple[int, str], WeightedSums] = {}
    with (
        late_attention(fits.model, layout, lowest) as mass,
        activations_below(layout, lowest) as below,
        BlockInputs(layout, range(lowest, layout.num_layers)) as block_inputs,
    ):
        for done, window in enumerate(windows):
            click.echo(f"calibration window {done + 1} of {len(windows)}", err=True)
            inputs = block_inputs.run(window.ids)
            y = torch.cat([target_rows(maps.at(lowest).target, inputs[layer][head:]) for layer in late], dim=1)
            for split in splits:
                x = feature_rows(Features.of(maps.at(split).features), inputs[split])[head:]  # [rows, n_in]
                y_of_split = y[:, d * (split - lowest) :]
                # The last layer's attention never runs: its input ends the pass.
                looked_at = torch.stack([mass[layer] for layer in range(split, layout.num_layers - 1)]).mean(0)
                for name in names:
                    columns = x
                    if (split, name) == (lowest, PLAIN):
                        own = own_activations(layout.layers[split], inputs[split])
                        columns = torch.cat([x, below[len(window.ids)][0, head:], own[head:]], dim=1)
                    if (split, name) not in sums:
                        sums[split, name] = WeightedSums(columns.shape[1], y_of_split.shape[1])
                    weights = row_weights(name, window.ids, looked_at, counts, head)
                    sums[split, name].add(columns, y_of_split, weights)
    return sums


def solve_fits(
    fits: Fits, sums: dict[tuple[int, str], WeightedSums], below: dict[int, torch.Tensor], tokens: int
) -> None:
    """Solve every weighting, and the columns of the split whose plain sums have activations.

    ``below``: `activations_below`, of prompts of ``tokens`` rows.
    """
    head, d = int(fits.maps.fit["head"]), fits.layout.hidden_size
    for (split, name), of_fit in sums.items():
        chosen, moments = fits.maps.at(split), of_fit.centred()
        count, f = len(chosen.features), len(chosen.features) * d
        of_features = moments.of_columns(range(f))
        fits.add(split, name, of_features, solve_ridge(of_features, chosen.ridge_lambda, features=count))
        if of_fit.n_in == f:
            continue
        width = (of_fit.n_in - f) // 2
        layer = fits.layout.layers[split]
        sources: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
            "below": lambda x: below[tokens][:, head : head + x.shape[1]],  # a bulk is one block of rows
            "own": lambda x, layer=layer: own_activations(layer, x[..., :d]),
        }
        for number, (source, activations) in enumerate(sources.items()):
            first = f + number * width
            of_source = moments.of_columns([*range(f), *range(first, first + width)])
            regression = Regression(of_source, [d] * count + [width], chosen.ridge_lambda)
            rank = min(256, width)
            narrow = regression.directions(rank) if source == "below" else regression.units(rank)
            fits.add(split, source, of_source, regression.weight(), activations)
            fits.add(split, f"{source}:256", of_source, regression.weight(narrow), activations)


# --- table ---------------------------------------------------------------------------------------------------------


def lines(
    fits: Fits, sums: dict[tuple[int, str], WeightedSums], scores: list[GroupScore], answers: list[Answer]
) -> list[dict[str, Any]]:
    """One line for each fit of each split."""
    found = []
    for split in sorted({split for split, _ in fits.fits}):
        names = [FILE, *(name for of_split, name in fits.fits if of_split == split)]

        def right(name: str, split: int = split) -> list[bool]:
            wanted = (0, "stock") if name == "stock" else (split, name)
            return [a.right for a in answers if (a.split, a.variant) == wanted]

        for name in names:
            tail = summarise(scores, split, name, "whole tail")
            assert tail is not None
            line: dict[str, Any] = {"split": split, "fit": name, "kl": dataclasses.asdict(tail.kl)}
            of_fit = sums.get((split, name)) or (sums[split, PLAIN] if name in COLUMNS else None)
            line["effective_rows"] = fits.maps.fit["rows"] if of_fit is None else round(of_fit.effective_rows)
            for figure, group, key in (
                ("kl", "whole tail", "kl_change"),
                ("dnll", "whole tail", "dnll_change"),
                ("dnll", "far-dependent", "far_change"),
            ):
                changes = differences(scores, split, name, PLAIN, group, figure)
                line[key] = dataclasses.asdict(mean_interval(changes)) if len(changes) > 1 else None
            if answers and (split, name) in sums:
                test = exact_mcnemar(right(PLAIN), right(name))
                line["needles"] = {"of": len(right(name)), "stock": sum(right("stock")), "right": sum(right(name))}
                line["needles"] |= {"lost": test.lost, "gained": test.gained, "p": test.p}
            found.append(line)
    return found


def print_table(found: list[dict[str, Any]]) -> None:
    """The lines, needles where they have been asked."""

    def cell(interval: dict[str, float] | None, form: str = "+.4f") -> str:
        if interval is None:
            return ""
        low, high = (f"{interval[end]:{form}}" for end in ("low", "high"))
        return rf"{interval['estimate']:{form}} \[{low}, {high}]"

    table = Table(title=f"changes are to {PLAIN}, paired [95%]", title_justify="left")
    for name in (
        *("S", "fit", "rows count as", "KL", "KL, change"),
        *("dNLL, change", "far-dependent dNLL, change", "needles"),
    ):
        table.add_column(name, justify="left" if name == "fit" else "right", no_wrap=True)
    for line in found:
        needles = ""
        if "needles" in line:
            n = line["needles"]
            needles = (
                f"{n['right']} of {n['of']} ({n['stock']}); lost {n['lost']}, gained {n['gained']}, p {n['p']:.2f}"
            )
        changes = (cell(line[key]) for key in ("kl_change", "dnll_change", "far_change"))
        rows = f"{line['effective_rows']:,}"
        table.add_row(str(line["split"]), line["fit"], rows, cell(line["kl"], ".4f"), *changes, needles)
    Console(width=240).print(table)


@click.command(help=__doc__)
@click.argument("maps_path", metavar="MAPS", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@common.model
@click.option("--splits", default="15,20", show_default=True, callback=common.numbers(int))
@click.option("--weights", "weightings", default="plain,attention,rarity", show_default=True)
@click.option("--fit-tokens", default=40_960, show_default=True, help="Calibration tokens.")
@click.option(
    "--tokens", default=1024, type=click.IntRange(max=FILL_BLOCK_ROWS), show_default=True, help="Of a prompt."
)
@click.option("--tail", default=256, show_default=True)
@click.option("--per-kind", default=3, type=click.IntRange(min=1), show_default=True, help="Prompts of each kind.")
@click.option("--needles", default=24, type=click.IntRange(min=0), show_default=True, help="Prompts with a needle.")
@click.option("--needle-tail", default=128, show_default=True)
@common.threads
@click.option("--sums", "sums_path", type=click.Path(path_type=Path), help="Keep the sums in this file, or take them.")
@common.json_path
def main(
    maps_path: Path,
    folder: Path,
    splits: tuple[int, ...],
    weightings: str,
    fit_tokens: int,
    tokens: int,
    tail: int,
    per_kind: int,
    needles: int,
    needle_tail: int,
    threads: int | None,
    sums_path: Path | None,
    json_path: Path | None,
) -> None:
    """Sum, solve, score (see the module's docstring)."""
    names = weightings.split(",")
    if unknown := [name for name in names if name.partition("^")[0] not in (PLAIN, "attention", "rarity")]:
        raise click.BadParameter(f"{unknown}: known are plain, attention, rarity", param_hint="--weights")
    if PLAIN not in names:
        raise click.BadParameter(
            f"{weightings!r} lacks {PLAIN}, with which the others are compared", param_hint="--weights"
        )
    model, tokenizer = common.load(folder, threads=threads)
    fits = Fits(model, RidgeMaps.load(maps_path))
    texts, head = unseen_texts(fits.maps), int(fits.maps.fit["head"])
    of = {"maps": fits.maps.fingerprint, "fit": fits.maps.fit, "weights": names, "tokens": fit_tokens}
    of["read"] = {split: fits.maps.at(split).features for split in splits}
    if sums_path is not None and sums_path.exists():
        kept = torch.load(sums_path, weights_only=False)  # this bench's own file
        if kept["of"] != of:
            raise click.ClickException(f"{sums_path} holds sums of other settings; name another file")
        sums = kept["sums"]
    else:
        sums = sum_rows(fits, tokenizer, splits, names, fit_tokens)
        if sums_path is not None:
            torch.save({"of": of, "sums": sums}, sums_path)
    scores: list[GroupScore] = []
    answers: list[Answer] = []
    with activations_below(fits.layout, min(splits)) as below:
        solve_fits(fits, sums, below, tokens)
        tried = [*((split, FILE) for split in splits), *fits.fits]
        windows = held_out_windows(tokenizer, tokens=tokens, per_kind=per_kind)
        for done, window in enumerate(windows):
            of_window = score_document(fits, tokenizer, window, tried, tail=tail, head=head)
            kl = {f"{s.split} {s.variant}": round(s.kl / s.tokens, 4) for s in of_window if s.group == "whole tail"}
            click.echo(f"prompt {done + 1} of {len(windows)}, {window.name}: KL {kl}", err=True)
            scores += of_window
        print_table(lines(fits, sums, scores, answers))
        filler = Filler(tokenizer, texts)
        items = build_items(tokenizer, filler, tokens=tokens, tail=needle_tail, count=needles, head=head, needles=(1,))
        for item in items:
            found = list(answer_item(fits, tokenizer, item, [Setting(*key) for key in sums], tail=needle_tail))
            click.echo(f"needle {item.name}: right {[(a.split, a.variant) for a in found if a.right]}", err=True)
            answers += found
    table = lines(fits, sums, scores, answers)
    if items:
        print_table(table)
    rows = sums[min(splits), PLAIN].rows
    click.echo(
        f"{folder.name}, float32, N={tokens}, T={tail} (needles {needle_tail}), head={head}, {len(windows)} prompts, "
        f"{len(items)} needles, {rows:,} calibration rows"
    )
    click.echo(machine_line())
    settings_used = {"tokens": tokens, "tail": tail, "needle_tail": needle_tail, "head": head, "rows": rows}
    common.write_json(json_path, {"settings": settings_used, "machine": machine(), "table": table})


if __name__ == "__main__":
    main()
