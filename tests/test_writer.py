"""The atomic writer: whatever interrupts it, the path holds the old file or the new one, whole.

The exact steps are killed one by one in rust/src/writer.rs (cargo test); here a real process dies at random moments.
"""

from __future__ import annotations

import os
import random
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from ridgefill import _core
from ridgefill.errors import MapFormatError


def write(path: Path | str, value: int, size: int = 64) -> None:
    _core.write_map_file(path, [("w", "U8", [size // 64, 64], np.full(size, value, np.uint8))], {"value": str(value)})


def value_of(path: Path) -> int:
    file = _core.MapFile.open(path)
    values = set(file.read().tolist())
    assert values == {int(file.metadata["value"])}, "data and metadata are of two different writes"
    return values.pop()


@pytest.fixture
def umask() -> Iterator[None]:
    old = os.umask(0o027)
    yield
    os.umask(old)


def test_an_old_file_is_replaced_and_nothing_is_left(tmp_path: Path) -> None:
    path = tmp_path / "maps.safetensors"
    for value in (1, 2):
        write(path, value)
        assert value_of(path) == value
    assert os.listdir(tmp_path) == [path.name]


def test_equal_arguments_give_equal_bytes_in_any_order(tmp_path: Path) -> None:
    tensors = [
        ("b", "U8", [3], np.arange(3, dtype=np.uint8)),
        ("a", "F64", [1], np.zeros(8, np.uint8)),
        ("c", "BF16", [1, 1], np.zeros(2, np.uint8)),
    ]
    _core.write_map_file(tmp_path / "one", tensors, {"x": "1", "y": "2"})
    _core.write_map_file(tmp_path / "two", tensors[::-1], {"y": "2", "x": "1"})
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()
    assert [info.name for info in _core.MapFile.open(tmp_path / "one").tensors] == ["a", "c", "b"]


@pytest.mark.usefixtures("umask")
def test_the_mode_is_0666_less_the_umask(tmp_path: Path) -> None:
    path = tmp_path / "maps.safetensors"
    write(path, 1)
    assert stat.S_IMODE(path.stat().st_mode) == 0o640


def test_a_symbolic_link_is_followed_and_stays(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    target, link = tmp_path / "store" / "real", tmp_path / "link"
    write(target, 1)
    link.symlink_to(target)
    write(link, 2)
    assert link.is_symlink()
    assert value_of(target) == 2


def test_a_link_to_a_file_that_is_not_there_yet_stays_too(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    link = tmp_path / "link"
    link.symlink_to(Path("store") / "real")
    write(link, 3)
    assert link.is_symlink()
    assert value_of(tmp_path / "store" / "real") == 3


def test_a_relative_path_and_a_name_of_255_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("maps.safetensors", "n" * 255):
        write(name, 3)
        assert value_of(tmp_path / name) == 3


BAD = {
    "duplicate_tensor": [("w", "U8", [1], np.zeros(1, np.uint8))] * 2,
    "size_mismatch": [("w", "U8", [2], np.zeros(1, np.uint8))],
    "unknown_dtype": [("w", "Q4", [1], np.zeros(1, np.uint8))],
    "non_finite": [("w", "F32", [1], np.frombuffer(b"\0\0\x80\x7f", np.uint8))],
    "dimension": [("w", "U8", [0, 2**20 + 1], np.zeros(0, np.uint8))],
    "too_many_dimensions": [("w", "U8", [1] * 9, np.zeros(1, np.uint8))],
    "reserved_name": [("__metadata__", "U8", [1], np.zeros(1, np.uint8))],
    "name_too_long": [("w" * 513, "U8", [1], np.zeros(1, np.uint8))],
    "too_many_tensors": [(f"w{i}", "U8", [0], np.zeros(0, np.uint8)) for i in range(4097)],
}


@pytest.mark.parametrize("kind", BAD)
def test_what_the_reader_would_refuse_is_not_written(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "maps.safetensors"
    write(path, 1)
    before = path.read_bytes()
    with pytest.raises(MapFormatError) as caught:
        _core.write_map_file(path, BAD[kind], {})
    assert caught.value.kind == kind
    assert caught.value.path == str(path)
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == [path.name]


def test_bytes_that_are_not_contiguous_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="pass numpy"):
        _core.write_map_file(tmp_path / "maps", [("w", "U8", [2], np.zeros(4, np.uint8)[::2])], {})
    assert os.listdir(tmp_path) == []


def test_a_missing_folder_is_the_systems_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as caught:
        write(tmp_path / "none" / "maps", 1)
    assert os.fspath(caught.value.filename) == str(tmp_path / "none" / "maps")


def test_a_folder_is_not_replaced(tmp_path: Path) -> None:
    with pytest.raises(MapFormatError, match="is a folder") as caught:
        write(tmp_path, 1)
    assert caught.value.kind == "not_regular"


def test_a_full_disk_keeps_the_old_file_and_leaves_no_other(tmp_path: Path) -> None:
    path = tmp_path / "maps.safetensors"
    write(path, 1)
    # A limit on file size stands in for the full disk: write(2) fails with EFBIG in the middle of the data.
    code = f"""
import resource, signal, sys
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
sys.path.insert(0, {str(Path(__file__).parent)!r})
from test_writer import write
try:
    write({str(path)!r}, 2, 1 << 20)
except OSError as error:
    print(error.errno, error.filename)
"""
    # -B: compiled modules would be cut off at the limit too, and stay so.
    command = [sys.executable, "-B", "-c", code]
    result = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    assert result.stdout == f"27 {path}\n", result.stderr
    assert value_of(path) == 1
    assert os.listdir(tmp_path) == [path.name]


def test_a_process_killed_at_random_leaves_a_whole_file(tmp_path: Path) -> None:
    path = tmp_path / "maps.safetensors"
    size = 4 << 20
    write(path, 0, size)
    code = f"""
import numpy as np
from ridgefill import _core
tensors = [[("w", "U8", [{size} // 64, 64], np.full({size}, value, np.uint8))] for value in (1, 2)]
print("ready", flush=True)
while True:
    for value in (1, 2):
        _core.write_map_file({str(path)!r}, tensors[value - 1], {{"value": str(value)}})
"""
    seen = set()
    for _ in range(8):
        with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
            time.sleep(random.uniform(0.005, 0.08))
            process.send_signal(signal.SIGKILL)
        seen.add(value_of(path))
    assert seen & {1, 2}, "no write ever finished: the test killed nothing"
