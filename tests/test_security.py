"""What README's Security section promises: no code from files, nothing outside, nothing told."""

from __future__ import annotations

import ast
import json
import logging
import os
import re
import shutil
import socket
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from nanovllm import LLM, SamplingParams
from nanovllm.batch import BatchOptions, run_batch
from nanovllm.engine.worker import WorkerGroup
from nanovllm.utils.channel import _anonymous_file
from nanovllm.utils.loader import iterate_safetensors

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "nanovllm"
GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
SMALL = {"device": "cpu", "dtype": "float32", "num_kvcache_blocks": 16}


# ---- files are data


class Evil:
    """Unpickled, it leaves a mark."""

    def __init__(self, mark: Path) -> None:
        self._mark = mark

    def __reduce__(self):
        return (open, (str(self._mark), "w"))


@pytest.mark.parametrize(
    "name", ["pytorch_model.bin", "model.pt", "model.pth", "consolidated.00.pth"]
)
@pytest.mark.parametrize("is_renamed", [False, True], ids=["by its name", "as model.safetensors"])
def test_a_pickle_is_refused_by_name_and_never_opened(tmp_path, tiny_model, name, is_renamed):
    directory, mark = tmp_path / "model", tmp_path / "mark"
    shutil.copytree(tiny_model, directory)
    (directory / "model.safetensors").unlink()
    torch.save(Evil(mark), directory / ("model.safetensors" if is_renamed else name))
    match = "not a readable safetensors" if is_renamed else f"{name}[^|]*Pickle files are not read"
    with pytest.raises(ValueError, match=match):
        LLM(directory, **SMALL)
    assert not mark.exists()


def test_only_private_pipes_are_unpickled():
    """`pickle` where ranks of one engine talk; nothing that loads or runs code anywhere."""
    allowed = {"engine/worker.py": {"pickle.loads"}, "engine/executor.py": {"pickle.dumps"}}
    # `nanovllm.moe` and others load their own modules by constant names.
    banned = re.compile(
        r"(c?pickle|dill|joblib|marshal|shelve)\.\w+|torch\.(load|hub\.\w+|jit\.load)|yaml\.\w*load"
        r"|eval|exec|compile|os\.(system|popen|exec\w+)|subprocess\.\w+|runpy\.\w+|__import__"
    )
    for path in PACKAGE.rglob("*.py"):
        name = str(path.relative_to(PACKAGE))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                if banned.fullmatch(called):
                    assert called in allowed.get(name, ()), f"{name}:{node.lineno} calls {called}"


@pytest.mark.parametrize("value", [True, 1, "yes"])
def test_code_from_a_checkpoint_is_refused(tiny_model, value):
    with pytest.raises((ValueError, TypeError), match="trust_remote_code"):
        LLM(tiny_model, trust_remote_code=value, **SMALL)


def test_code_beside_a_checkpoint_is_not_imported(tmp_path, tiny_model):
    """`auto_map` in any of the files makes transformers' Auto classes import modeling_*.py."""
    directory, mark = tmp_path / "model", tmp_path / "mark"
    shutil.copytree(tiny_model, directory)
    for name in ("modeling_evil", "tokenization_evil", "configuration_evil"):
        (directory / f"{name}.py").write_text(f"open({str(mark)!r}, 'w')\nclass Evil: pass\n")
    for name in ("config.json", "tokenizer_config.json"):
        values = json.loads((directory / name).read_text())
        values["auto_map"] = {
            "AutoConfig": "configuration_evil.Evil",
            "AutoModelForCausalLM": "modeling_evil.Evil",
            "AutoTokenizer": ["tokenization_evil.Evil", "tokenization_evil.Evil"],
        }
        (directory / name).write_text(json.dumps(values))
    try:
        with LLM(directory, **SMALL) as llm:
            llm.generate(["hello"], GREEDY, use_tqdm=False)
    except ValueError as error:
        assert "auto_map" in str(error)
    assert not mark.exists()
    assert not any("evil" in name for name in sys.modules)


# ---- chat templates are programs of strangers

