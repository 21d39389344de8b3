"""A user who got something wrong sees the cause, the remedy, and nothing expensive before it could be known."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from unittest.mock import patch

import pytest

import main
from configs.checks import check_early
from configs.errors import WorkerError, users_part
from custom.env_wrapper import ENVIRONMENTS
from tests.runs import ROOT, compose, learning_metrics, run_main, short_run


@pytest.fixture(autouse=True)
def environments_as_they_were():
    """Restores the environments after each case: some change their texts, in this process."""
    with patch.dict(ENVIRONMENTS):
        yield


ROWS = "".join(f'{{"prompt": "What is {i}+1?", "ground_truth": "{i + 1}"}}\n' for i in range(8))
SCORE = "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n    return {}\n"
GAME = """
import gymnasium as gym

class Game(gym.Env):
    action_space = gym.spaces.Discrete(2)
    observation_space = gym.spaces.Discrete(2)
    steps = 0

    def reset(self, seed=None, options=None):
        {reset}
        return 0, {{}}

    def step(self, action):
        {step}
        return 0, 1.0, True, False, {{}}

gym.register("Game-v0", Game)
"""
# Whatever a tiny model answers is a move.
FACTORY = """
from custom.env_wrapper import TextEnv
import {module}

def make(env_id, seed, max_turns, exclude_seeds, **_):
    return TextEnv(env_id, lambda env, state: "?", lambda text: 1, max_turns=max_turns, seed=seed)
"""

ENGINES = """
from workers.rollout import Rollout

class B(Rollout):
    def __init__(self, config, model_config, device_mesh): ...

    def generate(self, requests): ...
"""
LOSS = """
from training.core_algos import register_policy_loss

@register_policy_loss("{}")
def mine(old_log_probs, log_probs, advantages, response_mask{}):
    return log_probs.sum(), {{}}
"""

FALLS = "if self.seed == 1_000_001: raise OSError('the board fell')"  # a seed that only validation plays


class Case:
    """One bad input: the user's files, what they typed, and what the message must hold."""

    def __init__(self, name: str, overrides: str, *says: str, env: bool = False, **files: str) -> None:
        self.name, self.overrides, self.says, self.env, self.files = name, overrides, says, env, files

    def command(self, model: Path, folder: Path) -> list[str]:
        for name, text in {"rows_jsonl": ROWS, "score_py": SCORE.format("1.0"), **self.files}.items():
            (folder / re.sub("_(?=[a-z]+$)", ".", name)).write_text(text)
        rows = ["env.id=null", "data.custom_cls.path=null", f"data.train_files={folder}/rows.jsonl"]
        rows.append(f"reward.custom_reward_function.path={folder}/score.py")
        command = short_run(model, folder / "run", *([] if self.env else rows))
        return command + shlex.split(self.overrides.replace("DIR", str(folder)))

    def unsaid_in(self, output: str) -> list[str]:
        return [part for part in self.says if not re.search(part, output)]


BEFORE_TORCH = [
    Case("n of 1 with grpo", "actor_rollout_ref.rollout.n=1", "rollout.n=1: .*grpo compares", "at least 2"),
    Case("folder without a model", "actor_rollout_ref.model.path=DIR", "has no config.json", "save_pretrained"),
    Case("reward file does not parse", "", "function.path=.*SyntaxError", r"score.py, line 1", score_py="def ("),
    Case("library does not parse", "actor_rollout_ref.model.external_lib=[DIR/mine.py]",
         "external_lib=.*mine.py, line 1", mine_py="def ("),
    Case("trainer is not there", "trainer.cls=DIR/mine.py:Mine", "trainer.cls=.*there is no file"),
    Case("estimator", "algorithm.adv_estimator=gppo", "gppo: there is none of this name. Did you mean", "'grpo'"),
    Case("recipe", "algorithm.adv_estimator=dapo", "Did you mean recipe=dapo"),
    Case("loss", "actor_rollout_ref.actor.policy_loss.loss_mode=vanila", "Did you mean 'vanilla'"),
    Case("logger", "trainer.logger=[console,comet]", "trainer.logger has 'comet': choose from console"),
    Case("GPUs", "trainer.n_gpus_per_node=1", "n_gpus_per_node=1: 0 are there"),
    Case("environment", "env.id=FrozenLak-v1", "env.id='FrozenLak-v1': .*Did you mean: `FrozenLake`", env=True),
    Case("its version", "env.id=FrozenLake-v9", "env.id='FrozenLake-v9': .* provides", env=True),
    Case("reward file is not there", "reward.custom_reward_function.path=DIR/gone.py", "=.*gone.py: there is no"),
    Case("environment file does not parse", "env.path=DIR/bad.py", "env.path=.*bad.py: SyntaxError", bad_py="def (",
         env=True),
    Case("data set file is not there", "data.custom_cls.path=DIR/gone.py data.custom_cls.name=A",
         "custom_cls.path=.*gone.py: there is no file"),
    Case("model folder is not there", "actor_rollout_ref.model.path=./gone", "model.path=./gone: there is no such fol"),
    Case("batch above the rows", "data.train_batch_size=9", "=9 cannot be filled: an epoch has 8 rows. Lower it"),
    Case("batch above the samples", "data.train_max_samples=3", "=4 cannot be filled: an epoch has 3 rows"),
]  # fmt: skip


