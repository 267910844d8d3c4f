"""nanovllm: offline batch inference for language models, small enough to read, fast to use."""

from nanovllm.llm import LLM
from nanovllm.outputs import CompletionOutput, Logprob, RequestOutput
from nanovllm.sampling_params import SamplingParams

__version__ = "0.1.0"  # pyproject.toml reads it here

__all__ = ["LLM", "CompletionOutput", "Logprob", "RequestOutput", "SamplingParams"]
