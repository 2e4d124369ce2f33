"""The strict reader: every malformed file by its exact kind, bounded memory, and never looser than safetensors."""

from __future__ import annotations

import json
import os
import pickle
import re
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save as safetensors_save

from ridgefill import _core
from ridgefill.errors import MapFormatError, MapMismatchError, MapSchemaError, RidgeFillError

HASH = "0123456789abcdef" * 4
DOCUMENT = Path(__file__).parents[1] / "docs" / "map-format.md"


# ---------------------------------------------------------------------------------------------- building files


def raw(
    header: str | bytes | dict[str, Any], data: bytes = b"", *, length: int | None = None, pad: bool = True
) -> bytes:
    """A file with exactly this header; padded to 8 unless a test is about that."""
    text = json.dumps(header) if isinstance(header, dict) else header
    encoded = text.encode() if isinstance(text, str) else text
    if pad:
        encoded += b" " * (-len(encoded) % 8)
    return struct.pack("<Q", len(encoded) if length is None else length) + encoded + data


def tensor(dtype: str = "F32", shape: list[Any] | None = None, offsets: list[Any] | None = None) -> dict[str, Any]:
    return {"dtype": dtype, "shape": [2] if shape is None else shape, "data_offsets": offsets or [0, 8]}


FLOATS = struct.pack("<2f", 1.0, 2.0)
GOOD = tensor()
FINGERPRINT: dict[str, Any] = {
    "model_type": "llama",
    "name": "tiny",
    "hidden_size": 4,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 2,
    "vocab_size": 16,
    "layer_types": ["full_attention", "full_attention", "sliding_attention", "full_attention"],
    "sliding_window": 8,
    "rope": {"rope_theta": 10000.0, "scaling": {"factors": [1, 2.5]}},
    "quantization": None,
    "anchors": HASH,
    "tokenizer": HASH[::-1],
}
FIT = {
    "rows": 100,
    "held_out_rows": 10,
    "head": 4,
    "window_tokens": 64,
    "texts": [{"name": "a.txt", "sha256": HASH, "rows": 100}],
}
SPLITS: list[dict[str, Any]] = [
    {
        "split": 1,
        "features": ["stream", "previous:1"],
        "target": "normalized",
        "lambda": 0.001,
        "layers": [{"layer": 2, "metrics": {"key_cosine": 0.93, "quantiles": [0.1, 0.2]}}, {"layer": 3, "metrics": {}}],
    },
    {"split": 2, "features": ["stream"], "target": "raw", "lambda": 0.01, "layers": [{"layer": 3, "metrics": {}}]},
]


def good_metadata(**changes: Any) -> dict[str, str]:
    """The metadata of a valid file; a change to None removes a key."""
    metadata = {
        "format": "ridgefill",
        "version": "1",
        "credit": "its authors",
        "model": json.dumps(FINGERPRINT),
        "fit": json.dumps(FIT),
        "splits": json.dumps(SPLITS),
        "default_split": "2",
        **changes,
    }
    return {key: value for key, value in metadata.items() if value is not None}


def good_tensors(weight: str = "BF16") -> list[tuple[str, str, list[int], np.ndarray]]:
    width = {"BF16": 2, "F16": 2, "F32": 4}[weight]
    tensors = []
    for stem, inputs in [("split.1.layer.2", 8), ("split.1.layer.3", 8), ("split.2.layer.3", 4)]:
        tensors.append((f"{stem}.weight", weight, [inputs, 4], np.full(inputs * 4 * width, 0x30, np.uint8)))
        tensors.append((f"{stem}.bias", "F32", [4], np.full(16, 0x31, np.uint8)))
    return tensors


def write_good(path: Path, weight: str = "BF16", **changes: Any) -> None:
    _core.write_map_file(path, good_tensors(weight), good_metadata(**changes))


# ---------------------------------------------------------------------------------------- malformed containers

