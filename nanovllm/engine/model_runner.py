"""Builds the model, owns the KV cache and the device rows, and executes one step after another.

The same code runs on every tensor-parallel rank and on CPU and CUDA. It launches work and returns;
`StepHandle.wait` is the only place that waits for the device.
"""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch

from nanovllm.attention.backend import get_backend
from nanovllm.config import Config
from nanovllm.engine.cuda_graph import DecodeGraphs
from nanovllm.engine.kv_cache import (
    KVCacheShape,
    MemoryUse,
    num_blocks_on_cpu,
    num_blocks_on_cuda,
    sampling_bytes,
)
from nanovllm.engine.model_inputs import (
    PrefillColumns,
    RowMirror,
    Uploader,
    blank_prefill,
    prefill_columns,
    prefill_context,
)
from nanovllm.engine.step import Column, SchedulerOutput, row_width
from nanovllm.engine.step_handle import OutputBuffers, StepHandle, StepLogprobs, TokenLogprobs
from nanovllm.engine.warmup import KERNEL_BATCHES, LONG_PROMPT, largest_prompts, run_in_threads
from nanovllm.kernels.decode_inputs import decode_inputs
from nanovllm.layers.placement import Placement
from nanovllm.layers.sampler import SamplingInputs, draw
from nanovllm.models.model_config import ModelConfig
from nanovllm.models.registry import get_model_class
from nanovllm.models.weights import free_storage, restore_storage
from nanovllm.utils.context import ForwardContext
from nanovllm.utils.device import device_memory
from nanovllm.utils.loader import load_model

logger = logging.getLogger(__name__)

# What temperature alone does not need: loaded by name, since the core works without it.
_REDRAW = "nanovllm.sampling.redraw"
_CALIBRATION = "nanovllm.kv_calibration"  # for kv_cache_dtype="fp8" only, likewise


