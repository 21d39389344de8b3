"""A run that is stopped anywhere and started again is the run that was never stopped: to the last digit, on the CPU."""

import random
import shutil
import signal
from collections.abc import Callable
from operator import itemgetter
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import main
from configs.errors import ConfigError
from data.files import read_metrics
from data.seeding import rng_state
from data.types import SamplingParams
from tests.runs import Stopped, compose, files_of_at_most, learning_metrics, run_main, short_run, signalled, state_files
from training.checkpoint import write_sums
from training.ray_trainer import RayPPOTrainer
from training.tracking import Observers
from workers.engine import TrainEngine

# Scores that differ between samples, and that move every global generator a user may draw from.
REWARD = """
import random
import numpy as np
import torch

def compute_reward(prompt, response, ground_truth):
    return len(set(response)) + random.random() + np.random.rand() + torch.rand(1).item()
"""
SAVING = ("data.max_response_length=4", "trainer.n_threads=1", "trainer.total_training_steps=5", "trainer.save_freq=1")
ALGORITHMS = {
    "grpo": ("trainer.test_freq=2",),
    "ppo": (
        *("algorithm.adv_estimator=gae", "algorithm.use_kl_in_reward=true", "algorithm.kl_ctrl.type=adaptive"),
        *("algorithm.kl_ctrl.kl_coef=0.1", "algorithm.kl_ctrl.horizon=50", "critic.optim.lr=1e-3"),
        *("actor_rollout_ref.actor.ppo_mini_batch_size=2", "actor_rollout_ref.actor.ppo_epochs=2"),
        "actor_rollout_ref.actor.shuffle=true",
    ),
}
SAVES = "actor_rollout_ref.actor.checkpoint"
EPOCHS = {1: 0, 2: 0, 3: 1, 4: 1, 5: 2}  # two batches an epoch: steps 2 and 4 end one


@pytest.fixture(scope="module")
def settings(tiny_model, tmp_path_factory) -> Callable[..., list[str]]:
    """settings(folder, algorithm, more…): the overrides of a run."""
    reward = tmp_path_factory.mktemp("reward") / "reward.py"
    reward.write_text(REWARD)

    def overrides(folder: Path, algorithm: str = "grpo", *more: str) -> list[str]:
        function = f"reward.custom_reward_function={{path: {reward}, name: compute_reward}}"
        return short_run(tiny_model, folder, *SAVING, function, *ALGORITHMS[algorithm], *more)

    return overrides


@pytest.fixture(scope="module")
def unbroken(settings, tmp_path_factory) -> Callable[[str], Path]:
    """unbroken(algorithm): the folder of a run that was never stopped."""
    folders: dict[str, Path] = {}

    def folder(algorithm: str = "grpo") -> Path:
        if algorithm not in folders:
            folders[algorithm] = tmp_path_factory.mktemp(algorithm)
            main.run(compose(*settings(folders[algorithm], algorithm)))
        return folders[algorithm]

    return folder


def run_until(step: int, overrides: list[str], moment: tuple[type, str] = (Observers, "stepped")) -> None:
    """Runs up to the `moment` of `step`, the call of a class's method, and there stops."""
    owner, method = moment
    original = getattr(owner, method)

    def stop_or_go_on(self, *args):
        if step == (self.global_step if owner is RayPPOTrainer else args[0]):
            raise Stopped
        return original(self, *args)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(Stopped):
        patch.setattr(owner, method, stop_or_go_on)
        main.run(compose(*overrides))


def assert_same_run(run: Path, other: Path) -> None:
    assert [entry["step"] for entry in read_metrics(run / "metrics.jsonl")] == list(range(6))
    assert learning_metrics(run) == learning_metrics(other)
    assert state_files(run, 5) == state_files(other, 5)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_runs_below_learn_something_that_could_differ(unbroken, algorithm):
    metrics = learning_metrics(unbroken(algorithm))
    assert {step: metrics[step]["training/epoch"] for step in EPOCHS} == EPOCHS
    assert len({metrics[step]["critic/score/mean"] for step in EPOCHS}) == 5
    assert all(metrics[step]["actor/grad_norm"] > 0 for step in EPOCHS)
    if algorithm == "ppo":
        assert len({metrics[step]["actor/reward_kl_penalty_coeff"] for step in EPOCHS}) == 5
        assert all(metrics[step]["critic/grad_norm"] > 0 for step in EPOCHS)
    parts = {"data.pt", "actor", "critic"} if algorithm == "ppo" else {"data.pt", "actor"}
    assert {name.split("/")[0] for name in state_files(unbroken(algorithm), 5)} == parts


