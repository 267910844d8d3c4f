#!/bin/bash
# All that two GPUs are needed for: `bash tests/gpu/two_gpus.sh` in the repository's root, about 6.5
# minutes; `bash tests/gpu/two_gpus.sh PART...` runs some of: tests reduce single tp8 tp8n dp8 tp32 dp32 kill.
# NVLink multicast stays off in every process.
export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NVSHMEM_DISABLE_NVLS=1
export PYTHONPATH=. OMP_NUM_THREADS=4 TOKENIZERS_PARALLELISM=false
python=${PYTHON:-python3}
started=$SECONDS
out=${OUT:-$(mktemp -d)}

part() { # name, seconds, command...: prints what matters, keeps all in $out
    local name=$1 limit=$2 begun=$SECONDS
    shift 2
    timeout -k 5 "$limit" "$@" >"$out/$name.log" 2>&1
    local code=$?
    echo "=== $name: exit code $code, $((SECONDS - begun)) s, $((SECONDS - started)) s in all"
    grep -vi "tokenizer\|FutureWarning\|^ *$\|warn(" "$out/$name.log" | cut -c1-220 | tail -"${lines:-12}"
}
tests="$python -m pytest -v --tb=short --no-header -p no:cacheprovider -o faulthandler_timeout=60 tests/gpu/test_tensor_parallel.py"
bench="$python bench.py --engine-options"
half="--input-len 512 --output-len 256"

one_tests() { lines=40 part tests 190 $tests -k "not killed and not ctrl_c and not after_all" --durations=4; }
one_reduce() { lines=45 part reduce 75 $python -m tests.gpu.bench_all_reduce; }
one_single() { # one GPU each, at once
    (CUDA_VISIBLE_DEVICES=1 lines=6 part 32B-tp1 75 $bench max_num_seqs=256 --size 32B $half --runs 2) &
    CUDA_VISIBLE_DEVICES=0 lines=6 part 8B-tp1 75 $bench max_num_seqs=256 --size 8B --runs 2
    wait
}
one_tp8() { lines=24 part 8B-tp2 80 $bench max_num_seqs=256,tensor_parallel_size=2 --size 8B --runs 2 --profile "$out/p8"; }
one_tp8n() { lines=24 part 8B-tp2-nccl 80 $bench max_num_seqs=256,tensor_parallel_size=2,enable_custom_all_reduce=False --size 8B --runs 2 --profile "$out/p8n"; }
one_dp8() { lines=6 part 8B-dp2 75 $bench max_num_seqs=256 --size 8B --num-seqs 512 --runs 2 --data-parallel 2; }
one_tp32() { lines=14 part 32B-tp2 75 $bench max_num_seqs=256,tensor_parallel_size=2 --size 32B $half --runs 2 --profile "$out/p32"; }
one_dp32() { lines=6 part 32B-dp2 75 $bench max_num_seqs=256 --size 32B --num-seqs 512 $half --runs 2 --data-parallel 2; }
one_kill() { lines=40 part kill 150 $tests -s -k "killed or ctrl_c or after_all" --durations=4; }

for name in ${@:-tests reduce single tp8 tp8n dp8 kill tp32 dp32}; do "one_$name"; done
rm -f "$out"/p8/trace.json "$out"/p8n/trace.json "$out"/p32/trace.json
echo "=== all: $((SECONDS - started)) s; logs in $out"
