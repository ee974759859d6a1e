#!/usr/bin/env bash
# Everything that needs a GPU, in stages, in less than 9 minutes: the tests that are skipped without one, then the figures. No network.
# A stage that has ended well is left out when the script is called again, so that a machine that is taken away costs one stage; one
# that fails does not hinder the others; after 530 seconds the rest is left to the next call.
# usage: benchmarks/gpu.sh [--fresh] [OUT_DIR]      results land in benchmarks/results/*_cuda.json (and are copied to OUT_DIR)
# Ends with 0 when all is done, 75 when stages are left, 1 when one failed. PYTHON names the interpreter, if it is not
# python3; MODEL the model of speed.py (bundled; smollm2 where its folder was made).
#
# Seconds on one H200: tests 40, train 31, verify 51, verify-int8 and verify-int4 36 each, demo 16, shapes-8b 180 for all cells but compiling for
# batch 8 (compiling takes 26), shapes-1b 95, quantized 20; speed takes more than 90, attention was not finished.
set -euo pipefail
out="${*: -1}"
if [ $# -eq 0 ] || [ "$out" = --fresh ]; then out=""; else mkdir -p "$out"; out="$(cd "$out" && pwd)"; fi
cd "$(dirname "$0")/.."
export PYTHONPATH="$PWD/src:${PYTHONPATH:-}" PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1
python="${PYTHON:-python3}"
results=benchmarks/results
ended="${TMPDIR:-/tmp}/paceline-gpu-stages"
if [ "${1:-}" = --fresh ]; then rm -rf "$ended" "$results/gpu_shapes_cuda.json"; fi
mkdir -p "$ended" "$results"
model="${MODEL:-bundled}"
last=530
failed=0
left=0

copy() {
  if [ -n "$out" ]; then find "$results" -maxdepth 1 -name '*_cuda.json' -exec cp {} "$out"/ \;; fi
}

stage() { # NAME SECONDS RESULT COMMAND...    RESULT: a file for the standard output, "-" for none
  local name=$1 most=$2 result=$3 code=0 rest=$((last - SECONDS))
  shift 3
  if [ -e "$ended/$name" ]; then echo "== $name: ended before"; return; fi
  if [ "$rest" -lt 15 ]; then echo "== $name: left to the next call"; left=1; return; fi
  if [ "$rest" -lt "$most" ]; then most=$rest; fi
  echo "== $name, at $SECONDS s: $*"
  if [ "$result" = - ]; then
    timeout -k 5 "$most" "$@" || code=$?
  else
    timeout -k 5 "$most" "$@" >"$ended/$result" || code=$?
    if [ -s "$ended/$result" ] && [ $code -ne 124 ] && [ $code -ne 137 ]; then cp "$ended/$result" "$results/$result"; fi
  fi
  case $code in
    0) touch "$ended/$name" ;;
    75 | 124 | 137) echo "== $name: not finished, goes on with the next call"; left=1 ;;
    *) echo "== $name: failed ($code)"; failed=1 ;;
  esac
  copy
}

"$python" -c "import torch; assert torch.cuda.is_available(), 'no CUDA device'; print(torch.__version__, torch.cuda.get_device_name())"
mapfile -t marked < <(grep -rl --include='test_*.py' 'cuda.is_available' tests)
stage tests 100 - "$python" -m pytest "${marked[@]}" -q -k "cuda or graph"
stage verify 70 verify_cuda.json "$python" -m paceline verify --device cuda --samples 4 --json
stage verify-int8 60 verify_int8_cuda.json "$python" -m paceline verify --device cuda --samples 4 --quantization int8 --json
stage verify-int4 60 verify_int4_cuda.json "$python" -m paceline verify --device cuda --samples 4 --quantization int4 --json
stage demo 40 demo_cuda.json "$python" -m paceline demo --device cuda --json
stage train 90 - "$python" -m paceline train eagle3 --device cuda --texts --data benchmarks/data/smollm2_answers.jsonl.gz \
  --most-prompts 400 --steps 100 --speed-prompts 2 -o "$ended/eagle3"
stage shapes-8b 220 - "$python" benchmarks/gpu_shapes.py --shapes 8b --budget 150
stage shapes-1b 120 - "$python" benchmarks/gpu_shapes.py --shapes 1b --budget 80
stage speed 90 - "$python" benchmarks/speed.py --device cuda --repeats 5 --model "$model"
stage quantized 90 - "$python" benchmarks/quantized.py --device cuda --model 291m
stage attention 90 - "$python" benchmarks/attention.py --device cuda --contexts 1024 3584 --rows 16 --name attention_cuda
copy
echo "== ended after $SECONDS s"
if [ $failed -ne 0 ]; then exit 1; fi
if [ $left -ne 0 ]; then exit 75; fi