@pytest.mark.parametrize(
    ("algorithm", "moment", "steps"),
    [("ppo", (RayPPOTrainer, "after_step"), (1, 3, 4)), ("grpo", (Observers, "stepped"), (2, 5))],
    ids=["in a step", "saved"],
)
def test_a_run_stopped_in_any_step_is_the_unbroken_run(settings, unbroken, tmp_path, algorithm, moment, steps):
    """Runs are stopped in step k with weights updated but not saved; or saved, but not in the record yet."""
    for step in steps:
        run_until(step, settings(tmp_path, algorithm), moment)
    main.run(compose(*settings(tmp_path, algorithm)))
    assert_same_run(tmp_path, unbroken(algorithm))


@pytest.mark.parametrize(  # Ctrl-C: test_interrupt.py, and extras/python/tests
    ("algorithm", "number", "background"), [("grpo", signal.SIGHUP, "false"), ("ppo", signal.SIGTERM, "true")]
)
def test_a_signal_ends_a_run_after_its_step_which_is_saved(
    settings, unbroken, tmp_path, monkeypatch, capfd, algorithm, number, background
):
    monkeypatch.setattr(RayPPOTrainer, "step", signalled(RayPPOTrainer.step, 2, number))
    handlers = [signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)]
    with pytest.raises(KeyboardInterrupt):
        main.run(compose(*settings(tmp_path, algorithm, "trainer.save_freq=-1", f"{SAVES}.async_save={background}")))
    assert handlers == [signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)]
    name, (out, err) = number.name, capfd.readouterr()
    saved = "step 2 is saved when it is done, and the run ends. Once more ends it at once: steps 1 to 2 are lost."
    assert f"\n{name}: {saved}\n" in err
    assert f"stopped by {name} after step 2 of 5, which is saved: the same command goes on from it.\n" in out
    monkeypatch.undo()
    main.run(compose(*settings(tmp_path, algorithm, f"{SAVES}.async_save={background}")))
    assert "goes on from its weights, not from those of actor_rollout_ref.model.path" in capfd.readouterr().out
    assert_same_run(tmp_path, unbroken(algorithm))
    lines = [entry["data"] for entry in read_metrics(tmp_path / "metrics.jsonl")]
    seconds = [line["training/seconds"] for line in lines]
    assert seconds == sorted(seconds), "the time of both starts"
    assert [step for step, line in enumerate(lines) if "timing_s/start" in line] == [0, 3]


def test_sigusr1_saves_a_run_which_goes_on_and_says_at_its_end_what_it_did_not_save(
    settings, unbroken, tmp_path, monkeypatch, capfd
):
    monkeypatch.setattr(RayPPOTrainer, "step", signalled(RayPPOTrainer.step, 2, signal.SIGUSR1))
    main.run(compose(*settings(tmp_path, "grpo", "trainer.save_freq=-1")))
    out, err = capfd.readouterr()
    assert "\nSIGUSR1: step 2 is saved when it is done.\n" in err
    assert "They are older than the run's end: steps 3 to 5 are lost.\n" in out
    assert learning_metrics(tmp_path) == learning_metrics(unbroken())


def test_a_finished_run_says_so_and_returns_its_last_validation(settings, monkeypatch, tmp_path, capsys):
    validated = []
    measure = RayPPOTrainer.measure
    monkeypatch.setattr(RayPPOTrainer, "measure", lambda self: validated.append(self.global_step) or measure(self))
    run_until(3, settings(tmp_path))
    finished = main.run(compose(*settings(tmp_path)))
    assert validated == [0, 2, 4, 5]  # each once, the first one too
    assert finished
    record = (tmp_path / "metrics.jsonl").read_bytes()
    capsys.readouterr()
    assert main.run(compose(*settings(tmp_path))) == finished
    output = capsys.readouterr().out
    assert "step 5 of 5 is done, so nothing is left to do" in output
    assert "trainer.total_training_steps" in output and "trainer.resume_mode=disable" in output
    assert all(name in output for name in finished if name.startswith("val-core/"))
    assert validated == [0, 2, 4, 5]
    assert (tmp_path / "metrics.jsonl").read_bytes() == record


def test_a_finished_run_goes_on_when_it_is_given_more_steps(settings, tmp_path, capsys):
    constant = "actor_rollout_ref.actor.optim.lr_scheduler_type=constant", "trainer.test_freq=-1"
    for name, steps in (("twice", 1), ("twice", 3), ("once", 3)):
        main.run(compose(*settings(tmp_path / name, "grpo", *constant, f"trainer.total_training_steps={steps}")))
    assert "config changed since: trainer.total_training_steps: 1 → 3\n" in capsys.readouterr().out
    assert learning_metrics(tmp_path / "twice") == learning_metrics(tmp_path / "once")
    assert state_files(tmp_path / "twice", 3) == state_files(tmp_path / "once", 3)


