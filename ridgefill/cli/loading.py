"""What the command line is given, made into objects: the MODEL argument, and the processes of torchrun."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ridgefill.cli.terminal import says_what_to_install
from ridgefill.errors import RidgeFillError


def load_model(name: str, *, dtype: str = "auto", device: str = "auto") -> tuple[Any, Any]:
    """Return a causal language model in eval mode and its tokenizer.

    Args:
        name: a local folder, a hub id, or a ``.gguf`` file, which transformers unpacks to dense weights.
        dtype: "auto" (the checkpoint's own), "bfloat16", "float16" or "float32".
        device: a torch device, or "auto": the first CUDA device if there is one (under torchrun, each process its own),
            else the CPU.

    Raises:
        RidgeFillError: torch or transformers is missing, or the model cannot be read.
    """
    with says_what_to_install("hf"):
        import torch
        import transformers

    path = Path(name)
    where: dict[str, Any] = {}
    weights: dict[str, Any] = {}
    source = name
    if path.suffix == ".gguf":
        if not path.is_file():
            raise RidgeFillError(f"model {name}: no such file")
        source, where = str(path.parent), {"gguf_file": path.name}
        if hasattr(transformers, "GgufConfig"):
            # transformers 5.24 keeps the blocks packed unless told; older versions always unpack and lack the class.
            weights = {"quantization_config": transformers.GgufConfig(dequantize=True)}
    elif path.exists() and not path.is_dir():
        raise RidgeFillError(f"model {name}: expected a folder, a .gguf file or a hub id, found another kind of file")
    elif not path.exists() and (path.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1):
        raise RidgeFillError(f"model {name}: no such folder")
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
        if device == "cuda" and "TORCHELASTIC_RUN_ID" in os.environ:
            device = f"cuda:{os.environ['LOCAL_RANK']}"
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(source, **where)
        model = transformers.AutoModelForCausalLM.from_pretrained(
            source, dtype=dtype if dtype == "auto" else getattr(torch, dtype), **where, **weights
        )
    except (OSError, ValueError, ImportError, KeyError) as error:
        raise RidgeFillError(f"cannot load model {name}: {error}") from error
    return model.to(device).eval(), tokenizer


@contextmanager
def process_group() -> Iterator[int]:
    """Join the processes that torchrun has started, if it has, while the block runs; gives this one's number."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        yield 0
        return
    import torch.distributed as dist

    dist.init_process_group()
    try:
        yield int(dist.get_rank())
    finally:
        dist.destroy_process_group()
