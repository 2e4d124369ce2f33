"""Fit ridge maps: one pass over texts, one Cholesky per split, held-out figures for every late layer."""

from __future__ import annotations

import functools
import logging
import math
import os
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ridgefill.agreement import measure, measure_scale
from ridgefill.attachment import is_attached
from ridgefill.capture import BlockInputs, Text, text_windows
from ridgefill.device_fit import DeviceMoments, RidgeSystem
from ridgefill.errors import FitError
from ridgefill.features import STREAM, Features
from ridgefill.kernels import choose_backend
from ridgefill.layout import DecoderLayout, decoder_layout, fingerprint
from ridgefill.maps import LayerMap, RidgeMaps, SplitMaps
from ridgefill.matrices import Factors, dense, stored
from ridgefill.moments import Moments
from ridgefill.ridge import LAMBDA_GRID, PlainSystem, System, choose_lambda, ridge_bias
from ridgefill.sample import MakeMoments, Pass, Sample, process_number
from ridgefill.spectrum import ScaleSpectrum, principal_directions, scale_spectrum
from ridgefill.state_fit import state_errors
from ridgefill.tune import choose

if TYPE_CHECKING:
    from torch import nn

    from ridgefill.matrices import Matrix

# phase ("capture", "solve", "held-out", "choose"), done, total: tokens, splits, windows; total is None while unknown
Progress = Callable[[str, int, int | None], None]

# What ``features="auto"`` chooses from, cheapest first. Means and more rows before were not worth their cost (2.4).
FEATURE_SETS = (STREAM, Features(("stream", "previous:1")))
GAINS = ("none", "norm", "lsq")
# Shares of the width: what ``rank="auto"`` chooses from. Above half of it, factors of a stream's maps save nothing.
RANK_SHARES = (1 / 8, 1 / 4, 3 / 8)
# About 100 rows per input column are enough (design section 2); below 20 the map fits its rows more than the model.
_FEW_ROWS_PER_COLUMN = 20
# Rows between two writes of a checkpoint, at most so many are run twice: 64 windows of 1,024 tokens.
CHECKPOINT_ROWS = 65_536
_log = logging.getLogger("ridgefill")