ESCAPES = {
    "subclasses": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "by filter": "{{ ''|attr('__class__') }}",
    "by format": "{{ '{0.__class__}'.format('') }}",
    "globals": "{{ raise_exception.__globals__ }}",
    "by map": "{{ ['']|map(attribute='__class__')|list }}",
    "of a macro": "{% macro f() %}{% endmacro %}{{ f.__call__.__globals__ }}",
    "of the loop": "{% for m in messages %}{{ loop.__init__.__globals__ }}{% endfor %}",
    "cycler": "{{ cycler.__init__.__globals__.os.system('touch MARK') }}",
    "self": "{{ self.__init__.__globals__ }}",
    "import": "{% import 'os' as os %}{{ os.system('touch MARK') }}",
    "include": "{% include '/etc/passwd' %}",
    "change the list": "{{ messages.append(1) }}",
    "change a message": "{{ messages[0].update({'content': 'x'}) }}",
}


@pytest.mark.parametrize("name", ESCAPES)
def test_a_chat_template_does_not_get_out(llm, tmp_path, name):
    template = ESCAPES[name].replace("MARK", str(tmp_path / "mark"))
    messages = [{"role": "user", "content": "hello"}]
    try:
        (output,) = llm.chat(messages, GREEDY, chat_template=template, use_tqdm=False)
    except ValueError as error:  # refused, or nothing came of it
        assert "prompt 0" in str(error)
    else:
        for word in ("<class", "builtin", "root:", "function"):
            assert word not in output.prompt
    assert not (tmp_path / "mark").exists()
    assert messages == [{"role": "user", "content": "hello"}]


# ---- paths


def test_a_link_out_of_the_directory_is_followed_and_read_as_safetensors_only(tmp_path):
    """Hugging Face's cache is made of links: whoever may place links there is trusted to."""
    model, blobs = tmp_path / "model", tmp_path / "blobs"
    model.mkdir(), blobs.mkdir()
    save_file({"a": torch.ones(2)}, blobs / "0123abc")
    (model / "model.safetensors").symlink_to(blobs / "0123abc")
    assert [name for name, _ in iterate_safetensors(model)] == ["a"]
    (model / "model.safetensors").unlink()
    (blobs / "secret").write_text("the password")
    (model / "model.safetensors").symlink_to(blobs / "secret")
    with pytest.raises(ValueError, match="not a readable safetensors") as caught:
        list(iterate_safetensors(model))
    assert "password" not in str(caught.value)


@pytest.mark.parametrize("target", ["/dev/zero", "/dev/stdin", "fifo"])
def test_a_device_or_pipe_is_no_weight_file(tmp_path, target):
    if target == "fifo":
        os.mkfifo(tmp_path / "fifo")
        target = tmp_path / "fifo"
    model = tmp_path / "model"
    model.mkdir()
    (model / "model.safetensors").symlink_to(target)
    with pytest.raises(ValueError, match="no weights in"):
        list(iterate_safetensors(model))


# ---- the network and other users


def listening(pids):
    """Local addresses of the listening TCP sockets that belong to some processes."""
    inodes = set()
    for pid in pids:
        for entry in os.scandir(f"/proc/{pid}/fd"):
            try:
                inodes.add(os.readlink(entry.path))
            except OSError:
                continue
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pids[0]}/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and f"socket:[{words[9]}]" in inodes:
                found.append(words[1].split(":")[0])
    return found


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks into /proc")
def test_tensor_parallel_listens_on_loopback_only_and_leaves_private_files(
    tiny_model, monkeypatch, tmp_path
):
    seen, modes, is_over = [], set(), threading.Event()
    real = WorkerGroup.join

    def join(group):
        directory = Path(group._store_path).parent
        modes.add(stat.S_IMODE(directory.stat().st_mode))
        pids = [os.getpid(), *(process.pid for process in group._processes)]

        def look():
            while not is_over.wait(0.002):
                seen.extend(listening(pids))

        threading.Thread(target=look, daemon=True).start()
        return real(group)

    monkeypatch.setattr(WorkerGroup, "join", join)
    loopback = "0100007F"  # 127.0.0.1 in the byte order of a small endian
    with LLM(tiny_model, tensor_parallel_size=2, **SMALL) as llm:
        llm.generate([[5, 6]], GREEDY, use_tqdm=False)
        pids = [os.getpid(), *(p.pid for p in llm._engine._executor._group._processes)]
        seen.extend(listening(pids))
        is_over.set()
    assert seen and set(seen) == {loopback}, "gloo's own, and nothing else"
    assert modes == {0o700}


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks into /proc")
def test_an_engine_on_one_device_opens_no_port(tiny_model):
    before = listening([os.getpid()])  # of tests before
    with LLM(tiny_model, **SMALL) as llm:
        llm.generate([[5, 6]], GREEDY, use_tqdm=False)
        assert len(listening([os.getpid()])) <= len(before)