class ModelRunner:
    """Owns the model, the KV cache and the device rows of one rank."""

    def __init__(
        self,
        config: Config,
        model_config: ModelConfig,
        model_dir: Path,
        place: Placement,
        *,
        max_model_len: int,
    ) -> None:
        device, dtype, tp_size = place.device, place.dtype, place.parallel.tp_size
        self._config = config
        self._model_config = model_config
        self._parallel = place.parallel
        self._device = device
        self._is_cuda = device.type == "cuda"
        self._free_at_start = device_memory(device)[0] if self._is_cuda else 0
        self._block_size = config.kvcache_block_size
        self._max_num_blocks_per_seq = -(-max_model_len // self._block_size)
        self._max_model_len = max_model_len
        num_kv_heads = max(1, model_config.num_kv_heads // tp_size)
        is_fp8 = config.kv_cache_dtype == "fp8"
        dims = (model_config.num_layers, self._block_size, num_kv_heads, model_config.head_dim)
        self._kv_shape = KVCacheShape(*dims, torch.float8_e4m3fn if is_fp8 else dtype)
        scales_shape = (model_config.num_layers, 2, num_kv_heads)
        self._kv_scales = torch.ones(scales_shape, device=device) if is_fp8 else None
        backend_class = get_backend(
            config.attention_backend,
            device=device,
            dtype=dtype,
            head_dim=model_config.head_dim,
            block_size=self._block_size,
            is_fp8=is_fp8,
        )
        self._backend = backend_class(
            num_heads=model_config.num_heads // tp_size,
            num_kv_heads=num_kv_heads,
            head_dim=model_config.head_dim,
            max_num_seqs=config.max_num_seqs,
            dtype=self._kv_shape.dtype,
            device=device,
        )
        self._can_capture = self._is_cuda and self._backend.is_capturable
        model_class = get_model_class(model_config.architecture, model_config.quantization)
        self._model = model_class(model_config, place, self._backend, max_model_len=max_model_len)
        self._model_dir = model_dir
        self._load_weights()
        self._make_rows()
        # One block for the warm-up to read, until `init_kv_cache`.
        self._kv_cache = self._kv_shape.allocate(1, device)
        self._graphs: DecodeGraphs | None = None

    # ---- start-up

    def _load_weights(self) -> None:
        started = time.perf_counter()
        if self._config.load_format == "dummy":
            self._model.init_dummy_weights(self._config.seed)
        else:
            load_model(self._model, self._model_dir, lora=self._config.lora, device=self._device)
        logger.info("Model ready in %.2f s", time.perf_counter() - started)

    def _make_rows(self) -> None:
        num_rows, device = self._config.max_num_seqs, self._device
        width = row_width(self._max_num_blocks_per_seq)
        # The last row is no sequence: its first field is the number of rows that decode.
        self._rows = torch.zeros((num_rows + 1, width), dtype=torch.int32, device=device)
        self._num_active = self._rows[num_rows, :1]
        self._active_cell, self._host_num_active = num_rows * width, 0
        self._mirror = RowMirror(num_rows, width)
        self._uploader = Uploader(device)
        self._output_buffers = OutputBuffers(num_rows, device)
        self._token_ids = torch.zeros(num_rows, dtype=torch.int32, device=device)
        self._redrawer: Any = None  # see `_redrawer_for`
        self._every_row = np.arange(num_rows, dtype=np.int32)
        head = self._model.lm_head.weight
        self._logits = torch.empty((num_rows, len(head)), dtype=head.dtype, device=device)

    @torch.inference_mode()
    def init_kv_cache(self) -> int:
        """Allocate the KV cache; return its number of blocks, the same on every rank."""
        if self._can_capture:
            self._compile_kernels()
        num_blocks = self._config.num_kvcache_blocks
        if num_blocks is None:
            num_blocks = self._measured_num_blocks()
        self._num_blocks = self._parallel.min_int(num_blocks, self._device)
        self._kv_cache = self._kv_shape.allocate(self._num_blocks, self._device)
        self.make_ready()
        return self._num_blocks

    @torch.inference_mode()
    def calibrate(self) -> None:
        """Fit the scales of a cache in fp8 to the weights as they are now, in place."""
        if self._kv_scales is not None:
            import_module(_CALIBRATION).calibrate(
                self._kv_scales, self._kv_shape, self._model, self._backend, self._max_model_len
            )

    @torch.inference_mode()
    def make_ready(self) -> None:
        """Do what follows when there is a cache and its model has weights; ranks do it together."""
        self.calibrate()
        if self._can_capture and not self._config.enforce_eager:
            num_rows = self._config.max_num_seqs
            self._graphs = DecodeGraphs(max_num_seqs=num_rows, device=self._device)
            # The largest first: smaller ones then fit into the pool that it made.
            self._capture(num_rows)

    # ---- memory lent, weights replaced

    def check_weights(self, weights: list[tuple[str, torch.Tensor]]) -> None:
        """Raise if `load_weights` would; nothing is changed."""
        self._model.check_weights(weights)

    def load_weights(self, weights: list[tuple[str, torch.Tensor]]) -> None:
        """Replace some or all weights in place; graphs stay valid."""
        self._model.load_weights(weights, partial=True)

    def sleep(self, level: int) -> None:
        """Free the KV cache and the graphs that know its address; at level 2 the weights too."""
        self._graphs = None
        if self._redrawer is not None:
            self._redrawer.forget()
        self._kv_cache = self._kv_shape.allocate(0, self._device)
        if level == 2:
            free_storage(self._model)
        self._give_back_memory()

    @torch.inference_mode()
    def wake_up(self) -> None:
        """Allocate what `sleep` freed, reading weights again; `make_ready` is to follow."""
        if restore_storage(self._model):
            self._load_weights()
        self._kv_cache = self._kv_shape.allocate(self._num_blocks, self._device)

    def _give_back_memory(self) -> None:
        if self._is_cuda:
            torch.cuda.synchronize(self._device)
            torch.cuda.empty_cache()

    def _measured_num_blocks(self) -> int:
        if not self._is_cuda:
            num_useful = self._config.max_num_seqs * self._max_num_blocks_per_seq
            return num_blocks_on_cpu(self._config.cpu_kvcache_space_gib, self._kv_shape, num_useful)
        weights = torch.cuda.memory_allocated(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        # Some of it is taken only when a row asks for penalties, but there must be room.
        num_bytes = sampling_bytes(self._config.max_num_seqs, self._model_config.vocab_size)
        reserved = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        max_len = self._max_num_blocks_per_seq * self._block_size
        largest = (self._config.max_num_batched_tokens, self._config.max_num_seqs, max_len)
        self._run_blank_prefills(largest_prompts(*largest))
        del reserved
        torch.cuda.synchronize(self._device)
        activations = torch.cuda.max_memory_allocated(self._device) - weights
        torch.cuda.empty_cache()
        free_bytes, total_bytes = device_memory(self._device)
        memory = MemoryUse(total_bytes, free_bytes, self._free_at_start, weights, activations)
        return num_blocks_on_cuda(memory, self._config.gpu_memory_utilization, self._kv_shape)

    @torch.inference_mode()
    def _run_blank_prefills(self, *prompts: np.ndarray) -> None:
        for lengths in prompts:
            columns = blank_prefill(lengths)
            self._prefill(columns, self._uploader.upload(columns.arrays()))

    def _compile_kernels(self) -> None:
        """Launch every kernel variant of decode and prefill once; with no live row nothing changes.

        With kernels that were compiled before it takes some tens of milliseconds.
        """
        sizes = [size for size in KERNEL_BATCHES if size < self._config.max_num_seqs]
        jobs = [partial(self._decode_step, size) for size in (*sizes, self._config.max_num_seqs)]
        longest = min(LONG_PROMPT, self._config.max_num_batched_tokens, self._max_model_len)
        prompts = [np.full(1, length, dtype=np.int32) for length in (1, longest)]
        jobs += [partial(self._run_blank_prefills, *prompts), partial(self.calibrate)]
        # Collectives of several ranks must be called in one order.
        run_in_threads(jobs, self._device, len(jobs) if self._parallel.tp_size == 1 else 1)

    # ---- steps

    @torch.inference_mode()
    def execute(self, output: SchedulerOutput) -> StepHandle:
        """Launch a step: change the rows, compute, draw. Does not wait for the device."""
        num_rows = output.num_decode_rows
        if num_rows and self._graphs is not None and not self._graphs.has(num_rows):
            self._capture(num_rows)
        cells = output.cells
        if num_rows and num_rows != self._host_num_active:
            active = np.array([[self._active_cell, num_rows]], dtype=np.int32)
            cells = np.concatenate([cells, active])
        self._mirror.apply(output.moves, output.cells)
        arrays = [output.moves, cells]
        columns = None
        if output.prefill is not None:
            columns = prefill_columns(output.prefill, self._mirror.block_tables, self._block_size)
            arrays += columns.arrays()
        tensors = self._uploader.upload(arrays) if any(a.size for a in arrays) else []
        if tensors:
            self._apply_changes(tensors[0], tensors[1])
        if num_rows:
            # Not before: after a fault the host would believe what no device was told.
            self._host_num_active = num_rows
        sampled_rows = self._every_row[:num_rows] if columns is None else columns.sampled_rows
        plan, redrawer = None, self._redrawer_for(output)
        if redrawer is not None:
            features = self._mirror.features(sampled_rows)
            plan = redrawer.begin_step(output, sampled_rows, features)
        of_prompts: list[TokenLogprobs] = []
        if columns is not None:
            assert output.prefill is not None
            num_top = int(output.prefill.max_prompt_logprobs[0])
            token_ids, of_prompts = self._prefill(columns, tensors[2:], num_top=num_top)
        else:
            token_ids = self._decode(num_rows)
        logprobs = StepLogprobs(prompt=of_prompts)
        if plan is not None:
            logits = self._logits[: len(token_ids)]
            redrawn = redrawer.redraw(plan, output, logits, self._rows, token_ids)
            logprobs = replace(redrawn, prompt=of_prompts)
        return self._output_buffers.send(token_ids, logprobs)

    def _redrawer_for(self, output: SchedulerOutput) -> Any:
        """The Redrawer, or None until a record asks for it; from then on it follows them all."""
        if self._redrawer is None and output.needs_redrawer:
            sizes = (self._config.max_num_seqs, self._model_config.vocab_size)
            self._redrawer = import_module(_REDRAW).Redrawer(
                self._model, *sizes, self._device, logprobs_mode=self._config.logprobs_mode
            )
        return self._redrawer

    def _capture(self, num_rows: int) -> None:
        assert self._graphs is not None
        # The warm-up before a capture runs the step for real: with no live row nothing is stored,
        # and the rows, of which it overwrites the last tokens, are put back.
        rows = self._rows.clone()
        self._num_active.zero_()
        try:
            self._graphs.capture(num_rows, self._decode_step)
        finally:
            self._rows.copy_(rows)

    def _apply_changes(self, moves: torch.Tensor, cells: torch.Tensor) -> None:
        """Copy moved rows, all read before any is written, then set single fields."""
        if moves.numel():
            sources, targets = moves.long().unbind(1)
            self._rows.index_copy_(0, targets, self._rows.index_select(0, sources))
        if cells.numel():
            self._rows.view(-1).scatter_(0, cells[:, 0].long(), cells[:, 1])

    def _prefill(
        self,
        columns: PrefillColumns[np.ndarray],
        tensors: list[torch.Tensor],
        *,
        num_top: int = 0,
    ) -> tuple[torch.Tensor, list[TokenLogprobs]]:
        """Compute packed chunks.

        Returns:
            the tokens drawn for chunks that end their sequence
            log-probabilities of prompt tokens, with the `num_top` likeliest
        """
        on_device = PrefillColumns[torch.Tensor](*tensors)
        ctx = prefill_context(columns, on_device, self._rows, self._kv_cache, self._kv_scales)
        ctx = replace(ctx, attn_metadata=self._backend.prepare(ctx))
        hidden = self._model(on_device.token_ids, on_device.positions, ctx)
        of_prompts: list[TokenLogprobs] = []
        if len(columns.prompt_places):
            of_prompts = self._redrawer.prompt_logprobs(
                hidden, on_device.prompt_places, on_device.prompt_targets, num_top
            )
        num_sampled = len(columns.sampled_rows)
        token_ids = self._token_ids[:num_sampled]
        if num_sampled:
            rows = self._rows[on_device.sampled_rows, : Column.BLOCK_TABLE]
            logits = self._model.compute_logits(
                hidden[on_device.sampled_tokens], out=self._logits[:num_sampled]
            )
            # The drawn token's position is the number of tokens before it.
            positions = on_device.positions[on_device.sampled_tokens] + 1
            self._draw(logits, rows, positions, token_ids)
            self._rows[on_device.sampled_rows, int(Column.LAST_TOKEN)] = token_ids
        return token_ids, of_prompts

    def _decode(self, num_rows: int) -> torch.Tensor:
        if self._graphs is not None:
            self._graphs.replay(num_rows)
        else:
            self._decode_step(num_rows)
        return self._token_ids[:num_rows]

    @torch.inference_mode()
    def _decode_step(self, num_rows: int) -> None:
        """One token for each row, from the rows to the rows: all of it static, so captured."""
        first = int(Column.BLOCK_TABLE)
        rows = self._rows[:num_rows]
        inputs = decode_inputs(self._rows, self._num_active, num_rows, self._block_size, first)
        ctx = ForwardContext(
            kv_cache=self._kv_cache,
            is_decode=True,
            slot_mapping=inputs.slots,
            block_tables=rows[:, first:],
            seq_lens=inputs.seq_lens,
            kv_scales=self._kv_scales,
        )
        ctx = replace(ctx, attn_metadata=self._backend.prepare(ctx))
        hidden = self._model(inputs.input_ids, inputs.positions, ctx)
        logits = self._model.compute_logits(hidden, out=self._logits[:num_rows])
        token_ids = self._token_ids[:num_rows]
        self._draw(logits, rows, inputs.seq_lens, token_ids)
        rows[:, int(Column.LAST_TOKEN)] = token_ids

    def _draw(
        self,
        logits: torch.Tensor,  # [num_sampled, shard_size]
        rows: torch.Tensor,  # [num_sampled, at least the header] int32
        positions: torch.Tensor,  # [num_sampled] int32, of the drawn tokens
        token_ids: torch.Tensor,  # [num_sampled] int32, written in place
    ) -> None:
        inputs = SamplingInputs(
            temperatures=rows.view(torch.float32)[:, Column.TEMPERATURE],
            key_lo=rows[:, Column.KEY_LO],
            key_hi=rows[:, Column.KEY_HI],
            positions=positions,
        )
        draw(logits, inputs, self._model.lm_head, self._parallel, token_ids)

    def close(self) -> None:
        """Give the device's memory back. The runner cannot be used afterwards."""
        self._graphs = None
        del self._model, self._backend, self._kv_cache, self._logits, self._rows, self._num_active
        del self._redrawer
        self._give_back_memory()
