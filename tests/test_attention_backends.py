"""Attention backends: each against plain softmax attention, and the choice of one."""

import itertools
import logging
import os
import sys

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from nanovllm import SamplingParams
from nanovllm.attention.backend import get_backend
from nanovllm.kernels._triton import HAS_TRITON
from nanovllm.utils.context import ForwardContext

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
CPU = torch.device("cpu")
BACKENDS = ["sdpa"]
if HAS_TRITON and (DEVICE.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1"):
    BACKENDS.append("triton")
if DEVICE.type == "cuda":
    BACKENDS.append("flash_attn")
NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE = 4, 2, 64, 16
DTYPE = torch.float16 if DEVICE.type == "cuda" else torch.float32
TOLERANCE = 3e-3 if DEVICE.type == "cuda" else 2e-5


class Step:
    """One step over a cache of NaN in which only the sequences' tokens are written."""

    def __init__(self, chunks, *, is_decode=False, block_size=BLOCK_SIZE, is_fp8=False):
        self.chunks, self.block_size = chunks, block_size
        generator = torch.Generator().manual_seed(0)

        def random(*shape):
            return torch.randn(*shape, generator=generator).to(DTYPE).to(DEVICE)

        num_blocks = [-(-seq_len // block_size) for _, seq_len in chunks]
        shape = (2, 1, sum(num_blocks) + 1, block_size, NUM_KV_HEADS, HEAD_DIM)
        kv_cache = torch.full(shape, float("nan"), dtype=DTYPE, device=DEVICE)
        rows = torch.full((len(chunks) + 1, 2 + max(num_blocks)), -1, dtype=torch.int32)
        ids = torch.randperm(sum(num_blocks) + 1, generator=generator).tolist()
        self.keys, self.values, fresh = [], [], []
        self.kv_scale = torch.tensor([[2.0**-5, 2.0**-6], [2.0**-6, 2.0**-5]], device=DEVICE)
        for row, (num_queries, seq_len) in enumerate(chunks):
            rows[row, 1] = seq_len
            pair = random(2, seq_len, NUM_KV_HEADS, HEAD_DIM)
            for index in range(num_blocks[row]):
                rows[row, 2 + index] = block = ids.pop()
                part = pair[:, index * block_size : (index + 1) * block_size]
                kv_cache[:, 0, block, : part.shape[1]] = part
            if is_fp8:  # what is attended to, where also the fresh ones are not rounded
                scale = self.kv_scale[:, None, :, None]
                pair = (pair.float() / scale).to(torch.float8_e4m3fn).float() * scale
            self.keys.append(pair[0])
            self.values.append(pair[1])
            fresh.append(pair[:, seq_len - num_queries :] if seq_len else random(2, 1, 2, HEAD_DIM))
        # Rows of q, k, v are strided, as they are views of one projection.
        qkv = random(sum(c for c, _ in chunks), NUM_HEADS + 2 * NUM_KV_HEADS, HEAD_DIM)
        self.q, k, v = qkv.split([NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS], dim=1)
        k.copy_(torch.cat([pair[0] for pair in fresh]))
        v.copy_(torch.cat([pair[1] for pair in fresh]))
        if is_fp8:
            scale = self.kv_scale[:, None, None, None, :, None]
            kv_cache = (kv_cache.float() / scale).to(torch.float8_e4m3fn)
        else:
            self.kv_scale = None
        self.tensors = (self.q, k, v, kv_cache[0, 0], kv_cache[1, 0])
        rows = rows.to(DEVICE)
        fields = {
            "kv_cache": kv_cache,
            "is_decode": is_decode,
            "slot_mapping": torch.zeros(len(qkv), dtype=torch.int64, device=DEVICE),
            "block_tables": rows[: len(chunks), 2:],
            "seq_lens": rows[: len(chunks), 1],
        }
        if not is_decode:
            edges_q = [0, *itertools.accumulate(count for count, _ in chunks)]
            edges_k = [0, *itertools.accumulate(seq_len for _, seq_len in chunks)]
            fields |= {
                "cu_seqlens_q": torch.tensor(edges_q, dtype=torch.int32, device=DEVICE),
                "cu_seqlens_k": torch.tensor(edges_k, dtype=torch.int32, device=DEVICE),
                "max_seqlen_q": max(count for count, _ in chunks),
                "max_seqlen_k": max(seq_len for _, seq_len in chunks),
                "has_cached_prefix": any(count != seq_len for count, seq_len in chunks),
                "host_seqlens": tuple(chunks),
            }
        self.fields = fields

    def run(self, name):
        if name == "flash_attn":
            pytest.importorskip("flash_attn")
        backend = get_backend(
            name, device=DEVICE, dtype=DTYPE, head_dim=HEAD_DIM, block_size=self.block_size
        )(
            num_heads=NUM_HEADS,
            num_kv_heads=NUM_KV_HEADS,
            head_dim=HEAD_DIM,
            max_num_seqs=len(self.chunks) + 1,
            dtype=self.tensors[3].dtype,
            device=DEVICE,
        )
        metadata = backend.prepare(ForwardContext(**self.fields))
        context = ForwardContext(**self.fields, attn_metadata=metadata)
        return backend.forward(*self.tensors, context, self.kv_scale)

    def expected(self):
        outs, begin = [], 0
        for (num_queries, seq_len), keys, values in zip(
            self.chunks, self.keys, self.values, strict=True
        ):
            q = self.q[begin : begin + num_queries].float()
            begin += num_queries
            if seq_len == 0:
                outs.append(torch.zeros_like(q))
                continue
            keys, values = (x.to(q).repeat_interleave(2, dim=1) for x in (keys, values))
            scores = torch.einsum("qhd,khd->hqk", q, keys) * HEAD_DIM**-0.5
            mask = torch.ones(num_queries, seq_len, dtype=torch.bool, device=DEVICE)
            mask = mask.tril(seq_len - num_queries)
            weights = scores.masked_fill(~mask, float("-inf")).softmax(-1)
            outs.append(torch.einsum("hqk,khd->qhd", weights, values))
        return torch.cat(outs).to(DTYPE)

    def check(self, name):
        out = self.run(name)
        assert out.is_contiguous()
        tolerance = TOLERANCE if self.kv_scale is None else 3e-3  # Triton's products are float16's
        torch.testing.assert_close(out, self.expected(), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("name", BACKENDS)
def test_prompts_with_nothing_cached(name):
    Step([(1, 1), (16, 16), (37, 37)]).check(name)


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("block_size", [16, 256])
def test_chunks_attend_to_their_cached_prefix(name, block_size):
    Step([(5, 21), (17, 17), (1, 48), (20, 70)], block_size=block_size).check(name)


@pytest.mark.parametrize("name", ["sdpa", *BACKENDS[1:2]])
def test_fp8_is_read_from_the_cache_also_where_k_and_v_are_fresh(name):
    Step([(1, 1), (16, 16), (37, 37)], is_fp8=True).check(name)
    Step([(5, 21), (17, 17), (1, 48), (20, 70)], is_fp8=True).check(name)
    Step([(1, 40), (1, 0), (1, 1), (1, 0), (1, 150)], is_decode=True, is_fp8=True).check(name)


@pytest.mark.parametrize("name", BACKENDS)
def test_prefill_runs_on_a_cache_of_one_block(name):
    """As the warm-up does: all tables point at the only block there is, nothing is stored."""
    step = Step([(40, 40), (3, 3)])
    step.fields["block_tables"].zero_()
    caches = (torch.zeros(1, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM, dtype=DTYPE, device=DEVICE),) * 2
    step.tensors = (*step.tensors[:3], *caches)
    assert step.run(name).isfinite().all()


@pytest.mark.parametrize("name", BACKENDS)
def test_decode_with_padding_rows_gives_zeros_for_them(name):
    """Their table holds -1 and the cache NaN: nothing of it may be read."""
    Step([(1, 40), (1, 0), (1, 1), (1, 0), (1, 150)], is_decode=True).check(name)


class Launches(TorchDispatchMode):
    """Lists torch's operators, and what else is noted, in the order of their launch."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.skipif("triton" not in BACKENDS, reason="needs Triton, on a CPU its interpreter")
def test_an_ordinary_kernel_stands_between_the_plan_and_attention(
    make_llm, tiny_model, monkeypatch
):
    """Programs of attention read the work list before they wait for the kernel before theirs.

    Kernels launched for programmatic dependence may all begin before the first of them ends; those
    of torch, as the embedding's, neither begin before others have ended nor let others overtake.
    """
    options = {"device": str(DEVICE), "attention_backend": "triton", "enforce_eager": True}
    llm = make_llm(tiny_model, dtype="float32", num_kvcache_blocks=64, **options)
    backend = type(llm._engine._executor._runner._backend)
    launches = Launches()

    def noted(name, is_decode):
        method = getattr(backend, name)

        def call(*args):
            result = method(*args)
            launches.names += [name] * is_decode(args)
            return result

        monkeypatch.setattr(backend, name, call)

    noted("prepare", lambda args: args[1].is_decode)
    noted("forward", lambda args: args[6].is_decode)
    with launches:
        llm.generate([[5, 6, 7]], SamplingParams(temperature=0, max_tokens=3), use_tqdm=False)
    after_plan = launches.names[launches.names.index("prepare") :]
    assert "embedding" in after_plan[: after_plan.index("forward")]


def test_sdpa_decode_of_padding_rows_only_gives_zeros():
    Step([(1, 0), (1, 0)], is_decode=True).check("sdpa")


def test_sdpa_decode_in_slices_matches_one_slice(monkeypatch):
    monkeypatch.setattr("nanovllm.attention.sdpa._MAX_GATHERED_TOKENS", 100)
    Step([(1, 40), (1, 0), (1, 1), (1, 90), (1, 0), (1, 3)], is_decode=True).check("sdpa")


def choose(name, *, device=CPU, dtype=torch.bfloat16, head_dim=128, block_size=64, is_fp8=False):
    return get_backend(
        name, device=device, dtype=dtype, head_dim=head_dim, block_size=block_size, is_fp8=is_fp8
    ).name


def test_auto_on_a_cpu_is_sdpa_and_says_so(caplog):
    with caplog.at_level(logging.INFO, logger="nanovllm.attention.backend"):
        assert choose("auto") == "sdpa"
    assert "Attention backend: sdpa" in caplog.text


@pytest.mark.skipif(not HAS_TRITON, reason="needs Triton")
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, "triton"),
        ({"head_dim": 256}, "triton"),
        ({"dtype": torch.float32}, "triton"),
        ({"head_dim": 80}, "sdpa"),
        ({"head_dim": 16}, "triton"),
        ({"head_dim": 16, "is_fp8": True}, "sdpa"),  # the decode kernel would not compile
        ({"head_dim": 32, "is_fp8": True}, "triton"),
    ],
    ids=str,
)
def test_auto_on_cuda_is_triton_where_it_fits(options, expected):
    assert choose("auto", device=torch.device("cuda"), **options) == expected


def test_auto_on_cuda_without_triton_is_sdpa(monkeypatch):
    monkeypatch.setattr("nanovllm.attention.backend.HAS_TRITON", False)
    assert choose("auto", device=torch.device("cuda")) == "sdpa"


def test_unknown_backend_lists_the_choices():
    with pytest.raises(ValueError, match="'auto' or one of flash_attn, triton, sdpa, got 'flash'"):
        choose("flash")


@pytest.mark.parametrize("name", ["triton", "flash_attn"])
def test_a_cuda_backend_on_a_cpu_is_refused(name, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ValueError, match=f"{name}' needs a CUDA device, got 'cpu'.*'sdpa'"):
        choose(name)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"head_dim": 80}, "takes head_dim 16, 32, 64, 128, 256, got 80"),
        ({"dtype": torch.float64}, "takes dtype .*, got torch.float64"),
        ({"block_size": 24}, "multiple of 16, got 24"),
        ({"head_dim": 16, "is_fp8": True}, "takes head_dim 32 or more with a cache in fp8, got 16"),
    ],
    ids=str,
)
def test_an_unfit_model_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        choose("triton", device=torch.device("cuda"), **options)


def test_a_missing_package_is_named_with_the_way_out(monkeypatch):
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    monkeypatch.delitem(sys.modules, "nanovllm.attention.flash_attn", raising=False)
    monkeypatch.setattr("nanovllm.attention.backend.HAS_TRITON", True)
    with pytest.raises(ImportError, match=r"needs flash_attn.*pip install flash-attn`"):
        choose("flash_attn", device=torch.device("cuda"))
    monkeypatch.setattr("nanovllm.attention.backend.HAS_TRITON", False)
    with pytest.raises(ImportError, match=r"needs triton.*pip install triton`"):
        choose("triton", device=torch.device("cuda"))