@pytest.mark.parametrize("mode", ["resume_path", "disable"])
def test_a_branch_that_saved_nothing_leaves_no_steps_in_the_record_of_the_next_start(
    settings, unbroken, tmp_path, mode
):
    shutil.copytree(unbroken("grpo"), tmp_path, dirs_exist_ok=True)
    back = [f"trainer.resume_mode={mode}"]
    back += [f"trainer.resume_from_path={tmp_path}/global_step_2"] if mode == "resume_path" else []
    branch = ["trainer.total_training_steps=4", "trainer.save_freq=-1", "actor_rollout_ref.actor.optim.lr=5e-4"]
    main.run(compose(*settings(tmp_path, "grpo", *back, "trainer.val_only=true")))  # writes nothing
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "5"
    main.run(compose(*settings(tmp_path, "grpo", *back, *branch)))
    assert learning_metrics(tmp_path)[4] != learning_metrics(unbroken())[4]
    main.run(compose(*settings(tmp_path)))
    assert learning_metrics(tmp_path) == learning_metrics(unbroken())


def test_what_the_config_says_now_wins_over_the_checkpoint(settings, unbroken, tmp_path, monkeypatch):
    groups, update = [], TrainEngine.update
    monkeypatch.setattr(
        TrainEngine, "update", lambda self, *args: groups.extend(self.optimizer.param_groups) or update(self, *args)
    )
    main.run(
        compose(
            *settings(tmp_path, "ppo", "trainer.resume_mode=resume_path"),
            f"trainer.resume_from_path={unbroken('ppo')}/global_step_4",
            *("algorithm.kl_ctrl.type=fixed", "algorithm.kl_ctrl.kl_coef=0.7"),
            *("actor_rollout_ref.actor.optim.weight_decay=0.5", "actor_rollout_ref.actor.optim.lr=1e-5"),
        )
    )
    last = learning_metrics(tmp_path)[5]
    assert last["actor/reward_kl_penalty_coeff"] == 0.7
    policys = [group for group in groups if group["weight_decay"] == 0.5]
    assert policys and all(group["lr"] <= 1e-5 for group in policys)


def test_a_folder_without_a_config_is_refused(settings, unbroken, tmp_path):
    """A checkpoint of verl's has no config: the error says to merge it first."""
    shutil.copytree(unbroken("grpo") / "global_step_3", step := tmp_path / "global_step_3")
    (step / "config.yaml").unlink()
    resume = "trainer.resume_mode=resume_path", f"trainer.resume_from_path={step}"
    with pytest.raises(ConfigError, match=f"{step} .*extras.merge"):
        main.run(compose(*settings(tmp_path / "run", "grpo", *resume)))


@pytest.mark.parametrize("contents", ["[model]", "[hf_model]"])  # torch and safetensors say "disk full" in their ways
def test_a_full_disk_costs_one_checkpoint_and_not_the_run(settings, monkeypatch, tmp_path, caplog, contents):
    save = RayPPOTrainer.save

    def save_on_a_full_disk(self):
        if self.global_step not in full:
            return save(self)
        with files_of_at_most(10_000):
            return save(self)

    full = {2}
    monkeypatch.setattr(RayPPOTrainer, "save", save_on_a_full_disk)
    command = settings(tmp_path, "grpo", f"{SAVES}.save_contents={contents}", "trainer.resume_mode=disable")
    main.run(compose(*command, "trainer.total_training_steps=3"))
    failed = {step: data.get("training/failed_saves") for step, data in learning_metrics(tmp_path).items()}
    assert failed == {0: None, 1: None, 2: 1.0, 3: None}
    assert sorted(path.name for path in tmp_path.glob("*global_step_*")) == ["global_step_1", "global_step_3"]
    full = {3}
    assert "step 2 was not saved" in caplog.text
    with pytest.raises(RuntimeError, match=r"step 3, the last, could not be saved.*step_2"):
        main.run(compose(*command, "trainer.total_training_steps=3"))
    assert list(learning_metrics(tmp_path)) == [0, 1, 2, 3]


def with_a_bit_flipped(content: bytes) -> bytes:
    place = random.Random(len(content)).randrange(len(content))
    return content[:place] + bytes([content[place] ^ 4]) + content[place + 1 :]


