"""The exception tree: every error that RidgeFill raises on purpose, except the operating system's own.

An error says what failed, where, what was found and what was expected, and what to do. `OSError` (a missing
file, a full disk) passes through unchanged. The Rust core raises these same classes.
"""

from __future__ import annotations


class RidgeFillError(Exception):
    """Base of every error of this package."""


class _MapError(RidgeFillError, ValueError):
    """A map file that cannot be used.

    Attributes:
        path: The file, or None when the error is not about one file.
        tensor: The tensor, or None when the error is not about one tensor.
        kind: A stable word for the failure ("non_finite", "hidden_size", ...); docs/map-format.md lists them.
    """

    def __init__(self, message: str, *, path: str | None = None, tensor: str | None = None, kind: str = "") -> None:
        super().__init__(message)
        self.path = path
        self.tensor = tensor
        self.kind = kind

    def __reduce__(self) -> tuple[object, ...]:
        # Exceptions pickle by their positional arguments alone, which would lose the three attributes.
        return (_rebuild, (type(self), str(self), self.path, self.tensor, self.kind))


def _rebuild(cls: type[_MapError], message: str, path: str | None, tensor: str | None, kind: str) -> _MapError:
    return cls(message, path=path, tensor=tensor, kind=kind)


class MapFormatError(_MapError):
    """The file is not a well-formed safetensors file, or breaks one of the reader's stricter rules."""


class MapSchemaError(_MapError):
    """The container is sound, but its metadata or tensors are not those of a map file of version 1."""


class MapMismatchError(_MapError):
    """The maps were fitted for another model; `kind` is the fingerprint field that differs."""


class ScheduleError(RidgeFillError, ValueError):
    """An argument of the decision rule or of the cost formula makes no sense (a tail of no rows, say)."""


class PlanError(RidgeFillError):
    """A request that no plan can meet."""


class FitError(RidgeFillError):
    """Calibration failed: too few rows, a singular system, a text that holds nothing."""


class AttachError(RidgeFillError):
    """The maps cannot be attached to this model."""


class UnsupportedModelError(AttachError):
    """A model that can never fill: an unknown layout, a compiled module, weights offloaded to disk."""


class AlreadyAttachedError(AttachError):
    """The model has an attachment already."""


class EngineError(RidgeFillError):
    """An inference engine refused or broke the contract of its adapter."""


class KernelError(RidgeFillError):
    """A CUDA kernel failed to build, to launch or to finish."""