def test_the_memory_of_the_channel_is_the_users_own():
    fd = _anonymous_file()
    try:
        assert stat.S_IMODE(os.fstat(fd).st_mode) == 0o600
        assert not os.get_inheritable(fd)
    finally:
        os.close(fd)


def test_nothing_is_fetched_for_a_local_model(tiny_model, monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("a connection was made")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    with LLM(tiny_model, **SMALL) as llm:
        llm.chat([{"role": "user", "content": "hello"}], GREEDY, use_tqdm=False)


# ---- what is told

MARK = "xyzzy-marker-0815"


@pytest.mark.parametrize("level", [logging.INFO, logging.DEBUG])
def test_prompts_and_answers_are_not_logged(tiny_model, caplog, capfd, level):
    with caplog.at_level(level, logger="nanovllm"), LLM(tiny_model, **SMALL) as llm:
        prompt = f"{MARK} hello"
        llm.generate([prompt], GREEDY.clone(stop=[MARK], logprobs=1))
        llm.chat([{"role": "user", "content": prompt}], GREEDY)
        llm.score([prompt], [" world"])
        list(llm.stream(prompt, GREEDY))
        llm.generate([prompt, ""], GREEDY, return_errors=True)
        llm.abort(llm.add_request(prompt, GREEDY.clone(max_tokens=16)))
    told = [record.getMessage() for record in caplog.records]
    assert told, "there is a log"
    assert not any(MARK in line for line in told)
    out, err = capfd.readouterr()
    assert MARK not in out + err


def test_a_jobs_log_and_report_have_no_prompts_and_its_report_escapes_names(tmp_path, demo_model):
    """Names of models and files are whatever somebody made them."""
    evil = "<img src=x onerror=alert(1)>&\"'"
    model = tmp_path / evil.replace("/", "")
    model.symlink_to(demo_model)
    source = tmp_path / f"{evil}.jsonl"
    lines = [
        {"prompt": f"{MARK} 12+34=", "max_tokens": 4},
        {"custom_id": evil, "method": "POST", "url": "/v1/completions",
         "body": {"model": evil, "prompt": MARK, "max_tokens": 4}},
        {"prompt": MARK, "temperature": -1},
    ]  # fmt: skip
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    report = tmp_path / "report.html"
    words = ["run-batch", "-v", "-i", source, "-o", tmp_path / "out.jsonl", "--model", model]
    words += ["--device", "cpu", "--num-kvcache-blocks", "32", "--report", report]
    done = subprocess.run(
        [sys.executable, "-m", "nanovllm", *map(str, words)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    assert "INFO" in done.stderr
    assert MARK not in done.stderr + done.stdout
    html = report.read_text()
    assert MARK not in html and "<img" not in html and "&lt;img src=x" in html


def test_files_of_a_job_are_not_made_executable_or_shared_more_than_usual(tmp_path, demo_model):
    source = tmp_path / "in.jsonl"
    source.write_text(json.dumps({"prompt": "12+34=", "max_tokens": 4}) + "\n")
    before = os.umask(0o077)
    try:
        options = BatchOptions(str(source), tmp_path / "out.jsonl", show_progress=False)
        run_batch(demo_model, options, **SMALL)
    finally:
        os.umask(before)
    for name in ("out.jsonl", "out.jsonl.job.json"):
        assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o600
