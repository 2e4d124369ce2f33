"""The compiled core: the strict map-file reader, the atomic writer, the decision rule and the cost formula."""

import os
from collections.abc import Mapping, Sequence
from typing import final

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "Decision",
    "MapFile",
    "Planner",
    "PrefillCost",
    "TensorInfo",
    "__version__",
    "check_rates",
    "check_schedule",
    "compare_fingerprints",
    "decide",
    "describe_model",
    "device_rates",
    "device_sources",
    "first_needed_row",
    "known_model_types",
    "layer_schedule",
    "model_figures",
    "predict",
    "prefill_cost",
    "search",
    "write_map_file",
]

__version__: str

@final
class TensorInfo:
    """One tensor of a file; ``start`` and ``end`` are byte offsets in the data section."""

    @property
    def name(self) -> str: ...
    @property
    def dtype(self) -> str:
        """The header's word: "BF16", "F16", "F32", "I8", ..."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def start(self) -> int: ...
    @property
    def end(self) -> int: ...

@final
class MapFile:
    """An open, checked safetensors file; only the data's values are still unread."""

    @staticmethod
    def open(path: str | os.PathLike[str], *, mmap: bool = False) -> MapFile:
        """Opens a file and checks everything but the data's values (docs/map-format.md lists the rules).

        The path is opened once; what is checked is what is read. Opening never blocks. Memory: the header, at most
        8 MiB, and its tensors' names.

        Args:
            path: The file.
            mmap: Map the file instead of reading it. Less memory; but when another process truncates the file, touching
                the lost part kills this process (SIGBUS).

        Raises:
            MapFormatError: The file breaks a rule of the container; ``kind`` says which.
            OSError: The file cannot be opened or read.
        """

    @property
    def path(self) -> str: ...
    @property
    def metadata(self) -> dict[str, str]:
        """The header's metadata, a new dict at each access."""

    @property
    def tensors(self) -> list[TensorInfo]:
        """The tensors in the order of their data, a new list at each access."""

    @property
    def data_bytes(self) -> int: ...
    def schema(self) -> str:
        """Returns the content of a map file of version 1 as one JSON document with sorted keys.

        Its fields: format, version (int), credit, model, fit, splits, default_split (int), gate (object or null), extra
        (the file's own ``x_`` keys). Fields of model, fit, splits and gate are those of docs/map-format.md.

        Raises:
            MapSchemaError: The metadata or the tensors are not those of version 1.
        """

    def read(self) -> NDArray[np.uint8]:
        """Returns the data section, ``[data_bytes]`` uint8, in one allocation that the array owns; the GIL is released.

        With ``mmap=True`` the array is read-only and borrows the map: no allocation. Each call reads (or checks) anew.

        Raises:
            MapFormatError: A BF16, F16, F32, F64 or F8 value is not finite ("non_finite"), or the file has shrunk since
                it was opened ("truncated").
            OSError: The file cannot be read.
            MemoryError: The data section does not fit.
        """

def write_map_file(
    path: str | os.PathLike[str],
    tensors: Sequence[tuple[str, str, Sequence[int], NDArray[np.uint8]]],
    metadata: Mapping[str, str],
) -> None:
    """Writes a safetensors file atomically: at any kill point ``path`` holds the old file or the new one, whole.

    A temporary file in the same folder, fsync, rename, fsync of the folder. The mode is 0666 less the umask; a symbolic
    link at ``path`` is followed. Equal arguments give equal bytes. The container's rules are checked first: nothing is
    written that ``MapFile.open`` or ``read`` would refuse; the map-file schema is not (``MapFile.schema`` does that).

    Args:
        path: The file to write or replace.
        tensors: (name, dtype word, shape, little-endian bytes in row-major order); the arrays must be contiguous.
        metadata: The header's metadata.

    Raises:
        MapFormatError: The tensors or the metadata break a rule of the container; nothing was written.
        OSError: The file cannot be written; the old one is whole and no temporary file is left.
    """

def compare_fingerprints(file_json: str, model_json: str) -> list[tuple[str, str]]:
    """Returns what differs between the fingerprint in a file and a model's without stopping the maps from running.

    Returns:
        (kind, message) for each of quantization, anchors (when both are given) and name that differs.

    Raises:
        MapMismatchError: A field that the maps depend on differs; ``kind`` is its name: model_type, hidden_size,
            num_hidden_layers, num_attention_heads, num_key_value_heads, head_dim, vocab_size, layer_types,
            sliding_window, rope (numbers compare as numbers), tokenizer (when both are given).
        MapSchemaError: One of the two is no fingerprint.
    """

@final
class Decision:
    """The spans of one step: ``[cached, fill_start)`` exact, ``[fill_start, fill_end)`` filled, the rest exact."""

    @property
    def fill_start(self) -> int: ...
    @property
    def fill_end(self) -> int: ...
    @property
    def step_end(self) -> int: ...
    @property
    def rows_filled(self) -> int: ...
    @property
    def reason(self) -> str:
        """ "fill", or in words why the whole step is exact."""

