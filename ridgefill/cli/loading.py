"""What the command line is given, made into objects: the MODEL argument, and text files as lazy texts."""

from __future__ import annotations

import codecs
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ridgefill.errors import RidgeFillError

_READ_BYTES = 1 << 16


def load_model(name: str, *, dtype: str = "auto", device: str = "auto") -> tuple[Any, Any]:
    """Return a causal language model in eval mode and its tokenizer.

    Args:
        name: a local folder, a hub id, or a ``.gguf`` file, which transformers unpacks to dense weights.
        dtype: "auto" (the checkpoint's own), "bfloat16", "float16" or "float32".
        device: a torch device, or "auto": the first CUDA device if there is one, else the CPU.

    Raises:
        RidgeFillError: torch or transformers is missing, or the model cannot be read.
    """
    try:
        import torch
        import transformers
    except ImportError as error:
        raise RidgeFillError(f"the package {error.name!r} is not installed: run pip install 'ridgefill[hf]'") from error
    path = Path(name)
    where: dict[str, Any] = {}
    weights: dict[str, Any] = {}
    source = name
    if path.suffix == ".gguf":
        if not path.is_file():
            raise RidgeFillError(f"model {name}: no such file")
        source, where = str(path.parent), {"gguf_file": path.name}
        if hasattr(transformers, "GgufConfig"):
            # transformers 5.24 keeps the blocks packed unless told; older versions always unpack and lack the class.
            weights = {"quantization_config": transformers.GgufConfig(dequantize=True)}
    elif path.exists() and not path.is_dir():
        raise RidgeFillError(f"model {name}: expected a folder, a .gguf file or a hub id, found another kind of file")
    elif not path.exists() and (path.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1):
        raise RidgeFillError(f"model {name}: no such folder")
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(source, **where)
        model = transformers.AutoModelForCausalLM.from_pretrained(
            source, dtype=dtype if dtype == "auto" else getattr(torch, dtype), **where, **weights
        )
    except (OSError, ValueError, ImportError, KeyError) as error:
        raise RidgeFillError(f"cannot load model {name}: {error}") from error
    return model.to(device).eval(), tokenizer


class TextFile:
    """A UTF-8 file as an iterable of pieces; a file that is not UTF-8 text gives none and is counted as skipped."""

    def __init__(self, path: Path, skipped: list[Path]) -> None:
        self.path = path
        self._skipped = skipped

    def __iter__(self) -> Iterator[str]:
        # Checked to its end before the first piece: half a binary file is no text.
        if self._is_text():
            # newline="": the sha256 of the pieces is that of the file.
            with open(self.path, encoding="utf-8", newline="") as file:
                while piece := file.read(_READ_BYTES):
                    yield piece
        else:
            self._skipped.append(self.path)

    def _is_text(self) -> bool:
        decoder = codecs.getincrementaldecoder("utf-8")()
        with open(self.path, "rb") as file:
            try:
                while block := file.read(_READ_BYTES):
                    if "\0" in decoder.decode(block):
                        return False
                decoder.decode(b"", final=True)
            except UnicodeDecodeError:
                return False
        return True


def text_files(paths: Sequence[Path], skipped: list[Path]) -> list[tuple[str, TextFile]]:
    """Named lazy texts: each path itself, or all files below it in sorted order, hidden ones left out.

    Names are relative to the given path, so that a map file holds nothing of the machine's folders.

    Raises:
        RidgeFillError: a path does not exist, or there is no file at all.
    """
    found: list[tuple[str, TextFile]] = []
    for path in paths:
        if path.is_dir():
            for file in sorted(path.rglob("*")):
                relative = file.relative_to(path)
                if file.is_file() and not any(part.startswith(".") for part in relative.parts):
                    found.append((relative.as_posix(), TextFile(file, skipped)))
        elif path.is_file():
            found.append((path.name, TextFile(path, skipped)))
        elif path.exists():
            raise RidgeFillError(f"text {path}: not a regular file (a text is read twice); write it to a file first")
        else:
            raise RidgeFillError(f"text {path}: no such file or folder")
    if not found:
        raise RidgeFillError(f"text {', '.join(map(str, paths))}: no files found")
    return found
