"""What a request may ask for: each parameter checked, and refused with what to do."""

import dataclasses
import pickle

import numpy as np
import pytest

from nanovllm.engine.row_params import param_cells, row_features
from nanovllm.engine.sequence import Sequence
from nanovllm.engine.step import SamplingFeature
from nanovllm.sampling_params import SamplingParams


def test_defaults_are_vllms_but_for_max_tokens():
    params = SamplingParams()
    assert (params.n, params.temperature, params.top_p, params.top_k, params.min_p) == (
        1,
        1,
        1,
        0,
        0,
    )
    assert (params.presence_penalty, params.frequency_penalty) == (0.0, 0.0)
    assert (params.repetition_penalty, params.seed) == (1.0, None)
    assert (params.max_tokens, params.min_tokens, params.ignore_eos) == (64, 0, False)
    assert (params.stop, params.stop_token_ids, params.bad_words) == ((), (), ())
    assert (params.logprobs, params.prompt_logprobs) == (None, None)
    assert (params.logit_bias, params.allowed_token_ids, params.logits_processors) == ((), None, ())
    assert (params.detokenize, params.skip_special_tokens) == (True, True)
    assert (params.spaces_between_special_tokens, params.include_stop_str_in_output) == (
        True,
        False,
    )


def test_nobody_writes_to_sampling_params():
    with pytest.raises(dataclasses.FrozenInstanceError):
        SamplingParams().max_tokens = 1


def test_equal_values_are_equal_hashable_and_survive_pickling():
    params = SamplingParams(
        temperature=1, stop="a", logit_bias={7: 1, 3: -2.5}, allowed_token_ids=[3]
    )
    same = SamplingParams(
        temperature=1.0, stop=["a"], logit_bias={3: -2.5, 7: 1.0}, allowed_token_ids=(3,)
    )
    assert params == same
    assert hash(params) == hash(same)
    assert pickle.loads(pickle.dumps(params)) == params


def test_clone_changes_only_what_is_asked_and_checks_it():
    params = SamplingParams(
        n=2,
        top_k=-1,
        stop=["a"],
        logit_bias={3: 1.0},
        allowed_token_ids=[3],
        logits_processors=[max],
        max_tokens=None,
    )
    assert params.clone() == params
    changed = params.clone(max_tokens=5)
    assert changed.max_tokens == 5
    assert changed.clone(max_tokens=None) == params
    with pytest.raises(ValueError, match="max_tokens must be at least 1"):
        params.clone(max_tokens=0)


def test_repr_shows_what_differs_from_the_defaults():
    assert repr(SamplingParams()) == "SamplingParams()"
    params = SamplingParams(temperature=0, stop="a", max_tokens=None)
    assert repr(params) == "SamplingParams(temperature=0.0, stop=('a',), max_tokens=None)"
    assert eval(repr(params)) == params


def test_unknown_option_names_the_nearest_one():
    with pytest.raises(TypeError, match=r"no option 'temprature'\. Did you mean 'temperature'\?"):
        SamplingParams(temprature=0.5)
    with pytest.raises(TypeError, match="no option 'max_token'"):
        SamplingParams().clone(max_token=1)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("max_new_tokens", "'max_tokens'"),
        ("num_return_sequences", "'n'"),
        ("do_sample", "temperature=0 is greedy"),
        ("use_beam_search", "not supported"),
        ("length_penalty", "Beam search is not supported"),
        ("max_completion_tokens", "Did you mean 'max_tokens'"),
        ("response_format", "Structured output is not supported"),
        ("skip_reading_prefix_cache", "Leave it out"),
    ],
)
def test_options_of_other_libraries_are_met_with_what_to_do(name, hint):
    with pytest.raises(TypeError, match=hint):
        SamplingParams(**{name: 1})


def test_only_n_may_be_positional():
    assert SamplingParams(3).n == 3
    with pytest.raises(TypeError, match="positional"):
        SamplingParams(1, 0.5)


