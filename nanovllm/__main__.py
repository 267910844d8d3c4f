"""The command line: `nanovllm run-batch`, `generate`, `bench`, `models`."""

from __future__ import annotations

import argparse
import logging.config
import os
import random
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Any, get_type_hints

from nanovllm import __version__
from nanovllm.batch import BatchOptions, run_batch
from nanovllm.batch.summary import BROKEN, INTERRUPTED
from nanovllm.command_line import Parser, shard
from nanovllm.config import Config
from nanovllm.data_parallel import open_llm
from nanovllm.llm import LLM
from nanovllm.models.registry import supported_architectures
from nanovllm.sampling_params import SamplingParams
from nanovllm.utils.checks import check_int

_ENGINE_HELP = {
    "tokenizer": "directory or hub id of another tokenizer; default: the model's",
    "max_num_batched_tokens": "most tokens in one step",
    "max_num_seqs": "most sequences in one step",
    "max_model_len": "most tokens of prompt and answer; default: the model's, as the cache allows",
    "gpu_memory_utilization": "share of the GPU's memory to use",
    "tensor_parallel_size": "GPUs that share one copy of the model",
    "enforce_eager": "run without CUDA graphs",
    "kvcache_block_size": "tokens in a block of the KV cache",
    "num_kvcache_blocks": "blocks of the KV cache; default: as many as fit",
    "enable_prefix_caching": "keep the KV of prompt beginnings for later requests",
    "enable_overlap": "launch a step before the last one's tokens are known; default: on CUDA",
    "device": "auto, cpu, cuda or cuda:N",
    "dtype": "auto, float32, bfloat16 or float16",
    "kv_cache_dtype": "auto (the model's) or fp8, which holds twice the tokens of bfloat16",
    "attention_backend": "auto, triton, flash_attn or sdpa",
    "seed": "gives a seed to each request that names none",
    "cpu_kvcache_space_gib": "size of the KV cache on a CPU, in GiB",
    "load_format": "auto, or dummy for random weights",
    "enable_request_reordering": "run requests that begin alike together",
    "enable_custom_all_reduce": "tensor parallel: send small messages through a kernel of ours",
    "logprobs_mode": "raw_logprobs or processed_logprobs",
    "quantization": "fp8: weights and activations of the linear layers in 8 bits",
    "lora": "directory of a PEFT LoRA adapter to merge into the weights",
}
_LEFT_OUT = ("model", "trust_remote_code")

_SAMPLING: dict[str, tuple[Callable[[str], Any], str]] = {
    "temperature": (float, "0 is greedy"),
    "top_p": (float, "keep the likeliest tokens that make up this share; 1 is off"),
    "top_k": (int, "keep the k likeliest tokens; 0 is off"),
    "min_p": (float, "drop tokens less likely than this share of the likeliest; 0 is off"),
    "repetition_penalty": (float, "divides the logits of tokens seen; 1 is off"),
    "presence_penalty": (float, "subtracted from tokens the answer has; 0 is off"),
    "frequency_penalty": (float, "subtracted for each time the answer has a token; 0 is off"),
    "max_tokens": (int, "most tokens of an answer"),
    "min_tokens": (int, "fewest tokens of an answer"),
    "n": (int, "answers for each prompt"),
}


_NO_READER = 141  # what a shell says of a program that ends since nobody reads it, as by `head`


def main(arguments: list[str] | None = None) -> int:
    """Run one command; return its exit code."""
    _keep_standard_descriptors()
    args = _parser().parse_args(arguments)
    logging.config.dictConfig(
        {
            "version": 1,
            "disable_existing_loggers": False,
            "formatters": {"line": {"format": "%(levelname)s %(message)s"}},
            "handlers": {"stderr": {"class": "logging.StreamHandler", "formatter": "line"}},
            "loggers": {
                "nanovllm": {"level": "INFO" if args.verbose else "WARNING", "handlers": ["stderr"]}
            },
        }
    )
    try:
        code: int = args.command(args)
    except _NoReader:
        return _NO_READER
    except (ValueError, TypeError, ImportError, OSError) as error:
        if args.verbose:
            traceback.print_exc()
        _complain(f"nanovllm: {error}")
        return BROKEN
    except Exception as error:  # 1, as Python would exit, says that some lines failed
        if args.verbose:
            traceback.print_exc()
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        _complain(f"nanovllm: {reason} (--verbose says where)")
        return BROKEN
    except KeyboardInterrupt:
        _complain("Stopped.")
        return INTERRUPTED
    return code


# ---- commands