def fit(
    model: nn.Module,
    tokenizer: Any,
    texts: Iterable[Text],
    splits: Sequence[int] = (15, 20),
    *,
    default_split: int | None = None,
    max_tokens: int | None = None,
    window_tokens: int = 1024,
    head: int = 4,
    ridge_lambda: float | str = 1e-3,
    held_out: float = 1 / 16,
    features: Sequence[str] | str = "auto",
    gains: str = "auto",
    dtype: torch.dtype = torch.bfloat16,
    rank: int | str | None = None,
    backend: str = "auto",
    checkpoint: str | os.PathLike[str] | None = None,
    checkpoint_rows: int = CHECKPOINT_ROWS,
    progress: Progress | None = None,
) -> RidgeMaps:
    """Return maps that predict each late layer's block input from the stream of each split layer.

    ``W_l = (Sxx + lambda mean(diag Sxx) I)^-1 Sxy_l`` and ``b_l = my_l - mx W_l`` over all rows but the first ``head``
    of every window (design section 2). Several splits share one forward pass; layers above the last block input and
    the language-model head do not run. Equal inputs give equal maps, byte for byte, on one machine and thread count.
    `sum_texts`, then `fit_sums`.

    Args:
        model: a causal language model in eval mode; it runs in its own dtype, on its own device.
        tokenizer: the model's tokenizer.
        texts: strings or ``(name, text)`` pairs, where text is a string or an iterable of its pieces. With
            ``max_tokens`` and a sequence of texts, windows are drawn in turn from texts spread over the sequence.
        splits: the split layers, each ``1 <= S < num_layers``; maps cover layers ``S + 1`` to the last.
        default_split: the split that ``attach`` takes when none is named; the highest if None.
        max_tokens: stop after this many tokens, held-out ones included; None reads all texts.
        window_tokens: tokens in one forward pass.
        head: rows left out at the start of each window: attention sinks are outside the maps' domain.
        ridge_lambda: the penalty, relative to the mean diagonal of Sxx, or ``"auto"``: the value of ``LAMBDA_GRID``
            with the least held-out error, chosen for each split.
        held_out: the share of windows that never enter the sums: every ``round(1 / held_out)``-th, from the second.
        features: what the maps read, ``("stream", "previous:1")`` for example; ``"auto"`` chooses for each split one of
            ``FEATURE_SETS`` by held-out KL (`ridgefill.tune`).
        gains: one factor for each kv head of predicted keys and values (design section 2.2): ``"norm"`` gives them the
            exact ones' mean norm, ``"lsq"`` the least squared error, ``"none"`` leaves them; ``"auto"`` chooses for
            keys and for values, by held-out KL.
        dtype: of the stored weights, bfloat16, float16, float32 or int8 (a scale for 128 inputs of a column); held-out
            figures are read, biases and all else taken, with the weights as stored.
        rank: stores weights as two factors of this rank, ``W V`` and ``V^T``, where that takes fewer bytes: V holds the
            principal directions of the predictions over the fitted rows, so that no weight of that rank predicts these
            closer to W's own. ``"auto"``: for each split the smallest of ``RANK_SHARES`` of the width for which the KL
            of held-out prompts certainly rises by less than ``tune.MOST_RANK_KL``, or none. None: whole weights.
        backend: what sums the rows and solves the systems: ``torch``, or kernels and CUDA libraries (``cuda``: an
            NVIDIA GPU and CuPy), which round centred rows of a 16-bit model to bfloat16 once more; ``auto`` takes
            these where they can run, and `fit_backend` says why. Either way maps are the exact solution of sums within
            a stated bound of the exact ones: `moments.ERROR_BOUND`, `device_fit.error_bound`.
        checkpoint: a file that keeps the sums, and from which a pass that was killed goes on (`sum_texts`).
        checkpoint_rows: rows between two writes of it.
        progress: called as ``progress(phase, done, total)``.

    Raises:
        FitError: an argument makes no sense, there are fewer rows than input columns, activations are not finite, the
            normal equations are singular, or ``checkpoint`` holds the sums of another pass.
        UnsupportedModelError: the model's layout is unknown.
        KernelError: ``backend`` is unknown, or is ``cuda`` where kernels cannot run; or a system does not fit into the
            device's memory.

    Memory: the moments take ``8 n_in (n_in + d late layers)`` bytes for each split (12 by kernels, which solve a layer
    at a time in ``8 n_in (n_in + d)``), where ``n_in`` is d times the number of features, 2 with ``"auto"`` (twice all
    that with ``ridge_lambda="auto"``), whatever the texts' length.
    """
    # Before the long pass, not after it.
    solution: dict[str, Any] = {
        "default_split": default_split,
        "ridge_lambda": ridge_lambda,
        "features": features,
        "gains": gains,
        "dtype": dtype,
        "rank": rank,
    }
    check_solution(model, splits, **solution)
    sample = sum_texts(
        model,
        tokenizer,
        texts,
        splits,
        max_tokens=max_tokens,
        window_tokens=window_tokens,
        head=head,
        held_out=held_out,
        features=features,
        held_out_sums=ridge_lambda == "auto",
        backend=backend,
        checkpoint=checkpoint,
        checkpoint_rows=checkpoint_rows,
        progress=progress,
    )
    return fit_sums(model, tokenizer, sample, progress=progress, **solution)