# Runs `python main.py` with each of the commands in one process; says how each ended, and what it imported of these.
REFUSALS = """
import contextlib, io, json, runpy, sys

def refusal(command):
    sys.argv = ["main.py", "--config-name", "frozenlake", *command]
    said, before = io.StringIO(), {*sys.modules}
    with contextlib.redirect_stderr(said):
        try:
            code = runpy.run_path("main.py", run_name="__main__") and None
        except SystemExit as stop:
            code = stop.code
    return code, said.getvalue(), sorted({"torch", "transformers", "ray", "pandas"} & {*sys.modules} - before)

print(json.dumps([*map(refusal, json.loads(sys.argv[1]))]))
"""


@pytest.fixture(scope="module")
def refusals_before_torch(tmp_path_factory) -> dict[str, list]:
    commands = {}
    for case in BEFORE_TORCH:
        folder = tmp_path_factory.mktemp("case")
        commands[case.name] = case.command(folder, folder)
        if case.name != "folder without a model":
            (folder / "config.json").touch()
    argv = [sys.executable, "-c", REFUSALS, json.dumps([*commands.values()])]
    environment = {**os.environ, "RAY_ADDRESS": "local", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(argv, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    return dict(zip(commands, json.loads(done.stdout.splitlines()[-1]), strict=True))


@pytest.mark.parametrize("case", BEFORE_TORCH, ids=lambda case: case.name)
def test_what_needs_no_torch_is_refused_before_it_is_imported(case, refusals_before_torch):
    code, said, imported = refusals_before_torch[case.name]
    assert (code, imported) == (2, []) and not case.unsaid_in(said.rpartition("\nerror: ")[2])


@pytest.mark.parametrize(
    "overrides",
    [
        ["data.train_batch_size=9", "trainer.val_only=true"],
        ["data.train_batch_size=9", "trainer.dry_run=true"],  # which takes two prompts
        ["data.train_batch_size=9", "data.sampler={class_path: mine.py, class_name: Mine}"],
        ["data.train_batch_size=9", "data.custom_cls={path: mine.py, name: Mine}"],
        ["algorithm.adv_estimator=mine", "actor_rollout_ref.model.external_lib=mine.py"],
        ["algorithm.adv_estimator=mine", "trainer.cls=mine.py:Mine"],
        ["algorithm.adv_estimator=mine", "trainer.logger=[mine.py:Mine]"],
        [*(ENV := ("data.train_files=null",)), "env.id=mine.py:Mine-v0"],
        [*ENV, "env.id=Mine-v0", "env.path=mine.py"],
        [*ENV, "env.id=Mine-v0", "actor_rollout_ref.model.external_lib=mine.py"],
        [*ENV, "env.id=FrozenLake"],
        [*ENV, "env.id=CartPole-v1"],
    ],
)
def test_what_the_users_files_may_yet_bring_is_not_refused_before_they_are_loaded(overrides, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("1 / 0")
    command = Case("none", "trainer.test_freq=-1").command(tmp_path, tmp_path)
    (tmp_path / "config.json").touch()
    check_early(compose(*command, *overrides))


BEFORE_ANYTHING_STARTS = [
    Case("episodes scored twice", "env.mode=episode reward.custom_reward_function.path=DIR/score.py",
         "the environment pays for its episodes", env=True),
    Case("states of episodes", "env.mode=episode env.val_size=4", "no single states to validate on", env=True),
    Case("broken row", "", "rows.jsonl, line 9: this is not JSON", rows_jsonl=ROWS + '{"prompt": '),
    Case("prompts of states", "data.max_prompt_length=20", "10 of 10 states .*the longest 22: raise it", env=True),
    Case("prompts of episodes", "data.max_prompt_length=20 data.custom_cls.path=DIR/mine.py data.custom_cls.name=Mine",
         "2 of 2 validation episodes .*the longest 22", env=True,
         mine_py="from custom.env_dataset import CustomEnvDataset\nclass Mine(CustomEnvDataset):\n"
         "  def check_sizes(self, states, what):\n    if what != 'states': super().check_sizes(states, what)\n"),
    Case("text of an observation", "env.id=DIR/mine.py:CartPole-v1 env.kwargs={}", r"says None.*mine.py:2\)",
         env=True, mine_py="from custom.env_wrapper import make_text_env\n"
         "make_text_env('CartPole-v1', lambda env, seen: None)\n"),
    Case("episodes that begin nowhere", "env.mode=episode data.custom_cls.path=DIR/mine.py data.custom_cls.name=Mine "
         "env.val_size=0 env.val_episodes=1", r"row 0 of Mine has no extra_info\['state'\]", env=True,
         mine_py="from custom.env_dataset import CustomEnvDataset\nclass Mine(CustomEnvDataset):\n"
         "  def __getitem__(self, i):\n    return {'prompt': '?'}\n"),
    Case("no episodes", "data.custom_cls.path=DIR/mine.py data.custom_cls.name=Mine", "has no encode_state",
         "env.val_episodes=0", env=True, mine_py="from torch.utils.data import Dataset\nclass Mine(Dataset):\n"
         "  def __init__(self, *_, **__): pass\n  def __len__(self): return 9\n"
         "  def __getitem__(self, i): return {'prompt': 'S'}\n"),
    Case("chat template", "actor_rollout_ref.model.custom_chat_template='A {% for %}'",
         "actor_rollout_ref.model.custom_chat_template: line 1 of the chat template is no jinja: Expected"),
    Case("folder without a tokenizer", "actor_rollout_ref.model.tokenizer_path=DIR", "tokenizer_path=.*no tokenizer"),
    Case("more tokens than positions", "actor_rollout_ref.model.override_config.max_position_embeddings=16",
         r"data.max_prompt_length \+ data.max_response_length allow sequences of 25 tokens",
         "model.path was made for 16 positions.*lower the lengths"),
    Case("no decoder", "actor_rollout_ref.model.path=DIR", "actor_rollout_ref.model.path: transformers has no t5 that "
         "continues a text.*docs/models.md", config_json='{"model_type": "t5"}'),
    Case("critic of a kind without a value head", "critic.enable=true critic.model.path=DIR", "critic.model.path: "
         "transformers has no gptj with a value a token.*without one", config_json='{"model_type": "gptj"}'),
    Case("reward file raises", "", "ZeroDivisionError", r"\(.*score.py:2\)", score_py="x = 0\ny = 1 / x\n"),
    Case("no reward", "reward.custom_reward_function.path=null", "nothing scores the", "row 0 is 'rows.jsonl'"),
    Case("checkpoint to resume absent", "trainer.resume_mode=resume_path trainer.resume_from_path=DIR/global_step_9",
         "resume_from_path="),
    Case("custom engine does not load", "actor_rollout_ref.rollout.name=DIR/engine.py", "NameError",
         r"\(.*engine.py:1\)", engine_py="nothing()\n"),
    Case("custom_cls raises", "data.custom_cls.path=DIR/mine.py data.custom_cls.name=Mine",
         r"KeyError: 'size' \(.*mine.py:4\)", mine_py="from torch.utils.data import Dataset\nclass Mine(Dataset):\n"
         "  def __init__(self, **settings):\n    settings['size']\n"),
    Case("custom sampler of another type", "data.sampler.class_path=DIR/mine.py data.sampler.class_name=Mine",
         "data.sampler.class_name=Mine .*must be a subclass of torch.utils.data.sampler.Sampler",
         mine_py="class Mine: pass"),
    Case("rows without a ground truth", "", "score.py.* needs ground_truth, and none of 8", "data.ground_truth_key",
         rows_jsonl='{"prompt": "1+1?", "answer": 2}\n' * 8),
    Case("a label that is no dictionary", "", "rows.jsonl, row 0: reward_model is '4'", "a column ground_truth",
         rows_jsonl='{"prompt": "2+2?", "reward_model": "4"}\n' * 8),
    Case("all steps are the critic's", "trainer.critic_warmup=9 trainer.total_training_steps=8", "and the run has 8: "
         "it would never learn", "Set it below 8"),
    Case("engine that needs more", "actor_rollout_ref.rollout.name=DIR/engine.py:B", "missing a .*: 'model_config'",
         "config, tokenizer, model", engine_py=ENGINES),
    Case("trainer of another type", "trainer.cls=DIR/mine.py:Mine", "trainer.cls=Mine in .*mine.py is <class "
         ".*must be a subclass of training.ray_trainer.RayPPOTrainer", mine_py="class Mine: pass"),
    Case("empty validation set", "data.custom_cls.path=DIR/mine.py data.custom_cls.name=Mine "
         "data.val_files=DIR/val.jsonl", r"val_files=.*val\.jsonl: Mine has no rows", val_jsonl=ROWS,
         mine_py="from data.rl_dataset import RLHFDataset\n\nclass Mine(RLHFDataset):\n"
         "    def __len__(self):\n        return 0 if 'val' in str(self.data_files) else len(self.rows)\n"),
    Case("dataset that takes another argument", "data.custom_cls.path=DIR/mine.py data.custom_cls.name=Mine "
         "data.custom_cls.kwargs.size=3", r"Mine\(data_files\) cannot be called: .*'size'", "kwargs={'size': 3}",
         mine_py="from torch.utils.data import Dataset\n"
         "class Mine(Dataset):\n  def __init__(self, data_files): pass\n"),
    Case("loss that needs more", "actor_rollout_ref.model.external_lib=DIR/loss.py "
         "actor_rollout_ref.actor.policy_loss.loss_mode=needs_more", "loss_mode=needs_more: .*loss.py.* 'margins'",
         "policy_loss.kwargs", loss_py=LOSS.format("needs_more", ", agg, config, margins")),
    Case("loss without the weights", "actor_rollout_ref.model.external_lib=DIR/loss.py algorithm.rollout_correction="
         "decoupled_token_is actor_rollout_ref.actor.policy_loss.loss_mode=unweighted",
         "loss_mode=unweighted: .*'rollout_is_weights'", loss_py=LOSS.format("unweighted", "")),
    Case("yaml does not parse", "--config-name bad --config-path DIR", "bad.yaml cannot be", bad_yaml="a: [1\nb: 2"),
    Case("environment raises in reset", "env.id=broken_reset:Game-v0 env.path=DIR/make.py env.name=make",
         "Game-v0 raised OSError: no board, after reset", r"\(.*broken_reset.py:10\)", env=True,
         broken_reset_py=GAME.format(reset="raise OSError('no board')", step="pass"),
         make_py=FACTORY.format(module="broken_reset")),
]  # fmt: skip


@pytest.mark.parametrize("case", BEFORE_ANYTHING_STARTS, ids=lambda case: case.name)
def test_ends_with_code_2_and_one_helpful_line_before_a_worker_starts(case, tiny_model, tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(main.Launch, "init_workers", lambda _: pytest.fail("workers were started"))
    command = case.command(tiny_model, tmp_path)
    with pytest.raises(SystemExit) as stop:
        main.main(command if "--config-name" in command else ["--config-name", "frozenlake", *command])
    last_line = capsys.readouterr().err.rpartition("\nerror: ")[2]
    assert stop.value.code == 2 and not case.unsaid_in(last_line)


def test_a_slip_of_our_own_keeps_its_traceback(tiny_model, tmp_path, monkeypatch):
    monkeypatch.setattr("training.environment.derive_seed", None)
    command = Case("none", "").command(tiny_model, tmp_path)
    with pytest.raises(TypeError, match="'NoneType' object is not callable"):
        main.main(["--config-name", "frozenlake", *command])


IN_TRAINING = [
    Case("reward raises in a library", "", "JSONDecodeError", "score.py:3",
         score_py="import json\n" + SCORE.format("json.loads('no')")),
    Case("reward returns None", "", "compute_score .*returned None", "number", score_py=SCORE.format("None")),
    Case("filter by what the reward does not say", "recipe=dapo algorithm.filter_groups.metric=acc",
         r"filter_groups.metric=acc: the reward returns no such number. Use score, or one of \['len'\]",
         score_py=SCORE.format("{'score': 1.0, 'len': 2}")),
    Case("custom loss raises", "actor_rollout_ref.model.external_lib=DIR/loss.py "
         "actor_rollout_ref.actor.policy_loss.loss_mode=mine_raises", 'loss.py", line 5', "\nKeyError: 'no'$",
         loss_py="from training.core_algos import register_policy_loss\n\n@register_policy_loss('mine_raises')\n"
         "def mine(*args, **kwargs):\n    return {}['no']\n"),
    Case("environment raises in step", "env.id=broken_step:Game-v0 env.path=DIR/make.py env.name=make "
         "env.kwargs.random_maps=null trainer.test_freq=4 env.max_failed_fraction=0.2",
         "1 of 2 episodes failed .*Game-v0 raised OSError: the board fell, after reset", "broken_step.py:14", env=True,
         broken_step_py=GAME.format(reset="self.seed = seed", step=FALLS),
         make_py=FACTORY.format(module="broken_step")),
]  # fmt: skip


@pytest.mark.parametrize("case", IN_TRAINING, ids=lambda case: case.name)
def test_what_only_training_can_show_ends_with_the_users_frames_and_a_line_that_names_the_cause(
    case, tiny_model, tmp_path, monkeypatch, capsys
):
    monkeypatch.syspath_prepend(tmp_path)
    command = ["--config-name", "frozenlake", *case.command(tiny_model, tmp_path)]
    with pytest.raises(SystemExit):
        main.main(command)
    last = capsys.readouterr().err
    frames = re.findall(r'^ *File "(.+?)"', last, re.MULTILINE)
    assert not case.unsaid_in(last) and {Path(file).parent for file in frames} <= {tmp_path}
    assert len(last.splitlines()) < 12
    if case is IN_TRAINING[0]:
        monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
        with pytest.raises(RuntimeError, match="JSONDecodeError"):
            main.main(command)


def test_a_failure_in_training_that_is_not_the_users_keeps_its_traceback(tiny_model, tmp_path, monkeypatch):
    monkeypatch.setattr("training.ray_trainer.reward_metrics", None)
    with pytest.raises(TypeError, match="'NoneType' object is not callable"):
        main.main(["--config-name", "frozenlake", *Case("none", "").command(tiny_model, tmp_path)])


FROM_A_WORKER = """worker 1 failed:
ray::RemoteWorker.call() (pid=7, ip=10.0.0.1)
  File "{root}/workers/ray_group.py", line 9, in call
    return getattr(self.worker, method)(*share)
  File "{file}", line 3, in mine
    return seen["no"]
           ~~~~^^^^^^
KeyError: 'no'

The above exception was the direct cause of the following exception:

ray::RemoteWorker.call() (pid=7, ip=10.0.0.1)
  File "{root}/workers/dp_actor.py", line 9, in update
    raise RuntimeError("the loss failed") from error
RuntimeError: the loss failed"""


def test_of_a_worker_that_failed_the_users_frames_are_shown_if_there_are_any(tmp_path, monkeypatch):
    monkeypatch.setattr("configs.errors.is_on_purpose", lambda error: True)  # ray_group raises it
    (file := tmp_path / "loss.py").touch()
    errors = [WorkerError(FROM_A_WORKER.format(root=ROOT, file=name)) for name in (file, ROOT / "main.py")]
    assert users_part(errors[0]).splitlines() == [
        "configs.errors.WorkerError: worker 1 failed:", f'  File "{file}", line 3, in mine', '    return seen["no"]',
        "           ~~~~^^^^^^", "KeyError: 'no'", "RuntimeError: the loss failed",
    ]  # fmt: skip
    assert users_part(errors[1]) == ""


@pytest.mark.slow
def test_a_process_whose_reward_breaks_in_a_later_step_ends_with_its_line_and_keeps_the_record(tiny_model, tmp_path):
    score = "calls = 0\ndef compute_score(data):\n    global calls\n    calls += 1\n    return [1 / (3 - calls)] * 8\n"
    done = run_main(*Case("late", "trainer.save_freq=1", score_py=score).command(tiny_model, tmp_path))
    assert done.returncode == 1
    assert re.search(r"ZeroDivisionError.*score.py:5", "\n".join(done.stderr.splitlines()[-5:]))
    assert list(learning_metrics(tmp_path / "run")) == [1, 2]
    assert (tmp_path / "run/latest_checkpointed_iteration.txt").read_text() == "2"
