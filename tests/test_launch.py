"""What a launch tells CuPy: typed arguments, torch's stream, one module for each architecture; a fake stands in."""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import ridgefill
from ridgefill import kernels
from ridgefill.errors import KernelError
from ridgefill.evaluate.report import machine_line
from ridgefill.kernels import Launch

ROOT = Path(__file__).parent.parent


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
    script = ROOT / "benches" / "gpu.sh"
    environment = {**os.environ, "PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        ["bash", script, *arguments], env=environment, capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == code, done.stderr
    assert said in done.stderr


def test_the_device_script_says_that_there_is_no_extension(tmp_path: Path) -> None:
    for name in ("benches/gpu.sh", "ridgefill/__init__.py"):
        (tmp_path / name).parent.mkdir()
        shutil.copy(ROOT / name, tmp_path / name)
    environment = {**os.environ, "PYTHON": sys.executable}
    done = subprocess.run(
        ["bash", tmp_path / "benches/gpu.sh"], env=environment, capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == 2
    assert "the extension ridgefill/_core.abi3.so is missing" in done.stderr


def test_a_source_checkout_without_metadata_names_its_version(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.metadata.version

    def version(name: str) -> str:
        if name == "ridgefill":
            raise importlib.metadata.PackageNotFoundError(name)
        return real(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    assert machine_line().endswith(f"ridgefill {ridgefill.__version__}")


def test_a_part_that_fails_on_the_device_does_not_end_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device script's own logic, its measurements replaced: each result is on disk before the next part begins."""
    monkeypatch.syspath_prepend(str(ROOT / "benches"))
    gpu = importlib.import_module("gpu")
    seen: list[dict[str, Any]] = []

    def measured(result: Any) -> Any:
        def work(*_: Any, **__: Any) -> Any:
            report = tmp_path / "gpu.json"
            seen.append(json.loads(report.read_text()) if report.exists() else {})
            if isinstance(result, Exception):
                raise result
            return result

        return work

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "a fake")
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(gpu, "unavailable", lambda _: None)
    monkeypatch.setattr(gpu, "CHECKS", {"right": lambda: None, "wrong": measured(AssertionError("7 is not 8"))})
    monkeypatch.setattr(gpu, "floors", measured({"copy_bytes_per_s": 1.0, "bf16_flops_per_s": 1.0}))
    monkeypatch.setattr(gpu, "synthesis", measured(gpu.CheckFailed("3.00 times the error of one rounding")))
    monkeypatch.setattr(gpu, "sums", measured({"moments_of_matmul": 0.7}))
    monkeypatch.setattr(gpu, "large_model", measured("a model"))
    monkeypatch.setattr(gpu, "random_maps", measured("maps"))
    times = {"ratio": {"cuda": 1.8}, "peak_gb": {"cuda": 1, "exact": 2}}
    monkeypatch.setattr(gpu, "ttft", measured(times))
    monkeypatch.setattr(gpu, "fit", measured(torch.cuda.OutOfMemoryError("out of memory\nmore")))
    arguments = ["gpu.py", "--out", str(tmp_path), "--tokens", "32768", "131072", "--seconds", "1e6"]
    monkeypatch.setattr(sys, "argv", arguments)
    assert gpu.main() == 1
    report = json.loads((tmp_path / "gpu.json").read_text())
    assert report["checks"] == {"run": 2, "failed": {"wrong": "AssertionError: 7 is not 8"}}
    assert report["met"] == {
        "checks": False,
        "moments_of_matmul": True,
        "ttft_ratio_32k": True,
        "peak below exact": True,
    }
    assert set(report["failed"]) == {f"synthesis, {name}" for name in gpu.SHAPES}
    assert report["left_out"] == ["fit: out of memory"]
    assert report["ttft, 131072 tokens"] == times
    assert "checks" not in seen[0]
    assert "sums" in seen[-1]
    monkeypatch.setattr(sys, "argv", [*arguments[:-1], "1"])
    assert gpu.main() == 1
    report = json.loads((tmp_path / "gpu.json").read_text())
    assert [line.partition(":")[0] for line in report["left_out"]] == ["checks", "floors", "model"]
    assert report["failed"] == {}