CONTAINERS: dict[str, tuple[str, bytes]] = {
    "an empty file": ("too_short", b""),
    "seven bytes": ("too_short", b"\x08\0\0\0\0\0\0"),
    "a header longer than the file": ("header_past_end", raw("{}", length=4096)),
    "a header of 2^63 bytes": ("header_too_large", raw("{}", length=2**63)),
    "a header of 2^64 - 1 bytes": ("header_too_large", raw("{}", length=2**64 - 1)),
    "a header of 8 MiB and 8 bytes": ("header_too_large", raw("{" + " " * (8 << 20) + "}" + " " * 6)),
    "no header": ("json", raw(b"", pad=False)),
    "a header that is not UTF-8": ("not_utf8", raw(b'{"a\xff":1}')),
    "a header that starts with a space": ("json", raw(" {}")),
    "a list": ("json", raw("[]")),
    "a header cut short": ("json", raw('{"a":')),
    "a second document": ("json", raw("{}{}")),
    "a NUL after the document": ("json", raw("{}\0")),
    "a trailing comma": ("json", raw('{"__metadata__":{"a":"b"},}')),
    "single quotes": ("json", raw("{'a':1}")),
    "a lone surrogate": ("json", raw('{"__metadata__":{"a":"\\ud800"}}')),
    "an unknown escape": ("json", raw('{"__metadata__":{"a":"\\x41"}}')),
    "a control character in a string": ("json", raw('{"__metadata__":{"a":"\n"}}')),
    "metadata that is null": ("wrong_type", raw('{"__metadata__":null}')),
    "metadata that is a number": ("wrong_type", raw({"__metadata__": {"a": 1}})),
    "a metadata key twice": ("duplicate_metadata_key", raw('{"__metadata__":{"a":"1","a":"1"}}')),
    "a metadata key twice, once escaped": ("duplicate_metadata_key", raw('{"__metadata__":{"a":"1","\\u0061":"1"}}')),
    "two metadata objects": ("duplicate_metadata_key", raw('{"__metadata__":{},"__metadata__":{}}')),
    "a tensor twice": (
        "duplicate_tensor",
        raw(f'{{"a":{json.dumps(GOOD)},"a":{json.dumps(GOOD)}}}', FLOATS),
    ),
    "a tensor twice, once escaped": (
        "duplicate_tensor",
        raw(f'{{"a":{json.dumps(GOOD)},"\\u0061":{json.dumps(GOOD)}}}', FLOATS),
    ),
    "a tensor that is a list": ("wrong_type", raw({"a": [1]})),
    "an unknown field": ("unknown_field", raw({"a": {**GOOD, "colour": "red"}}, FLOATS)),
    "a field twice": ("duplicate_field", raw('{"a":{"dtype":"F32","dtype":"F32"}}')),
    "no dtype": ("missing_field", raw({"a": {"shape": [2], "data_offsets": [0, 8]}}, FLOATS)),
    "no shape": ("missing_field", raw({"a": {"dtype": "F32", "data_offsets": [0, 8]}}, FLOATS)),
    "no offsets": ("missing_field", raw({"a": {"dtype": "F32", "shape": [2]}}, FLOATS)),
    "an unknown dtype": ("unknown_dtype", raw({"a": tensor("Q4_K")}, FLOATS)),
    "a dtype in lower case": ("unknown_dtype", raw({"a": tensor("f32")}, FLOATS)),
    "a dtype that is a number": ("wrong_type", raw({"a": {**GOOD, "dtype": 1}}, FLOATS)),
    "a shape that is a number": ("wrong_type", raw({"a": {**GOOD, "shape": 2}}, FLOATS)),
    "a negative dimension": ("wrong_type", raw({"a": tensor(shape=[-2])}, FLOATS)),
    "a fractional dimension": ("wrong_type", raw({"a": tensor(shape=[2.0])}, FLOATS)),
    "a dimension with a leading zero": (
        "wrong_type",
        raw('{"a":{"dtype":"F32","shape":[02],"data_offsets":[0,8]}}', FLOATS),
    ),
    "a dimension over 2^64": ("wrong_type", raw({"a": tensor(shape=[2**64])}, FLOATS)),
    "a dimension over 2^20": ("dimension", raw({"a": tensor("U8", [2**20 + 1], [0, 2**20 + 1])}, bytes(2**20 + 1))),
    "nine dimensions": ("too_many_dimensions", raw({"a": tensor(shape=[1] * 8 + [2])}, FLOATS)),
    "a product over 2^64": ("size_mismatch", raw({"a": tensor(shape=[2**20] * 4)}, FLOATS)),
    "offsets too few": ("wrong_type", raw({"a": tensor(offsets=[8])}, FLOATS)),
    "offsets too many": ("wrong_type", raw({"a": tensor(offsets=[0, 8, 16])}, FLOATS)),
    "offsets backwards": ("offsets", raw({"a": tensor(shape=[0], offsets=[8, 0])}, FLOATS)),
    "offsets that do not fit the shape": ("size_mismatch", raw({"a": tensor(shape=[3])}, FLOATS)),
    "offsets past the data": ("truncated", raw({"a": tensor(shape=[4], offsets=[0, 16])}, FLOATS)),
    "data cut short": ("truncated", raw({"a": GOOD}, FLOATS[:-1])),
    "no data": ("truncated", raw({"a": GOOD})),
    "data left over": ("trailing_bytes", raw({"a": GOOD}, FLOATS + b"\0")),
    "data that no tensor names": ("trailing_bytes", raw("{}", FLOATS)),
    "a gap at the start": ("gap", raw({"a": tensor(offsets=[8, 16])}, FLOATS * 2)),
    "a gap between": ("gap", raw({"a": GOOD, "b": tensor(offsets=[12, 20])}, FLOATS * 3)),
    "an overlap": ("overlap", raw({"a": GOOD, "b": tensor(offsets=[4, 12])}, FLOATS * 2)),
    "the same bytes twice": ("overlap", raw({"a": GOOD, "b": GOOD}, FLOATS)),
    "an empty tensor inside another": ("overlap", raw({"a": GOOD, "b": tensor(shape=[0], offsets=[4, 4])}, FLOATS)),
    "a misaligned data section": ("misaligned_data", raw('{"a":' + json.dumps(GOOD) + "}", FLOATS, pad=False)),
    "a misaligned tensor": (
        "misaligned_tensor",
        raw({"a": tensor("U8", [1], [0, 1]), "b": tensor(offsets=[1, 9])}, FLOATS + b"\0"),
    ),
    "4097 tensors": ("too_many_tensors", raw({f"t{i}": tensor("U8", [0], [0, 0]) for i in range(4097)})),
    "257 metadata keys": ("too_many_metadata_keys", raw({"__metadata__": {f"k{i}": "" for i in range(257)}})),
    "a name of 513 bytes": ("name_too_long", raw({"a" * 513: GOOD}, FLOATS)),
    "metadata over 1 MiB": ("metadata_too_large", raw({"__metadata__": {"a": "b" * (1 << 20)}})),
}
NON_FINITE = {
    f"{dtype} {name}": (dtype, bits)
    for dtype, values in {
        "BF16": {"NaN": b"\xc0\x7f", "infinity": b"\x80\x7f", "-infinity": b"\x80\xff"},
        "F16": {"NaN": b"\x01\x7c", "infinity": b"\x00\x7c", "-infinity": b"\x00\xfc"},
        "F32": {"NaN": b"\x00\x00\xc0\x7f", "infinity": b"\x00\x00\x80\x7f", "signalling NaN": b"\x01\x00\x80\xff"},
        "F64": {"NaN": struct.pack("<d", float("nan")), "infinity": struct.pack("<d", float("-inf"))},
    }.items()
    for name, bits in values.items()
}


def check_message(error: MapFormatError | MapSchemaError | MapMismatchError, path: Path, kind: str) -> None:
    assert error.kind == kind != "", str(error)
    assert error.path == str(path)
    assert str(error).startswith(f"{path}: ")
    assert isinstance(error, RidgeFillError)
    assert isinstance(error, ValueError)
    if error.tensor is not None:
        assert json.dumps(error.tensor)[:50] in str(error)


@pytest.mark.parametrize("name", CONTAINERS)
def test_malformed_container(tmp_path: Path, name: str) -> None:
    kind, content = CONTAINERS[name]
    path = tmp_path / "bad.safetensors"
    path.write_bytes(content)
    for mmap in (False, True):
        with pytest.raises(MapFormatError) as caught:
            _core.MapFile.open(path, mmap=mmap)
        check_message(caught.value, path, kind)


