"""Tab completes settings, as bash itself does it."""

import subprocess

import pytest

from extras.completion.__main__ import script


@pytest.mark.parametrize(
    ("line", "completions"),
    [
        ("python main.py trainer.see", ["trainer.seed="]),
        ("python main.py env.id=CartPole-v1 trainer.executor=", ["trainer.executor=local", "trainer.executor=ray"]),
        ("python main.py --config-name frozenlake_pp", ["frozenlake_ppo"]),
        ("python main.py recipe=dap", ["recipe=dapo"]),
        ("python other.py trainer.see", []),
    ],
)
def test_tab_completes_settings_of_main_py_alone(line: str, completions: list[str]):
    words = line.split(" ")
    press = f'COMP_WORDS=({line}); COMP_CWORD={len(words) - 1}; complete_settings python "{words[-1]}" "{words[-2]}"'
    lines = [script(), press, 'printf "%s\\n" "${COMPREPLY[@]}"']
    ran = subprocess.run(["bash", "-c", "\n".join(lines)], capture_output=True, text=True, check=True)
    assert ran.stdout.split() == completions