def decide(
    *,
    cached_tokens: int,
    step_tokens: int,
    n_ahead: int = 0,
    tail: int,
    head: int,
    min_bulk: int,
    tile: int = 1,
    logits_to_keep: int = 1,
) -> Decision:
    """Returns which rows of one step are filled (design, section 3); rows are absolute positions.

    Args:
        cached_tokens: Rows in the cache before this step.
        step_tokens: Rows of this step.
        n_ahead: Prompt rows that later steps will bring.
        tail: The last prompt rows, which stay exact: at least 1.
        head: The first rows of the sequence, which stay exact.
        min_bulk: Fewer rows than this are not filled.
        tile: The number of filled rows is a multiple of this: at least 1.
        logits_to_keep: Last rows whose logits are wanted; counts when ``n_ahead`` is 0.

    Raises:
        ScheduleError: ``tail`` or ``tile`` below 1, or a negative count.
    """

def first_needed_row(fill_start: int, fill_end: int, window: int | None) -> int:
    """Returns the first bulk row that a layer with this window must fill: ``max(fill_start, fill_end - window)``."""

@final
class PrefillCost:
    """Floating-point operations of one prefill, exact and filled."""

    @property
    def exact_flops(self) -> float: ...
    @property
    def filled_flops(self) -> float: ...
    @property
    def fill_flops(self) -> float:
        """The part of ``filled_flops`` spent on predicting keys and values of bulk rows."""

    @property
    def ratio(self) -> float:
        """The speed-up that the operations allow: exact / filled."""

    @property
    def rows_filled(self) -> int: ...

def prefill_cost(
    shape_json: str,
    *,
    prompt_tokens: int,
    cached_tokens: int = 0,
    split: int,
    tail: int,
    head: int,
    min_bulk: int = 256,
    logits_to_keep: int = 1,
    features: int = 1,
    fused_rank: int | None = None,
) -> PrefillCost:
    """Returns the operations of a prefill, exact and filled as ``decide`` says.

    A multiply and an add are two operations; each visible (query, key) pair counts once; norms, rotary embeddings and
    softmax are left out on both sides.

    Args:
        shape_json: ``{"hidden_size", "vocab_size", "layers": [{"num_attention_heads", "num_key_value_heads",
            "head_dim", "mlp_flops_per_row", "window"}, ...]}``; mlp_flops_per_row is two times the active weights.
        prompt_tokens: The whole prompt, rows already cached included.
        cached_tokens: Rows already cached: only the others are computed.
        split: The first layer that does not run on bulk rows.
        tail: As in ``decide``.
        head: As in ``decide``.
        min_bulk: As in ``decide``.
        logits_to_keep: As in ``decide``; also the rows that the output layer runs on.
        features: Width of the maps' input, in units of hidden_size.
        fused_rank: None for two-step maps; else the rank of the row scale of fused maps.

    Raises:
        ScheduleError: The shape or an argument makes no sense.
    """

def describe_model(config_json: str) -> str:
    """Returns the decoder that the text of a Hugging Face ``config.json`` describes, as JSON (docs/layers.md).

    Needs no weights. Fields that the config omits take the defaults of its configuration class in transformers; of a
    multimodal wrapper the text part is described.

    Raises:
        ScheduleError: A field is wrong (the message names it), or the model type is none of ``known_model_types()``.
    """

def known_model_types() -> list[str]:
    """Returns the model types that ``describe_model`` reads."""

def model_figures(model_json: str, *, rows: int = 1) -> str:
    """Returns the counts of a model that ``describe_model`` or a user described, as JSON.

    ``{"parameters", "weights", "output_weights", "layers": [{"parameters", "weights", "cache_weights",
    "cache": [{"name", "shape"}, ...]}, ...]}``: weights are the matrix elements that one row meets (active experts
    only, the output layer apart), cache_weights those it must meet to be cached, and shapes are those of transformers'
    ``DynamicCache`` without the batch.

    Args:
        model_json: The description.
        rows: Rows in the cache.

    Raises:
        ScheduleError: The description is wrong; the message names the field.
    """

def layer_schedule(
    model_json: str, *, split: int, tail: int = 512, head: int = 4, tile: int = 1, chunk_tokens: int | None = None
) -> str:
    """Returns what each layer does with bulk rows (full, filled, windowed_fill, state_scan, skipped), as JSON.

    Args:
        model_json: A model's description.
        split: The first layer that does not run on bulk rows.
        tail: The last prompt rows that stay exact.
        head: The first rows that stay exact.
        tile: A fill is a multiple of so many rows.
        chunk_tokens: Bulk rows in one call; with recurrent layers a multiple of ``tile``.

    Raises:
        ScheduleError: The description or an argument makes no sense for this model.
    """

