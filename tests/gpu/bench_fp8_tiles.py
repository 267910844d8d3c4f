"""Which cuts of the fp8 GEMM are fastest: `python -m tests.gpu.bench_fp8_tiles [--blocks]`.

The four products of a layer of Qwen3-8B at few rows, and the activation between two of them. Under
a minute on an H200, most of which compiles. Times are as in bench_quantization; shares cost the
norm behind them more than what is timed here, four bytes a number and share.
"""

import argparse
import itertools
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple
from functools import partial

import torch

from nanovllm.kernels._triton import pdl_options
from nanovllm.quantization.kernels import silu_and_mul
from nanovllm.quantization.kernels.fp8_gemm import (
    Tile,
    fp8_linear_triton,
    share_tile_for,
    tile_for,
)
from nanovllm.quantization.kernels.quantize import (
    QuantTensor,
    empty_quantized,
    quantize,
    quantize_blocks,
)
from tests.gpu.bench_kernels import BANDWIDTH, BF16, graph_us, num_copies
from tests.gpu.bench_quantization import LAYERS, scaled_mm
from tests.gpu.needs_gpu import need_gpus


def cuts(block_m: int, *shapes: tuple[int, int, int, int]) -> list[Tile]:
    """Each shape (columns, K, warps, stages) whole and in shares of K."""
    return [
        Tile(block_m, n, warps, stages, k, splits)
        for (n, k, warps, stages), splits in itertools.product(shapes, (1, 2, 4))
    ]


SMALL = cuts(16, (32, 128, 4, 5), (32, 128, 4, 10), (64, 128, 4, 5), (64, 256, 4, 4))
MIDDLE = cuts(
    64, (32, 128, 4, 8), (64, 128, 4, 5), (64, 256, 4, 3), (128, 128, 4, 4), (128, 256, 8, 3)
)
LARGE = cuts(
    128, (32, 128, 4, 4), (64, 128, 8, 4), (64, 256, 8, 3), (128, 128, 8, 3), (128, 256, 8, 3)
)
# With batches that do not fill their tiles.
SWEEP = {
    4: SMALL, 16: SMALL, 48: MIDDLE, 64: MIDDLE,
    96: [*MIDDLE, *LARGE], 128: [*MIDDLE, *LARGE], 256: [*MIDDLE, *LARGE],
}  # fmt: skip


def sweep(group_size: int | None) -> None:
    """Print the best cuts of each product, the best without shares, today's, and the library's."""
    for layer, (rows, columns) in LAYERS.items():
        weights = []
        for _ in range(num_copies(rows * columns)):
            weight = torch.randn(rows, columns, **BF16)
            weights.append(quantize_blocks(weight) if group_size else quantize(weight, None))
        has_shares = layer in ("o", "down")  # what a norm follows
        now = {n: tile_for(n, rows) for n in SWEEP}
        shares = {n: share_tile_for(n, rows, columns) if has_shares else None for n in SWEEP}
        tiles = [
            tile
            for tile in dict.fromkeys(itertools.chain(*SWEEP.values()))
            if (tile.num_splits == 1 or has_shares) and (tile.block_k == 128 or not group_size)
        ]
        mine = [tile for tile in (*now.values(), *shares.values()) if tile is not None]
        x = quantize(torch.randn(16, columns, **BF16), group_size)
        started = time.perf_counter()
        usable = compile_all(x, weights[0], group_size, list(dict.fromkeys([*tiles, *mine])))
        seconds = time.perf_counter() - started
        print(f"{layer}: compiled {len(usable)} in {seconds:.0f} s", flush=True)
        for num_rows, candidates in SWEEP.items():
            x = quantize(torch.randn(num_rows, columns, **BF16), group_size)
            chosen = [t for t in (now[num_rows], shares[num_rows]) if t is not None]
            times = {
                tile: time_of(x, weights, group_size, tile)
                for tile in dict.fromkeys([*candidates, *chosen])
                if tile in usable
            }
            best = sorted(times, key=lambda tile: times[tile])
            whole = [tile for tile in best if tile.num_splits == 1]
            line = f"  {num_rows:>3} rows, bound {rows * columns / BANDWIDTH * 1e6:.1f}: "
            line += "; ".join(shown(tile, times) for tile in best[:4])
            if has_shares:
                line += " | whole " + "; ".join(shown(tile, times) for tile in whole[:2])
            line += " | now " + "; ".join(shown(tile, times) for tile in chosen)
            if group_size is None:
                us = graph_us([partial(scaled_mm, x, weight) for weight in weights], replays=4)
                line += f" | _scaled_mm {us:.1f}"
            print(line, flush=True)


def time_of(
    x: QuantTensor, weights: Sequence[QuantTensor], group_size: int | None, tile: Tile
) -> float:
    call = partial(
        fp8_linear_triton, bias=None, group_size=group_size, dtype=torch.bfloat16, tile=tile
    )
    return graph_us([partial(call, x, weight) for weight in weights], replays=4)


def shown(tile: Tile, times: dict[Tile, float]) -> str:
    return f"{times.get(tile, float('nan')):.1f} ({','.join(map(str, astuple(tile)))})"


def compile_all(
    x: QuantTensor, weight: QuantTensor, group_size: int | None, tiles: Sequence[Tile]
) -> set[Tile]:
    """Compile in threads; return those that fit into the device."""
    usable = set()

    def first_call(tile: Tile) -> None:
        try:
            fp8_linear_triton(
                x, weight, None, group_size=group_size, dtype=torch.bfloat16, tile=tile
            )
            usable.add(tile)
        except Exception as error:
            print(f"left out {tile}: {str(error)[:80]}")

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(first_call, tiles))
    torch.cuda.synchronize()
    return usable


def sweep_activation(size: int = 12288) -> None:
    """Print times of the activation of whole rows by chunk and warps."""
    kernel = silu_and_mul._silu_and_mul_row_kernel
    for num_rows in (16, 64, 256, 4096):
        copies = num_copies(4 * num_rows * size)
        inputs = [torch.randn(num_rows, 2 * size, **BF16) for _ in range(copies)]
        out = empty_quantized(num_rows, size, None, inputs[0].device)

        def launch(gate_up: torch.Tensor, chunk: int, warps: int, out: QuantTensor = out) -> None:
            kernel[(len(gate_up),)](
                gate_up, out.data, out.scale, gate_up.stride(0), SIZE=size, CHUNK=chunk,
                num_warps=warps, **pdl_options(gate_up),
            )  # fmt: skip

        times = {
            cut: graph_us([partial(launch, x, *cut) for x in inputs])
            for cut in ((4096, 16), (4096, 32), (2048, 8), (2048, 16), (4096, 8), (8192, 32))
        }
        line = "; ".join(f"{us:.2f} {cut}" for cut, us in times.items())
        print(f"activation, {num_rows} rows, us (chunk, warps): {line}", flush=True)


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--blocks", action="store_true", help="weights with a scale a block")
    arguments = parser.parse_args()
    need_gpus()
    torch.manual_seed(0)
    print(torch.cuda.get_device_name(), torch.__version__)
    sweep_activation()
    sweep(128 if arguments.blocks else None)


if __name__ == "__main__":
    main()
