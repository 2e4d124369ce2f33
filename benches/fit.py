"""What a fit costs, against a plain forward pass over the same text.

    python benches/fit.py                       131,072 tokens of SmolLM2-135M, splits 15, 18 and 20
    python benches/fit.py -o maps.safetensors   … and keep the maps

The plain pass runs every decoder layer and no language-model head, as a fit does, over the windows that the fit reads.
Half of it runs before the fit and half after, so that a machine whose speed drifts treats both alike.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import common
import torch

from ridgefill.capture import Window, text_windows
from ridgefill.demo import calibration_texts, model_folder
from ridgefill.evaluate.report import machine_line
from ridgefill.solve import fit


def plain_pass(model: Any, windows: list[Window]) -> float:
    """Seconds that the base model takes over these windows."""
    base = model.get_decoder()
    started = time.perf_counter()
    with torch.no_grad():
        for window in windows:
            base(input_ids=torch.tensor([window.ids]), use_cache=False)
    return time.perf_counter() - started


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=131_072)
    parser.add_argument("--model", default="smollm2-135m", help="one of the demo's models")
    parser.add_argument("--split", default="15,18,20")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--output", "-o", type=Path, help="keep the maps in this file")
    options = parser.parse_args()

    model, tokenizer = common.load(model_folder(options.model), options.dtype, options.threads)
    texts = calibration_texts(5 * options.tokens)
    windows = list(text_windows(tokenizer, texts, window_tokens=1024, min_tokens=5, max_tokens=options.tokens))
    plain_pass(model, windows[:2])  # first-call costs

    plain_s = plain_pass(model, windows[::2])
    started = time.perf_counter()
    began: dict[str, float] = {}  # phase -> seconds from the fit's start
    maps = fit(
        model,
        tokenizer,
        texts,
        [int(s) for s in options.split.split(",")],
        max_tokens=options.tokens,
        progress=lambda phase, _, __: began.setdefault(phase, time.perf_counter() - started) and None,
    )
    fit_s = time.perf_counter() - started
    plain_s += plain_pass(model, windows[1::2])
    if options.output is not None:
        maps.save(options.output)
    tokens = sum(len(window.ids) for window in windows)
    figures = {"tokens": tokens, "rows": maps.fit["rows"], "splits": sorted(maps.splits), "dtype": options.dtype}
    ends = [*list(began.values())[1:], fit_s]
    phases = {phase: end - start for (phase, start), end in zip(began.items(), ends, strict=True)}
    print(json.dumps({**figures, "plain_s": plain_s, "fit_s": fit_s, "ratio": fit_s / plain_s, "phases_s": phases}))
    print(f"# {machine_line()}")
    if fit_s > 2 * plain_s:
        raise SystemExit("the fit took more than twice the plain forward pass")


if __name__ == "__main__":
    main()
