"""Text as it comes: characters split over tokens, stop strings, and the n answers of a request."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from types import MappingProxyType

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tiny_models import write_tokenizer
from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from nanovllm import SamplingParams
from nanovllm.engine.scheduler import SequenceUpdates
from nanovllm.engine.sequence import Sequence, SequenceStatus
from nanovllm.engine.step import StepOutput
from nanovllm.frontend.output_processor import (
    IncrementalText,
    OutputProcessor,
    Request,
    find_stop,
)
from nanovllm.utils.tokenizer import load_tokenizer

TEXTS = [
    "hello world",
    "naïve café",
    "日本語のテキスト",
    "👩‍👩‍👧 family 🎉🎉",
    "a\n\n  b\tc",
    "é" * 5,
    "𐍈𐍆",
]
NOTHING = StepOutput(np.zeros(0, dtype=np.int32))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    directory = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(directory)
    return AutoTokenizer.from_pretrained(directory)


@pytest.fixture(scope="module")
def demo_tokenizer():
    return AutoTokenizer.from_pretrained(Path(__file__).parents[1] / "tiny-qwen3")


# ---- stop strings


@pytest.mark.parametrize(
    ("text", "stops", "searched", "expected"),
    [
        ("abcdef", ("cd",), 0, (2, "cd")),
        ("abcdef", ("x",), 0, None),
        ("abcdef", ("ef", "cd"), 0, (2, "cd")),  # the earliest match wins, not the first named
        ("abcdef", ("cd", "cde"), 0, (2, "cde")),  # of those that tie the longest
        ("abcdef", ("cde", "cd"), 0, (2, "cde")),
        ("abab", ("ab",), 2, (2, "ab")),  # what was searched before holds no hit
        ("aEND\n", ("END\n",), 4, (1, "END\n")),  # begun before, complete now
        ("aEND\n", ("END\n",), 1, (1, "END\n")),
        ("", ("a",), 0, None),
        ("a", ("a",), 0, (0, "a")),
        ("xx", ("xxx", "xx"), 1, (0, "xx")),
        ("abc", (), 0, None),
    ],
)
def test_the_stop_string_that_begins_first_is_found(text, stops, searched, expected):
    assert find_stop(text, stops, searched) == expected


@settings(max_examples=200, deadline=None)
@given(
    pieces=st.lists(st.text("ab", max_size=4), max_size=8),
    stops=st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_a_search_piece_by_piece_stops_where_the_first_match_is_complete(pieces, stops):
    text, searched = "", 0
    for piece in pieces:
        text += piece
        hit = find_stop(text, tuple(stops), searched)
        matches = [(text.find(s), -len(s), s) for s in stops if s in text]
        assert hit == ((min(matches)[0], min(matches)[2]) if matches else None)
        if hit:
            return
        searched = len(text)


# ---- incremental text


def pieces_of(tokenizer, token_ids, **options):
    text = IncrementalText(tokenizer, SamplingParams(**options))
    pieces = []
    for token_id in token_ids:
        before = text.to_give(1)
        text.push(token_id)
        assert text.to_give(1).startswith(before), "text that was shown is never taken back"
        pieces.append(text.to_give(1)[len(before) :])
    return pieces


@pytest.mark.parametrize("original", TEXTS)
@pytest.mark.parametrize("which", ["tokenizer", "demo_tokenizer"])
def test_pieces_put_together_are_the_text(request, which, original):
    tokenizer = request.getfixturevalue(which)
    token_ids = tokenizer.encode(original, add_special_tokens=False)
    pieces = pieces_of(tokenizer, token_ids)
    assert "".join(pieces) == tokenizer.decode(token_ids) == original
    assert not any("\ufffd" in piece for piece in pieces)


def test_a_character_is_held_back_until_its_last_token(tokenizer):
    token_ids = tokenizer.encode("🎉", add_special_tokens=False)
    assert len(token_ids) == 4
    assert pieces_of(tokenizer, token_ids) == ["", "", "", "🎉"]


def test_a_token_is_decoded_once_alone_and_once_with_the_one_before(tokenizer):
    """It is most of a step's host time where many requests have stop strings; four were made."""
    num_decoded = 0

    class Counting:
        convert_ids_to_tokens = staticmethod(tokenizer.convert_ids_to_tokens)

        def decode(self, token_ids, **options):
            nonlocal num_decoded
            num_decoded += 1
            return tokenizer.decode(token_ids, **options)

    token_ids = tokenizer.encode("hello world", add_special_tokens=False)
    assert "".join(pieces_of(Counting(), token_ids)) == "hello world"
    assert num_decoded == 2 * len(token_ids)


