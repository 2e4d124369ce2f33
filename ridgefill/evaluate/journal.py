"""Long evaluations that survive an interrupt: a JSON line for each finished item, under one that says of what."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from ridgefill.errors import RidgeFillError


class Journal:
    """Results by name, each on disk when `add` returns; a later run with the same configuration goes on from there."""

    def __init__(self, path: Path, configuration: dict[str, Any]) -> None:
        """Open or begin the file.

        Raises:
            RidgeFillError: the file holds the results of another configuration, or is no journal.
        """
        self._path = path
        self.done: dict[str, Any] = {}
        self.configuration: dict[str, Any] = json.loads(json.dumps(configuration))
        lines = path.read_bytes().split(b"\n") if path.exists() else []
        # What an interrupt left of a line has no end; what follows the last end is empty otherwise.
        kept = sum(len(line) + 1 for line in lines[:-1])
        for number, line in enumerate(lines[:-1]):
            try:
                entry = json.loads(line)
                if number == 0:
                    found = entry["configuration"]
                else:
                    self.done[entry["item"]] = entry["result"]
            except (ValueError, KeyError, TypeError):
                raise RidgeFillError(f"{path}: line {number + 1} is no line of a journal; name another file") from None
        if len(lines) > 1 and found != self.configuration:
            wanted = self.configuration
            names = sorted(name for name in {*found, *wanted} if found.get(name) != wanted.get(name))
            raise RidgeFillError(f"{path}: holds results of other settings ({', '.join(names)}); name another file")
        self._file = open(path, "ab")  # noqa: SIM115  (open as long as the journal)
        self._file.truncate(kept)
        if len(lines) < 2:
            self._write({"configuration": self.configuration})

    def add(self, item: str, result: Any) -> None:
        """Keep one item's result, ready for JSON."""
        self._write({"item": item, "result": result})
        self.done[item] = result

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _write(self, entry: dict[str, Any]) -> None:
        self._file.write(json.dumps(entry, allow_nan=False).encode() + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())
