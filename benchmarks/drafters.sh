#!/usr/bin/env bash
# Every drafter alone, pairs, and `auto`, on Spec-Bench, HumanEval, MT-Redundant and GSM8K (test): speed-up and acceptance, in turn.
#
# usage: drafters.sh DATA [CONVERSATIONS] [REPEATS]    DATA holds spec-bench/, humaneval/, mt-redundant/, gsm8k/ and mbpp/ as they are published
#
# The bundled model was trained on none of these prompts. `rest` and `rasd` look into a datastore of other texts of two of these kinds:
# the training set of GSM8K, and MBPP. One run of `paceline bench`; its document goes to results/drafters.json.
set -euo pipefail
data=${1:?usage: drafters.sh DATA [CONVERSATIONS] [REPEATS]}
here=$(cd "$(dirname "$0")" && pwd)
data=$(cd "$data" && pwd)
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
cd "$scratch"
paceline datastore build "$data/gsm8k/train.jsonl.gz" "$data/mbpp" --output texts.datastore
paceline bench --limit "${2:-10}" --max-tokens 96 --repeats "${3:-3}" --json "$here/results/drafters.json" \
  -w spec-bench="$data/spec-bench/question.odd.jsonl" -w humaneval="$data/humaneval/HumanEval.even.jsonl" \
  -w mt-redundant="$data/mt-redundant/question_redundant.odd.jsonl" -w gsm8k="$data/gsm8k/test.first-half.jsonl" \
  -s auto -s ngram -s suffix -s copyspec -s token_recycling -s aded -s lookahead -s jacobi -s draft_model \
  -s '{"method": "rest", "datastore": "texts.datastore"}' \
  -s '{"method": [{"method": "rasd", "datastore": "texts.datastore"}, "draft_model"]}' \
  -s '{"method": ["ngram", "draft_model"]}' -s '{"method": ["suffix", "draft_model"]}'
