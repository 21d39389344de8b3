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
        "torch<2.2,>=2.1",
        "ray[default]==2.2.*",
        "peft<2,>=0.9.1",
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


@pytest.mark.parametrize(
    ("version", "versions", "expected"),
    [
        ("2.14.1+cpu", ">=2.11,<2.15", True),
        ("2.15.0", ">=2.11,<2.15", False),
        ("2.9.1", ">=2.11,<2.15", False),
        ("2.60.1", "==2.60.*", True),
        ("2.6.0", "==2.60.*", False),
        ("0.33.0", "==0.32.0", False),
        ("0.1", "", True),
    ],
)
def test_ranges_are_read_as_pip_reads_them(version, versions, expected):
    assert check_env.is_allowed(version, versions) == expected
