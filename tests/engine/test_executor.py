"""The door to the device side: whatever goes through it runs on the engine's device."""

from contextlib import contextmanager

from nanovllm import LLM, SamplingParams
from nanovllm.engine import executor
from nanovllm.engine.model_runner import ModelRunner


def test_every_call_of_a_runner_is_made_on_its_device(tiny_model, monkeypatch):
    """So that the user's current device can stay what it was: tests/gpu/test_current_device.py."""
    entered, outside, inside = [], [], []

    @contextmanager
    def on_device(device):
        entered.append(device)
        yield
        entered.pop()

    monkeypatch.setattr(executor, "on_device", on_device)
    public = [name for name in vars(ModelRunner) if not name.startswith("_")]
    for name in ("__init__", *public):
        real = vars(ModelRunner)[name]

        def watched(runner, *args, name=name, real=real, **kwargs):
            (inside if entered else outside).append(name)
            return real(runner, *args, **kwargs)

        monkeypatch.setattr(ModelRunner, name, watched)
    with LLM(tiny_model, device="cpu", dtype="float32", num_kvcache_blocks=16) as llm:
        llm.generate([[5, 6]], SamplingParams(max_tokens=2), use_tqdm=False)
        weights = llm._engine._executor._runner._model.state_dict()
        llm.load_weights([("model.norm.weight", weights["model.norm.weight"].clone())])
        llm.sleep(2)
        llm.wake_up()
    assert outside == []
    assert set(inside) >= {"__init__", *public} and {"execute", "close"} <= set(public)
