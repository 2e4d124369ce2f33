"""Texts to calibrate on, read when needed: files, folders, JSON lines, datasets; conversations; contamination."""

from __future__ import annotations

import codecs
import json
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ridgefill.errors import RidgeFillError

NamedText = tuple[str, Iterable[str]]

# Words in a row that two texts share only where one was copied.
SHARED_WORDS = 50
_WORD = re.compile(r"\w+")
# A polynomial hash of words modulo a prime: one multiplication for each word that comes in and for each that leaves.
_PRIME, _BASE = (1 << 61) - 1, 0x1F3D5B79ACE02468
_LEAVES = pow(_BASE, SHARED_WORDS, _PRIME)
_READ_BYTES = 1 << 16


class TextFile:
    """A UTF-8 file as an iterable of pieces; a file that is not UTF-8 text gives none and is counted as skipped."""

    def __init__(self, path: Path, skipped: list[Path]) -> None:
        self.path = path
        self._skipped, self._counted = skipped, False

    def __iter__(self) -> Iterator[str]:
        # Checked to its end before the first piece: half a binary file is no text.
        if self._is_text():
            # newline="": the sha256 of the pieces is that of the file.
            with open(self.path, encoding="utf-8", newline="") as file:
                while piece := file.read(_READ_BYTES):
                    yield piece
        elif not self._counted:
            self._skipped.append(self.path)
            self._counted = True

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


class ChatFormat:
    """Conversations as the model was trained to see them; its tokenizer is given before the first text is read."""

    tokenizer: Any = None

    def text(self, messages: Any, where: str) -> str:
        """A conversation's text by the tokenizer's chat template, without the BOS that every window gets anyway.

        Raises:
            RidgeFillError: these are no messages, or there is no template, or it refuses them.
        """
        wanted = {"role", "content"}
        if not isinstance(messages, list) or not all(isinstance(m, dict) and wanted <= set(m) for m in messages):
            raise RidgeFillError(
                f"{where}: expected a text, or a list of messages with role and content, found {str(messages)[:60]!r}"
            )
        if not getattr(self.tokenizer, "chat_template", None):
            raise RidgeFillError(f"{where}: is a conversation, and the model's tokenizer has no chat template")
        from ridgefill.capture import special_prefix

        try:
            text = str(self.tokenizer.apply_chat_template(messages, tokenize=False))
        except Exception as error:  # a template raises what it likes
            raise RidgeFillError(f"{where}: the tokenizer's chat template refuses it: {error}") from error
        bos = self.tokenizer.bos_token
        return text.removeprefix(bos) if bos and special_prefix(self.tokenizer) else text


@dataclass(frozen=True)
class Record:
    """One record's text, read when it is its turn: a string, or a conversation through the chat template."""

    where: str
    read: Callable[[], Any]
    chat: ChatFormat

    def __iter__(self) -> Iterator[str]:
        value = self.read()
        yield value if isinstance(value, str) else self.chat.text(value, self.where)


def find_texts(
    paths: Sequence[Path], *, skipped: list[Path], field: str = "text", chat: ChatFormat | None = None
) -> list[NamedText]:
    """Return named lazy texts: each path itself, or all files below it in sorted order, hidden ones left out.

    A file is one text; of a ``.jsonl`` file each line is one, by the field that holds it. Names are relative to the
    given path, so that a map file holds nothing of the machine's folders.

    Raises:
        RidgeFillError: a path does not exist, there is no file at all, or the first line of a ``.jsonl`` file lacks the
            field.
    """
    found: list[NamedText] = []
    for name, path in _find_files(paths):
        if path.suffix == ".jsonl":
            found += _json_lines(name, path, field, chat or ChatFormat())
        else:
            found.append((name, TextFile(path, skipped)))
    return found


def dataset_texts(name: str, *, field: str = "text", chat: ChatFormat | None = None) -> list[NamedText]:
    """Return the texts of a Hugging Face dataset, by the package ``datasets``: ``NAME``, ``NAME:CONFIG:SPLIT``.

    Raises:
        RidgeFillError: the package is missing, the dataset cannot be loaded, or it has no such column.
    """
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise RidgeFillError(
            f"dataset {name}: the package 'datasets' is not installed: run pip install 'ridgefill[data]'"
        ) from error
    path, config, split = [*name.split(":", 2), "", ""][:3]
    try:
        dataset = load_dataset(path, config or None, split=split or "train")
    except (OSError, ValueError) as error:
        raise RidgeFillError(f"dataset {name}: {error}") from error
    if field not in dataset.column_names:
        columns = ", ".join(dataset.column_names)
        raise RidgeFillError(f"dataset {name}: has no column {field!r}; name one of {columns} with --field")
    shown = Path(path).name if Path(path).exists() else name  # nothing of the machine's folders
    names = (f"{shown}[{number}]" for number in range(len(dataset)))
    return [(n, Record(n, partial(_column, dataset, i, field), chat or ChatFormat())) for i, n in enumerate(names)]


