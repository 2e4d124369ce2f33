"""What a printed figure must say about where it was measured."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from pathlib import Path
from typing import Any


def machine() -> dict[str, Any]:
    """Return the processor, its cores, torch's threads and the versions that a measured figure depends on."""
    import torch

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": gpu,
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in ("torch", "transformers", "ridgefill")},
    }


def machine_line() -> str:
    """Return `machine` as one line."""
    found = machine()
    where = f"{found['cpu']}, {found['cores']} cores, {found['threads']} threads"
    if found["gpu"]:
        where += f", {found['gpu']}"
    versions = (f"{name} {found[name]}" for name in ("python", "torch", "transformers", "ridgefill"))
    return f"{where}; {', '.join(versions)}"


def _cpu_name() -> str:
    information = Path("/proc/cpuinfo")
    if information.is_file():
        for line in information.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
