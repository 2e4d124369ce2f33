"""Ridge maps in memory: what a map file holds, as torch tensors, and the way to and from the file."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ridgefill.errors import MapSchemaError
from ridgefill.matrices import Factors, converted, file_tensors, from_file

if TYPE_CHECKING:
    import torch

    from ridgefill.matrices import Matrix

CREDIT = (
    "RidgeFill method by Dylan Johnston and tcclaviger, doi:10.5281/zenodo.23179168; "
    "independent implementation, see NOTICE"
)


@dataclass(frozen=True)
class LayerMap:
    """One late layer's map: ``prediction = x @ weight + bias``.

    Attributes:
        layer: the late layer whose block input is predicted.
        weight: ``[n_in, hidden_size]``, input-major, kept as the file has it (`ridgefill.matrices.dense` makes it one
            tensor): bf16 by default, int8 codes, or two factors.
        bias: ``[hidden_size]``, float32.
        metrics: held-out figures by name, a float or a list of floats (quantiles).
        key_gain: ``[num_key_value_heads]``, float32: what predicted keys are multiplied by (design 2.2); None: 1.
        value_gain: the same of values.
        scale_basis: ``[hidden_size, rank]``, bf16, or int8 codes beside a weight of these: the predictions' principal
            directions in the calibration rows' metric, from which a fused map takes their length (design 2.1).
        scale_residual: ``[1]``, float32: the predictions' mean energy outside the basis.
        state_correction: ``[heads, .., ..]`` like the layer's recurrent state, float32: what is added to it behind a
            bulk of predicted inputs (`ridgefill.states`).
    """

    layer: int
    weight: Matrix
    bias: torch.Tensor
    metrics: dict[str, float | list[float]] = field(default_factory=dict)
    key_gain: torch.Tensor | None = None
    value_gain: torch.Tensor | None = None
    scale_basis: Matrix | None = None
    scale_residual: torch.Tensor | None = None
    state_correction: torch.Tensor | None = None

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """Its tensors by their names in the file."""
        names = ("weight", "bias", "key_gain", "value_gain", "scale_basis", "scale_residual", "state_correction")
        found = ((name, getattr(self, name)) for name in names)
        parts = (file_tensors(name, matrix) for name, matrix in found if matrix is not None)
        return {name: tensor for of_matrix in parts for name, tensor in of_matrix.items()}

    def stored_as(self, dtype: torch.dtype) -> LayerMap:
        """The same map with its matrices in another dtype: the weight in this one, the basis as `basis_dtype` says."""
        basis = self.scale_basis
        return replace(
            self,
            weight=converted(self.weight, dtype),
            scale_basis=None if basis is None else converted(basis, basis_dtype(dtype)),
        )


@dataclass(frozen=True)
class SplitMaps:
    """The maps of one split layer, by late layer; layer ``split`` itself needs none.

    ``features`` names what they read (`ridgefill.features.Features`); ``choice`` is how the fit chose features and
    gains, with the held-out figures it chose by, or None.
    """

    split: int
    layers: dict[int, LayerMap]
    features: tuple[str, ...] = ("stream",)
    target: str = "normalized"
    ridge_lambda: float = 1e-3
    choice: dict[str, Any] | None = None

    @property
    def rank(self) -> int | None:
        """The rank of its weights' factors; None where weights are whole."""
        weights = (m.weight for m in self.layers.values())
        return max((weight.rank for weight in weights if isinstance(weight, Factors)), default=None)

    def map_bytes(self) -> int:
        """Bytes of all tensors as they are held."""
        return sum(tensor.nbytes for m in self.layers.values() for tensor in m.tensors.values())


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
        """Read and validate a map file; tensors are views into one buffer, read once, codes and factors as they are.

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
        dtypes = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "I8": torch.int8}
        tensors: dict[str, dict[str, torch.Tensor]] = {}
        for info in map_file.tensors:
            stem, _, part = info.name.rpartition(".")
            tensor = data[info.start : info.end].view(dtypes[info.dtype]).view(info.shape)
            tensors.setdefault(stem, {})[part] = tensor
        splits = {}
        for entry in schema["splits"]:
            split = int(entry["split"])
            layers = {}
            for item in entry["layers"]:
                layer = int(item["layer"])
                stem = f"split.{split}.layer.{layer}"
                layers[layer] = LayerMap(layer, metrics=item["metrics"], **from_file(tensors[stem]))
            splits[split] = SplitMaps(
                split,
                layers,
                tuple(entry["features"]),
                str(entry["target"]),
                float(entry["lambda"]),
                entry.get("choice"),
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

    def stored_as(self, dtype: torch.dtype) -> RidgeMaps:
        """The same maps with every matrix in this dtype: bfloat16, float16, float32 or int8.

        Biases stay those of the fit. One that stores its maps so from the start (``fit(dtype=...)``) takes them against
        the stored weights, so that the mean prediction is exact: it is the better way while its sums are there. The
        gate's verdicts, of other weights, are left out.
        """
        splits = {
            split: replace(of_split, layers={layer: m.stored_as(dtype) for layer, m in of_split.layers.items()})
            for split, of_split in self.splits.items()
        }
        return replace(self, splits=splits, gate=None)

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
                tensors += [_to_bytes(f"{stem}.{name}", tensor) for name, tensor in layer_map.tensors.items()]
        _core.write_map_file(path, tensors, metadata)


def basis_dtype(dtype: torch.dtype) -> torch.dtype:
    """What a scale basis beside weights of ``dtype`` is kept in: int8 beside int8, else bf16."""
    import torch

    return dtype if dtype == torch.int8 else torch.bfloat16


def _split_entry(split_maps: SplitMaps) -> dict[str, Any]:
    entry = {
        "split": split_maps.split,
        "features": list(split_maps.features),
        "target": split_maps.target,
        "lambda": split_maps.ridge_lambda,
        "layers": [{"layer": layer, "metrics": m.metrics} for layer, m in sorted(split_maps.layers.items())],
    }
    return entry if split_maps.choice is None else {**entry, "choice": split_maps.choice}


def _to_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, sort_keys=True)


def _to_bytes(name: str, tensor: torch.Tensor) -> tuple[str, str, list[int], Any]:
    import torch

    dtypes = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32", torch.int8: "I8"}
    flat = tensor.detach().cpu().contiguous().view(-1)
    return name, dtypes[tensor.dtype], list(tensor.shape), flat.view(torch.uint8).numpy()
