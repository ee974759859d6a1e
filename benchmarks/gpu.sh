#!/usr/bin/env bash
# Everything that needs a GPU, in one call: the tests that are skipped without one, then the figures.
# usage: benchmarks/gpu.sh [OUT_DIR]      results land in benchmarks/results/ (and are copied to OUT_DIR)
set -euo pipefail
cd "$(dirname "$0")/.."
export PYTHONPATH="$PWD/src:${PYTHONPATH:-}"
python -c "import torch; assert torch.cuda.is_available(), 'no CUDA device'; print(torch.__version__, torch.cuda.get_device_name())"
python -m pytest tests -q -k "cuda or graph"
python -m paceline verify --device cuda --samples 4
python -m paceline demo --device cuda
python benchmarks/speed.py --device cuda --repeats 5
if [ $# -gt 0 ]; then cp benchmarks/results/*_cuda.json "$1"/; fi
