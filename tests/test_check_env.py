"""`python -m scripts.check_env` marks what is here, what is missing, and what is broken, and starts without torch."""

from types import SimpleNamespace

import pytest

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
