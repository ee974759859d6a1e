#!/usr/bin/env bash
# Everything that needs a GPU, in stages: the tests that are skipped without one, then the figures. A stage that has ended well is
# left out when the script is called again, so that a machine that is taken away costs one stage.
# usage: benchmarks/gpu.sh [--fresh] [OUT_DIR]      results land in benchmarks/results/ (and are copied to OUT_DIR)
set -euo pipefail
cd "$(dirname "$0")/.."
export PYTHONPATH="$PWD/src:${PYTHONPATH:-}"
ended="${TMPDIR:-/tmp}/paceline-gpu-stages"
if [ "${1:-}" = --fresh ]; then rm -rf "$ended"; shift; fi
mkdir -p "$ended"
model="${TMPDIR:-/tmp}/paceline-291m"
failed=0

stage() { # NAME COMMAND...
  local name=$1
  shift
  if [ -e "$ended/$name" ]; then echo "== $name: ended before"; return; fi
  echo "== $name: $*"
  if "$@"; then touch "$ended/$name"; else echo "== $name: failed"; failed=1; fi
}

python -c "import torch; assert torch.cuda.is_available(), 'no CUDA device'; print(torch.__version__, torch.cuda.get_device_name())"
stage tests python -m pytest tests -q -k "cuda or graph"
stage verify python -m paceline verify --device cuda --samples 4
stage verify-int8 python -m paceline verify --device cuda --samples 4 --quantization int8
stage verify-int4 python -m paceline verify --device cuda --samples 4 --quantization int4
stage demo python -m paceline demo --device cuda
stage speed python benchmarks/speed.py --device cuda --repeats 5
stage quantized python benchmarks/quantized.py --device cuda --model-dir "$model"
stage attention python benchmarks/attention.py --device cuda --model "$model" --contexts 1024 4096 16384 --rows 16 --name attention_cuda
if [ $# -gt 0 ]; then cp benchmarks/results/*_cuda.json "$1"/; fi
exit $failed
