"""What is asked of a Ray cluster before work is given to it; Ray itself is not needed here."""

import sys
from types import SimpleNamespace

import pytest

from nanovllm.ray import build_processor


class Rows:
    """A dataset that tells what it was asked for."""

    def map_batches(self, *_, **options):
        return options


@pytest.mark.parametrize(
    ("options", "num_there", "num_asked"),
    [
        ({}, 0, None),
        ({"tensor_parallel_size": 2}, 1, None),
        ({}, 1, 1),
        ({"tensor_parallel_size": 2}, 2, 2),
        ({"device": "cpu"}, 0, 0),
        ({"num_gpus": 1}, 0, 1),  # as where machines join later
    ],
)
def test_a_cluster_without_the_gpus_of_an_engine_is_told_so(
    monkeypatch, demo_model, options, num_there, num_asked
):
    """Ray waits for them for ever."""
    resources = {"CPU": 4.0} | ({"GPU": float(num_there)} if num_there else {})
    ray = SimpleNamespace(cluster_resources=lambda: resources)
    monkeypatch.setitem(sys.modules, "ray", ray)
    process = build_processor(str(demo_model), **options)
    if num_asked is None:
        with pytest.raises(ValueError, match=f"cluster has {num_there}. Pass device='cpu'"):
            process(Rows())
    else:
        assert process(Rows())["num_gpus"] == num_asked
