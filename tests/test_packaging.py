"""What an import loads, what a missing package says, and what travels in the source distribution."""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
import tomllib
from pathlib import Path

import ridgefill

ROOT = Path(__file__).parent.parent


def test_everything_but_models_works_without_torch() -> None:
    script = ROOT / "tests" / "without_torch.py"
    done = subprocess.run([sys.executable, "-I", script], capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr


def test_import_loads_no_heavy_package() -> None:
    code = "import sys, ridgefill; print(*sorted({n.partition('.')[0] for n in sys.modules}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=900, check=True)
    loaded = set(done.stdout.split())
    assert "ridgefill" in loaded
    assert not loaded & {"torch", "transformers", "cupy", "numpy", "rich", "click"}


def test_the_version_is_cargo_s() -> None:
    cargo = tomllib.loads((ROOT / "Cargo.toml").read_text())
    assert ridgefill.__version__ == cargo["package"]["version"]


def test_the_changelog_and_the_citation_name_this_version() -> None:
    version = ridgefill.__version__
    assert re.search(rf"^## {re.escape(version)}\b", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert re.search(rf"^version: {re.escape(version)}$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)


def test_credit_stands_where_it_must() -> None:
    for name in ("README.md", "NOTICE", "CITATION.cff"):
        text = " ".join((ROOT / name).read_text().split())
        for words in ("Dylan Johnston", "tcclaviger", "10.5281/zenodo.23179168", "independent implementation"):
            assert words in text, f"{name} lacks {words!r}"


def test_the_sdist_holds_the_core_and_the_papers(tmp_path: Path) -> None:
    command = [Path(sys.executable).parent / "maturin", "sdist", "--out", tmp_path]
    subprocess.run(command, cwd=ROOT, capture_output=True, timeout=900, check=True)
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        names = {name.partition("/")[2] for name in tar.getnames()}
    wanted = {"Cargo.toml", "Cargo.lock", "pyproject.toml", "README.md", "LICENSE", "NOTICE", "CITATION.cff"}
    wanted |= {str(p.relative_to(ROOT)) for p in ROOT.glob("rust/src/**/*.rs")}
    wanted |= {str(p.relative_to(ROOT)) for p in ROOT.glob("ridgefill/**/*.py")} | {"ridgefill/py.typed"}
    wanted |= {str(p.relative_to(ROOT)) for p in ROOT.glob("cuda/*")}
    assert wanted <= names, f"missing: {sorted(wanted - names)}"
    assert not [name for name in names if name.endswith(".so")], "a build product travels in the sdist"