class Contamination:
    """Which texts share ``SHARED_WORDS`` words in a row with an evaluation's; case and punctuation do not count.

    Memory: about 100 bytes for each word of the evaluation texts.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        """Read evaluation files: of ``.jsonl`` files every string, whatever its field.

        Raises:
            RidgeFillError: no file holds so many words in a row, so that nothing could be found.
        """
        self.dropped: list[str] = []
        self._grams: set[int] = set()
        skipped: list[Path] = []
        for name, path in _find_files(paths):
            if path.suffix == ".jsonl":
                for number, line in enumerate(path.read_bytes().splitlines(), 1):
                    for text in _strings(_parsed(line, f"{name}:{number}") if line.strip() else None):
                        self._grams.update(_word_grams([text]))
            else:
                self._grams.update(_word_grams(TextFile(path, skipped)))
        if not self._grams:
            raise RidgeFillError(
                f"{', '.join(map(str, paths))}: no file holds a text of {SHARED_WORDS} words, so no copy of one could "
                "be found"
            )

    def without(self, texts: Iterable[NamedText]) -> list[NamedText]:
        """The same texts, of which those that share words give none when they are read and are named in ``dropped``."""
        return [(name, _Checked(name, text, self._grams, self.dropped)) for name, text in texts]


@dataclass(frozen=True)
class _Checked:
    name: str
    text: Iterable[str]
    grams: set[int]
    dropped: list[str]

    def __iter__(self) -> Iterator[str]:
        # Read to its end before the first piece, as TextFile does.
        if any(gram in self.grams for gram in _word_grams(self.text)):
            self.dropped.append(self.name)
        else:
            yield from self.text


def _find_files(paths: Sequence[Path]) -> list[tuple[str, Path]]:
    found: list[tuple[str, Path]] = []
    for path in paths:
        if path.is_dir():
            for file in sorted(path.rglob("*")):
                relative = file.relative_to(path)
                if file.is_file() and not any(part.startswith(".") for part in relative.parts):
                    found.append((relative.as_posix(), file))
        elif path.is_file():
            found.append((path.name, path))
        elif path.exists():
            raise RidgeFillError(f"text {path}: not a regular file (a text is read twice); write it to a file first")
        else:
            raise RidgeFillError(f"text {path}: no such file or folder")
    if not found:
        raise RidgeFillError(f"text {', '.join(map(str, paths))}: no files found")
    return found


def _json_lines(name: str, path: Path, field: str, chat: ChatFormat) -> list[NamedText]:
    """A text for each line, kept as its place in the file; the first is looked at now, the others in their turn."""
    found: list[NamedText] = []
    start = 0
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            where = f"{name}:{number}"
            if line.strip():
                if not found:
                    _field(line, where, field)
                found.append((where, Record(where, partial(_read_field, path, start, where, field), chat)))
            start += len(line)
    return found


def _read_field(path: Path, start: int, where: str, field: str) -> Any:
    with open(path, "rb") as file:
        file.seek(start)
        return _field(file.readline(), where, field)


def _field(line: bytes, where: str, field: str) -> Any:
    record = _parsed(line, where)
    if not isinstance(record, dict) or field not in record:
        fields = ", ".join(record) if isinstance(record, dict) else f"no object but {str(record)[:40]!r}"
        raise RidgeFillError(f"{where}: has no field {field!r}; found {fields}; name the text's with --field")
    return record[field]


def _parsed(line: bytes, where: str) -> Any:
    try:
        return json.loads(line)
    except ValueError as error:  # no JSON, or no UTF-8
        raise RidgeFillError(f"{where}: expected a JSON object, found {line[:40]!r} ({error})") from None


def _column(dataset: Any, number: int, field: str) -> Any:
    return dataset[number][field]


def _strings(value: Any) -> Iterator[str]:
    """Every string in a JSON value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list | dict):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _strings(part)


def _words(pieces: Iterable[str]) -> Iterator[str]:
    """Words without their case, also those that two pieces share."""
    rest = ""
    for piece in pieces:
        rest += piece
        end = max(rest.rfind(" "), rest.rfind("\n")) + 1 or len(rest)
        yield from _WORD.findall(rest[:end].casefold())
        rest = rest[end:]
    yield from _WORD.findall(rest.casefold())


def _word_grams(pieces: Iterable[str]) -> Iterator[int]:
    """A hash of every ``SHARED_WORDS`` words in a row."""
    last = deque([0] * SHARED_WORDS, maxlen=SHARED_WORDS)
    total = 0
    for count, word in enumerate(_words(pieces), 1):
        value = hash(word)
        total = (total * _BASE + value - last[0] * _LEAVES) % _PRIME
        last.append(value)
        if count >= SHARED_WORDS:
            yield total