def test_special_tokens_are_left_out_or_kept_as_asked(tokenizer):
    token_ids = [*tokenizer.encode("hello", add_special_tokens=False), 2]
    assert "".join(pieces_of(tokenizer, token_ids)) == "hello"
    assert "".join(pieces_of(tokenizer, token_ids, skip_special_tokens=False)).startswith("hello<|")


def test_ids_beyond_the_tokenizer_are_no_text(tokenizer):
    """The model's vocabulary may be larger than the tokenizer's."""
    token_ids = [*tokenizer.encode("one", add_special_tokens=False), 516, 515]
    assert "".join(pieces_of(tokenizer, token_ids)) == "one"


@settings(max_examples=150, deadline=None)
@given(token_ids=st.lists(st.integers(0, 4095), max_size=30))
def test_any_tokens_give_a_beginning_of_the_decoded_text(token_ids):
    """Random bytes are no valid text: what is held back at the end is in the final text only."""
    tokenizer = _demo()
    joined = "".join(pieces_of(tokenizer, token_ids))
    assert tokenizer.decode(token_ids, skip_special_tokens=True).startswith(joined)


@cache
def _demo():
    return AutoTokenizer.from_pretrained(Path(__file__).parents[1] / "tiny-qwen3")


@cache
def _llama_2():
    """A tokenizer of Llama 2's kind: what has no token is spelt in bytes, line ends as well."""
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *"▁abc"]
    vocab = {name: number for number, name in enumerate(names)}
    model = models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>")


_LLAMA_IDS = st.one_of(
    st.integers(0, 270),
    st.integers(259, 262),
    st.sampled_from("\nab🎉é".encode()).map(lambda b: b + 3),
)


@settings(max_examples=300, deadline=None)
@given(token_ids=st.lists(_LLAMA_IDS, max_size=12))
@example([ord("a") + 3, 0xC4 + 3, 262])
def test_a_byte_that_fits_no_character_spoils_none_that_was_given(token_ids):
    """Such a decoder turns each byte of a run into U+FFFD if one of them is wrong."""
    tokenizer = _llama_2()
    text = IncrementalText(tokenizer, SamplingParams())
    whole = tokenizer.decode(token_ids, skip_special_tokens=True)
    for token_id in token_ids:
        text.push(token_id)
        assert whole.startswith(text.to_give(1))
    text.finish()
    assert text.to_give(1) == whole


def test_a_stop_string_of_byte_tokens_is_found_at_once():
    tokenizer = _llama_2()
    processor = OutputProcessor(tokenizer)
    request = make_request(tokenizer, SamplingParams(stop=["\n"]), streamed=True)
    processor.add(request)
    outputs, stopped = feed_text(processor, request.seqs[0], tokenizer, "ab\nc")
    assert stopped == [(request.seqs[0], "\n")]
    assert outputs[0].outputs[0].text == "ab"


