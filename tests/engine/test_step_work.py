"""What a step does on the device is done once, and for no more rows than need it."""

from __future__ import annotations

import pytest
import torch

from nanovllm import SamplingParams
from nanovllm.engine.step_handle import OutputBuffers, StepLogprobs
from nanovllm.utils.parallel import ParallelContext


def test_attention_is_prepared_once_a_step_and_logits_are_those_of_drawing_rows(
    tiny_llm, monkeypatch
):
    """Not once a layer, and not for the whole of a prompt, whose logits would fill gigabytes."""
    llm = tiny_llm(max_num_batched_tokens=24)
    runner = llm._engine._executor._runner
    num_prepared, num_logits = [], []

    def prepare(ctx, real=runner._backend.prepare):
        num_prepared[-1] += 1
        return real(ctx)

    def compute_logits(hidden, out=None, real=runner._model.compute_logits):
        num_logits[-1] += len(hidden)
        return real(hidden, out)

    def execute(output, real=runner.execute):
        num_prepared.append(0)
        num_logits.append(0)
        return real(output)

    monkeypatch.setattr(runner._backend, "prepare", prepare)
    monkeypatch.setattr(runner._model, "compute_logits", compute_logits)
    monkeypatch.setattr(runner, "execute", execute)
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    llm.generate([[5] * 40, [6] * 4], params, use_tqdm=False)
    assert len(runner._model.model.layers) == 2
    assert num_prepared == [1, 1, 1, 1]
    assert num_logits == [0, 2, 2, 2], "24 tokens of a chunk, the other 20, and two decode steps"


def test_a_step_in_flight_keeps_its_tokens_while_the_next_is_launched():
    """One step runs ahead: its tokens must not land where those of the step before are read."""
    buffers = OutputBuffers(4, torch.device("cpu"))
    handles, read = [], []
    for number in range(12):
        handles.append(buffers.send(torch.full((3,), number, dtype=torch.int32), StepLogprobs()))
        if len(handles) == 2:
            read.append(handles.pop(0).wait().token_ids)
    # Looked at after all steps: what was read is a copy.
    assert [tokens.tolist() for tokens in read] == [[number] * 3 for number in range(11)]


class Contiguous:
    """A process group as NCCL and gloo are: strided tensors are refused."""

    def allgather(self, outputs, inputs):
        assert inputs[0].is_contiguous()
        for part in outputs[0]:
            part.copy_(inputs[0])
        return self

    def wait(self):
        pass


@pytest.mark.parametrize("dim", [0, 1])
def test_strided_tensors_are_gathered(dim):
    """Rows of logits, or a column of them."""
    x = torch.arange(12.0).view(3, 4)[:, 1:3]
    both = ParallelContext(0, 2, Contiguous()).all_gather(x, dim=dim)
    assert torch.equal(both, torch.cat([x, x], dim=dim))
