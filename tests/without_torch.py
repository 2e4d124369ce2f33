"""What must work where torch, transformers and cupy are not installed; run as a script: ``python -I without_torch.py``.

`make package` runs it in clean environments, test_packaging.py in this one, where a finder hides the three packages.
An argument names a `ridgefill` console script to try as well.
"""

import json
import subprocess
import sys
import tempfile
from importlib.abc import MetaPathFinder
from pathlib import Path


class _Hidden(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "transformers", "cupy"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def expect(condition, what):
    """Fail with a sentence, also under ``python -O``."""
    if not condition:
        sys.exit(f"without torch: {what}")


def write_maps(path):
    """A small valid map file, written by the core alone."""
    import numpy as np

    from ridgefill import _core

    model = {
        "model_type": "llama",
        "name": "tiny",
        "hidden_size": 4,
        "num_hidden_layers": 2,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": 4,
        "vocab_size": 8,
        "layer_types": ["full_attention"] * 2,
        "sliding_window": None,
        "rope": {},
        "quantization": None,
        "anchors": None,
        "tokenizer": None,
    }
    fitted = {"rows": 9, "held_out_rows": 0, "head": 4, "window_tokens": 16, "texts": []}
    split = {"split": 0, "features": ["stream"], "target": "normalized", "lambda": 0.001}
    metadata = {
        "format": "ridgefill",
        "version": "1",
        "credit": "see NOTICE",
        "model": json.dumps(model),
        "fit": json.dumps(fitted),
        "splits": json.dumps([{**split, "layers": [{"layer": 1, "metrics": {}}]}]),
        "default_split": "0",
    }
    weight = np.eye(4, dtype=np.float32).view(np.uint8).reshape(-1)
    bias = np.zeros(4, dtype=np.float32).view(np.uint8)
    tensors = [("split.0.layer.1.weight", "F32", [4, 4], weight), ("split.0.layer.1.bias", "F32", [4], bias)]
    _core.write_map_file(path, tensors, metadata)


def main():
    """Run every check; the first that fails ends the process with its sentence."""
    sys.meta_path.insert(0, _Hidden())
    import ridgefill

    expect(ridgefill.__version__, "ridgefill has no version")
    for name, arguments in (("attach", (object(), "maps.safetensors")), ("fit", (object(), None, ["text"]))):
        try:
            getattr(ridgefill, name)(*arguments)
        except ImportError as error:
            expect("pip install" in str(error), f"ridgefill.{name}: {error!s} does not say what to install")
        except Exception as error:
            expect(False, f"ridgefill.{name} raised {error!r}, expected an ImportError that says what to install")
        else:
            expect(False, f"ridgefill.{name} worked, so torch was not hidden")

    from click.testing import CliRunner

    from ridgefill.cli.main import commands

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "maps.safetensors"
        write_maps(path)
        for arguments in (["--help"], ["fit", "--help"], ["demo", "--help"], ["--version"], ["inspect", str(path)]):
            result = CliRunner().invoke(commands, arguments)
            expect(result.exit_code == 0, f"ridgefill {arguments[0]} failed: {result.output}")
        shown = CliRunner().invoke(commands, ["inspect", "--json", str(path)])
        expect(json.loads(shown.output)["model"]["name"] == "tiny", f"inspect --json printed {shown.output}")
        if len(sys.argv) > 1:
            subprocess.run([sys.argv[1], "inspect", str(path)], check=True, stdout=subprocess.DEVNULL)
    from ridgefill import kernels

    for file in kernels.KERNELS:
        expect("__global__" in kernels.source(file), f"the extension carries no source of {file}.cu")
    around = Path(ridgefill.__file__).parent.parent
    expect(
        around.name != "site-packages" or not (around / "cuda").exists(), "a folder cuda was installed: NVIDIA's name"
    )
    loaded = {name.partition(".")[0] for name in sys.modules} & {"torch", "transformers", "cupy"}
    expect(not loaded, f"{sorted(loaded)} were imported")


if __name__ == "__main__":
    main()
