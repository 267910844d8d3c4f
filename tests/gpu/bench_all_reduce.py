"""Time all-reduces of decode steps between GPUs of one host, in a CUDA graph.

python -m tests.gpu.bench_all_reduce            # 2 GPUs; --ranks 4 for more

Columns, microseconds: NCCL on its own stream, and on the caller's; torch's symmetric-memory
one-shot and two-shot (without multicast), the copy into their buffer included; ours with so many
programs. Every result is checked against the sum first.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import tempfile
import threading
from collections.abc import Callable

import torch
import torch.distributed as dist

from nanovllm.collectives.peer_memory import PeerMemory
from nanovllm.utils.parallel import ParallelContext, join_group
from tests.gpu.needs_gpu import need_gpus

ROWS = (1, 8, 32, 64, 128, 256, 512)
HIDDEN = (1024, 2048, 4096, 5120)
NUM_OPS, NUM_REPLAYS = 20, 10
Op = Callable[[torch.Tensor], torch.Tensor]


def torch_symmetric(rank: int, size: int, device: torch.device, path: str) -> dict[str, Op]:
    """torch's own all-reduces over a buffer of theirs."""
    import torch.distributed._symmetric_memory  # registers the operators
    from torch._C import _distributed_c10d as c10d

    os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"
    name = "bench-symmetric"
    group = c10d.ProcessGroup(dist.FileStore(path, size), rank, size)
    c10d._register_process_group(name, group)
    torch_symmetric.group = group  # type: ignore[attr-defined]  # the registry's hold is weak
    buffer = c10d._SymmetricMemory.empty_strided_p2p((max(ROWS) * max(HIDDEN),), (1,),
                                                     torch.bfloat16, device)  # fmt: skip
    c10d._SymmetricMemory.rendezvous(buffer, name)

    def one_shot(x: torch.Tensor) -> torch.Tensor:
        part = buffer[: x.numel()]
        part.copy_(x.view(-1))
        return torch.ops.symm_mem.one_shot_all_reduce(part, "sum", name).view(x.shape)

    def two_shot(x: torch.Tensor) -> torch.Tensor:
        part = buffer[: x.numel()]
        part.copy_(x.view(-1))
        return torch.ops.symm_mem.two_shot_all_reduce_(part, "sum", name).view(x.shape)

    return {"one-shot": one_shot, "two-shot": two_shot}


def nccl_on_this_stream(parallel: ParallelContext) -> Op:
    options = dist.AllreduceOptions()
    options.asyncOp = False

    def run(x: torch.Tensor) -> torch.Tensor:
        work = parallel.group.allreduce([x], options)
        if work is not None:
            work.wait()
        return x

    return run


def nccl(parallel: ParallelContext) -> Op:
    def run(x: torch.Tensor) -> torch.Tensor:
        parallel.group.allreduce([x]).wait()
        return x

    return run


def microseconds(op: Op, x: torch.Tensor) -> float:
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        op(x)
        torch.cuda.synchronize()
        graph.capture_begin(capture_error_mode="thread_local")
        for _ in range(NUM_OPS):
            op(x)
        graph.capture_end()
        graph.replay()
        started, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        started.record()
        for _ in range(NUM_REPLAYS):
            graph.replay()
        ended.record()
    torch.cuda.synchronize()
    return 1e3 * started.elapsed_time(ended) / (NUM_OPS * NUM_REPLAYS)


def check(op: Op, rank: int, size: int, device: torch.device) -> str:
    """Sums of numbers that bfloat16 holds exactly."""
    for shape in ((1, 1024), (7, 4096), (512, 5120)):
        generator = torch.Generator().manual_seed(shape[0])
        parts = [torch.randint(-40, 40, shape, generator=generator) for _ in range(size)]
        x = parts[rank].to(device, torch.bfloat16)
        for _ in range(3):
            result = op(x.clone())
            expected = sum(parts).to(device, torch.bfloat16)  # type: ignore[union-attr]
            if not torch.equal(result, expected):
                return f"WRONG at {shape}"
    return ""


def run_rank(rank: int, size: int, directory: str) -> None:
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)  # kernels start on the current one, whatever their arguments
    parallel = join_group(f"{directory}/store", rank, size, device, use_peers=False)
    ops = {"nccl": nccl(parallel), "nccl-same": nccl_on_this_stream(parallel)}
    try:
        ops |= torch_symmetric(rank, size, device, f"{directory}/torch")
    except Exception as error:
        print(f"rank {rank}: no torch symmetric memory: {type(error).__name__}: {error}")
    for num_programs in (16, 32, 64, 128):
        path = f"{directory}/ours-{num_programs}"
        try:
            memory = PeerMemory(path, rank, size, device, num_programs)
            ops[f"ours-{num_programs}"] = memory.all_reduce
        except Exception as error:
            print(f"rank {rank}: no peer memory: {type(error).__name__}: {error}", flush=True)
            break
    for name, op in list(ops.items()):
        try:
            fault = check(op, rank, size, device)
        except Exception as error:
            fault = f"{type(error).__name__}: {error}"
        if fault:
            print(f"rank {rank}: {name}: {fault}"[:600], flush=True)
            del ops[name]
    if rank == 0:
        print("rows hidden    KiB " + " ".join(f"{name:>9}" for name in ops), flush=True)
    for hidden in HIDDEN:
        for rows in ROWS:
            x = torch.zeros(rows, hidden, dtype=torch.bfloat16, device=device)
            times = [microseconds(op, x) for op in ops.values()]
            if rank == 0:
                line = " ".join(f"{time:9.1f}" for time in times)
                print(f"{rows:4} {hidden:6} {x.nbytes / 1024:6.0f} {line}", flush=True)
    sys.stdout.flush()
    # Graphs may still hold the communicator: no orderly end is needed here.
    threading.Timer(0.5, os._exit, (0,)).start()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--ranks", type=int, default=2)
    size = parser.parse_args().ranks
    need_gpus(size)
    with tempfile.TemporaryDirectory() as directory:
        context = multiprocessing.get_context("spawn")
        ranks = [context.Process(target=run_rank, args=(r, size, directory)) for r in range(size)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()


if __name__ == "__main__":
    main()