@pytest.mark.parametrize(
    ("name", "good", "bad", "allowed"),
    [
        ("temperature", [0, 1e-9, 100.0], [-0.1, 1e39, 10**400], r"in \[0, 1e\+30\]"),
        ("top_p", [1e-6, 1], [0, -0.5, 1.1], r"in \(0, 1\]"),
        ("min_p", [0, 0.5, 1], [-0.1, 1.1], r"in \[0, 1\]"),
        ("presence_penalty", [-2, 0.5, 2], [-2.1, 2.1], r"in \[-2, 2\]"),
        ("frequency_penalty", [-2, 0.5, 2], [-2.1, 2.1], r"in \[-2, 2\]"),
        ("repetition_penalty", [0.1, 1, 5], [0, -1.0, 1e-50, 1e300], r"in \[0.001, 1000\]"),
    ],
)
def test_numbers_are_checked_and_stored_as_floats(name, good, bad, allowed):
    for value in (*good, np.float32(1.0)):
        stored = getattr(SamplingParams(**{name: value}), name)
        assert type(stored) is float
        assert stored == value
    for value in (*bad, float("nan"), float("inf"), float("-inf")):
        with pytest.raises(ValueError, match=f"{name} must be a finite number {allowed}, got"):
            SamplingParams(**{name: value})
    for value in ("1", True, None, [1.0], 1j):
        with pytest.raises(TypeError, match=f"{name} must be a number, got"):
            SamplingParams(**{name: value})


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("n", [1, 16384], [0, -1, 16385]),
        ("top_k", [0, 1, 10**9], [-2]),
        ("max_tokens", [1, 10**9], [0, -1]),
        ("min_tokens", [0, 64], [-1]),
        ("logprobs", [-1, 0, 5], [-2]),
        ("prompt_logprobs", [-1, 0, 5], [-2]),
        ("seed", [0, -7, 2**64 - 1, -(2**63)], [2**64, -(2**63) - 1]),
    ],
)
def test_counts_are_checked_and_stored_as_ints(name, good, bad):
    for value in (*good, np.int64(1)):
        stored = getattr(SamplingParams(**{name: value}), name)
        assert type(stored) is int
        assert stored == value
    for value in bad:
        with pytest.raises(ValueError, match=f"{name} must be (at least|from) .*, got {value}"):
            SamplingParams(**{name: value})
    for value in ("1", False, 1.0, [1]):
        with pytest.raises(TypeError, match=f"{name} must be an int, got"):
            SamplingParams(**{name: value})


@pytest.mark.parametrize("name", ["n", "top_k", "min_tokens"])
def test_none_is_refused_where_it_has_no_meaning(name):
    with pytest.raises(TypeError, match=f"{name} must be an int, got None"):
        SamplingParams(**{name: None})


@pytest.mark.parametrize(
    "name",
    [
        "ignore_eos",
        "detokenize",
        "skip_special_tokens",
        "spaces_between_special_tokens",
        "include_stop_str_in_output",
    ],
)
def test_switches_take_only_booleans(name):
    for value in (0, 1, None, "yes"):
        with pytest.raises(TypeError, match=f"{name} must be True or False, got"):
            SamplingParams(**{name: value})


def test_vllms_other_spellings_are_understood():
    assert SamplingParams(top_k=-1) == SamplingParams(top_k=0)
    assert SamplingParams(seed=-1) == SamplingParams(seed=None)
    assert SamplingParams(logprobs=True) == SamplingParams(logprobs=1)


@pytest.mark.parametrize("name", ["stop", "bad_words"])
def test_lists_of_strings_become_tuples_without_doubles(name):
    assert getattr(SamplingParams(**{name: ["b", "a", "b"]}), name) == ("b", "a")
    assert getattr(SamplingParams(**{name: []}), name) == ()
    with pytest.raises(ValueError, match=f"{name} must not hold an empty string"):
        SamplingParams(**{name: ["a", ""]})
    with pytest.raises(TypeError, match=f"{name} must hold strings only, got 1"):
        SamplingParams(**{name: ["a", 1]})
    for value in (1, b"a", {"a": 1}):
        with pytest.raises(TypeError, match=f"{name} must be a list of strings"):
            SamplingParams(**{name: value})


