"""Options that benches share (`benches/common.py`): what cannot be read or written is refused before a model loads."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

ROOT = Path(__file__).parent.parent


def _run(monkeypatch: pytest.MonkeyPatch, name: str, *arguments: str) -> Result:
    monkeypatch.syspath_prepend(str(ROOT / "benches"))
    bench: Any = importlib.import_module(name)

    def load(*_: Any, **__: Any) -> Any:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr(bench.common, "load", load)
    return CliRunner().invoke(bench.main, arguments)


@pytest.mark.parametrize("name", ["guard", "quality", "storage", "texts"])
def test_a_file_that_could_not_be_written(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for path, words in ((tmp_path / "no" / "out.json", "does not exist"), (tmp_path, "is a folder; name a file in it")):
        found = _run(monkeypatch, name, "--json", str(path))
        assert found.exit_code == 2, found.output
        assert words in found.output


@pytest.mark.parametrize(("name", "option", "default"), [("guard", "--splits", "20"), ("quality", "--split", "20,15")])
def test_a_list_that_is_none(name: str, option: str, default: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = _run(monkeypatch, name, option, "a,b")
    assert found.exit_code == 2, found.output
    assert f"'a,b' is not a list like {default}" in found.output