@pytest.mark.parametrize(
    ("harm", "background"), [(itemgetter(slice(-100)), False), (with_a_bit_flipped, False), (with_a_bit_flipped, True)]
)
def test_a_harmed_checkpoint_names_the_file(settings, unbroken, tmp_path, harm, background):
    whole = unbroken("ppo") / "global_step_5"
    if background:
        main.run(compose(*settings(tmp_path / "whole", "ppo", f"{SAVES}.async_save=true")))
        whole = tmp_path / "whole/global_step_5"
    names = [str(path.relative_to(whole)) for path in whole.rglob("*") if path.suffix in (".pt", ".safetensors")]
    names = [name for name in names if "huggingface" not in name]
    assert len(names) == 8
    harmed = tmp_path / "global_step_5"
    resume = "trainer.resume_mode=resume_path", f"trainer.resume_from_path={harmed}"
    for name in names:
        shutil.copytree(whole, harmed)
        (harmed / name).write_bytes(harm((whole / name).read_bytes()))
        with pytest.raises(ValueError, match=rf"file {harmed / name} cannot be loaded .*trainer\.resume_mode=disable"):
            main.run(compose(*settings(tmp_path / "run", "ppo", *resume)))
        shutil.rmtree(harmed)
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["run.lock"]


def test_the_result_answers_like_the_trainer(settings, unbroken, monkeypatch, tmp_path):
    """huggingface/ in a checkpoint loads with transformers alone: model, tokenizer and chat template."""
    answers, save = {}, RayPPOTrainer.save
    greedy = SamplingParams(do_sample=False, temperature=1.0, top_k=-1, top_p=1.0, max_tokens=4)

    def save_and_ask(self):
        prompts = self.as_prompts(self.train_loader.next_batch(), "asked")
        batch = self.rollout.generate_sequences(prompts, greedy, seed=0)
        answers.update(prompts=batch.raw_prompt, ids=batch.batch["responses"], mask=batch.batch["response_mask"])
        return save(self)

    monkeypatch.setattr(RayPPOTrainer, "save", save_and_ask)
    main.run(compose(*settings(tmp_path, "grpo", "trainer.save_freq=5")))
    folder = tmp_path / "global_step_5/actor/huggingface"
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    for prompt, ids, mask in zip(answers["prompts"], answers["ids"], answers["mask"], strict=True):
        encoded = tokenizer.apply_chat_template(list(prompt), add_generation_prompt=True, return_tensors="pt")
        out = model.generate(**encoded, do_sample=False, max_new_tokens=4)
        assert out[0, encoded["input_ids"].shape[1] :].tolist() == ids[mask.bool()].tolist()


def test_the_generators_of_the_trainer_win_where_it_shares_a_process_with_its_worker(settings, unbroken, tmp_path):
    """A run that began behind Ray, with a worker apart, may go on in one process: the worker's generators differ."""
    shutil.copytree(unbroken(), tmp_path, dirs_exist_ok=True)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("3")
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    torch.save(rng_state(), tmp_path / "global_step_3/actor/extra_state_world_size_1_rank_0.pt")
    write_sums(tmp_path / "global_step_3")
    main.run(compose(*settings(tmp_path)))
    assert_same_run(tmp_path, unbroken())


KILLER = '''
"""Kills its process by SIGKILL at the {number}-th {kind}; a file that is being written then is half there."""
import os
import signal

import torch

from workers.hf_rollout import HFRollout

calls = dict.fromkeys(("generation", "update", "write"), 0)


def is_last(kind):
    calls[kind] += 1
    return kind == "{kind}" and calls[kind] == {number}


def kill():
    os.kill(os.getpid(), signal.SIGKILL)


def generate(*args, original=HFRollout.generate):
    return kill() if is_last("generation") else original(*args)


def update(*args, original=torch.optim.AdamW.step):
    original(*args)
    if is_last("update"):
        kill()


def write(value, path, original=torch.save):
    original(value, path)
    if is_last("write"):
        os.truncate(path, os.path.getsize(path) // 2)
        kill()


HFRollout.generate, torch.optim.AdamW.step, torch.save = generate, update, write
'''


@pytest.mark.slow
def test_a_process_killed_three_times_ends_like_one_that_never_was(settings, tmp_path):
    draw = random.Random(0).randint
    moments = [("write", draw(6, 10)), ("generation", draw(2, 3)), ("update", draw(2, 3))]
    killer, run = tmp_path / "killer.py", tmp_path / "run"
    command = settings(run, "grpo", "trainer.total_training_steps=8", f"actor_rollout_ref.model.external_lib={killer}")
    for kind, number in moments:
        killer.write_text(KILLER.format(kind=kind, number=number))
        assert run_main(*command).returncode == -signal.SIGKILL
        if kind == "write":
            assert list(run.glob(".writing_global_step_*"))
    killer.write_text("")
    for more in ([], [f"trainer.default_local_dir={tmp_path / 'unbroken'}"]):
        main.run(compose(*command, *more))
    assert [entry["step"] for entry in read_metrics(run / "metrics.jsonl")] == list(range(9))
    assert learning_metrics(run) == learning_metrics(tmp_path / "unbroken")