def test_spaces_are_those_that_the_model_wrote(tmp_path):
    """`clean_up_tokenization_spaces` would change text that a stream has given."""
    tokenizer = Tokenizer(models.WordPiece({"[UNK]": 0, "do": 1, "n": 2, "'": 3, "t": 4, ".": 5}))
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=True)
    fast.save_pretrained(tmp_path)
    fast = load_tokenizer(tmp_path)
    processor = OutputProcessor(fast)
    for streamed in (False, True):
        request = make_request(fast, SamplingParams(), streamed=streamed)
        processor.add(request)
        for token_id in (1, 2, 3, 4):
            feed(processor, request.seqs[0], token_id)
        outputs, _ = feed(processor, request.seqs[0], 5, finish="length")
        assert outputs[0]["text"] == fast.decode([1, 2, 3, 4, 5]) == "do n ' t ."


# ---- requests


def make_request(tokenizer, params, num_seqs=1, request_id="r", prompt=(5, 6), streamed=False):
    seqs = [
        Sequence(
            seq_id=i,
            request_id=request_id,
            token_ids=list(prompt),
            params=params,
            max_num_tokens=100,
            noise_key=(0, 0),
            sample_index=i,
            is_watched=bool(params.stop) or streamed,
        )
        for i in range(num_seqs)
    ]
    return Request(request_id, "p", list(prompt), params, seqs, is_streamed=streamed)


def feed(processor, seq, token_id, *, finish=None, stop_reason=None):
    """One token for one sequence, as the scheduler would report it."""
    seq.token_ids.append(token_id)
    updates = SequenceUpdates(num_new_tokens=1)
    if seq.is_watched:
        updates.watched.append((seq, 0))
    if finish is not None:
        seq.status = SequenceStatus.FINISHED
        seq.finish_reason, seq.stop_reason = finish, stop_reason
        updates.finished.append(seq)
    outputs, stopped = processor.process(updates, NOTHING)
    processor.forget(outputs)
    return outputs, stopped


def feed_text(processor, seq, tokenizer, text):
    for token_id in tokenizer.encode(text, add_special_tokens=False):
        outputs, stopped = feed(processor, seq, token_id)
        if stopped:
            return outputs, stopped
    return outputs, stopped


def test_a_stop_string_over_several_tokens_cuts_the_text_at_its_beginning(tokenizer):
    processor = OutputProcessor(tokenizer)
    request = make_request(tokenizer, SamplingParams(stop=["END\n"]))
    processor.add(request)
    outputs, stopped = feed_text(processor, request.seqs[0], tokenizer, "oneEND\nmore")
    assert stopped == [(request.seqs[0], "END\n")]
    completion = outputs[0].outputs[0]
    assert (completion.text, completion.finish_reason, completion.stop_reason) == (
        "one",
        "stop",
        "END\n",
    )
    assert tokenizer.decode(completion.token_ids) == "oneEND\n"
    assert processor.requests == {}


def test_a_stop_string_may_be_kept(tokenizer):
    processor = OutputProcessor(tokenizer)
    params = SamplingParams(stop="world", include_stop_str_in_output=True)
    request = make_request(tokenizer, params)
    processor.add(request)
    outputs, _ = feed_text(processor, request.seqs[0], tokenizer, "hello world, x")
    assert outputs[0].outputs[0].text == "hello world"


def test_a_stop_string_split_inside_a_character_waits_for_the_character(tokenizer):
    processor = OutputProcessor(tokenizer)
    request = make_request(tokenizer, SamplingParams(stop="🎉"))
    processor.add(request)
    outputs, stopped = feed_text(processor, request.seqs[0], tokenizer, "one🎉two")
    assert stopped[0][1] == "🎉" and outputs[0].outputs[0].text == "one"


def test_the_end_by_length_and_a_stop_string_in_one_step_is_a_stop(tokenizer):
    processor = OutputProcessor(tokenizer)
    request = make_request(tokenizer, SamplingParams(stop="e"))
    processor.add(request)
    token_ids = tokenizer.encode("xe", add_special_tokens=False)
    for token_id in token_ids[:-1]:
        feed(processor, request.seqs[0], token_id)
    outputs, stopped = feed(processor, request.seqs[0], token_ids[-1], finish="length")
    assert outputs[0].outputs[0].finish_reason == "stop"
    assert outputs[0].outputs[0].text == "x"
    assert len(outputs) == 1 and len(stopped) == 1