@pytest.mark.parametrize("mmap", [False, True])
@pytest.mark.parametrize("name", NON_FINITE)
@pytest.mark.parametrize("at", [0, 1023, 1024, 2999])
def test_non_finite_values_are_refused(tmp_path: Path, name: str, at: int, mmap: bool) -> None:
    dtype, bits = NON_FINITE[name]
    data = bytearray(3000 * len(bits))
    data[at * len(bits) : (at + 1) * len(bits)] = bits
    path = tmp_path / "bad.safetensors"
    path.write_bytes(raw({"w": tensor(dtype, [3000], [0, len(data)])}, bytes(data)))
    file = _core.MapFile.open(path, mmap=mmap)
    with pytest.raises(MapFormatError, match=f"{dtype} element {at} is NaN or infinite") as caught:
        file.read()
    check_message(caught.value, path, "non_finite")
    assert caught.value.tensor == "w"


def test_the_largest_finite_values_are_read(tmp_path: Path) -> None:
    path = tmp_path / "maps.safetensors"
    largest = {"BF16": b"\x7f\x7f\x7f\xff", "F16": b"\xff\x7b\xff\xfb", "F32": b"\xff\xff\x7f\x7f"}
    for dtype, data in largest.items():
        path.write_bytes(raw({"w": tensor(dtype, [len(data) // (4 if dtype == "F32" else 2)], [0, len(data)])}, data))
        assert _core.MapFile.open(path).read().tobytes() == data


def test_the_corpus_is_large_enough() -> None:
    assert len(CONTAINERS) + len(SCHEMAS) + len(NON_FINITE) >= 40
    documented = set(re.findall(r"^\| `([a-z_0-9]+)` \|", DOCUMENT.read_text(encoding="utf-8"), re.MULTILINE))
    covered = {kind for kind, *_ in [*CONTAINERS.values(), *SCHEMAS.values()]} | {
        "non_finite",
        "not_regular",
        "reserved_name",
    }
    assert documented == covered, "docs/map-format.md lists exactly the kinds that this corpus reaches"


# ------------------------------------------------------------------------------------------------ kinds of file


def test_a_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(MapFormatError, match="is a folder; expected a regular file") as caught:
        _core.MapFile.open(tmp_path)
    check_message(caught.value, tmp_path, "not_regular")


@pytest.mark.timeout(20)
def test_a_fifo_is_refused_without_waiting_for_a_writer(tmp_path: Path) -> None:
    path = tmp_path / "fifo"
    os.mkfifo(path)
    with pytest.raises(MapFormatError, match="is a FIFO") as caught:
        _core.MapFile.open(path)
    check_message(caught.value, path, "not_regular")


def test_a_device_is_refused() -> None:
    with pytest.raises(MapFormatError, match="is a device") as caught:
        _core.MapFile.open("/dev/zero")
    assert caught.value.kind == "not_regular"


def test_a_link_to_a_regular_file_is_read(tmp_path: Path) -> None:
    write_good(tmp_path / "maps.safetensors")
    (tmp_path / "link").symlink_to("maps.safetensors")
    assert _core.MapFile.open(tmp_path / "link").path == str(tmp_path / "link")


def test_os_errors_pass_through(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as caught:
        _core.MapFile.open(tmp_path / "none")
    assert os.fspath(caught.value.filename) == str(tmp_path / "none")
    assert caught.value.errno == 2


def test_a_file_swapped_after_opening_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "maps.safetensors"
    write_good(path)
    file = _core.MapFile.open(path)
    before = file.read().tobytes()
    os.replace(tmp_path / "maps.safetensors", tmp_path / "moved")
    path.write_bytes(b"something else")
    assert file.read().tobytes() == before


def test_a_file_that_shrinks_after_opening_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "maps.safetensors"
    write_good(path)
    file = _core.MapFile.open(path)
    os.truncate(path, path.stat().st_size - 1)
    with pytest.raises(MapFormatError) as caught:
        file.read()
    check_message(caught.value, path, "truncated")


def test_a_sparse_file_of_eight_terabytes_is_a_memory_error(tmp_path: Path) -> None:
    # 8 tensors of 2^40 bytes: all the caps hold, only the data is absurd.
    size = 1 << 40
    header = {f"t{i}": tensor("U8", [1 << 20, 1 << 20], [i * size, (i + 1) * size]) for i in range(8)}
    path = tmp_path / "sparse"
    path.write_bytes(raw(header))
    os.truncate(path, path.stat().st_size + 8 * size)
    code = f"""
import resource
resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))
from ridgefill import _core
file = _core.MapFile.open({str(path)!r})
try:
    file.read()
except MemoryError:
    print("refused")
"""
    assert run_python(code) == "refused\n"


# ----------------------------------------------------------------------------------------------------- memory


def run_python(code: str) -> str:
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=900, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout


MEASURE = """
import sys
from pathlib import Path
from ridgefill import _core, errors
import numpy
def peak():
    # Not ru_maxrss: that one starts at the peak of the process that started this one.
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024
small, big = sys.argv[1:]
for path in (small, small):
    try: _core.MapFile.open(path).read()
    except errors.MapFormatError: pass
before = peak()
try: _core.MapFile.open(big).read()
except errors.MapFormatError as error: print(error.kind, end=" ")
print(peak() - before)
"""


def grown(tmp_path: Path, content: bytes) -> tuple[str, int]:
    """Reads a file in a fresh process: (error kind or "", bytes that its peak resident set grew by)."""
    (tmp_path / "small").write_bytes(raw("{}"))
    (tmp_path / "big").write_bytes(content)
    out = subprocess.run(
        [sys.executable, "-c", MEASURE, str(tmp_path / "small"), str(tmp_path / "big")],
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert out.returncode == 0, out.stderr
    *kind, size = out.stdout.split()
    return "".join(kind), int(size)


HOSTILE: dict[str, tuple[str, Callable[[], bytes]]] = {
    "millions of dimensions": (
        "too_many_dimensions",
        lambda: raw('{"a":{"dtype":"U8","shape":[' + "0," * 4_000_000 + '0],"data_offsets":[0,0]}}'),
    ),
    "100,000 metadata keys": (
        "too_many_metadata_keys",
        lambda: raw({"__metadata__": {str(i): "" for i in range(100_000)}}),
    ),
    "30,000 tensors": (
        "too_many_tensors",
        lambda: raw({str(i): tensor("U8", [0], [0, 0]) for i in range(30_000)}),
    ),
    "one value of 8 MB": ("metadata_too_large", lambda: raw({"__metadata__": {"a": "b" * 8_000_000}})),
    "8 MB of brackets": ("wrong_type", lambda: raw('{"a":' + "[" * 8_000_000)),
    "a length alone": ("header_past_end", lambda: raw("{}", length=8 << 20)),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_headers_take_little_memory(tmp_path: Path, name: str) -> None:
    kind, build = HOSTILE[name]
    content = build()
    found, size = grown(tmp_path, content)
    assert found == kind
    assert size <= len(content) + (16 << 20)


def test_reading_takes_one_copy_of_the_data(tmp_path: Path) -> None:
    size = 96 << 20
    shape = [96, 1 << 20]
    found, growth = grown(tmp_path, raw({"a": tensor("U8", shape, [0, size])}, bytes(size)))
    assert found == ""
    # A second copy would be twice; no growth would measure nothing. Pages the kernel took back meanwhile count less.
    assert size - (16 << 20) <= growth <= size + (16 << 20)


# ------------------------------------------------------------------------------------------- what reading gives


def test_what_is_read_is_what_was_written(tmp_path: Path) -> None:
    path = tmp_path / "maps.safetensors"
    write_good(path, x_note="café")
    file = _core.MapFile.open(path)
    assert file.metadata == good_metadata(x_note="café")
    data = file.read()
    assert (data.dtype, data.shape, data.nbytes) == (np.uint8, (file.data_bytes,), file.data_bytes)
    assert data.flags.owndata or data.base is not None
    assert data.flags.writeable
    written = {name: (dtype, tuple(shape), content.tobytes()) for name, dtype, shape, content in good_tensors()}
    read = {info.name: (info.dtype, info.shape, data[info.start : info.end].tobytes()) for info in file.tensors}
    assert read == written


def test_a_mapped_file_is_borrowed_and_read_only(tmp_path: Path) -> None:
    path = tmp_path / "maps.safetensors"
    write_good(path)
    expected = _core.MapFile.open(path).read()
    data = _core.MapFile.open(path, mmap=True).read()  # the array alone keeps the map alive
    assert data.tobytes() == expected.tobytes()
    assert not data.flags.writeable
    with pytest.raises(ValueError, match="read-only"):
        data[0] = 1


def test_reading_releases_the_gil(tmp_path: Path) -> None:
    size = 128 << 20
    path = tmp_path / "big"
    with path.open("wb") as stream:
        stream.write(raw({"a": tensor("BF16", [64, 1 << 20], [0, size])}))
        stream.truncate(stream.tell() + size)
    file = _core.MapFile.open(path)
    span: list[float] = []

    def read() -> None:
        span.append(time.perf_counter())
        file.read()
        span.append(time.perf_counter())

    ticks = []
    thread = threading.Thread(target=read)
    thread.start()
    while thread.is_alive():
        ticks.append(time.perf_counter())
        time.sleep(0.001)
    during = [tick for tick in ticks if span[0] < tick < span[1]]
    # With the GIL held, this thread could run only in the instants before and after the read itself.
    assert len(during) >= 5, f"{len(during)} ticks in {span[1] - span[0]:.3f} s"


def test_a_file_of_the_safetensors_package_is_read_alike(tmp_path: Path) -> None:
    arrays = {
        "f64": np.linspace(0, 1, 5),
        "f32": np.ones((2, 3), np.float32),
        "f16": np.ones((3, 1), np.float16),
        "i8": np.arange(-3, 4, dtype=np.int8),
        "empty": np.zeros((0, 4), np.float32),
        "scalar": np.full((), 3.5, np.float32),
    }
    path = tmp_path / "theirs"
    path.write_bytes(safetensors_save(arrays, {"who": "safetensors"}))
    file = _core.MapFile.open(path)
    data = file.read()
    assert file.metadata == {"who": "safetensors"}
    assert {info.name for info in file.tensors} == set(arrays)
    for info in file.tensors:
        assert data[info.start : info.end].tobytes() == arrays[info.name].tobytes()
        assert info.shape == arrays[info.name].shape


# -------------------------------------------------------------------------------------------------- differential


def accepted_alike(content: bytes, path: Path) -> bool:
    """Whether ours accepts; if so, safetensors must read the same names, shapes, metadata and bytes."""
    path.write_bytes(content)
    try:
        file = _core.MapFile.open(path)
        data = file.read()
    except MapFormatError as error:
        check_message(error, path, error.kind)
        return False
    try:
        file.schema()
    except MapSchemaError as error:
        check_message(error, path, error.kind)
    theirs = dict(safetensors.deserialize(content))
    assert theirs.keys() == {info.name for info in file.tensors}
    for info in file.tensors:
        view = theirs[info.name]
        assert (tuple(view["shape"]), view["dtype"]) == (info.shape, info.dtype)
        assert bytes(view["data"]) == data[info.start : info.end].tobytes()
    with safetensors.safe_open(path, framework="np") as opened:
        assert (opened.metadata() or {}) == file.metadata
    return True


TOKENS = [b"{", b"}", b"[", b"]", b",", b":", b'"', b"\\", b"null", b"-1", b"0", b"1e9", b" ", b'"dtype":"F32",']


@settings(max_examples=500)  # rust/tests/hostile.rs runs thousands of the same
@given(data=st.data())
def test_mutated_files(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.getbasetemp()
    content = bytearray(mutation_seed(folder))
    header_end = 8 + int.from_bytes(content[:8], "little")
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, min(len(content), header_end + 16) - 1)) if content else 0
        match data.draw(st.sampled_from(["flip", "cut", "insert", "remove", "copy", "digit"])):
            case "flip" if content:
                content[at] ^= data.draw(st.integers(1, 255))
            case "cut":
                del content[at:]
            case "insert":
                content[at:at] = data.draw(st.sampled_from(TOKENS))
            case "remove":
                del content[at : at + data.draw(st.integers(1, 40))]
            case "copy":
                start = data.draw(st.integers(0, max(0, len(content) - 1)))
                content[at:at] = content[start : start + data.draw(st.integers(1, 120))]
            case _:
                digits = [i for i in range(at, len(content)) if 0x30 <= content[i] <= 0x39]
                if digits:
                    content[digits[0]] = 0x30 + data.draw(st.integers(0, 9))
    if len(content) >= 8 and data.draw(st.booleans()):
        # Repair the length, so that the change is met by more than the first check.
        content[:8] = struct.pack("<Q", max(0, header_end - 8 + len(content) - len(mutation_seed(folder))))
    accepted_alike(bytes(content), folder / "mutated")


def mutation_seed(folder: Path) -> bytes:
    path = folder / "seed.safetensors"
    if not path.exists():
        write_good(path)
    return path.read_bytes()


def test_the_differential_can_fail(tmp_path: Path) -> None:
    path = tmp_path / "file"
    assert accepted_alike(mutation_seed(tmp_path), path)
    # safetensors keeps the last of two equal names; ours must not.
    twice = raw(f'{{"a":{json.dumps(GOOD)},"a":{json.dumps(GOOD)}}}', FLOATS)
    assert not accepted_alike(twice, path)
    assert len(safetensors.deserialize(twice)) == 1


# ------------------------------------------------------------------------------------- map-file version 1: schema


def model_json(**changes: Any) -> str:
    return json.dumps({**FINGERPRINT, **changes})


def without(document: dict[str, Any], key: str) -> str:
    return json.dumps({name: value for name, value in document.items() if name != key})


def splits_json(index: int = 0, **changes: Any) -> str:
    splits = [dict(entry) for entry in SPLITS]
    splits[index].update(changes)
    return json.dumps(splits)


def layers(*numbers: int, metrics: Any = None) -> list[dict[str, Any]]:
    return [{"layer": number, "metrics": {} if metrics is None else metrics} for number in numbers]


# name: (kind, changed metadata, words of the message)
SCHEMAS: dict[str, tuple[str, dict[str, Any], str]] = {
    "no format": ("missing_key", {"format": None}, '"format" is missing'),
    "another format": ("format", {"format": "pt"}, 'found "pt"'),
    "no version": ("missing_key", {"version": None}, '"version" is missing'),
    "version 2": ("version", {"version": "2", "future": "key"}, 'found "2"; this reader knows "1"'),
    "no credit": ("missing_key", {"credit": None}, '"credit"'),
    "an empty credit": ("credit", {"credit": " "}, "is empty"),
    "no model": ("missing_key", {"model": None}, '"model"'),
    "no fit": ("missing_key", {"fit": None}, '"fit"'),
    "no splits": ("missing_key", {"splits": None}, '"splits"'),
    "no default split": ("missing_key", {"default_split": None}, '"default_split"'),
    "an unknown key": ("unknown_key", {"colour": "red"}, 'keys of your own start with "x_"'),
    "a model that is no JSON": ("model", {"model": "{"}, "EOF"),
    "a model that is a list": ("model", {"model": "[]"}, "invalid length 0"),
    "a model field missing": ("model", {"model": without(FINGERPRINT, "rope")}, "missing field `rope`"),
    "a nullable model field missing": ("model", {"model": without(FINGERPRINT, "anchors")}, "missing field `anchors`"),
    "an unknown model field": ("model", {"model": model_json(colour=1)}, "unknown field `colour`"),
    "a model field twice": (
        "model",
        {"model": model_json()[:-1] + ', "name": "other"}'},
        "duplicate field `name`",
    ),
    "a hidden size of 0": ("model", {"model": model_json(hidden_size=0)}, "hidden_size is 0"),
    "a negative hidden size": ("model", {"model": model_json(hidden_size=-4)}, "invalid value"),
    "a hidden size in words": ("model", {"model": model_json(hidden_size="4")}, "invalid type"),
    "layer types too few": ("model", {"model": model_json(layer_types=["full_attention"])}, "has 1 entries"),
    "anchors that are no hash": ("model", {"model": model_json(anchors="abc")}, "anchors is"),
    "anchors in upper case": ("model", {"model": model_json(anchors=HASH.upper())}, "anchors is"),
    "a tokenizer that is no hash": ("model", {"model": model_json(tokenizer="g" * 64)}, "tokenizer is"),
    "rope that is a number": ("model", {"model": model_json(rope=1)}, "expected an object"),
    "a rope key twice, deep": (
        "model",
        {"model": model_json().replace('"factors"', '"a": 1, "a": 1, "factors"')},
        'key "a" is given twice',
    ),
    "a model over 128 KiB": ("model", {"model": model_json(name="a" * 131072)}, "at most 131072"),
    "rope too deep": ("model", {"model": model_json().replace("10000.0", "[" * 200 + "]" * 200)}, "recursion limit"),
    "a number beyond float64": ("model", {"model": model_json().replace("10000.0", "1e999")}, "number out of range"),
    "a fit field missing": ("fit", {"fit": without(FIT, "head")}, "missing field `head`"),
    "an unknown fit field": ("fit", {"fit": json.dumps({**FIT, "colour": 1})}, "unknown field `colour`"),
    "a text without a hash": (
        "fit",
        {"fit": json.dumps({**FIT, "texts": [{"name": "a", "sha256": "", "rows": 1}]})},
        'text "a" has sha256',
    ),
    "no split at all": ("splits", {"splits": "[]"}, "is empty"),
    "splits that descend": ("splits", {"splits": json.dumps(SPLITS[::-1])}, "expected ascending"),
    "a split twice": ("splits", {"splits": json.dumps([SPLITS[0], SPLITS[0]])}, "expected ascending"),
    "a split past the model": (
        "splits",
        {"splits": splits_json(1, split=4, layers=[])},
        "past the model's last layer, 3",
    ),
    "an unknown split field": ("splits", {"splits": splits_json(colour=1)}, "unknown field `colour`"),
    "an unknown target": ("splits", {"splits": splits_json(target="logits")}, "unknown variant `logits`"),
    "a negative lambda": ("splits", {"splits": splits_json(**{"lambda": -1})}, "lambda is -1"),
    "a lambda that is NaN": ("splits", {"splits": splits_json(**{"lambda": float("nan")})}, "expected value"),
    "a map for the split itself": ("splits", {"splits": splits_json(layers=layers(1, 2))}, "layer 1 after 1"),
    "a layer past the model": ("splits", {"splits": splits_json(layers=layers(2, 4))}, "layer 4 after 2"),
    "layers that descend": ("splits", {"splits": splits_json(layers=layers(3, 2))}, "layer 2 after 3"),
    "a metric in words": (
        "splits",
        {"splits": splits_json(layers=layers(2, 3, metrics={"a": "b"}))},
        "a number or a list",
    ),
    "a metric of lists": ("splits", {"splits": splits_json(layers=layers(2, 3, metrics={"a": [[1]]}))}, "invalid type"),
    "a metric that is true": (
        "splits",
        {"splits": splits_json(layers=layers(2, 3, metrics={"a": True}))},
        "a number or a list",
    ),
    "a metric twice": (
        "splits",
        {"splits": json.dumps(SPLITS).replace('"quantiles"', '"key_cosine"')},
        'key "key_cosine" is given twice',
    ),
    "seventeen features": (
        "splits",
        {"splits": splits_json(features=["stream", *(f"previous:{k}" for k in range(1, 17))])},
        "at most 16",
    ),
    "no features": ("features", {"splits": splits_json(features=[])}, 'must start with "stream"'),
    "a stream that is not first": (
        "features",
        {"splits": splits_json(features=["previous:1", "stream"])},
        "must start",
    ),
    "two streams": ("features", {"splits": splits_json(features=["stream", "stream"])}, '"stream" is unknown'),
    "a feature twice": ("features", {"splits": splits_json(features=["stream", "mlp", "mlp"])}, "given twice"),
    "previous without a number": ("features", {"splits": splits_json(features=["stream", "previous:"])}, "is unknown"),
    "previous 0": ("features", {"splits": splits_json(features=["stream", "previous:0"])}, "is unknown"),
    "a mean of 1": ("features", {"splits": splits_json(features=["stream", "mean:1.0"])}, "is unknown"),
    "an unknown feature": ("features", {"splits": splits_json(features=["stream", "next:1"])}, "is unknown"),
    "a default that is no split": ("default_split", {"default_split": "3"}, "one of the file's splits [1, 2]"),
    "a default with a sign": ("default_split", {"default_split": "+2"}, "one of the file's splits"),
    "a gate that is a list": ("gate", {"gate": "[]"}, "expected an object"),
    "a gate key twice": ("gate", {"gate": '{"a":1,"a":2}'}, 'key "a" is given twice'),
    # These change the list of layers or features, so that the tensors no longer fit.
    "a tensor missing": ("missing_tensor", {"splits": splits_json(split=0)}, "split.0.layer.2.weight"),
    "a tensor of no layer": ("unexpected_tensor", {"splits": splits_json(layers=layers(2))}, "split.1.layer.3.bias"),
    "a width of too few features": ("tensor_shape", {"splits": splits_json(features=["stream"])}, "[4, 4]"),
    "a width of too many features": (
        "tensor_shape",
        {"splits": splits_json(features=["stream", "previous:1", "mean:0.9"])},
        "[12, 4]",
    ),
    "no room for MLP rows": (
        "tensor_shape",
        {"splits": splits_json(features=["stream", "previous:1", "mlp:8"])},
        "[more than 8, 4]",
    ),
    "another hidden size": ("tensor_shape", {"model": model_json(hidden_size=8)}, "[16, 8]"),
    "weights in U8": ("tensor_dtype", {"weight": "U8"}, "BF16, F16, F32 or I8"),
    "biases in F16": ("tensor_dtype", {"bias": "F16"}, "expected F32"),
    "a choice that is a list": ("splits", {"splits": splits_json(choice=[])}, "expected an object"),
    "gains for other heads": ("tensor_shape", {"more": ("2.layer.3.key_gain", "F32", [2])}, "[1]"),
    "gains in BF16": ("tensor_dtype", {"more": ("2.layer.3.value_gain", "BF16", [1])}, "expected F32"),
    "a gain of no component": ("unexpected_tensor", {"more": ("2.layer.3.query_gain", "F32", [1])}, "query_gain"),
    "a scale basis without its residual": (
        "missing_tensor",
        {"more": ("2.layer.3.scale_basis", "F32", [4, 2])},
        "scale_residual",
    ),
    "a residual without its scale basis": (
        "unexpected_tensor",
        {"more": ("2.layer.3.scale_residual", "F32", [1])},
        "scale_residual",
    ),
    "a state correction without heads": (
        "tensor_shape",
        {"more": ("2.layer.3.state_correction", "F32", [4, 2])},
        "[heads, rows, columns]",
    ),
    "a state correction of nothing": (
        "tensor_shape",
        {"more": ("2.layer.3.state_correction", "F32", [2, 0, 2])},
        "[heads, rows, columns]",
    ),
    "a state correction in BF16": (
        "tensor_dtype",
        {"more": ("2.layer.3.state_correction", "BF16", [2, 4, 2])},
        "expected F32",
    ),
    "a scale basis wider than the stream": (
        "tensor_shape",
        {"more": ("2.layer.3.scale_basis", "F32", [4, 5])},
        "[4, rank]",
    ),
}


# The same for one layer's weight (hidden size 4, the stream alone), stored as codes or as factors.
CODES = ("weight", "I8", [4, 4])
FACTORS = (("weight_in", "BF16", [4, 2]), ("weight_out", "BF16", [2, 4]))
STORED: dict[str, tuple[str, list[tuple[str, str, list[int]]], str]] = {
    "codes without scales": ("missing_tensor", [CODES], 'tensor "split.2.layer.3.weight_scales": is missing'),
    "scales in F32": ("tensor_dtype", [CODES, ("weight_scales", "F32", [1, 4])], "has dtype F32; expected BF16"),
    "too many groups": (
        "tensor_shape",
        [CODES, ("weight_scales", "BF16", [2, 4])],
        'weight_scales": has shape [2, 4]; expected [1, 4]',
    ),
    "no group": ("tensor_shape", [CODES, ("weight_scales", "BF16", [0, 4])], "expected [1, 4]"),
    "scales of other columns": ("tensor_shape", [CODES, ("weight_scales", "BF16", [1, 3])], "expected [1, 4]"),
    "scales without an axis": ("tensor_shape", [CODES, ("weight_scales", "BF16", [4])], "expected [1, 4]"),
    "scales of a weight that is no codes": (
        "unexpected_tensor",
        [("weight", "BF16", [4, 4]), ("weight_scales", "BF16", [1, 4])],
        "weight_scales",
    ),
    "codes of another width": ("tensor_shape", [("weight", "I8", [4, 5])], "expected [4, 4]"),
    "a basis of codes without scales": (
        "missing_tensor",
        [("weight", "BF16", [4, 4]), ("scale_basis", "I8", [4, 2]), ("scale_residual", "F32", [1])],
        'tensor "split.2.layer.3.scale_basis_scales": is missing',
    ),
    "a basis with the scales of another rank": (
        "tensor_shape",
        [("weight", "BF16", [4, 4]), ("scale_basis", "I8", [4, 2]), ("scale_basis_scales", "BF16", [1, 3])],
        "expected [1, 2]",
    ),
    "scales without a basis": (
        "unexpected_tensor",
        [("weight", "BF16", [4, 4]), ("scale_basis_scales", "BF16", [1, 2])],
        "scale_basis_scales",
    ),
    "one factor": ("missing_tensor", [FACTORS[0]], 'tensor "split.2.layer.3.weight_out": is missing'),
    "the other factor": ("missing_tensor", [FACTORS[1]], 'tensor "split.2.layer.3.weight": is missing'),
    "factors beside a weight": ("unexpected_tensor", [*FACTORS, ("weight", "BF16", [4, 4])], '.weight": has no place'),
    "factors of two ranks": ("tensor_shape", [FACTORS[0], ("weight_out", "BF16", [3, 4])], "expected [2, 4]"),
    "a rank of 0": (
        "tensor_shape",
        [("weight_in", "BF16", [4, 0]), ("weight_out", "BF16", [0, 4])],
        "expected [4, rank], rank 1 to 4",
    ),
    "a rank above the width": ("tensor_shape", [("weight_in", "BF16", [4, 5])], "expected [4, rank], rank 1 to 4"),
    "a factor for other features": ("tensor_shape", [("weight_in", "BF16", [8, 2])], "expected [4, rank]"),
    "a factor in I32": ("tensor_dtype", [("weight_in", "I32", [4, 2])], "BF16, F16, F32 or I8"),
    "a factor of codes without scales": (
        "missing_tensor",
        [("weight_in", "I8", [4, 2]), ("weight_out", "I8", [2, 4]), ("weight_in_scales", "BF16", [1, 2])],
        'tensor "split.2.layer.3.weight_out_scales": is missing',
    ),
}
SCHEMAS |= {f"stored: {name}": (kind, {"stored": parts}, words) for name, (kind, parts, words) in STORED.items()}


def test_a_scale_that_is_not_finite_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "maps.safetensors"
    tensors = stored_tensors("codes")
    _core.write_map_file(path, tensors, good_metadata())
    file = _core.MapFile.open(path)
    file.schema()
    at = next(info.start for info in file.tensors if info.name == "split.2.layer.3.weight_scales")
    content = bytearray(path.read_bytes())
    start = len(content) - file.data_bytes + at
    content[start + 4 : start + 6] = b"\x80\x7f"  # the third scale: infinity
    path.write_bytes(content)
    file = _core.MapFile.open(path)
    file.schema()
    with pytest.raises(MapFormatError, match="BF16 element 2 is NaN or infinite") as caught:
        file.read()
    check_message(caught.value, path, "non_finite")
    assert caught.value.tensor == "split.2.layer.3.weight_scales"


def stored_tensors(form: str) -> list[tuple[str, str, list[int], np.ndarray]]:
    """The tensors of a valid file whose last layer's matrices are codes or factors of codes."""
    tensors = [one for one in good_tensors() if one[0] != "split.2.layer.3.weight"]
    shapes = {"weight": [4, 4]} if form == "codes" else {"weight_in": [4, 3], "weight_out": [3, 4]}
    for part, shape in {**shapes, "scale_basis": [4, 2]}.items():
        codes = np.arange(int(np.prod(shape)), dtype=np.int8) - 5
        scales = np.full(2 * shape[1], 0x3C, np.uint8)
        tensors.append((f"split.2.layer.3.{part}", "I8", shape, codes.view(np.uint8)))
        tensors.append((f"split.2.layer.3.{part}_scales", "BF16", [1, shape[1]], scales))
    return [*tensors, ("split.2.layer.3.scale_residual", "F32", [1], np.full(4, 0x31, np.uint8))]


@pytest.mark.parametrize("form", ["codes", "factors"])
def test_codes_and_factors_are_read_as_they_were_written_by_both(tmp_path: Path, form: str) -> None:
    path = tmp_path / "maps.safetensors"
    _core.write_map_file(path, stored_tensors(form), good_metadata())
    document = json.loads(_core.MapFile.open(path).schema())
    assert document["splits"] == SPLITS
    assert accepted_alike(path.read_bytes(), path)
    names = {info.name for info in _core.MapFile.open(path).tensors}
    assert ("split.2.layer.3.weight_out_scales" in names) == (form == "factors")


@pytest.mark.parametrize("name", SCHEMAS)
def test_malformed_schema(tmp_path: Path, name: str) -> None:
    kind, changes, words = SCHEMAS[name]
    changes = dict(changes)
    dtypes = {"weight": changes.pop("weight", "BF16"), "bias": changes.pop("bias", "F32")}
    sizes = {"BF16": 2, "F16": 2, "F32": 4, "I32": 4, "I8": 1, "U8": 1}
    named = [(name, dtypes[name.rsplit(".", 1)[1]], shape) for name, _, shape, _ in good_tensors()]
    if stored := changes.pop("stored", None):  # the weight of one layer, otherwise than good_tensors has it
        named = [one for one in named if one[0] != "split.2.layer.3.weight"]
        named += [(f"split.2.layer.3.{part}", dtype, shape) for part, dtype, shape in stored]
    if more := changes.pop("more", None):
        named.append((f"split.{more[0]}", more[1], more[2]))
    tensors = [
        (name, dtype, shape, np.zeros(int(np.prod(shape)) * sizes[dtype], np.uint8)) for name, dtype, shape in named
    ]
    path = tmp_path / "bad.safetensors"
    _core.write_map_file(path, tensors, good_metadata(**changes))
    file = _core.MapFile.open(path)
    with pytest.raises(MapSchemaError) as caught:
        file.schema()
    check_message(caught.value, path, kind)
    assert words in str(caught.value)


@pytest.mark.parametrize("weight", ["BF16", "F16", "F32"])
def test_a_valid_file_gives_one_canonical_document(tmp_path: Path, weight: str) -> None:
    path = tmp_path / "maps.safetensors"
    write_good(path, weight, gate='{"passed": true}', x_note="mine")
    text = _core.MapFile.open(path).schema()
    assert json.loads(text) == {
        "format": "ridgefill",
        "version": 1,
        "credit": "its authors",
        "model": FINGERPRINT,
        "fit": FIT,
        "splits": SPLITS,
        "default_split": 2,
        "gate": {"passed": True},
        "extra": {"x_note": "mine"},
    }
    assert text == json.dumps(json.loads(text), sort_keys=True, separators=(",", ":"))
    # Other spacing and another order of keys give the same document.
    other = {key: json.dumps(json.loads(value), indent=2) for key, value in good_metadata().items() if value[0] in "[{"}
    write_good(path, weight, gate='{"passed":true}', x_note="mine", **other)
    assert _core.MapFile.open(path).schema() == text


@pytest.mark.parametrize(
    "features", [["stream", "previous:1"], ["stream", "mean:0.95"], ["stream", "mlp"], ["stream", "mlp:4"]]
)
def test_every_feature_name(tmp_path: Path, features: list[str]) -> None:
    write_good(tmp_path / "maps", splits=splits_json(features=features))
    assert json.loads(_core.MapFile.open(tmp_path / "maps").schema())["splits"][0]["features"] == features


@given(metric=st.floats(allow_nan=False, allow_infinity=False))
def test_metrics_keep_every_bit(metric: float, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.getbasetemp() / "metrics"
    write_good(path, splits=splits_json(layers=layers(2, 3, metrics={"a": metric, "b": [metric]})))
    read = json.loads(_core.MapFile.open(path).schema())["splits"][0]["layers"][0]["metrics"]
    assert struct.pack("<2d", read["a"], read["b"][0]) == struct.pack("<2d", metric, metric)


# -------------------------------------------------------------------------------------------------- fingerprint


def compare(**changes: Any) -> list[tuple[str, str]]:
    return _core.compare_fingerprints(json.dumps(FINGERPRINT), model_json(**changes))


@pytest.mark.parametrize(
    ("kind", "changes", "found", "expected"),
    [
        ("model_type", {"model_type": "qwen3"}, '"qwen3"', '"llama"'),
        ("hidden_size", {"hidden_size": 8}, "8", "4"),
        ("num_hidden_layers", {"num_hidden_layers": 5, "layer_types": ["full_attention"] * 5}, "5", "4"),
        ("num_attention_heads", {"num_attention_heads": 4}, "4", "2"),
        ("num_key_value_heads", {"num_key_value_heads": 2}, "2", "1"),
        ("head_dim", {"head_dim": 4}, "4", "2"),
        ("vocab_size", {"vocab_size": 17}, "17", "16"),
        ("layer_types", {"layer_types": ["full_attention"] * 4}, '"full_attention" at layer 2', '"sliding_attention"'),
        ("sliding_window", {"sliding_window": None}, "none", "8"),
        (
            "rope",
            {"rope": {"rope_theta": 5e5, "scaling": {"factors": [1, 2.5]}}},
            "rope.rope_theta = 500000.0",
            "10000.0",
        ),
        ("rope", {"rope": {"rope_theta": 1e4, "scaling": {"factors": [1, 2]}}}, "rope.scaling.factors[1]", "2.5"),
        ("rope", {"rope": {"rope_theta": 1e4}}, "rope.scaling = nothing", "factors"),
        ("tokenizer", {"tokenizer": HASH}, HASH, HASH[::-1]),
    ],
)
def test_another_model_is_refused_by_field(kind: str, changes: dict[str, Any], found: str, expected: str) -> None:
    with pytest.raises(MapMismatchError) as caught:
        compare(**changes)
    message = str(caught.value)
    assert caught.value.kind == kind
    assert message.index(found) < message.index(expected)
    assert "ridgefill fit" in message


@pytest.mark.parametrize(
    ("kinds", "changes"),
    [
        ([], {}),
        ([], {"rope": {"rope_theta": 10000, "scaling": {"factors": [1.0, 2.5]}}}),  # numbers as numbers
        ([], {"anchors": None, "tokenizer": None}),  # not given: nothing to compare
        (["anchors"], {"anchors": HASH[::-1]}),
        (["quantization"], {"quantization": "bitsandbytes"}),
        (["name"], {"name": "tiny-finetuned"}),
        (["quantization", "anchors", "name"], {"quantization": "fp8", "anchors": HASH[::-1], "name": "b"}),
    ],
)
def test_a_variant_of_the_model_warns(kinds: list[str], changes: dict[str, Any]) -> None:
    assert [kind for kind, _ in compare(**changes)] == kinds


def test_a_fingerprint_that_is_none_is_a_schema_error() -> None:
    with pytest.raises(MapSchemaError, match="missing field"):
        _core.compare_fingerprints(json.dumps(FINGERPRINT), "{}")


# ------------------------------------------------------------------------------------------- errors, stub, document


def test_errors_pickle_with_their_attributes() -> None:
    with pytest.raises(MapMismatchError) as caught:
        compare(head_dim=4)
    copy = pickle.loads(pickle.dumps(caught.value))
    assert (type(copy), str(copy), copy.kind) == (MapMismatchError, str(caught.value), "head_dim")


@pytest.mark.slow
def test_the_stub_is_what_the_extension_has(tmp_path: Path) -> None:
    config = tmp_path / "mypy.ini"
    # The package's __init__ leads to torch: reading its sources takes minutes and tells nothing about the stub.
    skipped = ",".join(f"{name}.*" for name in ("numpy", "torch", "transformers", "safetensors", "click", "rich"))
    config.write_text(f"[mypy]\n[mypy-{skipped}]\nfollow_imports = skip\n")
    result = subprocess.run(
        [sys.executable, "-m", "mypy.stubtest", "--mypy-config-file", str(config), "ridgefill._core"],
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr


def test_the_documents_examples_are_true(tmp_path: Path) -> None:
    """Every ```json block under "Examples" is a header; the line above it says what the reader answers."""
    text = DOCUMENT.read_text(encoding="utf-8")
    examples = re.findall(r"^(Valid|Invalid, `([a-z_0-9]+)`)[^\n]*\n+```json\n(.*?)```", text, re.MULTILINE | re.DOTALL)
    assert len(examples) >= 6
    for verdict, kind, header in examples:
        needed = [int(end) for end in re.findall(r'"data_offsets": *\[\d+, *(\d+)\]', header)]
        path = tmp_path / "example"
        path.write_bytes(raw(header, bytes(max(needed, default=0))))
        try:
            _core.MapFile.open(path).schema()
            found = ""
        except (MapFormatError, MapSchemaError) as error:
            found = error.kind
        assert found == kind, f"{verdict}: {header}"
