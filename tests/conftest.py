"""Seeds, threads, no network, and the two real models that the tests share."""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

# Before transformers is imported anywhere: a test that needs the network is a broken test.
os.environ["HF_HUB_OFFLINE"] = "1"

import numpy as np
import pytest
import torch
from hypothesis import settings
from kernel_host import HostKernels, build
from torch import nn

from ridgefill import kernels
from ridgefill.demo import model_folder

# One thread for each of two test processes: a busy virtual machine makes two threads wait 100 times longer for each
# other than a tiny model's matmul takes.
torch.set_num_threads(1)
# No deadline: on a shared virtual machine any call can take a second. The same examples in every run.
settings.register_profile("ridgefill", deadline=None, derandomize=True)
settings.load_profile("ridgefill")


@pytest.fixture(autouse=True)
def _seeds() -> None:
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002  (libraries draw from the global generator)
    torch.manual_seed(0)


def _load(name: str) -> tuple[nn.Module, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    # A missing weights package raises here, with the pip command that installs it: real weights are never skipped.
    folder = model_folder(name)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return model, AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="session")
def smollm2() -> tuple[nn.Module, Any]:
    """SmolLM2-135M-Instruct in float32, and its tokenizer."""
    return _load("smollm2-135m")


@pytest.fixture(scope="session")
def gemma3() -> tuple[nn.Module, Any]:
    """Gemma 3 270M in float32, and its tokenizer."""
    return _load("gemma3-270m")


@pytest.fixture(scope="session")
def host() -> Iterator[HostKernels]:
    """The CUDA kernels on the CPU, threads in their order."""
    server = HostKernels(build())
    yield server
    server.close()


@pytest.fixture(scope="session")
def reversed_host() -> Iterator[HostKernels]:
    """The same, threads and blocks the other way round."""
    server = HostKernels(build(), reverse=True)
    yield server
    server.close()


@pytest.fixture
def kernels_on_host(host: HostKernels, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Launches run on the CPU through cuda/host_shim.h, as if it were a GPU; counted by kernel."""
    counts: Counter[str] = Counter()

    def run(launch: kernels.Launch, _: torch.device) -> None:
        counts[launch.kernel] += 1
        host.run(launch)

    monkeypatch.setattr(kernels, "unavailable", lambda _: None)
    monkeypatch.setattr(kernels.Launch, "run", run)
    return counts
