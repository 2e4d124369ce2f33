"""What a pass over texts leaves: sums for each split, a few held-out windows, and their file: resumed, merged."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from ridgefill.agreement import feature_rows, target_rows
from ridgefill.capture import BlockInputs, TextRecord, Window
from ridgefill.errors import FitError
from ridgefill.features import Features
from ridgefill.moments import Moments

if TYPE_CHECKING:
    from ridgefill.layout import DecoderLayout

# Held-out figures are read on at most this many windows: 8,160 rows at the defaults.
_METRIC_WINDOWS = 8
# A file names each text until the list takes this many bytes, half of what metadata may take; the rest share an entry.
_LISTED_TEXTS_BYTES = 512 * 1024
_FORMAT = {"format": "ridgefill-moments", "version": "1"}
_STATE = ("texts", "rows", "windows", "chain", "finished")
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "I64": torch.int64, "I32": torch.int32}

# Zero sums of so many inputs and targets.
MakeMoments = Callable[[int, int], Moments]


@dataclass
class Sample:
    """What one pass over texts leaves, or several merged: all that solving needs of them.

    Attributes:
        settings: what the sums depend on beside the texts, ready for JSON: ``model`` (its fingerprint) and ``dtype``,
            ``splits``, ``features``, ``head``, ``window_tokens``, ``held_out``, ``max_tokens``, ``held_out_sums``
            (whether there are any), ``products`` (what rows are multiplied in), and ``process``: ``[number, count]``
            where one of several processes has summed its own windows only, else None.
        sums: by split, over the fitted rows.
        held_out_sums: the same over held-out rows, for ``lambda auto``; None where none were wanted.
        held_out_windows: a few windows that never entered ``sums``, spread over the texts.
        texts: each text's ``name``, ``sha256`` and fitted ``rows``.
        rows: fitted rows, of all processes.
        windows: windows of the texts that were looked at, in their order.
        chain: sha256 of the last chain and the last window's ids: tells one row of windows from another.
        finished: whether these are all the windows of the texts.
    """

    settings: dict[str, Any]
    sums: dict[int, Moments]
    held_out_sums: dict[int, Moments] | None
    held_out_windows: list[Window] = field(default_factory=list)
    texts: list[dict[str, Any]] = field(default_factory=list)
    rows: int = 0
    windows: int = 0
    chain: str = ""
    finished: bool = False

    @staticmethod
    def zero(settings: Mapping[str, Any], make: MakeMoments = Moments) -> Sample:
        """No rows yet, of these settings; ``make`` says where the sums lie."""
        plain: dict[str, Any] = json.loads(json.dumps(settings))
        d, layers = plain["model"]["hidden_size"], plain["model"]["num_hidden_layers"]

        def zeros() -> dict[int, Moments]:
            return {s: make(d * len(plain["features"]), d * (layers - 1 - s)) for s in plain["splits"]}

        return Sample(plain, zeros(), zeros() if plain["held_out_sums"] else None)

    @property
    def head(self) -> int:
        """First rows of each window that are in no sum."""
        return int(self.settings["head"])

    @property
    def features(self) -> Features:
        """The columns of x, of which maps may read some."""
        return Features.of(self.settings["features"])

    def _all_sums(self) -> dict[str, Moments]:
        kinds = (("fitted", self.sums), ("held_out", self.held_out_sums or {}))
        return {f"{kind}.{split}": moments for kind, of_splits in kinds for split, moments in of_splits.items()}

    # --- the file ----------------------------------------------------------------------------------------------------

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a moments file atomically: at any kill point ``path`` is the old file or the new one, whole.

        A strict safetensors file (docs/fitting.md): totals in float64 as they are, so that who loads them goes on to
        the last bit. Equal samples give equal bytes.
        """
        from ridgefill import _core

        tensors = {f"{stem}.{name}": t for stem, sums in self._all_sums().items() for name, t in sums.tensors().items()}
        for number, window in enumerate(self.held_out_windows):
            tensors[f"window.{number}"] = torch.tensor(window.ids, dtype=torch.int32)
        state = {name: getattr(self, name) for name in _STATE}
        words = {dtype: word for word, dtype in _DTYPES.items()}
        flat = {name: tensor.detach().cpu().contiguous().view(-1) for name, tensor in tensors.items()}
        _core.write_map_file(
            path,
            [
                (name, words[t.dtype], list(tensors[name].shape), t.view(torch.uint8).numpy())
                for name, t in flat.items()
            ],
            {**_FORMAT, "settings": _to_json(self.settings), "state": _to_json(state)},
        )

    @staticmethod
    def load(path: str | os.PathLike[str], make: MakeMoments = Moments) -> Sample:
        """Read a moments file into sums that ``make`` gives.

        Raises:
            FitError: no moments file of version 1, or a damaged one.
            MapFormatError: no well-formed safetensors file, or a value that is not finite.
            OSError: the file cannot be opened or read.

        Memory: the file's size beside the sums.
        """
        from ridgefill import _core

        map_file = _core.MapFile.open(path)
        metadata = map_file.metadata
        if found := {name: metadata.get(name) for name, word in _FORMAT.items() if metadata.get(name) != word}:
            raise FitError(f"{path}: expected a moments file ({_FORMAT}), found {found}; write one with --checkpoint")
        data = torch.from_numpy(map_file.read())
        tensors: dict[str, dict[str, torch.Tensor]] = {}
        try:
            for info in map_file.tensors:
                stem, _, name = info.name.rpartition(".")
                tensor = data[info.start : info.end].view(_DTYPES[info.dtype]).view(info.shape)
                tensors.setdefault(stem, {})[name] = tensor
            sample = Sample.zero(json.loads(metadata["settings"]), make)
            state = json.loads(metadata["state"])
            for name in _STATE:
                setattr(sample, name, state[name])
            for stem, moments in sample._all_sums().items():
                moments.restore(tensors[stem])
            windows = tensors.get("window", {})
            ids = (windows[str(number)].tolist() for number in range(len(windows)))
            sample.held_out_windows = [Window(of_window, TextRecord("held out")) for of_window in ids]
        except (KeyError, ValueError, TypeError, FitError) as error:
            raise FitError(f"{path}: the moments file is damaged ({type(error).__name__}: {error})") from error
        return sample

    def check_settings(self, wanted: Mapping[str, Any], path: object, but: Sequence[str] = ()) -> None:
        """Refuse other settings than these, each by its name; a model may have moved to a folder of another name.

        Raises:
            FitError: with what differs, there and here.
        """
        found, here = (_flat(settings, but) for settings in (self.settings, json.loads(json.dumps(wanted))))
        if names := sorted(name for name in {*found, *here} if found.get(name) != here.get(name)):
            what = "; ".join(f"{name}: {str(found.get(name))[:60]}, here {str(here.get(name))[:60]}" for name in names)
            raise FitError(f"{path}: holds the sums of another pass ({what}); name another file")

    def check_whole(self, path: object) -> None:
        """Refuse sums that do not hold all the rows of their texts.

        Raises:
            FitError: the pass was not finished, or these are one process's part of it.
        """
        if not self.finished:
            raise FitError(
                f"{path}: its pass over the texts is not finished ({self.windows} windows so far); run the command "
                "that wrote it again: it goes on from there"
            )
        if self.settings["process"] is not None:
            number, count = self.settings["process"]
            raise FitError(
                f"{path}: holds the part of process {number} of {count}; the sum of all is in the file without"
            )

    # --- more than one -----------------------------------------------------------------------------------------------

    def merge(self, other: Sample) -> None:
        """Add the rows of a sample of the same settings and other texts."""
        theirs = other._all_sums()
        for stem, moments in self._all_sums().items():
            moments.merge(theirs[stem])
        self.texts = listed_texts([*self.texts, *other.texts])
        turns = itertools.zip_longest(self.held_out_windows, other.held_out_windows)
        self.held_out_windows = [window for turn in turns for window in turn if window is not None][:_METRIC_WINDOWS]
        self.rows += other.rows
        self.windows += other.windows
        self.chain = hashlib.sha256(f"{self.chain}{other.chain}".encode()).hexdigest()

    def all_reduce(self) -> None:
        """Make each process's part the whole, in all of them (`Moments.all_reduce`)."""
        for moments in self._all_sums().values():
            moments.all_reduce()
        self.settings["process"] = None