def test_no_stop_string_before_min_tokens(tokenizer):
    processor = OutputProcessor(tokenizer)
    request = make_request(tokenizer, SamplingParams(stop="o", min_tokens=30))
    processor.add(request)
    _, stopped = feed_text(processor, request.seqs[0], tokenizer, "hello world")
    assert stopped == []


def test_an_unfinished_character_at_the_end_is_what_decode_gives(tokenizer):
    processor = OutputProcessor(tokenizer)
    request = make_request(tokenizer, SamplingParams())
    processor.add(request)
    token_ids = tokenizer.encode("one🎉", add_special_tokens=False)[:-1]
    for token_id in token_ids[:-1]:
        feed(processor, request.seqs[0], token_id)
    outputs, _ = feed(processor, request.seqs[0], token_ids[-1], finish="length")
    assert outputs[0].outputs[0].text == tokenizer.decode(token_ids)
    assert outputs[0].outputs[0].finish_reason == "length"


@pytest.mark.parametrize(("min_tokens", "kept"), [(0, False), (0, True), (99, False)])
def test_a_stop_string_beside_an_unfinished_character_at_the_end(tokenizer, min_tokens, kept):
    """One token, as a vocabulary may have, of a letter and the first byte of a character."""

    class Halves:
        added_tokens_decoder = MappingProxyType({})

        def decode(self, ids, **options):
            return "".join({1: "one", 2: "Xy\ufffd"}[i] for i in ids)

    processor = OutputProcessor(Halves())
    params = SamplingParams(
        stop="X", min_tokens=min_tokens, max_tokens=100, include_stop_str_in_output=kept
    )
    request = make_request(None, params)
    processor.add(request)
    feed(processor, request.seqs[0], 1)
    outputs, _ = feed(processor, request.seqs[0], 2, finish="length")
    done = outputs[0].outputs[0]
    if min_tokens:
        assert (done.text, done.finish_reason) == ("oneXy\ufffd", "length")
    else:
        assert (done.text, done.finish_reason) == ("oneX" if kept else "one", "stop")
        assert done.stop_reason == "X"


def test_the_last_token_of_an_end_by_length_stays_in_the_text(tokenizer):
    processor = OutputProcessor(tokenizer)
    request = make_request(tokenizer, SamplingParams())
    processor.add(request)
    token_ids = tokenizer.encode("hello world", add_special_tokens=False)
    for token_id in token_ids[:-1]:
        feed(processor, request.seqs[0], token_id)
    outputs, _ = feed(processor, request.seqs[0], token_ids[-1], finish="length")
    assert outputs[0]["text"] == "hello world"
    assert outputs[0]["token_ids"] == token_ids


def test_eos_is_in_the_ids_and_not_in_the_text(tokenizer):
    processor = OutputProcessor(tokenizer)
    request = make_request(tokenizer, SamplingParams())
    processor.add(request)
    (word,) = tokenizer.encode("e", add_special_tokens=False)
    feed(processor, request.seqs[0], word)
    outputs, _ = feed(processor, request.seqs[0], 2, finish="stop")
    assert outputs[0]["text"] == "e"
    assert outputs[0]["token_ids"] == [word, 2]


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize(("include", "text"), [(False, "e"), (True, "e<|im_end|>")])
def test_eos_is_in_the_text_if_special_tokens_and_the_stop_are_asked_for(
    tokenizer, is_streamed, include, text
):
    """skip_special_tokens=False alone gave the text of eos too."""
    processor = OutputProcessor(tokenizer)
    params = SamplingParams(skip_special_tokens=False, include_stop_str_in_output=include)
    request = make_request(tokenizer, params, streamed=is_streamed)
    processor.add(request)
    (word,) = tokenizer.encode("e", add_special_tokens=False)
    feed(processor, request.seqs[0], word)
    outputs, _ = feed(processor, request.seqs[0], 2, finish="stop")
    assert outputs[0]["text"] == text
    assert outputs[0]["token_ids"] == [word, 2]


