#!/usr/bin/env bash
# Qualifies and measures the CUDA backend on a machine with an NVIDIA GPU, from a checkout:
#     tools/h200.sh HALLMARK OUT
# HALLMARK is a program built with `cargo build --profile carried -p cli --no-default-features --features cuda`; OUT gets the receipts
# and the raw figures. The synthetic model takes 137 GiB of GPU memory.
set -uo pipefail
hallmark=$1
out=$2
mkdir -p "$out"
verdicts() { grep -hE "^(ops|model|release): |^G[0-4] |FAIL" "$@"; }

# What the kernels do wrong in memory or against each other, if anything: a few tokens, because the tools are slow.
few="run models/demo --device cuda --allow-unqualified --temperature 0 --prompt-ids 0,5,6,7 --max-tokens 3"
for tool in memcheck racecheck; do
    if command -v compute-sanitizer > /dev/null; then
        timeout 120 compute-sanitizer --tool $tool "$hallmark" $few > "$out/$tool.txt" 2>&1
        echo "$tool: $(grep -h SUMMARY "$out/$tool.txt" || echo NOT RUN: no summary)"
    else
        echo "$tool: NOT RUN: no compute-sanitizer"
    fi
done

# The first run compiles the kernels; the others find them in the cache.
"$hallmark" qualify model nano --device cuda --numerics exact --receipt "$out/first.json" > "$out/first.txt" 2>&1
"$hallmark" qualify release --device cuda --receipt "$out/release-cuda-sm_90-source.json" > "$out/release-source.txt" 2>&1 &
for n in exact source native; do
    "$hallmark" qualify ops --device cuda --numerics $n --receipt "$out/ops-cuda-sm_90-$n.json" > "$out/ops-$n.txt" 2>&1 &
    for m in nano micro wide; do
        "$hallmark" qualify model $m --device cuda --numerics $n --receipt "$out/$m-cuda-sm_90-$n.json" \
            > "$out/$m-$n.txt" 2>&1 &
    done
    "$hallmark" qualify model models/demo --device cuda --numerics $n --against cpu \
        --receipt "$out/demo-cuda-sm_90-$n.json" > "$out/demo-$n.txt" 2>&1 &
done
wait
rm -f "$out/first.json" "$out/first.txt"
for f in "$out"/{ops,nano,micro,wide,demo,release}-*.txt; do echo "$(basename "$f" .txt)"; verdicts "$f"; done

synthetic="--synthetic flash --bits 2 --device cuda --json"
"$hallmark" bench decode $synthetic --tokens 4096 --decode 32 --runs 5 > "$out/decode-4k.json"
"$hallmark" bench decode $synthetic --tokens 32768 --decode 16 --runs 3 > "$out/decode-32k.json"
"$hallmark" bench prefill $synthetic --tokens 4096 --runs 3 > "$out/prefill-4k.json"
