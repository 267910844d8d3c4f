"""How long the search for NaN and infinities takes in a model that was just loaded.

`python -m tests.gpu.bench_finite` (10 s, 16 GB): tensors as Qwen3-8B has them, in bfloat16 and with
fp8 linear layers. Compare it with the seconds that the log line "Loaded 16.38 GB" says. The first
call of a process, which is the one that counts, also loads the kernels.
"""

from __future__ import annotations

import time

import torch

from nanovllm.utils.finite import NamedTensor, check_finite
from tests.gpu.needs_gpu import need_gpus

HIDDEN, INNER, VOCAB, NUM_LAYERS = 4096, 12288, 151936, 36


def tensors(linear: torch.dtype) -> list[NamedTensor]:
    shapes = [(6144, HIDDEN), (HIDDEN, HIDDEN), (2 * INNER, HIDDEN), (HIDDEN, INNER)]
    table = {"dtype": torch.bfloat16, "device": "cuda"}
    found = [(f"table{i}", torch.ones(VOCAB, HIDDEN, **table)) for i in range(2)]
    for layer in range(NUM_LAYERS):
        for number, shape in enumerate(shapes):
            weight = torch.ones(shape, **table).to(linear)
            found.append((f"{layer}.{number}", weight))
            if linear is not torch.bfloat16:
                found.append((f"{layer}.{number}.scale", torch.ones(shape[0], 1, device="cuda")))
        found += [(f"{layer}.norm{i}", torch.ones(HIDDEN, device="cuda")) for i in range(4)]
    return found


def main() -> None:
    need_gpus()
    for linear in (torch.bfloat16, torch.float8_e4m3fn):
        weights = tensors(linear)
        num_bytes = sum(tensor.nbytes for _, tensor in weights)
        times = []
        for _ in range(3):
            torch.cuda.synchronize()
            started = time.perf_counter()
            check_finite(weights, torch.float32)
            times.append(time.perf_counter() - started)
        shown = ", ".join(f"{1000 * seconds:.1f}" for seconds in times)
        print(f"{linear}: {num_bytes / 1e9:.1f} GB in {shown} ms (first, second, third call)")
        weights[-5][1].view(torch.uint8).view(-1)[-4:] = 0xFF
        try:
            check_finite(weights, torch.float32)
        except ValueError as error:
            print(" ", error)
        del weights


if __name__ == "__main__":
    main()