def test_one_stop_string_is_a_list_of_one():
    assert SamplingParams(stop="END\n").stop == ("END\n",)
    with pytest.raises(ValueError, match="stop must not hold an empty string"):
        SamplingParams(stop="")


@pytest.mark.parametrize("name", ["stop", "bad_words"])
def test_half_a_surrogate_pair_is_no_text(name):
    """As a stop string it was never found, as a bad word it was said to be no text input."""
    with pytest.raises(ValueError, match=f"{name} must hold text, got .*half of a surrogate pair"):
        SamplingParams(**{name: ["fine", "a\ud83d"]})


def test_bad_words_are_never_one_string():
    """One string would ban each of its characters."""
    with pytest.raises(TypeError, match="bad_words must be a list of strings, got 'word'"):
        SamplingParams(bad_words="word")


@pytest.mark.parametrize("name", ["stop_token_ids", "allowed_token_ids"])
def test_token_ids_become_tuples_without_doubles(name):
    assert getattr(SamplingParams(**{name: [5, np.int32(3), 5]}), name) == (5, 3)
    with pytest.raises(ValueError, match=rf"{name}\[1\] must be from 0 to 2147483647, got -1"):
        SamplingParams(**{name: [5, -1]})
    for value in ([True], ["5"], [5.0], [None]):
        with pytest.raises(TypeError, match=rf"{name}\[0\] must be an int"):
            SamplingParams(**{name: value})
    for value in (5, "5", {5: 1}):
        with pytest.raises(TypeError, match=f"{name} must be a list of token ids"):
            SamplingParams(**{name: value})


def test_at_least_one_token_is_allowed():
    with pytest.raises(ValueError, match="allowed_token_ids must name at least one token"):
        SamplingParams(allowed_token_ids=[])


def test_logit_bias_is_stored_as_pairs_by_token_id():
    params = SamplingParams(logit_bias={9: -100, 2: 1e6})
    assert params.logit_bias == ((2, 1e6), (9, -100.0))
    assert SamplingParams(logit_bias={}).logit_bias == ()


@pytest.mark.parametrize(
    ("logit_bias", "error", "message"),
    [
        ({3: float("nan")}, ValueError, r"logit_bias\[3\] must be a finite number"),
        ({3: float("inf")}, ValueError, r"logit_bias\[3\] must be a finite number"),
        ({3: "1"}, TypeError, r"logit_bias\[3\] must be a number"),
        ({"3": 1.0}, TypeError, "a token id in logit_bias must be an int, got '3'"),
        ({-1: 1.0}, ValueError, "a token id in logit_bias must be from 0"),
        ([3, 4], TypeError, "logit_bias must be a dict of token id to bias"),
        (3, TypeError, "logit_bias must be a list of"),
    ],
)
def test_bad_logit_bias_is_refused(logit_bias, error, message):
    with pytest.raises(error, match=message):
        SamplingParams(logit_bias=logit_bias)


def test_logits_processors_must_be_callable():
    assert SamplingParams(logits_processors=[max, min]).logits_processors == (max, min)
    with pytest.raises(TypeError, match="logits_processors must hold callables only, got 3"):
        SamplingParams(logits_processors=[3])
    with pytest.raises(TypeError, match="logits_processors must be a list of callables"):
        SamplingParams(logits_processors=max)


@pytest.mark.parametrize(
    "processor", [lambda: 0, lambda ids: 0, lambda a, b, c, d: 0, lambda ids, *, logits: 0]
)
def test_a_processor_that_cannot_be_called_is_refused_before_a_batch_runs(processor):
    """The call in the middle of the batch failed, and took all its answers along."""
    with pytest.raises(TypeError, match=r"are called with \(output ids, logits\), or .* with \("):
        SamplingParams(logits_processors=[processor])