def merge_files(paths: Sequence[str | os.PathLike[str]]) -> Sample:
    """Return the sum of finished passes of the same settings over different texts; ``max_tokens`` may differ.

    Raises:
        FitError: a file is no finished pass, its settings differ, or a text is in two of them: its rows would count
            twice, and the held-out windows of one would be among the fitted rows of the other.

    Memory: that of two files.
    """
    merged = Sample.load(paths[0])
    merged.check_whole(paths[0])
    for path in paths[1:]:
        other = Sample.load(path)
        other.check_whole(path)
        other.check_settings(merged.settings, path, but=("max_tokens",))
        known = {text["sha256"] for text in merged.texts}
        if both := [text["name"] for text in other.texts if text["sha256"] in known]:
            raise FitError(f"{path}: its text {both[0]} is in a file before it; merge passes over different texts")
        merged.merge(other)
    return merged


def process_number() -> tuple[int, int]:
    """This process's number and their count in torch.distributed's default group; (0, 1) where there is none."""
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        return int(dist.get_rank()), int(dist.get_world_size())
    return 0, 1


class Pass:
    """One pass over the windows of texts: fitted rows into a sample's sums, a few held-out windows aside.

    Over a sample that has seen windows already, these are looked at again but not run: so a pass is resumed, and texts
    that differ from those before are refused. Of several processes, all look at all windows, and each runs its turn.
    """

    def __init__(self, layout: DecoderLayout, sample: Sample) -> None:
        self._layout, self._sample = layout, sample
        self._features, self._head = sample.features, sample.head
        self._late = range(min(sample.sums) + 1, layout.num_layers)
        share = sample.settings["held_out"]
        self._every = round(1 / share) if share else 0
        process: list[int] | None = sample.settings["process"]
        self._process, self._processes = process or (0, 1)
        self._turns = 0
        self._stride, self._held_out_seen = 1, 0
        self._texts: dict[int, TextRecord] = {}
        self.tokens = 0
        self.rows_run = 0  # by this object: held-out ones are run where they are summed
        # What the sums hold already; the rest of the sample is told again by the windows.
        self.resumed_windows, self._resumed_chain, self.was_finished = sample.windows, sample.chain, sample.finished
        sample.rows, sample.windows, sample.chain, sample.finished = 0, 0, "", False
        sample.held_out_windows = []

    def needed_layers(self) -> set[int]:
        """The layers whose block inputs a pass must deliver."""
        return set(self._sample.sums) | set(self._late)

    def add(self, window: Window, block_inputs: BlockInputs) -> None:
        """Put one window into the sums, or aside as held out.

        Raises:
            FitError: it is not the window that the sample has seen here.
        """
        sample = self._sample
        number, rows = sample.windows, len(window.ids) - self._head
        sample.windows += 1
        sample.chain = hashlib.sha256(f"{sample.chain}{window.ids}".encode()).hexdigest()
        self.tokens += len(window.ids)
        self._texts[id(window.text)] = window.text
        if self._every and number % self._every == 1:
            self._hold_out(window)
            sums = sample.held_out_sums
        else:
            sums = sample.sums
            window.text.rows += rows
            sample.rows += rows
        mine = self._turns % self._processes == self._process
        self._turns += sums is not None
        if sample.windows <= self.resumed_windows:
            if sample.windows == self.resumed_windows and sample.chain != self._resumed_chain:
                self._refuse("differ from")
        elif self.was_finished:
            self._refuse("hold more than")
        elif sums is not None and (mine or not all(moments.begun for moments in sums.values())):
            self._run(window, sums, mine, block_inputs)

    def finish(self) -> None:
        """Note that these were all windows.

        Raises:
            FitError: the sample has seen more of them.
        """
        if self._sample.windows < self.resumed_windows:
            self._refuse("hold less than")
        for moments in self._sample._all_sums().values():
            moments.flush()
        self._sample.finished = True
        self.note_texts()

    def note_texts(self) -> None:
        """Bring the sample's list of texts up to date, before it is saved."""
        records = ({"name": t.name, "sha256": t.digest.hexdigest(), "rows": t.rows} for t in self._texts.values())
        self._sample.texts = listed_texts(records)

    def _run(self, window: Window, sums: dict[int, Moments], mine: bool, block_inputs: BlockInputs) -> None:
        """Add a window's rows; of another process's first window only the shift is taken, so that all share it."""
        inputs = block_inputs.run(window.ids)
        y = self._targets(inputs, next(iter(sums.values())).device)  # [rows, late layers * d]
        for split, moments in sums.items():
            x = feature_rows(self._features, inputs[split])[self._head :].to(moments.device)  # [rows, n_in]
            x = x if x.dtype.itemsize <= 4 else x.float()  # a float64 model's: sums take float32 at most
            (moments.add if mine else moments.begin)(x, y[:, y.shape[1] - moments.n_out :])
        self.rows_run += len(y) if mine else 0

    def _targets(self, inputs: dict[int, torch.Tensor], device: torch.device) -> torch.Tensor:
        parts = [target_rows(self._layout.target(late), inputs[late][self._head :]).to(device) for late in self._late]
        if not parts:  # the last layer as split: nothing to predict
            return torch.zeros(len(next(iter(inputs.values()))) - self._head, 0, device=device)
        return torch.cat(parts, dim=1)

    def _hold_out(self, window: Window) -> None:
        """Keep every stride-th held-out window; a full list doubles the stride, so the kept ones stay spread."""
        kept = self._sample.held_out_windows
        if self._held_out_seen % self._stride == 0:
            if len(kept) == _METRIC_WINDOWS:
                del kept[1::2]
                self._stride *= 2
            if self._held_out_seen % self._stride == 0:
                kept.append(window)
        self._held_out_seen += 1

    def _refuse(self, how: str) -> None:
        raise FitError(
            f"the texts {how} the {self.resumed_windows} windows that the checkpoint has summed: give the texts that "
            "it was begun with, in the same order, or name another file"
        )


def listed_texts(entries: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The entries that a file's metadata has room for, and one for the others together."""
    entries = list(entries)
    sizes = itertools.accumulate(len(json.dumps(entry, ensure_ascii=False).encode()) + 2 for entry in entries)
    room = sum(size <= _LISTED_TEXTS_BYTES for size in sizes)
    listed, rest = entries[:room], entries[room:]
    if not rest:
        return listed
    record = TextRecord(f"{len(rest)} more texts (sha256 of their sha256s in order)", sum(t["rows"] for t in rest))
    for entry in rest:
        record.digest.update(entry["sha256"].encode())
    return [*listed, {"name": record.name, "sha256": record.digest.hexdigest(), "rows": record.rows}]


def _flat(settings: Mapping[str, Any], but: Sequence[str]) -> dict[str, Any]:
    """Settings by name, those of the model beside the others."""
    model = {f"model.{name}": value for name, value in settings["model"].items() if name != "name"}
    return {**{name: value for name, value in settings.items() if name not in ("model", *but)}, **model}


def _to_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, sort_keys=True)
