"""Trains from Python or a notebook (docs/python.md):

    trainer = GRPOTrainer(model, reward, rows, tokenizer=tokenizer, settings={"data.train_batch_size": 8})
    result = trainer.train(total_steps=100)

It is a run of main.py: objects are first written into the run's folder, where every executor and engine finds them;
only the reward and a torch data set of dicts are called here. The trained weights are then read back into the model.
"""

import io
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch
from torch.utils.data import DataLoader, SequentialSampler
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from configs.errors import ConfigError, is_on_purpose
from configs.extras import has
from configs.import_utils import split_object
from configs.loader import compose
from configs.schema import Config
from configs.settings import LAST
from data.seeding import rng_state, set_rng_state
from extras.python.notebook import Result
from extras.python.objects import TrainingConfig, as_dataset, as_override, settings_of_environment, write_rows
from main import run
from training.checkpoint import find_checkpoint

MODEL, REWARD = "actor_rollout_ref.model", "reward.custom_reward_function"
FOLDER, NAME = "trainer.default_local_dir", "trainer.experiment_name"
NEWEST = {"trainer.val_only": True, "trainer.resume_mode": "auto"}  # settings that measure the newest checkpoint


@contextmanager
def process_as_before() -> Iterator[None]:
    """Gives back the generators and the number of threads that the body changes: a notebook goes on with its own."""
    state, threads = rng_state(), torch.get_num_threads()
    try:
        yield
    finally:
        set_rng_state(state)
        torch.set_num_threads(threads)


