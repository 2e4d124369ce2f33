#!/usr/bin/env bash
# What must be seen on a GPU, in one command of under 6 minutes, without a network:
#
#     bash benches/gpu.sh [--out FOLDER] [--seconds 330] [--tokens 8192 32768 131072]
#
# It runs from a source checkout whose extension is built (ridgefill/_core.abi3.so) and whose python3 (PYTHON names
# another) has torch, transformers, cupy, pytest and hypothesis. The tests marked `gpu` come first, then benches/gpu.py.
# Exit codes: 0 all bars met, 1 a test or a bar failed, 2 wrong arguments, 3 no NVIDIA GPU (nothing was measured).
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON="${PYTHON:-python3}"
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONDONTWRITEBYTECODE=1
started=$SECONDS
"$PYTHON" benches/gpu.py --check "$@"
failed=0
timeout 150 "$PYTHON" -m pytest tests/test_gpu.py -m gpu -q -p no:cacheprovider || failed=1
"$PYTHON" benches/gpu.py --spent $((SECONDS - started)) "$@" || failed=1
exit $failed
