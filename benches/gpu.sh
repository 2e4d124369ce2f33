#!/usr/bin/env bash
# What must be seen on a GPU, in one command of under 6 minutes, without a network and with nothing to install:
#
#     bash benches/gpu.sh [--out FOLDER] [--seconds 330] [--tokens 8192 32768 131072]
#
# It runs from a source checkout whose extension is built (ridgefill/_core.abi3.so, which may come from another machine)
# and whose python3 (PYTHON names another; 3.11 or later) has torch, transformers and cupy. benches/gpu.py does it all.
# Exit codes: 0 all bars met, 1 a check or a bar failed, 2 wrong arguments or no extension, 3 no NVIDIA GPU (nothing was
# measured).
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON="${PYTHON:-python3}"
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONDONTWRITEBYTECODE=1 HF_HUB_OFFLINE=1
"$PYTHON" -c 'import ridgefill._core' \
  || { echo "the extension ridgefill/_core.abi3.so is missing or not for this machine: build it with make setup" >&2; exit 2; }
# No part starts that would end too late; the timeout is for one that hangs.
exec timeout 358 "$PYTHON" benches/gpu.py "$@"