def test_processors_of_two_or_three_parameters_are_taken():
    taken = [lambda a, b: b, lambda a, b, c: c, lambda *args: 0, lambda a, b, c=0, d=0: b]
    assert SamplingParams(logits_processors=taken).logits_processors == tuple(taken)


def test_min_tokens_may_not_exceed_max_tokens():
    assert SamplingParams(min_tokens=100, max_tokens=None).min_tokens == 100
    with pytest.raises(ValueError, match="min_tokens must be at most max_tokens=64, got 65"):
        SamplingParams(min_tokens=65)


def test_stop_strings_need_text():
    with pytest.raises(ValueError, match="needs text, but detokenize is False"):
        SamplingParams(stop="a", detokenize=False)


def test_greedy_answers_are_all_the_same_so_n_is_one():
    with pytest.raises(ValueError, match="n must be 1 when temperature is 0, got 2"):
        SamplingParams(n=2, temperature=0)


@pytest.mark.parametrize(("temperature", "is_greedy"), [(0, True), (9e-6, True), (1e-5, False)])
def test_tiny_temperatures_are_greedy(temperature, is_greedy):
    assert SamplingParams(temperature=temperature).is_greedy == is_greedy


@pytest.mark.parametrize(
    ("options", "feature"),
    [
        ({"top_p": 0.9}, SamplingFeature.TOP_K_P),
        ({"top_k": 5}, SamplingFeature.TOP_K_P),
        ({"min_p": 0.1}, SamplingFeature.MIN_P),
        ({"presence_penalty": 0.5}, SamplingFeature.PENALTIES),
        ({"frequency_penalty": -0.5}, SamplingFeature.PENALTIES),
        ({"repetition_penalty": 1.1}, SamplingFeature.PENALTIES),
        ({"logit_bias": {1: 2.0}}, SamplingFeature.TOKEN_RULES),
        ({"allowed_token_ids": [1]}, SamplingFeature.TOKEN_RULES),
        ({"bad_words": ["a"]}, SamplingFeature.TOKEN_RULES),
        ({"min_tokens": 1}, SamplingFeature.TOKEN_RULES),
        ({"logits_processors": [max]}, SamplingFeature.PYTHON_PROCESSORS),
        ({"logprobs": 5}, SamplingFeature.LOGPROBS),
        ({"stop": "a", "stop_token_ids": [1], "seed": 1}, SamplingFeature.NONE),
    ],
    ids=str,
)
def test_a_request_pays_for_the_features_that_it_asks_for(options, feature):
    assert row_features(SamplingParams(**options)) == feature
    # Filters always keep the likeliest token.
    is_filter = feature in (SamplingFeature.TOP_K_P, SamplingFeature.MIN_P)
    greedy = row_features(SamplingParams(temperature=0, **options))
    assert greedy == (SamplingFeature.NONE if is_filter else feature)


@pytest.mark.parametrize("top_p", [5e-324, 1e-50, 1e-45])
def test_a_tiny_top_p_is_not_zero_in_float32(top_p):
    assert np.float32(SamplingParams(top_p=top_p).top_p) >= np.finfo(np.float32).tiny


@pytest.mark.parametrize(
    "name",
    [
        "temperature",
        "top_p",
        "min_p",
        "presence_penalty",
        "frequency_penalty",
        "repetition_penalty",
    ],
)
def test_every_number_that_is_accepted_fits_the_row(name):
    """A row that cannot be written would block all others with it."""
    for value in (s * 10.0**e for s in (1, -1) for e in range(-320, 309, 4)):
        try:
            params = SamplingParams(**{name: value})
        except ValueError:
            continue
        cells = param_cells(
            Sequence(0, "r", [5], params, max_num_tokens=9, noise_key=(0, 0), sample_index=0)
        )
        assert all(-(2**31) <= cell < 2**31 for cell in cells.values())
