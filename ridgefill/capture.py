"""From texts to rows: token windows, one forward pass each, and the block inputs that hooks see."""

from __future__ import annotations

import hashlib
import itertools
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch

from ridgefill.errors import FitError

if TYPE_CHECKING:
    from torch import nn

    from ridgefill.layout import DecoderLayout

# A text, or a named one; a text may be an iterable of pieces, so that a file need not be held in memory.
Text = str | tuple[str, str | Iterable[str]]

# Characters tokenised at once: about four windows of 1,024 tokens, whatever the text's length.
_PIECE_CHARACTERS = 16_384
# Texts read side by side when a token limit asks for variety.
_OPEN_TEXTS = 64


@dataclass
class TextRecord:
    """What a map file says about one calibration text: its name, the sha256 of its UTF-8 bytes, its rows."""

    name: str
    rows: int = 0
    digest: Any = field(default_factory=hashlib.sha256)


@dataclass(frozen=True)
class Window:
    """One sequence to run: token ids, the tokenizer's own prefix included, and the text they come from."""

    ids: list[int]
    text: TextRecord


class _Pass(Exception):
    """Ends a forward pass where its last block input is known; never seen outside this file."""


class BlockInputs:
    """Runs token windows through the base model and returns the inputs of chosen decoder layers.

    A context manager: its hooks exist inside the ``with`` block only. The pass ends at the last chosen layer; the
    layers above it and the language-model head never run.
    """

    def __init__(self, layout: DecoderLayout, layers: Iterable[int]) -> None:
        self._layout = layout
        self._layers = sorted(layers)
        self._handles: list[Any] = []
        self._seen: dict[int, torch.Tensor] = {}

    def __enter__(self) -> BlockInputs:
        try:
            for layer_idx in self._layers:
                hook = self._hook(layer_idx)
                module = self._layout.layers[layer_idx]
                self._handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Remove the hooks and drop what they hold."""
        while self._handles:
            self._handles.pop().remove()
        self._seen.clear()

    def _hook(self, layer_idx: int) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]:
        def see(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            hidden = args[0] if args else kwargs["hidden_states"]  # [1, tokens, d]
            # A copy: a layer may add to its residual in place.
            self._seen[layer_idx] = hidden[0].detach().clone()
            if layer_idx == self._layers[-1]:
                raise _Pass

        return see

    def run(self, ids: Sequence[int]) -> dict[int, torch.Tensor]:
        """The block inputs of one window, by layer: ``[tokens, d]`` in the model's dtype.

        Raises:
            FitError: a layer was not reached, or its input is not finite.
        """
        base = self._layout.base
        device = self._layout.embeddings.device
        try:
            with torch.no_grad():
                base(input_ids=torch.tensor([list(ids)], device=device), use_cache=False)
        except _Pass:
            pass
        seen, self._seen = self._seen, {}
        for layer_idx in self._layers:
            if layer_idx not in seen:
                raise FitError(f"layer {layer_idx} never ran in a plain forward pass; cannot capture its input")
            if not bool(torch.isfinite(seen[layer_idx]).all()):
                raise FitError(
                    f"the input of layer {layer_idx} is not finite (overflow, or damaged weights); "
                    "load the model in float32 or bfloat16 and check that it generates text"
                )
        return seen


def text_windows(
    tokenizer: Any, texts: Iterable[Text], *, window_tokens: int, min_tokens: int, max_tokens: int | None
) -> Generator[Window, None, None]:
    """Yield token windows of the texts, tokenised lazily; a window never mixes two texts.

    Every window starts with whatever the tokenizer puts before a text (a BOS token, or nothing), counted in
    ``window_tokens``; a text's last window may be shorter, and is dropped below ``min_tokens``. Without a limit, texts
    come in their order. With ``max_tokens`` and a sequence of texts, windows are drawn in turn from texts spread
    evenly over the sequence, because variety matters more than rows (design section 2).

    Memory: a few pieces of 16,384 characters for each text being read, at most 64 of them.
    """
    prefix = special_prefix(tokenizer)
    named: Iterable[tuple[str, str | Iterable[str]]] = _named(texts)
    if max_tokens is not None and isinstance(texts, Sequence):
        listed = list(named)
        named = (listed[i] for i in _spread(len(listed)))
        open_texts = _OPEN_TEXTS
    else:
        open_texts = 1
    left = max_tokens
    windows = _in_turn((_text_windows(tokenizer, prefix, *item, window_tokens) for item in named), open_texts)
    try:
        for window in windows:
            ids = window.ids if left is None else window.ids[:left]
            if len(ids) >= min_tokens:
                yield Window(ids, window.text)
            if left is not None:
                left -= len(ids)
                if left < min_tokens:
                    return
    finally:
        windows.close()


def special_prefix(tokenizer: Any) -> list[int]:
    """The ids that the tokenizer puts before every text (BOS by its own convention), often none."""
    plain = list(tokenizer("a", add_special_tokens=False)["input_ids"])
    full = list(tokenizer("a", add_special_tokens=True)["input_ids"])
    for length in range(len(full) - len(plain) + 1):
        if full[length : length + len(plain)] == plain:
            return full[:length]
    return []


def _named(texts: Iterable[Text]) -> Iterator[tuple[str, str | Iterable[str]]]:
    for number, text in enumerate(texts):
        yield (f"text {number}", text) if isinstance(text, str) else text


def _text_windows(
    tokenizer: Any, prefix: list[int], name: str, text: str | Iterable[str], window_tokens: int
) -> Generator[Window, None, None]:
    record = TextRecord(name.encode("utf-8", "replace").decode())  # a file's name need not be UTF-8; the map file's is
    room = window_tokens - len(prefix)
    ids: list[int] = []
    pieces = _pieces(text)
    try:
        for piece in pieces:
            record.digest.update(piece.encode("utf-8", "surrogatepass"))
            ids += tokenizer(piece, add_special_tokens=False)["input_ids"]
            while len(ids) >= room:
                yield Window(prefix + ids[:room], record)
                ids = ids[room:]
        if ids:
            yield Window(prefix + ids, record)
    finally:
        # The file names the whole text, also where a token limit ended the reading.
        for piece in pieces:
            record.digest.update(piece.encode("utf-8", "surrogatepass"))


def _pieces(text: str | Iterable[str]) -> Iterator[str]:
    """Cut a text before white space, in pieces of at most ``_PIECE_CHARACTERS``."""
    buffer = ""
    for part in [text] if isinstance(text, str) else text:
        for start in range(0, len(part), _PIECE_CHARACTERS):
            buffer += part[start : start + _PIECE_CHARACTERS]
            while len(buffer) > _PIECE_CHARACTERS:
                half = _PIECE_CHARACTERS // 2
                cut = max(buffer.rfind(space, half, _PIECE_CHARACTERS) for space in "\n ")
                cut = cut if cut > 0 else _PIECE_CHARACTERS
                yield buffer[:cut]
                buffer = buffer[cut:]
    if buffer:
        yield buffer


def _spread(count: int) -> list[int]:
    """0 … count-1 so that every beginning of the list is spread evenly (van der Corput order)."""
    bits = max(1, (count - 1).bit_length())
    return sorted(range(count), key=lambda i: int(f"{i:0{bits}b}"[::-1], 2))


def _in_turn(streams: Iterator[Generator[Window, None, None]], open_texts: int) -> Generator[Window, None, None]:
    """One window from each of ``open_texts`` streams in turn; a stream that ends makes room for the next one."""
    running: deque[Generator[Window, None, None]] = deque(itertools.islice(streams, open_texts))
    try:
        while running:
            window = next(running[0], None)
            if window is None:
                running.popleft()
                running.extend(itertools.islice(streams, 1))
            else:
                yield window
                running.rotate(-1)
    finally:
        for stream in running:
            stream.close()
