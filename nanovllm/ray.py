"""Many machines: an engine in each actor of a Ray Data pipeline. Needs `pip install -e '.[ray]'`.

import ray
from nanovllm.ray import build_processor

processor = build_processor("Qwen/Qwen3-8B", sampling={"max_tokens": 512}, concurrency=8)
processor(ray.data.read_parquet("s3://in/")).write_parquet("s3://out/")
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from nanovllm.batch.api_fields import text_of_messages
from nanovllm.batch.prompts import chat_text, encode_chats
from nanovllm.batch.records import changed_fields, line_seed
from nanovllm.config import Config
from nanovllm.llm import LLM
from nanovllm.outputs import RequestOutput
from nanovllm.sampling_params import SamplingParams
from nanovllm.utils.checks import check_int


@dataclass(frozen=True, slots=True)
class RowSpec:
    """Which columns are read and written, and how rows are sampled."""

    prompt_column: str  # text or token ids; with `is_chat` a list of messages
    output_column: str
    id_column: str | None
    is_chat: bool
    sampling: Mapping[str, Any]  # keyword arguments of SamplingParams
    template: Mapping[str, Any]  # options of the chat template

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that are added."""
        prefix = self.output_column
        return (
            prefix,
            f"{prefix}_finish_reason",
            f"{prefix}_num_prompt_tokens",
            f"{prefix}_num_tokens",
            f"{prefix}_error",
        )


class RowGenerator:
    """Owns an engine; called with a batch of rows it adds their answers, row by row the same order.

    What `Dataset.map_batches` takes, with batch_format="pyarrow". A row that cannot run has its
    reason in the error column and no answer.
    """

    def __init__(self, model: str, engine_options: Mapping[str, Any], spec: RowSpec) -> None:
        self._llm = LLM(model, **engine_options)
        self._spec = spec
        self._seed = Config.from_options(model, dict(engine_options)).seed
        defaults = changed_fields(self._llm.get_default_sampling_params())
        self._params = SamplingParams(**{**defaults, **spec.sampling})

    def __call__(self, table: Any) -> Any:
        """Take a pyarrow.Table and return it with the columns of `RowSpec.columns`."""
        import pyarrow

        spec = self._spec
        if taken := [name for name in spec.columns if name in table.column_names]:
            raise ValueError(f"The rows have a column {taken[0]!r}. Pass another output_column.")
        if spec.prompt_column not in table.column_names:
            raise ValueError(
                f"The rows have no column {spec.prompt_column!r}, but {table.column_names}."
            )
        values = table.column(spec.prompt_column).to_pylist()
        ids = table.column(spec.id_column).to_pylist() if spec.id_column else None
        outputs = self._generate(values, self._seeds(values, ids))
        text_type = pyarrow.string()
        answers_type = pyarrow.list_(text_type) if self._params.n > 1 else text_type
        types = (answers_type, answers_type, pyarrow.int64(), pyarrow.int64(), text_type)
        rows = [self._cells(output) for output in outputs]
        for place, (name, kind) in enumerate(zip(spec.columns, types, strict=True)):
            table = table.append_column(name, pyarrow.array([row[place] for row in rows], kind))
        return table

    def _seeds(self, values: list[Any], ids: list[Any] | None) -> list[int]:
        """A seed for each row: by its id, else by its prompt and how often that came before."""
        if ids is not None:
            return [line_seed(self._seed, repr(value)) for value in ids]
        counts: Counter[str] = Counter()
        seeds = []
        for value in values:
            text = repr(value).encode("utf-8", errors="surrogatepass")
            digest = hashlib.blake2b(text, digest_size=16).hexdigest()
            seeds.append(line_seed(self._seed, f"{digest}:{counts[digest]}"))
            counts[digest] += 1
        return seeds

    def _generate(self, values: list[Any], seeds: list[int]) -> list[RequestOutput]:
        prompts, reasons = self._prompts(values)
        params = [
            self._params if self._params.seed is not None else self._params.clone(seed=seed)
            for seed in seeds
        ]
        good = [place for place in range(len(values)) if place not in reasons]
        outputs = self._llm.generate(
            [prompts[place] for place in good],
            [params[place] for place in good],
            use_tqdm=False,
            return_errors=True,
        )
        by_place = dict(zip(good, outputs, strict=True))
        return [
            by_place.get(place) or RequestOutput("", None, [], [], True, error=reasons[place])
            for place in range(len(values))
        ]

    def _prompts(self, values: list[Any]) -> tuple[list[Any], dict[int, str]]:
        """The engine's prompts, and for rows that have none the reason."""
        if not self._spec.is_chat:
            return values, {}
        tokenizer = self._llm.get_tokenizer()
        texts: dict[int, str] = {}
        reasons: dict[int, str] = {}
        for place, value in enumerate(values):
            try:
                messages = text_of_messages(_without_nulls(value))
                texts[place] = chat_text(tokenizer, messages, self._spec.template)
            except (TypeError, ValueError) as error:
                reasons[place] = str(error)
        chats = encode_chats(tokenizer, list(texts.values()), self._llm.max_model_len)
        encoded = dict(zip(texts, chats, strict=True))
        reasons |= {i: str(chat) for i, chat in encoded.items() if isinstance(chat, ValueError)}
        return [encoded.get(place) for place in range(len(values))], reasons

    def _cells(self, output: RequestOutput) -> tuple[Any, ...]:
        if output.error is not None:
            return None, None, None, None, output.error
        texts = [answer.text for answer in output.outputs]
        reasons = [answer.finish_reason for answer in output.outputs]
        is_many = self._params.n > 1
        return (
            texts if is_many else texts[0],
            reasons if is_many else reasons[0],
            len(output.prompt_token_ids),
            output.num_output_tokens,
            None,
        )


