"""Notebooks: the shipped ones run from start to end, and ■ ends a training after its step. Real kernels."""

import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest
from jupyter_client.manager import start_new_kernel
from nbclient import NotebookClient

from data.files import read_metrics
from tests.processes import until
from tests.runs import ROOT

PATIENCE = 120  # seconds
NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))
SHORT = {
    "quickstart": "DEMONSTRATIONS, STEPS, EPISODES, FOLDER = 32, 2, 4, Path('outputs/short')",
    "own_reward": "MODEL, STEPS = {model!r}, 2",
}


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A folder that looks like the repository, and into which runs write."""
    for path in ROOT.iterdir():
        if path.name != "outputs" and path.name[0] != ".":
            (tmp_path / path.name).symlink_to(path)
    return tmp_path


def said(outputs: list[Any]) -> str:
    """Returns what a cell has printed."""
    return "".join(output.text for output in outputs if output.output_type == "stream")


@pytest.mark.slow
@pytest.mark.parametrize("name", SHORT)
def test_a_notebook_runs_from_start_to_end(name, copy, tiny_model):
    path = ROOT / f"examples/{name}.ipynb"
    notebook = nbformat.read(path, 4)
    [parameters] = [cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", ())]
    parameters.source += f"\n{SHORT[path.stem].format(model=str(tiny_model))}"
    NotebookClient(notebook, timeout=PATIENCE, resources={"metadata": {"path": str(copy)}}).execute()
    outputs = {cell.id: cell.outputs for cell in notebook.cells if cell.cell_type == "code"}
    [line] = [output.data for output in outputs["train"] if output.output_type == "display_data"]
    assert line["text/plain"].startswith("step 2/2  reward") and '<progress value="2" max="2">' in line["text/html"]
    assert outputs["curve"][-1].data["image/png"]
    printed = "".join(map(said, outputs.values()))
    assert "ipywidgets" not in printed and "\x1b" not in printed
    assert "step 1/2" not in printed, "steps are told by the line that changes"
    last = outputs["validate" if path.stem == "quickstart" else "answers"]
    assert ("score " in str(last)) if path.stem == "quickstart" else (said(last).count("now:") == 3)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_has_few_cells_that_compile_and_no_outputs(path):
    notebook = nbformat.read(path, 4)
    nbformat.validate(notebook)
    assert len(notebook.cells) <= 10
    for cell in notebook.cells:
        if cell.cell_type == "code" and not re.search(r"^\s*[%!]", cell.source, re.MULTILINE):
            compile(cell.source, cell.id, "exec")
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in notebook.cells)


class Kernel:
    """A kernel in a folder, whose cells are run one by one."""

    def __init__(self, folder: Path) -> None:
        environment = {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}
        # By that variable, a kernel would not show what is written to its file descriptors.
        self.manager, self.client = start_new_kernel(cwd=str(folder), startup_timeout=PATIENCE, env=environment)

    def start(self, cell: str) -> str:
        """Begins a cell; returns what `finish` takes."""
        return self.client.execute(cell)

    def finish(self, cell: str) -> tuple[str, list[dict[str, Any]]]:
        """Waits for the end of a cell: "ok" or "error", and all that it showed."""
        shown, status = [], ""
        while status != "idle":
            message = self.client.get_iopub_msg(timeout=PATIENCE)
            if message["parent_header"].get("msg_id") == cell:
                status = message["content"].get("execution_state")
                shown.append({"type": message["msg_type"], **message["content"]})
        return self.client._recv_reply(cell, timeout=PATIENCE)["content"]["status"], shown

    def run(self, cell: str) -> list[dict[str, Any]]:
        status, shown = self.finish(self.start(cell))
        assert status == "ok", shown
        return shown


@pytest.fixture
def kernel(copy: Path) -> Iterator[Kernel]:
    kernel = Kernel(copy)
    yield kernel
    kernel.client.stop_channels()
    kernel.manager.shutdown_kernel(now=True)


TRAINER = """
import sys, time, random
from pathlib import Path
sys.path.insert(0, {root!r})
from training.api import GRPOTrainer

calls, handlers = [], []

def reward(response):
    calls.append(response)
    if len(calls) == 8:  # in step 2
        Path("in_step").touch()
        time.sleep(2)
    return len(set(response)) / 4

settings = {{"data.train_batch_size": 2, "data.max_prompt_length": 16, "data.max_response_length": 4}}
settings |= {{"actor_rollout_ref.rollout.n": 3, "trainer.default_local_dir": "run", "trainer.executor": {executor!r}}}
trainer = GRPOTrainer({model!r}, reward, ["1+1=", "1+2=", "1+3=", "1+4="], settings=settings)
"""


@pytest.mark.parametrize("executor", ["local", pytest.param("ray", marks=pytest.mark.slow)])
def test_the_stop_button_ends_a_training_after_its_step_and_the_next_cell_goes_on(kernel, copy, tiny_model, executor):
    kernel.run(TRAINER.format(root=str(ROOT), model=str(tiny_model), executor=executor))
    cell = kernel.start("result = trainer.train(total_steps=5)")
    until((copy / "in_step").exists)
    kernel.manager.interrupt_kernel()
    status, shown = kernel.finish(cell)
    printed = "".join(message["text"] for message in shown if message["type"] == "stream")
    assert status == "ok" and "■: step 2 is saved when it is done, and the run ends. Once more ends it" in printed
    assert "stopped by ■ after step 2 of 5, which is saved: train() goes on from it." in printed
    assert recorded_steps(copy) == [1, 2]
    shown = kernel.run("result = trainer.train(total_steps=4); assert len(result.metrics) == 4")
    lines = [message["type"] for message in shown if "display" in message["type"]]
    assert lines == ["display_data", "update_display_data"]  # of steps 3 and 4
    assert recorded_steps(copy) == [1, 2, 3, 4]
    kernel.run("import signal; assert signal.getsignal(signal.SIGINT) is signal.default_int_handler")


def recorded_steps(copy: Path) -> list[int]:
    return [entry["step"] for entry in read_metrics(copy / "run/metrics.jsonl")]


MISTAKES = {
    "setting": ("trainer.settings['trainer.sed'] = 1; trainer.train()", "trainer.sed"),
    "form": ("trainer.reward = lambda text: 1.0; trainer.train()", "none of the known forms"),
    "reward": (
        "def broken(response):\n    return respones\n\ntrainer.reward = broken; trainer.train()",
        "line 2 of its",
    ),
}


def test_a_second_stop_ends_the_cell_at_once_and_a_mistake_is_one_line_that_names_its_cells_line(
    kernel, copy, tiny_model
):
    kernel.run(TRAINER.format(root=str(ROOT), model=str(tiny_model), executor="local").replace("sleep(2)", "sleep(99)"))
    cell = kernel.start("trainer.train(total_steps=5)")
    until((copy / "in_step").exists)
    for _ in range(2):
        kernel.manager.interrupt_kernel()
        time.sleep(1)
    status, shown = kernel.finish(cell)
    assert status == "error" and [message["ename"] for message in shown if "ename" in message] == ["KeyboardInterrupt"]
    for name, (cell, said) in MISTAKES.items():
        status, shown = kernel.finish(kernel.start(cell))
        [error] = [message for message in shown if message["type"] == "error"]
        assert status == "error" and said in error["evalue"]
        assert name == "reward" or len(error["traceback"]) == 1
        kernel.run("trainer.settings.pop('trainer.sed', None)")