def _run_batch(args: argparse.Namespace) -> int:
    options = BatchOptions(
        input=args.input,
        output=args.output,
        sampling=_sampling(args),
        shard=args.shard,
        fsync_interval_s=args.fsync_interval,
        overwrite=args.overwrite,
        force_resume=args.force_resume,
        retry_failed=args.retry_failed,
        window=args.window,
        show_progress=not args.quiet,
        metrics=args.metrics,
        report=args.report,
        trace=args.trace,
    )
    summary = run_batch(
        args.model, options, data_parallel_size=args.data_parallel_size, **_engine_options(args)
    )
    if not args.quiet:
        try:
            _say(summary.text())
        except (OSError, _NoReader) as error:  # no reason to do the job again
            _complain(f"nanovllm: the summary was not printed: {error}")
    return summary.exit_code


def _generate(args: argparse.Namespace) -> int:
    with LLM(args.model, **_engine_options(args)) as llm:
        defaults = llm.get_default_sampling_params()
        params = defaults.clone(**{"max_tokens": 256, **_sampling(args)})
        prompt: Any = args.prompt
        if args.chat:
            messages = [{"role": "user", "content": args.prompt}]
            (output,) = llm.chat(messages, params, use_tqdm=False)
            _say("\n---\n".join(answer.text for answer in output.outputs))
        elif params.n > 1:
            (output,) = llm.generate(prompt, params, use_tqdm=False)
            _say("\n---\n".join(answer.text for answer in output.outputs))
        else:
            for piece in llm.stream(prompt, params):
                _say(piece, end="")
            _say("")
    return 0


def _bench(args: argparse.Namespace) -> int:
    for name in ("num_prompts", "input_len", "output_len"):
        check_int(_flag(name), getattr(args, name), minimum=1)
    draw = random.Random(args.seed)
    with open_llm(args.model, args.data_parallel_size, _engine_options(args)) as llm:
        vocab_size = min(len(llm.get_tokenizer()), 50_000)
        prompts = [
            [draw.randrange(3, vocab_size) for _ in range(args.input_len)]
            for _ in range(args.num_prompts)
        ]
        params = SamplingParams(temperature=1.0, ignore_eos=True, max_tokens=args.output_len)
        warm_up = params.clone(max_tokens=min(args.output_len, 8))
        llm.generate(prompts[: min(8, len(prompts))], warm_up, use_tqdm=False)
        started = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=not args.quiet)
        elapsed = time.perf_counter() - started
    num_in = args.num_prompts * args.input_len
    # Not what was asked for: an answer ends where the context does.
    num_out = sum(output.num_output_tokens for output in outputs)
    _say(
        f"{args.num_prompts} requests, {num_in:,} tokens in, {num_out:,} out in {elapsed:.2f} s: "
        f"{args.num_prompts / elapsed:,.2f} requests/s, {num_out / elapsed:,.0f} tokens out/s, "
        f"{(num_in + num_out) / elapsed:,.0f} tokens/s in all"
    )
    return 0


def _models(args: argparse.Namespace) -> int:
    _say("Architectures that run ('architectures' in the model's config.json):")
    _say("\n".join(f"  {name}" for name in supported_architectures()))
    return 0


# ---- standard streams, which may be closed, full, or without a reader


class _NoReader(Exception):
    """Who read standard output has gone."""


def _keep_standard_descriptors() -> None:
    """Open what the caller closed, or the next file would be 0, 1 or 2, where C libraries write."""
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(fd)
    for fd in range(3):  # for processes that this one starts, too
        os.set_inheritable(fd, True)


def _say(text: str, end: str = "\n") -> None:
    """Print at once; what the terminal's encoding has not is printed as an escape."""
    if sys.stdout is None:
        return
    encoding = sys.stdout.encoding or "utf-8"
    try:
        sys.stdout.write((text + end).encode(encoding, "backslashreplace").decode(encoding))
        sys.stdout.flush()
    except OSError as error:
        # What is left in the buffer would fail again at exit, and change the exit code.
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):
            raise _NoReader("nobody reads standard output") from error
        raise


def _complain(text: str) -> None:
    with suppress(OSError, AttributeError):  # None where it is closed
        sys.stderr.write(text + "\n")


# ---- options


