"""Ridge maps in memory: what a map file holds, as torch tensors, and the way to and from the file."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ridgefill.errors import MapSchemaError

if TYPE_CHECKING:
    import torch

# What this version's maps read: the split layer's residual stream.
FEATURES = ("stream",)
CREDIT = (
    "RidgeFill method by Dylan Johnston and tcclaviger, doi:10.5281/zenodo.23179168; "
    "independent implementation, see NOTICE"
)


@dataclass(frozen=True)
class LayerMap:
    """One late layer's map: ``prediction = x @ weight + bias``.

    Attributes:
        layer: the late layer whose block input is predicted.
        weight: ``[n_in, hidden_size]``, bf16 in files, input-major.
        bias: ``[hidden_size]``, float32.
        metrics: held-out figures by name, a float or a list of floats (quantiles).
    """

    layer: int
    weight: torch.Tensor
    bias: torch.Tensor
    metrics: dict[str, float | list[float]] = field(default_factory=dict)


@dataclass(frozen=True)
class SplitMaps:
    """The maps of one split layer, by late layer; layer ``split`` itself needs none."""

    split: int
    layers: dict[int, LayerMap]
    features: tuple[str, ...] = FEATURES
    target: str = "normalized"
    ridge_lambda: float = 1e-3

    def map_bytes(self) -> int:
        """Bytes of all weights and biases as they are held."""
        return sum(m.weight.nbytes + m.bias.nbytes for m in self.layers.values())


@dataclass(frozen=True)
class RidgeMaps:
    """Everything a map file holds: the model's fingerprint, how the maps were fitted, and maps for each split."""

    fingerprint: dict[str, Any]
    fit: dict[str, Any]
    splits: dict[int, SplitMaps]
    default_split: int
    gate: dict[str, Any] | None = None
    path: str | None = None
    credit: str = CREDIT
    extra: dict[str, str] = field(default_factory=dict)  # the file's own ``x_…`` metadata keys

    def at(self, split: int | None) -> SplitMaps:
        """The maps of ``split``, or of the file's default split.

        Raises:
            MapSchemaError: the file holds no maps for this split.
        """
        wanted = self.default_split if split is None else split
        if wanted not in self.splits:
            raise MapSchemaError(
                f"no maps for split {wanted}: {self.path or 'these maps'} hold splits {sorted(self.splits)}",
                path=self.path,
                kind="split_missing",
            )
        return self.splits[wanted]

    @staticmethod
    def load(path: str | os.PathLike[str]) -> RidgeMaps:
        """Read and validate a map file; tensors are views into one buffer, read once.

        Raises:
            MapFormatError: not a well-formed map container.
            MapSchemaError: a container whose contents are not map format 1.
            OSError: the file cannot be opened or read.
        """
        import torch

        from ridgefill import _core

        map_file = _core.MapFile.open(path)
        schema = json.loads(map_file.schema())
        data = torch.from_numpy(map_file.read())
        dtypes = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
        tensors = {
            info.name: data[info.start : info.end].view(dtypes[info.dtype]).view(info.shape)
            for info in map_file.tensors
        }
        splits = {}
        for entry in schema["splits"]:
            split = int(entry["split"])
            layers = {}
            for item in entry["layers"]:
                layer = int(item["layer"])
                stem = f"split.{split}.layer.{layer}"
                layers[layer] = LayerMap(layer, tensors[f"{stem}.weight"], tensors[f"{stem}.bias"], item["metrics"])
            splits[split] = SplitMaps(
                split, layers, tuple(entry["features"]), str(entry["target"]), float(entry["lambda"])
            )
        return RidgeMaps(
            schema["model"],
            schema["fit"],
            splits,
            int(schema["default_split"]),
            schema.get("gate"),
            os.fspath(path),
            schema["credit"],
            schema["extra"],
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the file atomically: at any kill point ``path`` is the old file or the new one, whole.

        The bytes depend on the maps alone (no clock, no host), so equal maps give equal files.
        """
        from ridgefill import _core

        metadata = {
            **self.extra,
            "format": "ridgefill",
            "version": "1",
            "credit": self.credit,
            "model": _to_json(self.fingerprint),
            "fit": _to_json(self.fit),
            "splits": _to_json([_split_entry(self.splits[split]) for split in sorted(self.splits)]),
            "default_split": str(self.default_split),
        }
        if self.gate is not None:
            metadata["gate"] = _to_json(self.gate)
        tensors = []
        for split in sorted(self.splits):
            for layer, layer_map in sorted(self.splits[split].layers.items()):
                stem = f"split.{split}.layer.{layer}"
                tensors.append(_to_bytes(f"{stem}.weight", layer_map.weight))
                tensors.append(_to_bytes(f"{stem}.bias", layer_map.bias))
        _core.write_map_file(path, tensors, metadata)


def _split_entry(split_maps: SplitMaps) -> dict[str, Any]:
    return {
        "split": split_maps.split,
        "features": list(split_maps.features),
        "target": split_maps.target,
        "lambda": split_maps.ridge_lambda,
        "layers": [{"layer": layer, "metrics": m.metrics} for layer, m in sorted(split_maps.layers.items())],
    }


def _to_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, sort_keys=True)


def _to_bytes(name: str, tensor: torch.Tensor) -> tuple[str, str, list[int], Any]:
    import torch

    dtypes = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}
    flat = tensor.detach().cpu().contiguous().view(-1)
    return name, dtypes[tensor.dtype], list(tensor.shape), flat.view(torch.uint8).numpy()
