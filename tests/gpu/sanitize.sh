#!/usr/bin/env bash
# Kernels and replayed graphs under NVIDIA's compute-sanitizer, in about five minutes.
#
#     tests/gpu/sanitize.sh [python]
#
# One line of verdict each: PASSED, FAILED, TIMEOUT or SKIPPED; details in $OUT (default: a temporary
# directory). Exit code 1 if one FAILED. Triton compiles outside the sanitizer first, since under it
# that would take minutes. Kernel tests run without torch's caching allocator: then every tensor has
# an allocation of its own, and a read one element beyond its end is seen. Graphs cannot be captured
# so, and are checked with the allocator's pools.
set -uo pipefail
cd "$(dirname "$0")/../.."
python=${1:-python}
out=${OUT:-$(mktemp -d)}
mkdir -p "$out"
export PYTHONPATH=$PWD OMP_NUM_THREADS=4 TRITON_CACHE_DIR=${TRITON_CACHE_DIR:-$out/triton}
sanitizer=$(command -v compute-sanitizer || ls /usr/local/cuda*/bin/compute-sanitizer 2>/dev/null | tail -1)
if [ -z "$sanitizer" ]; then
    echo "SKIPPED: no compute-sanitizer in PATH or /usr/local/cuda*/bin"
    exit 0
fi

# A few tests a kernel: small ones that have borders, padding, strides and more than one tile.
k=tests/kernels
pytest=("$python" -m pytest -q -p no:cacheprovider
    "$k/test_silu_and_mul.py::test_triton_matches_the_reference[5-100-torch.bfloat16]"
    "$k/test_silu_and_mul.py::test_triton_takes_strided_rows"
    "$k/test_rms_norm.py::test_triton_matches_the_reference[2-896-torch.bfloat16]"
    "$k/test_rms_norm.py::test_triton_takes_strided_rows"
    "$k/test_split_gemm.py"
    "$k/test_qk_norm_rope_store.py::test_triton_matches_the_reference[(14, 2, 64)-torch.bfloat16-True]"
    "$k/test_qk_norm_rope_store.py::test_triton_takes_int32_and_strided_indices"
    "$k/test_sample.py::test_triton_draws_like_the_reference[517-torch.bfloat16]"
    "$k/test_sample.py::test_ids_can_go_into_a_strided_column[sample_triton]"
    "$k/test_paged_attention.py::test_lengths_around_a_tile_match_the_reference"
    "$k/test_paged_attention.py::test_pages_smaller_and_larger_than_a_tile_match_the_reference[16-48]"
    "$k/test_paged_attention.py::test_a_plan_is_reused_after_lengths_shrink"
    "$k/test_paged_prefill.py::test_chunks_after_a_cached_prefix_match_the_reference"
    "$k/test_paged_prefill.py::test_a_sequence_without_queries_is_skipped"
)

captured=tests/quantization/test_fp8_kernels.py::test_many_rows_and_a_narrow_weight_are_two_calls_at_once
more=("$python" -m pytest -q -p no:cacheprovider --maxfail=3 --deselect "$captured"
    -k "1 or special or fused or penalties"
    tests/fused "tests/sampling/test_filters.py::test_special_values_pass_the_filters"
    "tests/sampling/test_filters.py::test_penalties_follow_the_published_formulas" tests/moe/test_kernels.py
    tests/quantization/test_fp8_kernels.py
    tests/quantization/test_fp8_experts.py::test_products_equal_the_references
)

failed=0
# check NAME SECONDS TOOL COMMAND...: run a command under one tool and say how it went.
check() {
    local name=$1 seconds=$2 tool=$3 started=$SECONDS verdict errors
    shift 3
    timeout -k 5 "$seconds" "$sanitizer" --tool "$tool" --error-exitcode 86 \
        --target-processes application-only --print-limit 20 "$@" >"$out/$name.log" 2>&1
    case $? in
        0) verdict=PASSED ;;
        124 | 137) verdict=TIMEOUT ;;
        *) verdict=FAILED failed=1 ;;
    esac
    errors=$(grep -E "ERROR SUMMARY|RACECHECK SUMMARY|Internal Sanitizer Error" "$out/$name.log" | tail -1)
    echo "$verdict $name: $((SECONDS - started)) s; $(grep -E "passed|failed" "$out/$name.log" | tail -1) ${errors#========= }"
}

started=$SECONDS
"${pytest[@]}" >"$out/warm.log" 2>&1
"${more[@]}" >"$out/warm-more.log" 2>&1
echo "without the sanitizer: $((SECONDS - started)) s; $(tail -1 "$out/warm.log")"
"$python" tests/gpu/replay.py >"$out/warm-replay.log" 2>&1
echo "without the sanitizer: replay $(tail -1 "$out/warm-replay.log")"

PYTORCH_NO_CUDA_MEMORY_CACHING=1 check memcheck-more 150 memcheck "${more[@]}"
PYTORCH_NO_CUDA_MEMORY_CACHING=1 check memcheck-kernels 45 memcheck "${pytest[@]}"
check racecheck-kernels 45 racecheck "${pytest[@]}"
check memcheck-replay 40 memcheck "$python" tests/gpu/replay.py
check memcheck-captured 45 memcheck "$python" -m pytest -q -p no:cacheprovider "$captured"
echo "logs: $out"
exit $failed
