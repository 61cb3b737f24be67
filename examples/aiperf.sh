#!/usr/bin/env bash
# Measure through the router with aiperf (https://github.com/ai-dynamo/aiperf), in a virtual environment of its own:
#
#     python3 -m venv aiperf-venv && aiperf-venv/bin/pip install aiperf==0.13.0
#     PATH=$PWD/aiperf-venv/bin:$PATH examples/aiperf.sh http://router:30000 MODEL trace.jsonl
#
# Deadlines: EXTRA='{"ignore_eos": true, "custom_params": {"ttft_slo_ms": 250}}'. Without a network: HF_HUB_OFFLINE=1.
# The TTFT of aiperf ends with the first event that has a text.
set -euo pipefail
url=${1:?URL of the router} model=${2:?model name or path} trace=${3:?trace in the format of Mooncake}
exec aiperf profile --url "$url" --model "$model" --tokenizer "$model" \
    --endpoint-type completions --streaming --extra-inputs "${EXTRA:-ignore_eos:true}" \
    --input-file "$trace" --custom-dataset-type mooncake_trace --fixed-schedule --random-seed 1 \
    --wait-for-model-timeout 120 --reset-kv-cache --reset-kv-cache-path /flush_cache \
    --no-gpu-telemetry --ui simple --artifact-dir "${OUT:-out}"