def _parser() -> argparse.ArgumentParser:
    parser = Parser("nanovllm", description="Offline batch inference for language models.")
    parser.add_argument("--version", action="version", version=f"nanovllm {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    batch = _command(commands, "run-batch", _run_batch, "answer a file of requests")
    batch.add_argument("-i", "--input", required=True, help="JSONL, also .gz or .zst; - is stdin")
    batch.add_argument("-o", "--output", required=True, type=Path, help="JSONL that is appended to")
    _add_model(batch)
    job = batch.add_argument_group("job")
    job.add_argument(
        "--shard", type=shard, default=(0, 1), metavar="I/N", help="do every n-th line, i from 0"
    )
    job.add_argument("--overwrite", action="store_true", help="start anew: results so far are lost")
    job.add_argument(
        "--force-resume",
        action="store_true",
        help="go on though model, parameters or input differ from those of the output file",
    )
    job.add_argument(
        "--retry-failed",
        action="store_true",
        help="run lines with an error again, mended or not; the last line of an id then counts",
    )
    job.add_argument(
        "--fsync-interval",
        type=float,
        default=5.0,
        metavar="S",
        help="seconds between writes to the disk itself; 0: each result (default: %(default)s)",
    )
    job.add_argument(
        "--window",
        type=int,
        metavar="N",
        help="requests read ahead of results (default: 4 * max_num_seqs)",
    )
    job.add_argument("--metrics", type=Path, metavar="FILE", help="write all counters as JSON")
    job.add_argument("--report", type=Path, metavar="FILE", help="write charts of the run as HTML")
    job.add_argument("--trace", type=Path, metavar="FILE", help="write the steps for Perfetto")
    job.add_argument("-q", "--quiet", action="store_true", help="no progress and no summary")
    _add_data_parallel(batch)
    _add_sampling(
        batch,
        "for lines that leave them open (default: the model's own; max_tokens: 64 in plain lines, "
        "16 in completions, to the context's end in chats)",
    )
    _add_engine(batch)

    generate = _command(commands, "generate", _generate, "continue one prompt")
    generate.add_argument("prompt", help="a text; with --chat what a user says")
    _add_model(generate)
    generate.add_argument("--chat", action="store_true", help="ask it through the chat template")
    _add_sampling(generate, "(default: the model's own; max_tokens: 256)")
    _add_engine(generate)

    bench = _command(commands, "bench", _bench, "measure throughput on random prompts")
    _add_model(bench)
    for name, default, text in (
        ("--num-prompts", 256, "how many requests"),
        ("--input-len", 128, "tokens of each prompt"),
        ("--output-len", 128, "tokens of each answer"),
    ):
        text += " (default: %(default)s)"
        bench.add_argument(name, type=int, default=default, metavar="N", help=text)
    bench.add_argument("-q", "--quiet", action="store_true", help="no progress bar")
    _add_data_parallel(bench)
    _add_engine(bench)

    _command(commands, "models", _models, "list the architectures that run")
    return parser


def _command(
    commands: Any, name: str, run: Callable[[argparse.Namespace], int], text: str
) -> argparse.ArgumentParser:
    description = f"{text[0].upper()}{text[1:]}."
    parser: argparse.ArgumentParser = commands.add_parser(name, help=text, description=description)
    parser.set_defaults(command=run)
    parser.add_argument("-v", "--verbose", action="store_true", help="say more, on stderr")
    return parser


def _add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", required=True, help="a model's directory, or a hub id")


def _add_data_parallel(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--data-parallel-size",
        type=int,
        default=1,
        metavar="N",
        help="engines, each with its own GPU or tensor-parallel group (default: %(default)s)",
    )


def _add_sampling(parser: argparse.ArgumentParser, what: str) -> None:
    group = parser.add_argument_group("sampling", what)
    for name, (kind, text) in _SAMPLING.items():
        group.add_argument(_flag(name), type=kind, help=text, metavar=_metavar(name, kind))
    group.add_argument("--stop", action="append", metavar="TEXT", help="end at TEXT; repeatable")
    group.add_argument("--ignore-eos", action="store_true", default=None, help="run to max_tokens")


def _add_engine(parser: argparse.ArgumentParser) -> None:
    """An option for every field of Config, so that none is forgotten."""
    group = parser.add_argument_group("engine")
    types = get_type_hints(Config)
    for item in fields(Config):
        if item.name in _LEFT_OUT:
            continue
        text = _ENGINE_HELP.get(item.name, "see nanovllm.config.Config")
        if item.default is not None:
            text += f" (default: {item.default})"
        names = {name.strip() for name in str(types[item.name]).split("|")}
        if types[item.name] is bool or "bool" in names:
            group.add_argument(
                _flag(item.name), action=argparse.BooleanOptionalAction, default=None, help=text
            )
            continue
        kind: Callable[[str], Any] = str
        if types[item.name] is int or "int" in names:
            kind = int
        elif types[item.name] is float or "float" in names:
            kind = float
        group.add_argument(
            _flag(item.name), type=kind, metavar=_metavar(item.name, kind), help=text
        )


def _engine_options(args: argparse.Namespace) -> dict[str, Any]:
    """The engine options that were given; the others keep Config's defaults."""
    names = [item.name for item in fields(Config) if item.name not in _LEFT_OUT]
    return {name: getattr(args, name) for name in names if getattr(args, name) is not None}


def _sampling(args: argparse.Namespace) -> dict[str, Any]:
    names = [*_SAMPLING, "stop", "ignore_eos"]
    return {name: getattr(args, name) for name in names if getattr(args, name) is not None}


def _metavar(name: str, kind: Callable[[str], Any]) -> str:
    """N for a whole number, X for any, else the last word of the name: help stays short."""
    return "N" if kind is int else "X" if kind is float else name.rpartition("_")[2].upper()


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


if __name__ == "__main__":
    sys.exit(main())
