"""The model's files and tokenizer: where they are, text to ids and back, and what ends a text.

Hugging Face's packages are imported when they are used: it takes most of a second, which
tensor-parallel workers can spare.
"""

from __future__ import annotations

import logging
from importlib import import_module
from pathlib import Path
from typing import Any

from nanovllm.utils.json_file import read_json_object

logger = logging.getLogger(__name__)

_SLOW_TOKENIZERS = ("tokenizer.model", "vocab.json", "sentencepiece.bpe.model", "spiece.model")
_USUAL_CHARS = 16  # a token; whole texts of longer ones are rare
_HUB_PATTERNS = ["*.safetensors", "*.json", "*.txt", "*.model", "*.jinja"]


def find_model(model: str, what: str = "model") -> Path:
    """The absolute directory of `model`: itself, or what the hub (or its cache) has as that id."""
    advice = (
        "Pass the directory of a downloaded model: config.json, *.safetensors, tokenizer files."
    )
    try:
        directory = Path(model).expanduser()
        is_directory, exists = directory.is_dir(), directory.exists()
    except (OSError, RuntimeError, ValueError) as error:  # too long, no such user, not readable
        shown = model if len(model) <= 200 else f"{model[:200]}..."
        raise ValueError(f"{what} {shown!r} is no directory ({error!s:.200}). {advice}") from error
    if is_directory:
        return directory.absolute()
    if exists:
        raise ValueError(f"{what} {model!r} is a file. {advice}")
    if model.startswith((".", "/", "~")) or model.count("/") != 1:
        raise ValueError(
            f"{what} {model!r} is no directory, and no hub id such as 'Qwen/Qwen3-0.6B'. {advice}"
        )
    hub = import_module("huggingface_hub")
    try:
        return Path(hub.snapshot_download(model, allow_patterns=_HUB_PATTERNS)).absolute()
    except (OSError, hub.errors.HFValidationError) as error:  # of its own most are OSErrors
        raise ValueError(
            f"{what} {model!r} is no directory, and fetching it from the hub failed "
            f"({type(error).__name__}). {advice}"
        ) from error


def load_tokenizer(directory: Path) -> Any | None:
    """The fast tokenizer of a model's directory; None where it ships none."""
    if not (directory / "tokenizer.json").is_file():
        others = [name for name in _SLOW_TOKENIZERS if (directory / name).is_file()]
        if others:
            raise ValueError(
                f"{directory} has {others[0]} but no tokenizer.json. Convert it with "
                "transformers.AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)."
            )
        logger.warning("%s has no tokenizer: prompts must be ids, texts stay empty", directory)
        return None
    # Not AutoTokenizer: importing that takes seconds, and it may look into other code.
    kind = import_module("transformers").PreTrainedTokenizerFast
    try:
        tokenizer = kind.from_pretrained(directory)
    except BaseException as error:  # the library raises what its parsers happen to raise
        if not _is_its_own(error):
            raise
        raise ValueError(f"The tokenizer of {directory} cannot be loaded: {error}") from error
    tokenizer.model_max_length = int(1e30)  # the engine checks lengths, with the prompt's index
    # Texts are what the model wrote: tidied up, they would change behind what a stream has given.
    tokenizer.clean_up_tokenization_spaces = False
    return tokenizer


def encode_texts(
    tokenizer: Any, texts: list[str], *, max_tokens: int, add_special_tokens: bool
) -> list[list[int] | ValueError]:
    """The ids of each text, or an error that says why it has none, in words to follow its name.

    A text that is longer than `max_tokens` tokens could ever be is not looked at: a million
    characters take seconds, and from ten of them some tokenizers panic.
    """
    most = max_tokens * _USUAL_CHARS
    if any(len(text) > most for text in texts):
        # Four, as normalisers may join characters.
        most = max(most, 4 * max_tokens * max(map(len, tokenizer.get_vocab()), default=0))
    fitting = [text for text in texts if len(text) <= most]
    encoded = iter(_encode(tokenizer, fitting, add_special_tokens))
    return [
        next(encoded)
        if len(text) <= most
        else ValueError(
            f"has {len(text)} characters, more than max_model_len = {max_tokens} tokens can stand "
            "for. Shorten it"
        )
        for text in texts
    ]


def _encode(
    tokenizer: Any, texts: list[str], add_special_tokens: bool
) -> list[list[int] | ValueError]:
    if not texts:
        return []
    try:
        ids: list[list[int] | ValueError] = tokenizer(texts, add_special_tokens=add_special_tokens)[
            "input_ids"
        ]
        return ids
    except BaseException as error:  # half a surrogate pair, for one; any text of them may be why
        if not _is_its_own(error):
            raise
        if len(texts) > 1:
            return [ids for text in texts for ids in _encode(tokenizer, [text], add_special_tokens)]
        return [ValueError(f"cannot be tokenised ({type(error).__name__}: {error})")]


def _is_its_own(error: BaseException) -> bool:
    """Whether the library raised it. A panic in Rust is no Exception, so that it ends programs."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


def stop_token_ids(
    directory: Path, tokenizer: Any | None, config_ids: tuple[int, ...], vocab_size: int
) -> list[int]:
    """All ids that end a text: those of config, generation_config and tokenizer together.

    Ids that the model cannot draw are left out, with a warning: they may be as large as memory.
    """
    ids = set(config_ids) | set(_generation_config_ids(directory / "generation_config.json"))
    if tokenizer is not None and tokenizer.eos_token_id is not None:
        ids.add(tokenizer.eos_token_id)
    if outside := sorted(token_id for token_id in ids if token_id >= vocab_size):
        logger.warning(
            "%s: eos_token_id %s is beyond vocab_size = %d, so it never ends a text",
            directory,
            ", ".join(map(str, outside)),
            vocab_size,
        )
    return sorted(ids.difference(outside))


def load_generation_config(path: Path) -> dict[str, Any]:
    """The parsed generation_config.json, {} where there is none."""
    return read_json_object(path) if path.is_file() else {}


def _generation_config_ids(path: Path) -> list[int]:
    value = load_generation_config(path).get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    for token_id in ids:
        if isinstance(token_id, bool) or not isinstance(token_id, int) or not 0 <= token_id < 2**31:
            raise ValueError(f"{path}: eos_token_id must be token ids, got {value!r}.")
    return ids
