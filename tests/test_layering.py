"""Keeps the layout of the package: who may import whom, how, and how long things may get."""

import ast
import graphlib
import io
import subprocess
import sys
import tokenize
from functools import cache
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "nanovllm"

# Lowest first; a module may import its own layer and those before it.
LAYERS = [
    {"utils"},
    {"config", "sampling_params", "outputs", "metrics"},
    {"kernels"},
    {"lora"},  # a checkpoint's weights with an adapter added: the loader loads it by name
    {"collectives"},  # between GPUs, by kernels of ours: utils.parallel loads it by name
    {"attention"},
    {"layers"},
    {"moe"},  # for sparse models; the core never imports it
    {"models"},
    {"quantization"},  # fp8 weights: the model registry loads it by name
    {"fused"},  # decode of narrow models in fewer kernels: the decoder loads it by name
    {"engine"},
    {"sampling", "kv_calibration"},  # what options ask for: the engine loads it by name
    {"frontend"},  # text and requests; below it there are tokens only
    {"generation_defaults", "chat", "run_requests", "read_ahead"},
    {"lazy", "scoring"},
    {"llm"},
    {"__init__"},
    {"data_parallel"},
    {"batch", "ray", "lm_eval", "report", "command_line"},
    {"__main__"},
]
LEAVES = {"data_parallel", "batch", "ray", "lm_eval", "report", "command_line", "__main__"}

# What may be imported inside a function, since the package works without it.
OPTIONAL_PACKAGES = {"flash_attn", "lm_eval", "matplotlib", "pandas", "pyarrow", "ray", "zstandard"}

# What a module below loads by name, on demand: the only names that may point upward.
LOADED_ON_DEMAND = {
    "nanovllm.engine.model_runner": {"nanovllm.sampling.redraw", "nanovllm.kv_calibration"},
    "nanovllm.models.decoder": {"nanovllm.fused"},
    "nanovllm.utils.loader": {"nanovllm.lora.merge"},
    "nanovllm.models.registry": {"nanovllm.quantization.model"},
    "nanovllm.utils.parallel": {"nanovllm.collectives.peer_memory"},
}

HOST_SIDE = {
    *(f"nanovllm.engine.{name}" for name in ("step", "sequence", "block_manager", "scheduler")),
    "nanovllm.frontend.output_processor",
}
DEVICE_SIDE = {
    f"nanovllm.engine.{name}" for name in ("model_inputs", "model_runner", "cuda_graph", "executor")
}

# What runs a Qwen3 with temperature, from tokens to tokens.
CORE_PACKAGES = {"engine", "attention", "kernels", "layers"}
CORE_MODULES = {f"nanovllm.models.{name}" for name in ("decoder", "weights", "qwen3")}
MAX_CORE_LINES = 4000
MAX_FILE_LINES = 400


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 2 else parts)


FILES = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def resolve(name: str) -> str | None:
    """Return our module that a dotted name stands for; it may end in a name inside the module."""
    if name.split(".")[0] != "nanovllm":
        return None
    while name not in FILES and "." in name:
        name = name.rpartition(".")[0]
    return "nanovllm.__init__" if name == "nanovllm" else name


@cache
def tree_of(module: str) -> ast.Module:
    return ast.parse(FILES[module].read_text(encoding="utf-8"))


def imported_names(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        return [f"{node.module}.{alias.name}" for alias in node.names]
    return []


@cache
def imports_of(module: str) -> frozenset[str]:
    """Return what a module imports: ours by module, others by package; registries' names count."""
    found = set()
    for node in ast.walk(tree_of(module)):
        for name in imported_names(node):
            found.add(resolve(name) or name.split(".")[0])
        if isinstance(node, ast.Constant) and node.value in FILES:
            found.add(node.value)
    return frozenset(found - {module})


@cache
def reachable_from(module: str) -> frozenset[str]:
    found: set[str] = set()
    left = [module]
    while left:
        for name in imports_of(left.pop()) - found:
            found.add(name)
            if name in FILES:
                left.append(name)
    return frozenset(found)


def layer_of(module: str) -> int:
    top = module.split(".")[1]
    for layer, names in enumerate(LAYERS):
        if top in names:
            return layer
    raise AssertionError(f"{module} has no layer: place it in LAYERS, as in the design")


@pytest.mark.parametrize("module", FILES)
def test_imports_go_downward_only(module):
    layer = layer_of(module)
    names = imports_of(module) - LOADED_ON_DEMAND.get(module, set())
    upward = [name for name in names if name in FILES and layer_of(name) > layer]
    assert not upward, f"{module} imports {upward}, which are above it"


def test_no_module_imports_itself_by_a_detour():
    graph = {module: runtime_imports_of(module) & FILES.keys() for module in FILES}
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError, which lists the cycle


def runtime_imports_of(module: str) -> set[str]:
    """Return what is imported along with a module: not names in registries, not types alone."""
    types_only = {
        inner
        for node in ast.walk(tree_of(module))
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")
        for inner in ast.walk(node)
    }
    nodes = set(ast.walk(tree_of(module))) - types_only
    names = {resolve(name) for node in nodes for name in imported_names(node)}
    return {name for name in names if name is not None} - {module}


@pytest.mark.parametrize("module", FILES)
def test_imports_are_absolute_and_at_the_top(module):
    for node in ast.walk(tree_of(module)):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}:{node.lineno} has a relative import"
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            for inner in ast.walk(node):
                for name in imported_names(inner):
                    assert name.split(".")[0] in OPTIONAL_PACKAGES, (
                        f"{module}:{inner.lineno} imports {name} inside a function; "
                        "only optional packages may be"
                    )