@pytest.mark.parametrize(("include", "text"), [(False, "x"), (True, "xe")])
def test_a_stop_id_that_is_an_ordinary_token_leaves_the_text_unless_asked_for(
    tokenizer, include, text
):
    processor = OutputProcessor(tokenizer)
    x, e = tokenizer.encode("xe", add_special_tokens=False)
    params = SamplingParams(stop_token_ids=[e], include_stop_str_in_output=include)
    request = make_request(tokenizer, params)
    processor.add(request)
    feed(processor, request.seqs[0], x)
    outputs, _ = feed(processor, request.seqs[0], e, finish="stop", stop_reason=e)
    assert outputs[0]["text"] == text
    assert outputs[0].outputs[0].stop_reason == e


def test_n_answers_are_returned_together_by_index(tokenizer):
    processor = OutputProcessor(tokenizer)
    request = make_request(tokenizer, SamplingParams(n=3), num_seqs=3)
    processor.add(request)
    first, second, third = request.seqs
    assert feed(processor, third, 7, finish="length") == ([], [])
    assert feed(processor, first, 8, finish="stop") == ([], [])
    outputs, _ = feed(processor, second, 9, finish="length")
    assert len(outputs) == 1 and outputs[0].finished
    assert [(o.index, o.token_ids) for o in outputs[0].outputs] == [(0, [8]), (1, [9]), (2, [7])]
    assert [o.finish_reason for o in outputs[0].outputs] == ["stop", "length", "length"]


def test_an_abort_gives_what_there_is(tokenizer):
    processor = OutputProcessor(tokenizer)
    request = make_request(tokenizer, SamplingParams(n=2), num_seqs=2)
    processor.add(request)
    feed(processor, request.seqs[1], 9, finish="length")
    (word,) = tokenizer.encode("e", add_special_tokens=False)
    feed(processor, request.seqs[0], word)
    request.seqs[0].finish_reason = "abort"
    output = processor.abort("r")
    assert output is not None and output.finished
    assert [(o.token_ids, o.finish_reason) for o in output.outputs] == [
        ([word], "abort"),
        ([9], "length"),
    ]
    assert output.outputs[0].text == "e"
    assert processor.abort("r") is None


def test_tokens_of_an_aborted_request_are_ignored(tokenizer):
    processor = OutputProcessor(tokenizer)
    request = make_request(tokenizer, SamplingParams(stop="e"))
    processor.add(request)
    processor.abort("r")
    assert feed(processor, request.seqs[0], 7, finish="stop") == ([], [])


def test_a_stream_never_shows_what_may_become_a_stop_string(tokenizer):
    processor = OutputProcessor(tokenizer)
    request = make_request(tokenizer, SamplingParams(stop="lo w"), streamed=True)
    processor.add(request)
    shown = []
    for token_id in tokenizer.encode("hello world", add_special_tokens=False):
        outputs, stopped = feed(processor, request.seqs[0], token_id)
        shown.append(outputs[0].outputs[0].text)
        if stopped:
            break
    assert shown[-1] == "hel"
    assert all("hel".startswith(text) for text in shown)


def test_without_detokenize_or_tokenizer_there_is_no_text(tokenizer):
    for tokens_to_text, params in [
        (tokenizer, SamplingParams(detokenize=False)),
        (None, SamplingParams()),
    ]:
        processor = OutputProcessor(tokens_to_text)
        request = make_request(tokens_to_text, params)
        processor.add(request)
        outputs, _ = feed(processor, request.seqs[0], 7, finish="length")
        assert (outputs[0]["text"], outputs[0]["token_ids"]) == ("", [7])