def sum_texts(
    model: nn.Module,
    tokenizer: Any,
    texts: Iterable[Text],
    splits: Sequence[int] = (15, 20),
    *,
    max_tokens: int | None = None,
    window_tokens: int = 1024,
    head: int = 4,
    held_out: float = 1 / 16,
    features: Sequence[str] | str = "auto",
    held_out_sums: bool = False,
    backend: str = "auto",
    checkpoint: str | os.PathLike[str] | None = None,
    checkpoint_rows: int = CHECKPOINT_ROWS,
    progress: Progress | None = None,
) -> Sample:
    """Run texts through the model once and return their sums, from which `fit_sums` solves maps any number of times.

    Arguments are those of `fit`; features ``"auto"`` are the largest of ``FEATURE_SETS``: it has the others' columns.

    Args:
        held_out_sums: also sum the held-out rows, which ``ridge_lambda="auto"`` needs.
        checkpoint: a file that keeps the sums, written every ``checkpoint_rows`` rows and at the end (`Sample.save`).
            Where it exists already, the pass goes on from it: texts are read and cut again, and windows that were
            summed are not run again. Sums are the same to the last bit as those of a pass that was never killed.

    In several processes (torch.distributed is initialised), each runs its share of the windows, and all return the sums
    of all; ``checkpoint`` is written by the first, and each keeps its own share in ``checkpoint.NUMBER-of-COUNT``.

    Raises:
        FitError: an argument makes no sense, activations are not finite, or ``checkpoint`` holds the sums of another
            model, of other settings (each is named) or of other texts.
        UnsupportedModelError, KernelError: as `fit`.
    """
    chosen_backend, backend_reason = fit_backend(model, backend)
    _log.info("sums and systems by %s: %s", chosen_backend, backend_reason)
    layout = decoder_layout(model)
    splits = _checked_splits(splits, layout.num_layers)
    _check_pass(model, layout, splits, max_tokens, window_tokens, head, held_out)
    report = progress or (lambda phase, done, total: None)
    process, processes = process_number()
    settings = {
        "model": fingerprint(model, tokenizer),
        "dtype": str(layout.embeddings.dtype).removeprefix("torch."),
        "splits": splits,
        # The largest set holds the others' columns, so one pass gives the sums of all.
        "features": FEATURE_SETS[-1].names if features == "auto" else _given_features(features).names,
        "head": head,
        "window_tokens": window_tokens,
        "held_out": held_out,
        "max_tokens": max_tokens,
        "held_out_sums": held_out_sums,
        "products": _products(layout) if chosen_backend == "cuda" else "torch",
        "process": [process, processes] if processes > 1 else None,
    }
    own = None
    if checkpoint is not None:
        own = os.fspath(checkpoint) + (f".{process}-of-{processes}" if processes > 1 else "")
    if own is not None and os.path.exists(own):
        sample = Sample.load(own, _zero_moments(layout, chosen_backend))
        sample.check_settings(settings, own)
    else:
        sample = Sample.zero(settings, _zero_moments(layout, chosen_backend))

    windows = text_windows(tokenizer, texts, window_tokens=window_tokens, min_tokens=head + 1, max_tokens=max_tokens)
    reading = Pass(layout, sample)
    saved_rows = 0
    with BlockInputs(layout, reading.needed_layers()) as block_inputs:
        report("capture", 0, max_tokens)
        for window in windows:
            reading.add(window, block_inputs)
            if own is not None and reading.rows_run - saved_rows >= checkpoint_rows:
                reading.note_texts()
                sample.save(own)
                saved_rows = reading.rows_run
            report("capture", reading.tokens, max_tokens)
    reading.finish()
    if own is not None and not reading.was_finished:
        sample.save(own)
    if processes > 1:
        sample.all_reduce()
        if checkpoint is not None and process == 0:
            sample.save(checkpoint)
    return sample


