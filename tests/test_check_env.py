"""`python -m scripts.check_env` marks what is here, what is missing, and what is broken, and starts without torch."""

import shutil
from types import SimpleNamespace

import pytest
import torch

from scripts import check_env

BROKEN = {"raise OSError('libtorch.so')": "OSError: libtorch.so", "import os; os.abort()": "it ends with status -6"}


@pytest.mark.parametrize("code", BROKEN)
def test_a_broken_torch_is_shown_with_the_remedy(code, write, tmp_path, monkeypatch, capsys):
    write("torch.py", code)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert check_env.main([]) == 1
    lines = capsys.readouterr().out.splitlines()
    [line] = [line for line in lines if line.startswith("✗")]
    assert line.startswith(f"✗ torch: {BROKEN[code]}. `make setup`") and any(line.startswith("– GPU") for line in lines)


def test_versions_are_compared_with_those_of_the_requirements(tmp_path, monkeypatch):
    monkeypatch.setattr(check_env, "ROOT", tmp_path)  # as in a wheel, which has no files of requirements
    required = [
        "torch==2.1",
        "ray[default]==2.2",
        "peft==1.0",
        "numpy==2.0",
        "pandas==3.0",
        "vllm==1.0; extra == 'vllm'",
    ]
    monkeypatch.setattr(check_env.metadata, "requires", lambda name: required)
    present = [SimpleNamespace(name=name, version="1.0") for name in ("Peft", "numpy", None)]
    monkeypatch.setattr(check_env.metadata, "distributions", lambda: present)
    monkeypatch.setattr(check_env, "result_of", lambda program: (True, "2.1+cpu"))
    marks = {text.split()[0].strip(":"): mark for mark, text in check_env.packages()}
    assert marks == {"Python": "✓", "torch": "✓", "ray": "–", "numpy": "–", "pandas": "✗"}
    assert [mark for mark, _ in check_env.optional()] == ["✓", "✓"]  # vLLM of any version


def test_too_little_room_is_marked_where_a_run_needs_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=2e9 if folder == "/tmp" else 0.5e9))
    monkeypatch.setattr(check_env.tempfile, "gettempdir", lambda: "/tmp")
    monkeypatch.setattr(check_env, "memory_and_disk", lambda folder: "1.5 of 8 GB of memory, 3 of /dev/shm")
    marks = {text.split(":")[0]: mark for mark, text in check_env.machine()}
    assert marks == {"cores": "✓", "memory": "✗", str(tmp_path): "✗", "/tmp": "✓", "/dev/shm": "–"}


def test_a_gpu_is_described(monkeypatch):
    answers = {"is_available": True, "device_count": 2, "get_device_name": "V100", "is_bf16_supported": False}
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, lambda answer=answer, **_: answer)
    assert check_env.gpu() == f"2 x V100, CUDA {torch.version.cuda}, no bfloat16, so float32"
