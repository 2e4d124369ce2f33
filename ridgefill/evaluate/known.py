"""Layers whose outputs for a prompt's tail are known, so that later passes over the tail need not run them again."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from ridgefill import caches

if TYPE_CHECKING:
    from torch import nn
    from transformers import Cache

    from ridgefill.layout import DecoderLayout


class KnownLayers:
    """The first layers' outputs for the last ``rows`` rows of one prompt, noted in a pass that ends with them.

    Every variant of a fill has the same layers below its split, and every edit of a filled cache those below the first
    layer that it changes. A pass that hands these back instead of running them costs what the layers from there on do;
    its hooks see the true block inputs.
    """

    def __init__(self, layout: DecoderLayout, count: int, rows: int) -> None:
        self._layout, self._count, self._rows = layout, count, rows
        self._outputs: list[Any] = [None] * count

    @contextmanager
    def note(self) -> Iterator[None]:
        """Note what one pass inside the block gives."""
        with ExitStack() as undo:
            for layer_idx in range(self._count):
                hook = functools.partial(self._note, layer_idx)
                undo.callback(self._layout.layers[layer_idx].register_forward_hook(hook).remove)
            yield

    def _note(self, layer_idx: int, _: nn.Module, __: tuple[Any, ...], output: Any) -> None:
        self._outputs[layer_idx] = self._cut(output)

    def _cut(self, output: Any) -> Any:
        """The tail's rows of a block output ``[batch, rows, d]``, or of the first of several."""
        if isinstance(output, tuple):
            return (self._cut(output[0]), *output[1:])
        return output[:, -self._rows :].clone()  # a view would keep all rows of every layer

    @contextmanager
    def hand_back(self, count: int, noted: Cache) -> Iterator[None]:
        """The first ``count`` layers give what is known in one pass over the tail inside the block.

        ``noted`` is the cache that the noted pass left, with every row: the tail's keys and values, and the states
        behind it, are taken from there. The pass may be of several sequences that have these rows in common, where no
        layer keeps a state.
        """
        with ExitStack() as undo:
            for layer_idx in range(count):
                layer = self._layout.layers[layer_idx]
                own = vars(layer).get("forward")  # an instance's own, where a library has put one
                undo.callback(functools.partial(_set_forward, layer, own))
                _set_forward(layer, functools.partial(self._give, layer_idx, noted))
            yield

    def _give(self, layer_idx: int, noted: Cache, *args: Any, **layer_kwargs: Any) -> Any:
        cache = layer_kwargs[self._layout.cache_argument]
        batch = (args[0] if args else layer_kwargs["hidden_states"]).shape[0]
        if self._layout.keeps_keys(layer_idx):
            kept: Any = noted.layers[layer_idx]
            tail = (rows[..., -self._rows :, :].expand(batch, -1, -1, -1) for rows in (kept.keys, kept.values))
            cache.update(*tail, layer_idx)
        if self._layout.keeps_state(layer_idx):
            caches.copy_state(cache, layer_idx, noted)
        return self._repeated(self._outputs[layer_idx], batch)

    def _repeated(self, output: Any, batch: int) -> Any:
        """A block output ``[1, rows, d]``, or the first of several, for each sequence of a batch."""
        if isinstance(output, tuple):
            return (self._repeated(output[0], batch), *output[1:])
        return output.expand(batch, -1, -1)


def _set_forward(layer: Any, forward: Any) -> None:
    if forward is None:
        vars(layer).pop("forward", None)
    else:
        layer.forward = forward
