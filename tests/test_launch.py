"""What a launch tells CuPy: typed arguments, torch's stream, one module for each architecture; a fake stands in."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from ridgefill import kernels
from ridgefill.errors import KernelError
from ridgefill.kernels import Launch


class FakeCupy(SimpleNamespace):
    """Records modules made and functions called; compiles nothing."""

    def __init__(self, *, broken: bool = False) -> None:
        self.modules: list[dict[str, Any]] = []
        self.calls: list[tuple[Any, ...]] = []
        self.streams: list[Any] = []
        fake = self

        class Module:
            def __init__(self, **settings: Any) -> None:
                fake.modules.append(settings)

            def compile(self) -> None:
                if broken:
                    raise RuntimeError("line 3: no such thing")

            def get_function(self, name: str) -> Any:
                return lambda *arguments: fake.calls.append((name, *arguments))

        class Stream:
            @staticmethod
            def from_external(stream: Any) -> Any:
                fake.streams.append(stream.__cuda_stream__())
                return contextlib.nullcontext()

        super().__init__(
            cuda=SimpleNamespace(Device=lambda _: contextlib.nullcontext(), Stream=Stream), RawModule=Module
        )


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeCupy:
    fake = FakeCupy()
    monkeypatch.setitem(sys.modules, "cupy", fake)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: SimpleNamespace(cuda_stream=77))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    kernels._build.cache_clear()
    return fake


def test_a_launch_hands_over_typed_arguments_on_torch_s_stream(fake: FakeCupy) -> None:
    for _ in range(2):
        Launch("gram", "add_products", (3, 1), 256, (2**40, 17, 1.0)).run(torch.device("cuda", 0))
    (name, grid, block, arguments), second = fake.calls
    assert (name, grid, block) == ("add_products", (3, 1), (256, 1, 1))
    assert [type(a) for a in arguments] == [np.int64, np.int64, np.float64]
    assert list(arguments) == [2**40, 17, 1.0]
    assert second == fake.calls[0]
    assert fake.streams == [(0, 77)] * 2
    assert [m["code"] for m in fake.modules] == [kernels.source("gram")], "compiled once for both"


def test_a_source_that_does_not_compile_names_its_file(monkeypatch: pytest.MonkeyPatch, fake: FakeCupy) -> None:
    monkeypatch.setitem(sys.modules, "cupy", FakeCupy(broken=True))
    with pytest.raises(KernelError, match=r"gram\.cu does not compile for sm_90: line 3: no such thing"):
        Launch("gram", "add_products", (1, 1), 256, ()).run(torch.device("cuda", 0))


def test_why_kernels_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    assert kernels.unavailable("cuda") == "this torch was built without CUDA"
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 0))
    assert kernels.unavailable("cuda") == "compute capability 7.0 is older than 7.5"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setitem(sys.modules, "cupy", None)
    reason = kernels.unavailable("cuda")
    assert reason is not None
    assert reason.startswith("cupy cannot be imported")
    assert "ridgefill[cuda13]" in reason
    monkeypatch.setitem(sys.modules, "cupy", FakeCupy())
    assert kernels.unavailable("cuda") is None


def test_the_fake_has_the_shape_of_cupy() -> None:
    import cupy

    assert "str code" in cupy.RawModule.__doc__
    assert "tuple options" in cupy.RawModule.__doc__
    assert callable(cupy.cuda.Stream.from_external)
    assert callable(cupy.RawModule.compile)
    assert callable(cupy.RawModule.get_function)
    assert callable(cupy.cuda.device.get_cublas_handle)
    assert callable(cupy.cuda.device.get_cusolver_handle)


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        ([], 3, "no device is present: torch sees no NVIDIA GPU; nothing was measured"),
        (["--tokens", "9"], 2, "--tokens"),
    ],
)
def test_the_device_script_says_that_there_is_no_device(arguments: list[str], code: int, said: str) -> None:
    script = Path(__file__).parent.parent / "benches" / "gpu.sh"
    environment = {**os.environ, "PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        ["bash", script, *arguments], env=environment, capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == code, done.stderr
    assert said in done.stderr