def check_schedule(model_json: str, schedule_json: str) -> str:
    """Returns a schedule as JSON again, checked against the model it is for.

    Raises:
        ScheduleError: It would leave a hole in the cache or read what is not there; the message names the layer.
    """

def device_rates(name: str) -> str:
    """Returns assumed rates of a known device (a data sheet's peaks times assumed shares), as JSON.

    Raises:
        ScheduleError: The device is unknown; the message lists the known ones.
    """

def device_sources() -> dict[str, str]:
    """Returns the CUDA sources that the extension carries, by file name ("common.cuh", "synth_kv.cu", ...)."""

def check_rates(rates_json: str) -> str:
    """Returns rates as JSON again, checked.

    Args:
        rates_json: ``{"matmul_flops_per_s", "attention_flops_per_s", "masked_attention_flops_per_s",
            "memory_bytes_per_s", "weight_bytes_per_s", "layer_call_s", "source"}``; the masked and the weights' rate
            may be missing, ``source`` too.

    Raises:
        ScheduleError: A rate is missing or makes no sense.
    """

def predict(model_json: str, question_json: str) -> str:
    """Returns what a prefill is predicted to cost, exact and filled, part by part, as JSON (docs/planning.md).

    Args:
        model_json: A model's description.
        question_json: ``{"prompt_tokens", "split", ...}``: also cached_tokens, output_tokens, tail, head, min_bulk,
            tile, features, fused_rank, selected_share, chunk_tokens, element_bytes, map_element_bytes, rates.

    Raises:
        ScheduleError: The description or the question makes no sense.
    """

def search(
    model_json: str,
    question_json: str,
    *,
    losses: Sequence[tuple[int, float]] = ...,
    max_loss: float | None = None,
) -> str:
    """Returns what each split would give, as a JSON list in the order of the splits.

    Args:
        model_json: A model's description.
        question_json: As in ``predict``; its split is not used.
        losses: (split, measured dNLL in nats); a split without one has an unknown loss.
        max_loss: Rows say whether their loss is known and at most this.

    Raises:
        ScheduleError: The description or the question makes no sense.
    """

@final
class Planner:
    """A model and a policy, made ready to plan requests.

    Args:
        model_json: A model's description.
        policy_json: ``{"loss_budget_nats", "rates", "maps": [{"split", "features", "fused_rank", "gates": [{"tier",
            "dnll", "tail", "share"}]}], "memory_budget_bytes", "tail", "head", "min_bulk", "tile", "chunk_tokens",
            "element_bytes", "map_element_bytes"}``; all but the first may be left out. Without rates, operations
            stand for seconds.

    Raises:
        ScheduleError: The description or the rates make no sense.
        PlanError: The policy makes no sense.
    """

    def __new__(cls, model_json: str, policy_json: str) -> Planner: ...
    @staticmethod
    def from_shape(shape_json: str, policy_json: str) -> Planner:
        """Returns a planner for a shape, as ``prefill_cost`` takes it."""

    @property
    def candidates(self) -> list[tuple[str, int | None, int, float | None]]:
        """(tier, split, tail, loss in nats) of each candidate; exact first; a loss of None is unknown."""

    def plan(self, request_json: str) -> str:
        """Returns the plan for one request, with every reason and rejected alternative, as JSON.

        Args:
            request_json: ``{"prompt_tokens", "cached_tokens", "output_tokens", "sensitivity", "ttft_target_s",
                "exact_spans"}``; all but the first may be left out.

        Raises:
            PlanError: The request makes no sense, or no allowed plan fits the memory budget.
        """

    def plan_trace(
        self,
        prompt_tokens: NDArray[np.int64],
        *,
        cached_tokens: NDArray[np.int64] | None = None,
        output_tokens: NDArray[np.int64] | None = None,
        sensitivity: NDArray[np.uint8] | None = None,
        ttft_target_s: NDArray[np.float64] | None = None,
    ) -> tuple[NDArray[np.int32], NDArray[np.float64], NDArray[np.float64]]:
        """Returns the choices for many requests in one call, with the GIL released.

        Args:
            prompt_tokens: ``[n]``, contiguous, like the others.
            cached_tokens: ``[n]``; None for none.
            output_tokens: ``[n]``; None for none.
            sensitivity: ``[n]``: 0 latency, 1 balanced, 2 accuracy; None for balanced.
            ttft_target_s: ``[n]``, NaN for none; None for none.

        Returns:
            Indices into ``candidates`` (-1 where no plan fits the memory budget), predicted TTFTs in seconds (NaN
            there), and the TTFTs with every row exact.

        Raises:
            PlanError: A request makes no sense; the message names its index.
            ValueError: An array is not contiguous.
        """