@dataclass(eq=False, repr=False)
class Trainer:
    """Trains a model by a recipe of configs/recipe/.

    Args:
        model: a PreTrainedModel, which gets the trained weights, or the path of one.
        reward: a function in any form of docs/rewards.md, or file.py:name; None: as settings say.
        rows: a list of dicts or prompts, a data frame, a data set of torch's or of datasets, one of an environment's
            states, a DataLoader, or the path of a file.
        tokenizer: an object or a path; None: the model's own.
        environment: where prompts come from in place of rows: a gymnasium id, class, or environment.
        settings: by their path, as on the command line, or by the short names of `TrainingConfig`. They may name a
            folder, where a run goes on from its newest checkpoint; unless they do, it is a new one.

    The order (model, tokenizer, settings, reward_fn=reward) is known, too.
    """

    model: PreTrainedModel | str | Path
    reward: Callable | str | None = None
    rows: Any = None
    _: KW_ONLY
    tokenizer: PreTrainedTokenizerBase | str | Path | None = None
    val_rows: Any = None
    environment: Any = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    recipe: str | None = None
    reward_fn: Callable | str | None = None

    def __post_init__(self) -> None:
        if isinstance(self.reward, PreTrainedTokenizerBase):
            self.tokenizer, self.settings, self.rows = self.reward, self.rows or self.settings, None
            self.reward = self.reward_fn
        if not isinstance(self.model, PreTrainedModel | str | Path):
            raise ConfigError(f"model is a {type(self.model).__name__}: give a PreTrainedModel, or the path of one.")
        self.settings = TrainingConfig({"recipe": self.recipe} | self.settings)
        if FOLDER not in self.settings:
            Path("outputs").mkdir(exist_ok=True)
            new = NAME not in self.settings and mkdtemp(prefix=time.strftime("run_%m%d_%H%M_"), dir="outputs")
            self.settings[FOLDER] = new or f"outputs/{self.settings[NAME]}"
        self.folder = Path(self.settings[FOLDER])

    def train(self, rows: Any = None, total_steps: int | None = None) -> Result:
        """Trains up to step `total_steps` of the run (None: as settings say), from its newest checkpoint."""
        self.rows = self.rows if rows is None else rows
        validation = self._run(
            self.reward, {} if total_steps is None else {"trainer.total_training_steps": total_steps}
        )
        if isinstance(self.model, PreTrainedModel):
            with process_as_before():
                trained = type(self.model).from_pretrained(self._trained(), dtype=self.model.dtype)
                self.model.load_state_dict(trained.state_dict())
        return Result(self.folder, validation)

    def validate(self) -> dict[str, float]:
        """Measures the newest checkpoint on `val_rows`, or on the environment as settings say."""
        return self._run(self.reward, NEWEST)

    def generate(self, prompts: list) -> list[str]:
        """Answers prompts, texts or messages, by the newest checkpoint; settings under rollout.val_kwargs say how."""
        answers: list[str] = []
        rows = write_rows(prompts, self.folder / "prompts.jsonl")
        settings = {**NEWEST, "env.id": None, "env.mode": "step"}
        settings |= {"data.train_files": None, "data.val_files": rows, "data.filter_overlong_prompts": False}
        settings |= {"trainer.log_val_generations": 0} if has("observer", "watch") else {}
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            self._run(lambda responses: answers.extend(responses) or [0.0] * len(responses), settings)
        return answers

    def save(self, folder: str | Path) -> None:
        """Writes the model of the newest checkpoint, and its tokenizer, where from_pretrained finds them."""
        shutil.copytree(self._trained(), folder, dirs_exist_ok=True)

    def _trained(self) -> Path:
        if not (checkpoint := find_checkpoint(self.folder, "auto", None)):
            raise ConfigError(f"{self.folder} has no checkpoint: train, and let trainer.save_freq save one.")
        return checkpoint / "actor" / "huggingface"

    def _run(self, reward: Callable | str | None, more: Mapping[str, Any]) -> dict[str, float]:
        """Does a run with further settings, which win; returns the metrics of its last validation."""
        settings = {**self._settings_of(reward), **self.settings, **more}
        objects = {"train_dataset": as_dataset(self.rows), "val_dataset": as_dataset(self.val_rows)}
        datasets = {} if "data.val_files" in more else objects
        overrides = [as_override(*item) for item in settings.items()]
        config = compose("ppo_trainer", overrides, takes_objects=any(rows is not None for rows in datasets.values()))
        self._check(config, reward)
        try:
            with process_as_before():
                return run(config, reward_fn=reward if callable(reward) else None, **datasets)
        except ValueError as error:
            if isinstance(error, ConfigError) or not is_on_purpose(error):
                raise
            raise ConfigError(str(error)) from error  # a mistake, which a notebook shows without its traceback

    def _check(self, config: Config, reward: Callable | str | None) -> None:
        trainer, contents = config.trainer, config.actor_rollout_ref.actor.checkpoint.save_contents
        if not trainer.val_only and (trainer.save_freq == -1 or "hf_model" not in contents):
            raise ConfigError("trainer.save_freq, save_contents: the trained weights come from the last checkpoint.")
        other = config.reward.source() or ("env.mode=episode" if config.env.mode == "episode" else None)
        if other and callable(reward) and reward is self.reward:
            raise ConfigError(f"{other} scores the answers, and a reward is given: take one of the two back.")

    def _settings_of(self, reward: Callable | str | None) -> dict[str, Any]:
        """Writes objects into the run's folder; returns the settings that name them."""
        start, model, tokenizer = self.folder / "start_model", self.model, self.tokenizer
        settings = {NAME: self.folder.name, "trainer.save_freq": LAST, **settings_of_environment(self.environment)}
        if isinstance(model, PreTrainedModel):
            tokenizer = tokenizer or model.name_or_path or None
            if find_checkpoint(self.folder, "auto", None) is None:
                model.save_pretrained(start)
            model = start
        if isinstance(tokenizer, PreTrainedTokenizerBase):
            tokenizer.save_pretrained(start)
            tokenizer = start
        settings |= {f"{MODEL}.path": model, f"{MODEL}.tokenizer_path": tokenizer}
        if isinstance(reward, str):
            path, name = split_object(reward)
            settings |= {f"{REWARD}.path": path} | ({f"{REWARD}.name": name} if name else {})
        if isinstance(self.rows, DataLoader):
            is_ordered = isinstance(self.rows.sampler, SequentialSampler)
            settings |= {"data.train_batch_size": self.rows.batch_size, "data.shuffle": not is_ordered}
        for name, rows in (("train", self.rows), ("val", self.val_rows)):
            if rows is not None and as_dataset(rows) is None:
                settings[f"data.{name}_files"] = write_rows(rows, self.folder / f"{name}_rows.jsonl")
        return settings


@dataclass(eq=False, repr=False)
class GRPOTrainer(Trainer):
    """Trains by GRPO, without a critic: a response is compared with the others to its prompt."""

    recipe: str | None = "grpo"


@dataclass(eq=False, repr=False)
class PPOTrainer(Trainer):
    """Trains by PPO, with a critic."""

    recipe: str | None = "ppo"
