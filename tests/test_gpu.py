"""On a real device: kernels against the float64 oracle, fills and fits against torch's own (gpu_checks.py).

Where there is none, the checks' own code runs on the kernels' host build, so that a device never meets it first.
"""

from __future__ import annotations

from collections import Counter

import gpu_checks
import pytest
import torch
from gpu_checks import CHECKS

from ridgefill import assembly, device_fit, provenance, residency


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU")
@pytest.mark.parametrize("name", CHECKS)
def test_on_the_device(name: str) -> None:
    CHECKS[name]()


class Immediate:
    """Queues that do everything at once, a millisecond each time they are asked."""

    def __init__(self, _: torch.device) -> None:
        self._clock = 0

    def pinned(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone()

    def copy(self, to: torch.Tensor, from_: torch.Tensor) -> None:
        to.copy_(from_)

    def mark(self, *, copies: bool) -> int:
        self._clock += 1
        return self._clock

    def wait(self, event: int, *, copies: bool) -> None:
        assert event <= self._clock

    def milliseconds(self, first: int, second: int) -> float:
        return float(second - first)


@pytest.mark.parametrize("name", CHECKS)
def test_the_checks_run_on_the_host_build(
    name: str, kernels_on_host: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_checks, "CUDA", torch.device("cpu"))
    monkeypatch.setattr(device_fit, "CudaLibrary", lambda _: device_fit.TorchLibrary())
    monkeypatch.setattr(residency, "queues_of", Immediate)
    monkeypatch.setattr(assembly, "host_obstacle", lambda _: None)
    monkeypatch.setattr(provenance, "_in_host_memory", lambda kept: kept)
    CHECKS[name]()
    assert kernels_on_host
