"""On a real device: the kernels against the float64 oracle, fills and fits against torch's own (gpu_checks.py)."""

from __future__ import annotations

import pytest
import torch
from gpu_checks import CHECKS

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU")]


@pytest.mark.parametrize("name", CHECKS)
def test_on_the_device(name: str) -> None:
    CHECKS[name]()