def build_processor(
    model: str,
    *,
    prompt_column: str = "prompt",
    messages_column: str | None = None,
    output_column: str = "output",
    id_column: str | None = None,
    sampling: Mapping[str, Any] | None = None,
    chat_template_options: Mapping[str, Any] | None = None,
    concurrency: int | tuple[int, int] = 1,
    batch_size: int = 1024,
    num_gpus: float | None = None,
    ray_options: Mapping[str, Any] | None = None,
    **engine_options: Any,
) -> Callable[[Any], Any]:
    """Return a function from a Ray Dataset to a lazy one whose rows have answers.

    Rows keep their other columns, in whatever order Ray gives them. An actor that dies is started
    again by Ray and its batch is run again; with the same seeds, so with the same answers.

    Args:
        messages_column: rows are conversations in this column, not texts in `prompt_column`
        id_column: seeds derive from it and the engine's seed; without it, from the prompt
        sampling: keyword arguments of SamplingParams; the rest is the model's default
        chat_template_options: such as tools and chat_template_kwargs
        concurrency: actors, each with an engine of its own; (least, most) lets Ray decide
        batch_size: rows an engine is given at once: many, since it idles at the end of each batch
        num_gpus: of each actor; None: tensor_parallel_size, or 0 with device="cpu". Say it where
            the GPUs join the cluster later: else a ValueError if it has too few of them now
        ray_options: further keyword arguments of `Dataset.map_batches`, such as num_cpus
        engine_options: as for `LLM`
    """
    config = Config.from_options(model, engine_options)
    batch_size = check_int("batch_size", batch_size, minimum=1)
    for number in concurrency if isinstance(concurrency, tuple) else (concurrency,):
        check_int("concurrency", number, minimum=1)
    spec = RowSpec(
        prompt_column=messages_column or prompt_column,
        output_column=output_column,
        id_column=id_column,
        is_chat=messages_column is not None,
        sampling=dict(sampling or {}),
        template=dict(chat_template_options or {}),
    )
    SamplingParams(**spec.sampling)  # refuses bad values here, not on another machine
    num_needed = 0 if config.device == "cpu" else config.tensor_parallel_size
    # As they were checked: a relative path would mean another place where an actor runs.
    options = {name: getattr(config, name) for name in engine_options}
    arguments = {"model": config.model, "engine_options": options, "spec": spec}

    def process(dataset: Any) -> Any:
        if num_gpus is None and num_needed:
            _check_gpus(num_needed)
        return dataset.map_batches(
            RowGenerator,
            fn_constructor_kwargs=arguments,
            batch_format="pyarrow",
            batch_size=batch_size,
            concurrency=concurrency,
            num_gpus=num_needed if num_gpus is None else num_gpus,
            **(ray_options or {}),
        )

    return process


def _check_gpus(num_gpus: int) -> None:
    """ValueError where the cluster cannot run an actor, for which Ray would wait for ever."""
    import ray

    there = ray.cluster_resources().get("GPU", 0)
    if there < num_gpus:
        raise ValueError(
            f"An engine takes {num_gpus} GPU(s), and the Ray cluster has {there:g}. Pass "
            "device='cpu', a smaller tensor_parallel_size, or, where machines with GPUs join the "
            f"cluster later, num_gpus={num_gpus}."
        )


def _without_nulls(messages: Any) -> Any:
    """Arrow gives all messages of a column the same keys; templates take a null for a value."""
    if not isinstance(messages, list):
        return messages
    return [
        {k: v for k, v in message.items() if v is not None or k == "content"}
        if isinstance(message, dict)
        else message
        for message in messages
    ]
