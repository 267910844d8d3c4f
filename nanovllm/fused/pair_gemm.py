"""What the fused decode GEMMs share: products with two blocks of weight rows, fetched early.

Both kernels need two tiles of the same columns side by side: the halves of a head that rotate into
each other, and gate and up.
"""

from nanovllm.kernels._triton import prefetch_l2, tl, triton


@triton.jit
def pair_gemm(
    x, x_stride, weight, rows, first, second, num_rows, WIDTH: tl.constexpr,
    IN_FEATURES: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
    PREFETCH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Return `x @ weight[first : first + WIDTH].T` and the same from `second`, rounded as stored.

    Each is [BLOCK_M, WIDTH] float32. Waits for the kernel before; weights are fetched before that.
    """
    lanes = tl.arange(0, 2 * WIDTH)
    columns = tl.where(lanes < WIDTH, first + lanes, second - WIDTH + lanes)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        if PREFETCH:
            # Programs of one weight block share the work: they are neighbours in the grid.
            lines = weight + columns[:, None] * IN_FEATURES
            lines += tl.arange(0, BLOCK_K // 64)[None, :] * 64
            step = tl.num_programs(0) * BLOCK_K
            for offset in range(tl.program_id(0) * BLOCK_K, IN_FEATURES, step):
                prefetch_l2(lines + offset)
        # Not inside the loop, whose pipelining would move loads above it.
        tl.extra.cuda.gdc_wait()
    features = tl.arange(0, BLOCK_K)
    # Masked, not clamped to the last row: hundreds of programs that read one line wait for it.
    is_row = rows[:, None] < num_rows
    x_pointers = x + rows[:, None] * x_stride + features[None, :]
    weight_pointers = weight + columns[None, :] * IN_FEATURES + features[:, None]
    sums = tl.zeros([BLOCK_M, 2 * WIDTH], tl.float32)
    for _ in range(0, IN_FEATURES, BLOCK_K):
        sums = tl.dot(tl.load(x_pointers, mask=is_row, other=0.0), tl.load(weight_pointers), sums)
        x_pointers += BLOCK_K
        weight_pointers += BLOCK_K
    sums = sums.to(x.dtype.element_ty).to(tl.float32)
    return tl.split(tl.permute(tl.reshape(sums, [BLOCK_M, 2, WIDTH]), [0, 2, 1]))