def fit_sums(
    model: nn.Module,
    tokenizer: Any,
    sums: Sample | str | os.PathLike[str],
    splits: Sequence[int] | None = None,
    *,
    default_split: int | None = None,
    ridge_lambda: float | str = 1e-3,
    features: Sequence[str] | str = "auto",
    gains: str = "auto",
    dtype: torch.dtype = torch.bfloat16,
    rank: int | str | None = None,
    backend: str = "auto",
    progress: Progress | None = None,
) -> RidgeMaps:
    """Return the maps of a pass over texts, its sums given or in a moments file: no text is read again.

    Arguments are those of `fit`; only a few held-out windows run, for figures and choices.

    Args:
        sums: what `sum_texts` returned, or the path of its checkpoint or of several merged.
        splits: some of those that were summed; None: all.
        features: any of those that were summed, the stream first.

    Raises:
        FitError: as `fit`; or the sums are another model's, unfinished, or lack what is asked for.
        UnsupportedModelError, KernelError: as `fit`.
    """
    layout = decoder_layout(model)
    sample = sums if isinstance(sums, Sample) else load_sums(model, tokenizer, sums, backend=backend)
    summed = set(sample.features.names)
    splits = sorted(sample.sums) if splits is None else _checked_splits(splits, layout.num_layers)
    if missing := sorted(set(splits) - set(sample.sums)):
        raise FitError(
            f"splits {missing}: the sums are of splits {sorted(sample.sums)}; sum the texts again for others"
        )
    check_solution(
        model,
        splits,
        default_split=default_split,
        ridge_lambda=ridge_lambda,
        features=features,
        gains=gains,
        dtype=dtype,
        rank=rank,
    )
    sets = tuple(read for read in FEATURE_SETS if set(read.names) <= summed)
    if features != "auto":
        sets = (_given_features(features),)
        if lacking := sorted(set(sets[0].names) - summed):
            raise FitError(f"features {lacking}: the sums are of {sorted(summed)}; sum the texts again for others")
    report = progress or (lambda phase, done, total: None)

    _check_rows(sample.rows, sets[0].width(layout.hidden_size))
    sets = tuple(read for read in sets if read is sets[0] or _has_rows_for(sample, read, layout.hidden_size))
    candidates: dict[int, list[SplitMaps]] = {}
    for done, split in enumerate(splits):
        report("solve", done, len(splits))
        of_sets = (_solve_split(layout, split, sample, read, ridge_lambda, dtype, rank) for read in sets)
        candidates[split] = [maps for of_set in of_sets for maps in of_set]
    report("solve", len(splits), len(splits))
    with BlockInputs(layout, {layer for split in splits for layer in range(split, layout.num_layers)}) as block_inputs:
        agreements, held_out_rows = measure(
            layout, candidates, sample.held_out_windows, block_inputs, sample.head, report
        )

    found = RidgeMaps(
        fingerprint=fingerprint(model, tokenizer),
        fit={
            "rows": sample.rows,
            "held_out_rows": held_out_rows,
            "head": sample.head,
            "window_tokens": sample.settings["window_tokens"],
            "texts": sample.texts,
        },
        splits={split: of_split[0] for split, of_split in candidates.items()},
        default_split=max(splits) if default_split is None else default_split,
    )
    chosen = choose(
        model,
        found,
        candidates,
        agreements,
        sample.held_out_windows,
        head=sample.head,
        gains=gains,
        spectra=lambda maps: _spectra(sample, maps),
        states=lambda best, windows: state_errors(layout, best, windows, sample.head),
        report=report,
    )
    with BlockInputs(layout, splits) as block_inputs:
        measure_scale(chosen, sample.held_out_windows, block_inputs, sample.head)
    return chosen


def load_sums(model: nn.Module, tokenizer: Any, path: str | os.PathLike[str], *, backend: str = "auto") -> Sample:
    """Read the sums of a finished pass of this model, to where ``backend`` solves them.

    Raises:
        FitError: they are another model's, or unfinished, or no sums.
        MapFormatError, OSError: as `Sample.load`.
        UnsupportedModelError, KernelError: as `fit`.
    """
    sample = Sample.load(path, _zero_moments(decoder_layout(model), fit_backend(model, backend)[0]))
    sample.check_whole(path)
    sample.check_settings({**sample.settings, "model": fingerprint(model, tokenizer)}, path)
    return sample


def fit_backend(model: nn.Module, backend: str = "auto") -> tuple[str, str]:
    """What sums the rows of this model and solves their systems, ``torch`` or ``cuda``, and why.

    Raises:
        KernelError: ``backend`` is unknown, or is ``cuda`` where kernels cannot run.
        UnsupportedModelError: the model's layout is unknown.
    """
    layout = decoder_layout(model)
    chosen, reason = choose_backend(backend, _moments_device(layout))
    return chosen, reason if chosen == "torch" else f"{reason}; products in {_products(layout)}"


def _zero_moments(layout: DecoderLayout, backend: str) -> MakeMoments:
    """Makes sums on the moments' device, for kernels or for torch."""
    if backend == "cuda":
        return functools.partial(DeviceMoments, device=_moments_device(layout), products=_products(layout))
    return functools.partial(Moments, device=_moments_device(layout))


def _has_rows_for(sample: Sample, features: Features, hidden_size: int) -> bool:
    """Whether there are rows enough to choose maps over more features; says so where there are not."""
    enough = _FEW_ROWS_PER_COLUMN * features.width(hidden_size)
    if sample.rows < enough:
        warnings.warn(
            f"{' + '.join(features.names)} is not tried: {sample.rows} calibration rows, it needs {enough}",
            UserWarning,
            stacklevel=3,
        )
    return sample.rows >= enough


def _spectra(sample: Sample, maps: SplitMaps) -> dict[int, ScaleSpectrum]:
    """The spectrum of each late layer's predictions over the fitted rows; none where no norm follows."""
    if maps.target != "normalized":
        return {}
    fitted = _system(sample, sample.sums[maps.split], maps.features).inputs()
    return {layer: scale_spectrum(layer_map, fitted) for layer, layer_map in maps.layers.items()}


