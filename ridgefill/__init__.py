"""RidgeFill: closed-form maps that let a long prompt skip most of its late layers.

Importing this package loads neither torch nor transformers; each is imported when something first needs it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ridgefill._core import __version__ as __version__
    from ridgefill.attachment import Attachment as Attachment
    from ridgefill.attachment import attach as attach
    from ridgefill.maps import RidgeMaps as RidgeMaps
    from ridgefill.solve import fit as fit

_HOMES = {
    "__version__": "ridgefill._core",
    "Attachment": "ridgefill.attachment",
    "attach": "ridgefill.attachment",
    "RidgeMaps": "ridgefill.maps",
    "fit": "ridgefill.solve",
}

__all__ = ["Attachment", "RidgeMaps", "__version__", "attach", "fit"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'ridgefill' has no attribute {name!r}")
    needed = [] if name == "__version__" else ["torch"] if name == "RidgeMaps" else ["torch", "transformers"]
    for package in needed:
        try:
            importlib.import_module(package)
        except ModuleNotFoundError as error:
            raise ImportError(f"ridgefill.{name} needs {package}: pip install 'ridgefill[hf]'", name=package) from error
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