@pytest.mark.parametrize("module", sorted(HOST_SIDE))
def test_the_host_side_never_imports_torch(module):
    if module not in FILES:
        pytest.skip("not written yet")
    heavy = reachable_from(module) & {"torch", "triton", "flash_attn", "transformers"}
    assert not heavy, f"{module} reaches {heavy} through its imports"


@pytest.mark.parametrize("module", sorted(DEVICE_SIDE))
def test_the_device_side_knows_the_host_side_by_its_records_only(module):
    if module not in FILES:
        pytest.skip("not written yet")
    assert reachable_from(module) & HOST_SIDE <= {"nanovllm.engine.step"}


@pytest.mark.parametrize("module", FILES)
def test_no_global_state_is_changed(module):
    for node in ast.walk(tree_of(module)):
        assert not isinstance(node, ast.Global), f"{module}:{node.lineno} changes a module global"
        if isinstance(node, ast.Attribute):
            assert not node.attr.startswith("set_default_"), (
                f"{module}:{node.lineno} calls {node.attr}: pass dtype and device instead"
            )
            assert node.attr != "set_device", (
                f"{module}:{node.lineno} changes the thread's current device, which is the "
                "user's: use utils.device.on_device"
            )
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            assert node.func.attr not in ("basicConfig", "addHandler"), (
                f"{module}:{node.lineno} sets up logging, which is the program's business"
            )


def is_core(module: str) -> bool:
    return module.split(".")[1] in CORE_PACKAGES or module in CORE_MODULES


def test_files_stay_short():
    """All lines count here: a file should fit a reader's head."""
    num_lines = {
        module: len(path.read_text(encoding="utf-8").splitlines()) for module, path in FILES.items()
    }
    too_long = {module: n for module, n in num_lines.items() if n > MAX_FILE_LINES}
    assert not too_long


def test_the_core_stays_small():
    """The core stays below 4,000 lines of code.

    Core: the engine (scheduler, KV cache, model runner, executors), attention backends, kernels,
    layers, and Qwen3 with the decoder and the weight loading it is made of. Not counted: what it
    shares with the rest (`utils`, `config`, `sampling_params`, the reading of config.json) and all
    that is above it, such as text and requests (`frontend`) and richer sampling (`sampling`).
    A line counts if it has code: not blank lines, comments or docstrings.
    """
    core = {module: num_code_lines(path) for module, path in FILES.items() if is_core(module)}
    assert all(module in core for module in CORE_MODULES)
    assert sum(core.values()) < MAX_CORE_LINES, core


def num_code_lines(path: Path) -> int:
    source = path.read_text(encoding="utf-8")
    layout = {
        tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT,
        tokenize.ENDMARKER,
    }  # fmt: skip
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in layout:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if (
            isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
            and ast.get_docstring(node) is not None
        ):
            docstring = node.body[0]
            assert docstring.end_lineno is not None
            lines.difference_update(range(docstring.lineno, docstring.end_lineno + 1))
    return len(lines)


def test_code_lines_are_those_with_code(tmp_path):
    path = tmp_path / "some.py"
    path.write_text(
        '"""A docstring\n\nof three lines."""\n\nx = (\n    1,  # why\n)\n'
        '# A comment\ndef f():\n    """Another."""\n    return """two\n    lines"""\n'
    )
    assert num_code_lines(path) == 6


def test_the_core_imports_nothing_beyond_it():
    """It may look down, at what is shared, and nowhere else: not by name either, but on demand."""
    shared = {"utils", "config", "sampling_params", "models"}
    for module in filter(is_core, FILES):
        names = imports_of(module) - LOADED_ON_DEMAND.get(module, set())
        beyond = {name for name in names & FILES.keys() if not is_core(name)}
        beyond = {name for name in beyond if name.split(".")[1] not in shared}
        assert not beyond, f"{module} imports {beyond}"


LOADED_AFTER = """
import sys
from nanovllm import LLM, SamplingParams
if __name__ == "__main__":
    options = {"device": "cpu", "num_kvcache_blocks": 8, "kvcache_block_size": 16}
    with LLM(sys.argv[1], **options) as llm:
        for params in ({"temperature": 0.0}, {"temperature": 0.8}, {"top_k": 2}):
            llm.generate([[1, 2]], SamplingParams(max_tokens=2, seed=0, **params))
            print("nanovllm.sampling.redraw" in sys.modules)
"""


def test_plain_sampling_never_loads_the_rest_of_it(tiny_model):
    result = subprocess.run(
        [sys.executable, "-c", LOADED_AFTER, str(tiny_model)],
        cwd=PACKAGE.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.stdout.split() == ["False", "False", "True"], result.stderr


IMPORT_ALL = """
import importlib, logging, sys
for name in ("triton", "flash_attn"):
    sys.modules[name] = None  # import of it now raises ImportError
handlers = list(logging.getLogger().handlers)
import nanovllm
for name in sys.argv[1:]:
    importlib.import_module(name)
import torch
assert torch.get_default_dtype() == torch.float32
assert not torch.cuda.is_initialized()
assert not torch.distributed.is_initialized()
assert logging.getLogger().handlers == handlers
assert "transformers" not in sys.modules  # workers, which load no tokenizer, start without it
"""


def test_import_works_without_triton_and_flash_attn_and_changes_nothing():
    modules = [
        module
        for module in FILES
        if module.split(".")[1] not in LEAVES and module != "nanovllm.attention.flash_attn"
    ]
    result = subprocess.run(
        [sys.executable, "-c", IMPORT_ALL, *modules],
        cwd=PACKAGE.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