def _system(sample: Sample, sums: Moments, features: Sequence[str]) -> System:
    """The ridge systems of some of the features, from one split's sums, by what these were summed by."""
    summed, count = sample.features, len(features)
    columns = summed.columns(features, sums.n_in // len(summed.names))
    if isinstance(sums, DeviceMoments):
        return RidgeSystem(sums, columns=columns, features=count)
    return PlainSystem(sums.centred().of_columns(columns), features=count)


def _solve_split(
    layout: DecoderLayout,
    split: int,
    sample: Sample,
    features: Features,
    ridge_lambda: float | str,
    dtype: torch.dtype,
    rank: int | str | None,
) -> list[SplitMaps]:
    """Solve one split's maps, one Cholesky factor for all late layers, and bring them into the form that is stored.

    Returns:
        The maps; with rank ``"auto"`` those of each smaller rank behind them, the smallest first.
    """
    late, width = range(split + 1, layout.num_layers), layout.hidden_size
    fitted = _system(sample, sample.sums[split], features.names)
    if isinstance(ridge_lambda, str):
        if sample.held_out_sums is None:
            raise FitError("lambda 'auto' needs held-out sums, and there are none; sum the texts with lambda 'auto'")
        if sample.held_out_sums[split].n == 0:
            raise FitError("lambda 'auto' needs held-out windows, and the texts gave none; add text or name a lambda")
        held_out = _system(sample, sample.held_out_sums[split], features.names)
        ridge_lambda = choose_lambda(fitted, held_out, width) if late else LAMBDA_GRID[0]
    if late:
        fitted.factor(ridge_lambda)
    ranks = _useful_ranks(rank, features.width(width), width)
    sxx = fitted.inputs().sxx if any(ranks) else None
    of_ranks: list[dict[int, LayerMap]] = [{} for _ in ranks]
    for slot, layer in enumerate(late):
        solution = fitted.solve(slot * width, width)  # [n_in, d]
        directions = None
        if sxx is not None:
            directions, _ = principal_directions(solution.T @ sxx @ solution, max(r or 0 for r in ranks))
        for r, layers in zip(ranks, of_ranks, strict=True):
            weight: Matrix
            if r is None or directions is None:
                weight = stored(solution, dtype)
            else:
                weight = Factors(stored(solution @ directions[:, :r], dtype), stored(directions[:, :r].T, dtype))
            # Against the stored weight: the mean prediction stays exact where outlier dimensions have large means.
            as_stored = dense(weight, torch.float32, solution.device)
            bias = ridge_bias(fitted, as_stored, slot * width)
            if not (bool(torch.isfinite(as_stored).all()) and bool(torch.isfinite(bias).all())):
                raise FitError(f"split {split}: maps are not finite in {dtype}; store them in bfloat16 or float32")
            layers[layer] = LayerMap(layer, weight, bias.float().contiguous().cpu())
    target = _target(layout, late)
    return [SplitMaps(split, layers, features.names, target, float(ridge_lambda)) for layers in of_ranks]


def _useful_ranks(rank: int | str | None, n_in: int, n_out: int) -> list[int | None]:
    """The ranks of weights to make; None: whole ones, also in place of a rank that would take no fewer bytes."""

    def saves(r: int) -> bool:
        return r * (n_in + n_out) < n_in * n_out

    if isinstance(rank, int):
        return [rank if saves(rank) else None]
    shares = RANK_SHARES if rank == "auto" else ()
    return [None, *(r for r in (round(share * n_out) for share in shares) if r >= 1 and saves(r))]


def _given_features(names: Sequence[str] | str) -> Features:
    if isinstance(names, str):
        raise FitError(f"features {names!r}: expected 'auto' or a list of names, ['stream', 'previous:1'] for example")
    return Features.of(names)


def _checked_splits(splits: Sequence[int], num_layers: int) -> list[int]:
    found = sorted({int(split) for split in splits})
    if not found:
        raise FitError("splits: expected at least one split layer, found none")
    for split in found:
        if not 1 <= split < num_layers:
            raise FitError(f"split {split}: expected 1 <= split < {num_layers}, the model's number of layers")
    return found


def _check_pass(
    model: nn.Module,
    layout: DecoderLayout,
    splits: Sequence[int],
    max_tokens: int | None,
    window_tokens: int,
    head: int,
    held_out: float,
) -> None:
    if model.training:
        raise FitError("the model is in training mode (dropout would enter the maps): call model.eval() first")
    if not 0 <= held_out <= 0.5:
        raise FitError(f"held_out {held_out}: expected a share between 0 and 0.5")
    if head < 0:
        raise FitError(f"head {head}: expected >= 0")
    if window_tokens <= head + 1:
        raise FitError(f"window_tokens {window_tokens}: expected more than head + 1 = {head + 1}")
    longest = getattr(layout.config, "max_position_embeddings", None)
    if longest is not None and window_tokens > longest:
        raise FitError(f"window_tokens {window_tokens}: the model has {longest} positions (max_position_embeddings)")
    if max_tokens is not None and max_tokens < 1:
        raise FitError(f"max_tokens {max_tokens}: expected >= 1")
    _target(layout, range(min(splits) + 1, layout.num_layers))


def check_solution(
    model: nn.Module,
    splits: Sequence[int],
    *,
    default_split: int | None,
    ridge_lambda: float | str,
    features: Sequence[str] | str,
    gains: str,
    dtype: torch.dtype = torch.bfloat16,
    rank: int | str | None = None,
) -> None:
    """Refuse what `fit_sums` would refuse of its arguments, before a long pass over texts.

    Raises:
        FitError: an argument makes no sense, or maps are attached that a choice among others would replace.
    """
    if default_split is not None and default_split not in splits:
        raise FitError(f"default_split {default_split}: expected one of the splits {list(splits)}")
    if isinstance(ridge_lambda, str) and ridge_lambda != "auto":
        raise FitError(f"ridge_lambda {ridge_lambda!r}: expected a number >= 0 or 'auto'")
    if not isinstance(ridge_lambda, str) and not (ridge_lambda >= 0 and math.isfinite(ridge_lambda)):
        raise FitError(f"ridge_lambda {ridge_lambda}: expected a finite number >= 0 or 'auto'")
    if features != "auto":
        _given_features(features)
    if gains not in (*GAINS, "auto"):
        raise FitError(f"gains {gains!r}: expected one of {', '.join(GAINS)} and auto")
    if "auto" in (features, gains, rank) and is_attached(model):
        raise FitError(
            "the model has maps attached, and choosing features, gains or ranks attaches others; detach() first"
        )
    if dtype not in (torch.bfloat16, torch.float16, torch.float32, torch.int8):
        raise FitError(f"dtype {dtype}: a map file holds bfloat16, float16, float32 or int8")
    if rank not in (None, "auto") and not (isinstance(rank, int) and rank >= 1):
        raise FitError(f"rank {rank!r}: expected None, 'auto' or a number >= 1")


def _check_rows(rows: int, n_in: int) -> None:
    if rows < n_in:
        raise FitError(
            f"{rows} calibration rows for {n_in} input columns: a map needs at least as many rows as columns, "
            f"and about {100 * n_in} to be good; add text"
        )
    if rows < _FEW_ROWS_PER_COLUMN * n_in:
        warnings.warn(
            f"only {rows} calibration rows for {n_in} input columns; "
            f"{_FEW_ROWS_PER_COLUMN * n_in} are few and {100 * n_in} are enough",
            UserWarning,
            stacklevel=3,
        )


def _target(layout: DecoderLayout, late: Iterable[int]) -> str:
    """The one target that all these layers share."""
    targets = {layout.target(layer) for layer in late}
    if len(targets) > 1:
        raise FitError(f"late layers differ in what a map must predict ({sorted(targets)}); one file names one target")
    return targets.pop() if targets else "normalized"


def _moments_device(layout: DecoderLayout) -> torch.device:
    """Where the sums live: beside the last layer, or on the CPU where its device has no float64."""
    device = next(layout.layers[-1].parameters()).device
    return device if device.type in ("cpu", "cuda", "xpu") else torch.device("cpu")


def _products(layout: DecoderLayout) -> str:
    """What kernels multiply a model's rows in: those of a 16-bit model in bfloat16, at the rate of tensor cores."""
    device = _moments_device(layout)
    has_cores = device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 0)  # Turing's take no bfloat16
    return "bfloat16" if layout.embeddings.dtype.itemsize == 2 and has_cores else "float32"
