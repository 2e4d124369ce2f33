"""The kernels on the CPU: built by g++ through cuda/host_shim.h, run in a process of their own under the sanitizers.

As a module: `build` and `HostKernels`, which runs a `Launch` that was planned on CPU tensors. As a script: the other
process, which needs numpy alone (torch would not like the sanitizers). Every buffer is allocated by itself, to the
byte, so that one element too far ends the process with a report.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import pickle
import struct
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ridgefill.kernels import Launch

CUDA = Path(__file__).parent.parent / "cuda"
_FLAGS = [
    *("-std=c++17", "-O1", "-g1", "-fPIC", "-shared", "-fno-strict-aliasing", "-ffp-contract=off"),
    *("-Wall", "-Werror", "-Wno-unknown-pragmas", "-Wno-attributes"),
    *("-fsanitize=address,undefined", "-fno-sanitize-recover=all"),
]


def build() -> Path:
    """Compile the embedded sources into one shared library, once for each text of them; returns its path."""
    from ridgefill.kernels import KERNELS, source

    texts = {}
    for file, names in KERNELS.items():
        exports = "\n".join(f"auto host_{name} = &shim::Host<&{name}>::run;" for name in names)
        texts[file] = f'#include "host_shim.h"\n{source(file)}\nextern "C" {{\n{exports}\n}}\n'
    shim = (CUDA / "host_shim.h").read_text()
    digest = hashlib.sha256("\n".join([shim, *texts.values(), *_FLAGS]).encode()).hexdigest()[:16]
    cache = Path(os.environ.get("RIDGEFILL_CACHE") or Path.home() / ".cache" / "ridgefill")
    library = cache / "host-kernels" / f"{digest}.so"
    if not library.exists():
        library.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=library.parent) as folder:
            for file, text in texts.items():
                Path(folder, f"{file}.cpp").write_text(text)
            inputs = [Path(folder, f"{file}.cpp") for file in texts]
            command = ["g++", *_FLAGS, f"-I{CUDA}", *inputs, "-o", Path(folder, "kernels.so")]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stderr
            Path(folder, "kernels.so").replace(library)  # whole or not at all, whoever else builds it
    return library


class HostKernels:
    """A running server. ``run`` does a launch on the CPU tensors that it keeps, which change in place."""

    def __init__(self, library: Path, *, reverse: bool = False) -> None:
        sanitizer = subprocess.run(["g++", "-print-file-name=libasan.so"], capture_output=True, text=True, check=True)
        environment = {
            **os.environ,
            "LD_PRELOAD": sanitizer.stdout.strip(),
            "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=0:detect_stack_use_after_return=0",
            "UBSAN_OPTIONS": "print_stacktrace=1",
            "RIDGEFILL_ORDER": "reverse" if reverse else "forward",
        }
        self._process = subprocess.Popen(
            [sys.executable, "-I", __file__, library],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment,
        )

    def close(self) -> None:
        self._process.communicate()

    def run(self, launch: Launch) -> None:
        import torch

        tables = [] if launch.descriptors is None else [launch.descriptors]
        storages = {s.data_ptr(): s for t in (*launch.keeps, *tables) if (s := t.untyped_storage()).nbytes()}
        starts = sorted(storages)

        def place(address: int) -> tuple[int, int] | None:
            """The buffer that an address points into, and how far."""
            for number, start in enumerate(starts):
                if start <= address < start + storages[start].nbytes():
                    return number, address - start
            return None

        bytes_of = [torch.tensor([], dtype=torch.uint8).set_(storages[start]) for start in starts]
        buffers = [view.numpy().tobytes() for view in bytes_of]
        patches = []  # addresses inside a table of descriptors
        for table in tables:
            number = starts.index(table.untyped_storage().data_ptr())
            words = struct.unpack(f"<{len(buffers[number]) // 8}Q", buffers[number])
            patches += [(number, 8 * i, found) for i, word in enumerate(words) if (found := place(word))]
        arguments = [(a, None if isinstance(a, float) else place(a)) for a in launch.arguments]
        request = (launch.kernel, launch.grid, launch.threads, arguments, buffers, patches)
        for view, content in zip(bytes_of, self._answer(pickle.dumps(request)), strict=True):
            view.copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8))

    def _answer(self, request: bytes) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        try:
            self._process.stdin.write(struct.pack("<q", len(request)) + request)
            self._process.stdin.flush()
            size = struct.unpack("<q", self._process.stdout.read(8))[0]
        except (BrokenPipeError, struct.error):
            raise AssertionError(f"the kernel process ended:\n{self._process.stderr.read().decode()}") from None
        return pickle.loads(self._process.stdout.read(size))


def serve(library: str) -> None:
    """Answer launches from standard input until it ends."""
    kernels = ctypes.CDLL(library)
    libc = ctypes.CDLL(None)  # through the sanitizer: with red zones
    libc.malloc.restype = ctypes.c_void_p
    libc.malloc.argtypes = [ctypes.c_size_t]
    libc.free.argtypes = [ctypes.c_void_p]
    while header := sys.stdin.buffer.read(8):
        request = pickle.loads(sys.stdin.buffer.read(struct.unpack("<q", header)[0]))
        kernel, grid, threads, arguments, contents, patches = request
        buffers = [libc.malloc(len(content)) for content in contents]
        for address, content in zip(buffers, contents, strict=True):
            ctypes.memmove(address, content, len(content))
        for number, offset, (target, distance) in patches:
            pointer = struct.pack("<Q", buffers[target] + distance)
            ctypes.memmove(buffers[number] + offset, pointer, 8)
        types: list[Any] = [ctypes.c_uint] * 3
        values: list[int | float] = [grid[0], grid[1], threads]
        for value, pointed in arguments:
            types.append(ctypes.c_double if isinstance(value, float) else ctypes.c_longlong)
            values.append(value if pointed is None else buffers[pointed[0]] + pointed[1])
        address = ctypes.c_void_p.in_dll(kernels, f"host_{kernel}").value
        ctypes.CFUNCTYPE(None, *types)(address)(*values)
        answer = pickle.dumps([ctypes.string_at(a, len(c)) for a, c in zip(buffers, contents, strict=True)])
        for buffer in buffers:
            libc.free(buffer)
        sys.stdout.buffer.write(struct.pack("<q", len(answer)) + answer)
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    serve(sys.argv[1])
