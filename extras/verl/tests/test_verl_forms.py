"""The forms of Python that verl's docs show, each a user's file with verl's imports (verl_forms/), unchanged.

A case is a file, verl's keys for it, and what has to be seen. Files that are rewards score `ROWS`.
"""

import asyncio
import json
import math
import runpy
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import Dataset

from configs import extras
from configs.import_utils import load_extern_object, load_module, load_modules, load_subclass
from configs.loader import load_config, parse_arguments, yaml_folder
from configs.schema import AlgorithmConfig, RolloutConfig
from custom.tiny_model import build_tokenizer
from data.chat import encode_prompt
from data.pretrained import as_users_read
from data.protocol import DataProto
from data.sampler import PromptLoader
from data.tool_parsers import FunctionCall, ToolCall, ToolParser
from data.types import NotScored, SamplingParams
from extras.sft.dataset import answer_end, create_sft_dataset
from extras.sft.settings import SFTConfig
from extras.sft.verl_datasets import MultiTurnSFTDataset, VerlSFTDataset
from extras.tools import files as tool_files
from extras.tools.conversations import ToolEpisodes
from extras.verl.compat import find_latest_ckpt_path
from extras.verl.imports import table_of_verl
from extras.verl.managers import get_reward_manager_cls, move_to_policy, register
from tests.engines import Scripted
from tests.runs import compose
from training.advantage import Estimator
from training.core_algos import get_policy_loss_fn
from training.environment import begin_episodes, data_settings
from training.losses import ReadableNamespace, call_policy_loss
from training.preparation import build_datasets, build_train_loader, check_rows
from training.ray_trainer import RayPPOTrainer
from training.reward import add_scores, load_reward_manager, reward_metrics
from training.reward_function import FunctionReward
from workers.agent_loop import AgentLoop
from workers.rollout import build_rollout, generate_batch, load_rollout_class

FORMS = Path(__file__).parent / "verl_forms"
TOKENIZER = as_users_read(build_tokenizer())
R = "reward.custom_reward_function"
LOSS = {"clip_ratio": 0.2, "clip_ratio_low": 0.2, "clip_ratio_high": 0.2, "clip_ratio_c": 3.0, "global_batch_info": {}}


# Rewards

ROWS = [("openai/gsm8k", "so #### 4", "4"), ("my/sums", "5", "5"), ("my/sums", "", "7"), ("my/sums", "~call~out", "9")]


def rollouts() -> DataProto:
    """`ROWS` as an engine returns them: data source, response and truth; after ~ comes a tool's text. The
    third is empty, and what the policy did not write earns nothing, whatever a function says."""
    width = 12
    tensors = {name: torch.zeros(len(ROWS), width, dtype=torch.long) for name in ("responses", "response_mask")}
    attention = torch.zeros(len(ROWS), 4 + width, dtype=torch.long)
    for row, (_, text, _) in enumerate(ROWS):
        parts = text.split("~")[1:] or [text]
        ids = [TOKENIZER.encode(part) for part in parts]
        tokens = [token for part in ids for token in part]
        tensors["responses"][row, : len(tokens)] = torch.tensor(tokens)
        tensors["response_mask"][row, : len(ids[0])] = 1
        attention[row, : 4 + len(tokens)] = 1
    prompts = torch.tensor([TOKENIZER.encode("2+2=")] * len(ROWS))
    columns = {
        "data_source": [source for source, _, _ in ROWS],
        "reward_model": [{"style": "rule", "ground_truth": truth} for _, _, truth in ROWS],
        "raw_prompt_ids": prompts.tolist(), "uid": [0, 0, 1, 1], "level": [1, 2, 3, 4],
    }  # fmt: skip
    return DataProto.from_single_dict({**tensors, "prompts": prompts, "attention_mask": attention, **columns})


def scored(form: str, *keys: str) -> DataProto:
    [file] = FORMS.glob(f"{form}_*.py")
    keys = [key.replace("FILE", str(file)) for key in keys]
    config = compose("env.id=null", "env.val_episodes=0", "reward.in_process=true", *keys)
    load_modules(config.actor_rollout_ref.model.external_lib)
    reward = load_reward_manager(config.reward, TOKENIZER, None, config)
    return add_scores(rollouts(), reward, TOKENIZER, config.reward)


EXTERNAL = "actor_rollout_ref.model.external_lib=FILE"
REWARDS = {  # form: (keys, scores of ROWS, extra columns)
    "01": (["custom_reward_function.path=FILE"], [1, 1, 0, 0], {}),
    "02": ([f"{R}.path=FILE", f"{R}.name=graded"], [1, 1, 0, -1], {"acc": [True, True, False, False]}),
    "03": ([f"{R}.path=FILE", f"{R}.name=scaled", f"+{R}.reward_kwargs.scale=3.0"], [3, 3, 0, 0], {}),
    "04": ([f"{R}.path=FILE"], [1, 1, 0, 0], {"peak": [4] * 4}),
    "05": (
        ["reward_model.reward_manager=batch", "custom_reward_function.path=FILE"], [1, 1, 0, 0], {"in_call": [4] * 4}
    ),
    "06": (["custom_reward_function.path=FILE"], [1, 0.5, 0, 0], {}),
    "07": (["custom_reward_function.path=FILE"], [1, -1, 0, -1], {"pred": [""] * 4}),
    "08": (["custom_reward_function.path=FILE"], [1, 1, 0, 0], {"turns": [2] * 4, "earlier": [0] * 4}),
    "10": (["custom_reward_function.path=FILE", "custom_reward_function.name=mixed"], [1, 1.2, 0, 0], {}),
    "11": ([EXTERNAL, "reward_model.reward_manager=word_count"], [1, 1, 0, 0], {"words": [3, 1, 0, 1]}),
    "12": (
        [EXTERNAL, "reward_model.reward_manager=bounded", "+reward_model.reward_kwargs.bound=2",
         "+reward_model.reward_kwargs.max_resp_len=8"],
        [2, 1, 0, 2], {},
    ),
    "13": (
        ["reward.reward_manager.source=importlib", "reward.reward_manager.module.path=FILE",
         "reward.reward_manager.name=CarefulManager", "data.max_response_length=12"],
        [1, 1, 0, 0], {"tokens": [9, 1, 0, 7], "width": [12] * 4},
    ),
    "14": (
        [EXTERNAL, "reward_model.reward_manager=keyed", "reward_model.enable_reward_loop=True",
         "+reward_model.reward_kwargs.word=four"],
        [1, 1, 0, 1], {"made": [1] * 4},
    ),
    "15": ([EXTERNAL, "reward.reward_manager.name=doubled", f"{R}.path={FORMS}/01_reward_per_sample.py"],
           [2, 2, 0, 0], {"acc": [1, 1, 0, 0]}),
    "16": ([EXTERNAL, "reward.reward_manager.name=ranked"], [1, 0, 0, 0], {}),
    "60": ([EXTERNAL, "reward_model.reward_manager=measured"], [9, 1, 0, 7], {"long": [True, False, False, True]}),
}  # fmt: skip


@pytest.mark.parametrize("form", REWARDS)
def test_a_reward_or_a_manager_of_verls_scores_as_it_does_there(form):
    keys, scores, columns = REWARDS[form]
    batch = scored(form, *keys)
    found = batch.batch["token_level_scores"]
    assert found.sum(1).tolist() == pytest.approx(scores)
    assert not found[batch.batch["response_mask"] == 0].any() and (found != 0).sum(1).max() <= 1
    assert {name: batch.non_tensor_batch[name].tolist() for name in columns} == columns
    assert reward_metrics(batch)


SLOW = """
import asyncio, time
from verl.experimental.reward_loop.reward_manager.base import RewardManagerBase
class Slow(RewardManagerBase):
    async def run_single(self, data):
        if data.non_tensor_batch["level"][0] == 2:
            {wait}
        return {{"reward_score": 1.0, "reward_extra_info": {{}}}}
class OfBatches(Slow):
    async def run_batch(self, data):
        {wait}
class Together(Slow):
    all_four = asyncio.Barrier(4)
    async def run_single(self, data):
        await self.all_four.wait()
        return await super().run_single(data)
"""


@pytest.mark.parametrize(
    ("name", "wait", "in_time"),
    [("Slow", "await asyncio.sleep(9)", 3), ("Slow", "time.sleep(2)", 1), ("OfBatches", "await asyncio.sleep(9)", 0),
     ("OfBatches", "time.sleep(2)", 0), ("Together", "pass", 4)],
)  # fmt: skip
def test_what_its_manager_does_not_score_in_time_is_not_scored_and_the_others_are(name, wait, in_time, tmp_path):
    """A manager that blocks keeps the rows behind it from being scored, too."""
    (tmp_path / "slow.py").write_text(SLOW.format(wait=wait))
    config = compose(
        "env.id=null", "env.val_episodes=0", f"reward.reward_manager.path={tmp_path}/slow.py", "reward.timeout=0.2",
        f"reward.reward_manager.name={name}", "reward.max_concurrent=4",
    )  # fmt: skip
    results = load_reward_manager(config.reward, TOKENIZER, None, config)(rollouts())
    assert [one["score"] for one in results if not isinstance(one, NotScored)] == [1.0] * in_time
    assert len(results) == len(ROWS)
    assert {one.outcome for one in results if isinstance(one, NotScored)} <= {"timeout"}


def test_a_managers_score_goes_to_the_last_token_of_the_policy():
    """A manager in verl scores a row's last token, maybe a tool's; a row without any of the policy has no score."""
    data, scores = rollouts(), torch.zeros(len(ROWS), 12)
    scores[0, 1] = scores[2, -1] = scores[3, data.batch["attention_mask"][3, -12:].sum() - 1] = 1.0
    moved = move_to_policy(scores, data)
    assert moved.nonzero().tolist() == [[0, 1], [3, int(data.batch["response_mask"][3].sum()) - 1]]


def test_an_unknown_manager_and_a_name_used_twice_are_refused():
    with pytest.raises(ValueError, match=r"Unknown reward manager: nobody.*@register\('nobody'\)"):
        scored("01", "reward.reward_manager.name=nobody")
    assert register("of the tests")(Arrow) is register("of the tests")(Arrow) is get_reward_manager_cls("of the tests")
    with pytest.raises(ValueError, match="Arrow already"):
        register("of the tests")(type("Two", (), {}))


def test_a_judge_that_verl_serves_says_how_it_is_served_here():
    with pytest.raises(ValueError, match="needs reward_model_tokenizer and reward_router_address"):
        scored("09", f"{R}.path=FILE", f"{R}.name=compute_score_judged")


# Engines


def test_an_engine_of_verls_is_built_and_answers():
    engine_class = load_rollout_class(f"{FORMS}/56_rollout.py")
    engine = build_rollout(engine_class, RolloutConfig(prompt_length=8, response_length=3), TOKENIZER, None)
    prompts = DataProto.from_single_dict({"raw_prompt_ids": [[5, 6], [5, 6, 8]]})
    batch = generate_batch(engine, prompts, SamplingParams(True, 1.0, -1, 1.0, 3), 0, 0)
    assert batch.batch["responses"][:, :2].tolist() == [[7, TOKENIZER.eos_token_id]] * 2
    assert batch.batch["response_mask"].tolist() == [[1, 1, 0]] * 2


# Scripts


def run_script(name: str, *arguments: object) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [name, *map(str, arguments)])
        runpy.run_path(str(FORMS / name), run_name="__main__")


def test_a_script_uses_every_part_of_dataproto():
    run_script("52_dataproto.py")


def test_a_script_finds_the_newest_checkpoint(tmp_path, capsys):
    (tmp_path / "global_step_7/actor").mkdir(parents=True)
    (tmp_path / "global_step_7/actor/model").touch()
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("7")
    run_script("55_checkpoint.py", tmp_path)
    assert capsys.readouterr().out.strip() == f"7 {tmp_path}/global_step_7 ['model']"
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("8")
    assert find_latest_ckpt_path(str(tmp_path)) is None is find_latest_ckpt_path(str(tmp_path / "none"))


def test_a_script_that_prepares_rows_writes_them(tmp_path, monkeypatch):
    class Rows(Arrow):
        def map(self, function, with_indices):
            return Rows([function(row, place) for place, row in enumerate(self.rows)])

        def to_parquet(self, path):
            Path(path).write_text(json.dumps(self.rows))

    fake = SimpleNamespace(Dataset=SimpleNamespace(from_list=Rows))
    monkeypatch.setitem(sys.modules, "datasets", fake)
    run_script("58_preprocess.py", "--local_save_dir", tmp_path / "here", "--hdfs_dir", tmp_path / "there")
    [row] = json.loads((tmp_path / "there/train.parquet").read_text())
    assert row["reward_model"]["ground_truth"] == "4" and row["extra_info"]["index"] == 0
    with pytest.raises(ValueError, match="only local paths are known here"):
        run_script("58_preprocess.py", "--local_save_dir", tmp_path / "here", "--hdfs_dir", "hdfs://there")


# Estimators, losses, trainers


@pytest.mark.parametrize(
    ("form", "name", "loss"),
    [("44", "squared", 1 + 0.1 * 0.25), ("45", "plain_pg", 1.0), ("47", "tripled", -3 * math.exp(-0.5))],
)
def test_a_policy_loss_of_verls_is_called_as_it_is_there(form, name, loss):
    load_modules(file_of(form))
    log_probs = torch.full((2, 3), -1.0, requires_grad=True)
    columns = [torch.full((2, 3), -0.5), log_probs, torch.ones(2, 3), torch.ones(2, 3)]
    found, metrics = call_policy_loss(get_policy_loss_fn(name), columns, "token-mean", ReadableNamespace(**LOSS), {})
    found.backward()
    assert found.item() == pytest.approx(loss) and log_probs.grad.abs().sum() > 0 and metrics


def test_an_estimator_of_verls_is_given_groups():
    load_modules(file_of("46"))
    batch = DataProto.from_single_dict({
        "token_level_rewards": torch.tensor([[0.0, 1], [0, 2], [0, 3], [4, 0]]), "response_mask": torch.ones(4, 2),
        "uid": ["a", "a", "a", "b"],
    })  # fmt: skip
    columns = Estimator(AlgorithmConfig(adv_estimator="median"))(batch)
    assert columns["advantages"].tolist() == columns["returns"].tolist() == [[-1, -1], [0, 0], [1, 1], [0, 0]]


def test_a_trainer_that_overrides_a_stage_of_verls_is_told_the_method_of_ours():
    with pytest.raises(ValueError, match=r"Halfway._\w+ is not called here: override "):
        load_subclass(file_of("49"), "Halfway", RayPPOTrainer, "trainer.cls")
    told = [why for name, why in table_of_verl()[1].items() if name.startswith("training.ray_trainer.RayPPOTrainer.")]
    named = {why.split()[1].rstrip(",") for why in told if why.startswith("override ")}
    assert named and named <= {*dir(RayPPOTrainer)}


# Agent loops


def played(agent: str, *overrides: str, answer: str = "4") -> DataProto:
    """Three rows about sums, played by `agent`."""
    config = compose(
        "env.id=null", "data.train_files=x", "data.max_prompt_length=40", "data.max_response_length=40", *overrides
    )
    messages = [{"role": "user", "content": "2+2=?"}]
    rows = {
        "raw_prompt": [messages] * 3, "raw_prompt_ids": [encode_prompt(messages, TOKENIZER)] * 3, "uid": [0, 1, 2],
        "scored": [True, True, False], "data_source": ["sums"] * 3, "ground_truth": ["4"] * 3,
    }  # fmt: skip
    loop = AgentLoop(config, TOKENIZER, Scripted(config, TOKENIZER, lambda text, times: answer), None)
    prompts = begin_episodes(DataProto.from_single_dict(rows), agent)
    return loop.generate_sequences(prompts, SamplingParams(True, 1.0, -1, 1.0, 40), seed=0, first_row=0)


SEEN = ["data_source", "ground_truth", "interaction_kwargs"]
AGENTS = {  # what its rows are, turns, further columns
    "37_agent_loop_single.py": ("one_answer", ["4"], 2, {"seen": SEEN}),
    "38_agent_loop_two_turns.py": ("looker", ["4", "<|tool|>you said 1 characters", "4"], 4, {"tool_rewards": [0.0]}),
    "39_agent_loop_yaml.yaml": ("retrying", ["4"], 2, {"tries": 2}),
    "42_agent_loop_sequences.py": ("halves", ["4"], 2, {}),
}


@pytest.mark.parametrize("form", AGENTS)
def test_an_agent_loop_of_verls_plays_rows(form):
    agent, said, turns, columns = AGENTS[form]
    if form.endswith(".py"):
        load_modules(str(FORMS / form))
    key = "actor_rollout_ref.rollout.agent"
    batch = played(agent, *([f"{key}.agent_loop_config_path={FORMS / form}"] if form.endswith(".yaml") else []))
    assert len(batch) == (6 if agent == "halves" else 3) and set(batch.failure) == {None}, batch.failure
    parts = [TOKENIZER.decode(ids[mask == 1]) for ids, mask in zip(batch.responses, batch.response_mask, strict=True)]
    assert set(parts) == {"".join(f"{text}<|end|>" for text in said if text[0] != "<")}
    whole = TOKENIZER.decode(batch.responses[0][batch.attention_mask[0, -40:] == 1])
    assert all(text in whole for text in said) and (batch.rollout_log_probs[batch.response_mask == 1] == -1).all()
    assert set(batch.non_tensor_batch["__num_turns__"]) == {turns}
    for name, value in columns.items():
        assert batch.non_tensor_batch[name][0] == value
    asked = []
    scored = add_scores(batch, lambda data: asked.extend(data.uid) or [2.0] * len(data), TOKENIZER)
    scores = [2.0] * 3 if agent != "halves" else [0.0, 2.0] * 3
    assert scored.batch["token_level_scores"].sum(1).tolist() == ([1.0, 1.0, 2.0] if agent == "looker" else scores)
    assert asked == ([2] if agent == "looker" else [0, 1, 2])


def test_a_tool_agent_loop_with_other_states_is_refused_with_what_to_write():
    with pytest.raises(RuntimeError, match="write a subclass of AgentLoopBase"):
        load_modules(str(FORMS / "40_agent_loop_of_tool_agent.py"))


def test_an_environment_of_trls_is_an_object_an_episode():
    key, file = "actor_rollout_ref.rollout.multi_turn", FORMS / "59_trl_environment.py"
    overrides = (f"{key}.enable=true", f"{key}.environment_factory={file}:Shelf", f"{key}.format=plain")
    batch = played("tool_agent", *overrides, f"{key}.max_assistant_turns=2", answer="put(4)")
    assert "The shelf is empty." in TOKENIZER.decode(batch.input_ids[0]) and set(batch.tool_call_counts) == {1}
    reward = FunctionReward(load_extern_object(str(file), "reward_func"))
    assert add_scores(batch, reward, TOKENIZER).batch["token_level_scores"].sum(1).tolist() == [1.0] * 3


# Data sets, generators, samplers

PROMPTS = [f"{'x' * 5}", "y" * 600] * 3  # characters, which are tokens here


def file_of(form: str, ending: str = "py") -> str:
    [file] = FORMS.glob(f"{form}_*.{ending}")
    return str(file)


def write_rows(folder: Path) -> None:
    rows = [
        {"prompt": [{"role": "user", "content": prompt}], "question": f"{place}?", "truth": str(place),
         "data_source": "my/sums", "reward_model": {"style": "rule", "ground_truth": str(place)},
         "extra_info": {"index": place}}
        for place, prompt in enumerate(PROMPTS)
    ]  # fmt: skip
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


class Arrow:
    """Stands for `datasets.Dataset`, where that is not installed."""

    def __init__(self, rows: list[dict]) -> None:
        self.rows, self.column_names = rows, list(rows[0])

    def to_list(self) -> list[dict]:
        return self.rows

    def map(self, function, remove_columns):
        assert remove_columns == self.column_names
        return Arrow([function(row) for row in self.rows])


def read_arrow(kind: str, data_files: str) -> dict[str, Arrow]:
    return {"train": Arrow([json.loads(line) for line in Path(data_files).read_text().splitlines()])}


def loader_of(form: str, *keys: str) -> PromptLoader:
    """The prompts of a run with the form's file, without a model."""
    given = ["env.id=null", "env.val_episodes=0", "data.train_files=rows.jsonl", "data.train_batch_size=2"]
    given += ["data.max_prompt_length=1024", "data.shuffle=false", "data.custom_cls.path=null"]
    config = compose(*given, *(key.replace("FILE", file_of(form)) for key in keys))
    plan = SimpleNamespace(config=config, data=data_settings(config), tokenizer=TOKENIZER)
    return build_train_loader(plan, build_datasets(plan, None)[0])


SYSTEM, SAID = {"role": "system", "content": "Add."}, {"role": "user", "content": PROMPTS[0]}
CLASS = "data.custom_cls.path=FILE"
TOOLS_KWARGS = {"lookup": {"create_kwargs": {"level": 0}}}
DATA_SETS = {  # form: (keys, rows, columns of the first, attributes of the data set)
    "17": ([f"{CLASS} data.custom_cls.name=ListedPrompts", "+data.custom_cls.before='Q: '"], 6,
           {"raw_prompt": [SAID | {"content": f"Q: {PROMPTS[0]}"}]}, {}),
    "18": ([f"{CLASS} data.custom_cls.name=Positional data.max_prompt_length=700"], 6, {}, {"max_prompt_length": 700}),
    "19": ([f"{CLASS} data.custom_cls.name=WithSystem"], 6, {"raw_prompt": [SYSTEM, SAID]}, {}),
    "20": ([f"{CLASS} data.custom_cls.name=Mapped"], 6,
           {"raw_prompt": [{"role": "user", "content": "0?"}], "reward_model": {"style": "rule", "ground_truth": "0"}},
           {"calls": 1}),
    "21": ([f"{CLASS} data.custom_cls.name=Filtered data.filter_overlong_prompts=True data.max_prompt_length=100"], 2,
           {"index": 0}, {"num_filtered": 3}),
    "22": ([f"{CLASS} data.custom_cls.name=Fetched data.train_files=store://rows.jsonl"], 6, {},
           {"data_files": ["rows.jsonl"], "original_data_files": ["store://rows.jsonl"]}),
    "23": ([f"{CLASS} data.custom_cls.name=Tagged"], 6,
           {"agent_name": "single_turn_agent", "level": 0, "tools_kwargs": TOOLS_KWARGS, "interaction_kwargs": {}}, {}),
    "24": ([f"{CLASS} data.custom_cls.name=SelfTokenised data.return_raw_chat=True"], 6, {"raw_prompt": [SAID]}, {}),
    "25": (["data.datagen.path=FILE data.datagen.name=Harder", "+data.datagen.step=2"], 8, {"index": 0}, {}),
    "26": ([f"{CLASS} data.custom_cls.name=Listening data.dataloader_num_workers=0"], 6, {}, {}),
    "27": (["data.sampler.class_path=FILE data.sampler.class_name=Backwards data.dataloader_num_workers=0",
            "+data.sampler.keep=4"], 6, {}, {}),
    "28": (["data.sampler.class_path=FILE data.sampler.class_name=EasyFirst"], 6, {}, {}),
}  # fmt: skip


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """An empty working directory, in which the users' files can be imported by their names."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(FORMS))
    return tmp_path


def places(loader: PromptLoader, batches: int) -> list[int]:
    return [place for _ in range(batches) for place in loader.next_batch()["dataset_position"]]


def batch_of(loader: PromptLoader, scores: list[float]) -> DataProto:
    infos = [loader.row(place)["extra_info"] for place in range(len(scores))]
    columns = {"extra_info": infos, "uid": ["a", "b"] * (len(scores) // 2)}
    return DataProto.from_single_dict({"token_level_scores": torch.tensor([scores]).T, **columns})


@pytest.mark.parametrize("form", DATA_SETS)
def test_a_data_set_a_generator_or_a_sampler_of_verls_gives_the_rows_that_it_gives_there(form, folder, monkeypatch):
    fake = SimpleNamespace(load_dataset=read_arrow, concatenate_datasets=lambda parts: parts[0])
    fake.Dataset = SimpleNamespace(from_list=Arrow)
    monkeypatch.setitem(sys.modules, "datasets", fake)
    write_rows(folder)
    keys, rows, columns, attributes = DATA_SETS[form]
    loader = loader_of(form, *" ".join(keys[:1]).split(), *keys[1:])
    first = loader.row(0)
    assert len(loader.dataset) == rows and {name: first[name] for name in columns} == columns
    assert {name: getattr(loader.dataset, name) for name in attributes} == attributes
    assert first["raw_prompt_ids"] == encode_prompt(first["raw_prompt"], TOKENIZER)
    check_rows(RolloutConfig(), loader, range(2))
    if form == "25":
        loader.dataset.on_batch_end(None)
        assert len(loader.dataset) == 10 and loader.row(9)["extra_info"] == {"index": 8}
    elif form == "26":
        loader.dataset.on_batch_end(batch_of(loader, [1.0, 0.0]))
        assert loader.dataset.heard == ((2, 0.5),)
    elif form == "27":
        assert places(loader, 2) == [5, 4, 3, 2] and len(loader) == 2
    elif form == "28":
        assert places(loader, 1) == [0, 1]
        loader.sampler.update(batch_of(loader, [0.0, 1.0, 2.0, 3.0]))
        assert loader.sampler.scores == {0: 0.0, 1: 1.0, 2: 2.0, 3: 3.0}


# Tools, interactions


def conversation(row: dict, answers: list[str], *keys: str) -> tuple[list[str], list[float], dict, dict]:
    """Returns the reply to each answer, what it earns, the columns at the end, and the tools."""
    keys = [f"actor_rollout_ref.rollout.multi_turn.{key}" for key in ("enable=True", *keys)]
    config = compose("env.id=null", "env.val_episodes=0", *keys)
    episodes = ToolEpisodes(config.actor_rollout_ref.rollout.multi_turn, TOKENIZER)

    async def talk() -> tuple[list[str], list[float], dict]:
        episode = episodes({"raw_prompt_ids": [1], "raw_prompt": "hi", **row})
        replies = [await episode.step(answer) for answer in answers]
        end = await episode.finish()
        await episode.close()
        said = [message["content"] for reply in replies for message in reply.messages]
        earned = [reply.reward for reply in replies]
        return said, [*earned[:-1], earned[-1] + end.reward], end.columns

    return *asyncio.run(talk()), episodes.tools


def call(tool: str, **arguments: object) -> str:
    return ToolParser.get_tool_parser("hermes").write(tool, arguments)


CREATED = {"counter": {"create_kwargs": {"start": 1}}}
NOTES = "{} notes; {} messages; turn {}"
TOOLS = {  # form: (columns of the row, answers, what is said to them, what they earn, columns at the end)
    "29": ({"tools_kwargs": CREATED}, [call("counter", by=2) + call("counter", by=3), "bye"], ["3", "6"], [0.2, 1.0],
           {"tool_rewards": [0.1, 0.1], "tool_call_counts": 2}),
    "29 extra_info": ({"extra_info": {"tools_kwargs": CREATED}}, [call("counter", by=2)], ["3"], [0.1], {}),
    "30": ({"level": 1}, [call("notebook", note="a"), call("notebook", note="b"), "bye"],
           [NOTES.format(1, 2, 1), NOTES.format(2, 4, 2)], [0, 0, 0], {"notes": ["a", "b"]}),
    "30 taken": ({"notes": 1}, [call("notebook", note="a")], [NOTES.format(1, 2, 1)], [0], {"extra_notes": ["a"]}),
    "31": ({}, [call("celsius_of", town="Ulm")], ['{"town": "Ulm", "celsius": 17.5}'], [0], {}),
    "32": ({}, [call("half", number=4) + call("greet", name="Bo")], ["2.0", '{"text": "Hello Bo"}'], [0], {}),
    "33": ({}, [call("calc", expression="3+4") + call("roll")], ["7", "4"], [0.25], {"tool_rewards": [0.25, 0.0]}),
}  # fmt: skip


@pytest.mark.parametrize("case", TOOLS)
def test_a_tool_of_verls_is_called_as_it_is_there(case, folder):
    form, (row, answers, said, earned, columns) = case[:2], TOOLS[case]
    key, ending = ("function_tool_path", "py") if form in ("32", "33") else ("tool_config_path", "yaml")
    found = conversation(row, answers, f"{key}={file_of(form, ending)}", "max_parallel_calls=2")
    assert found[:2] == (said, pytest.approx(earned))
    assert {name: found[2][name] for name in columns} == columns
    if form == "29":
        assert found[3]["counter"].released == 1 and not found[3]["counter"].totals
    elif form == "32":
        assert load_module(file_of(form)).half(4) == 2 and [*found[3]] == ["half", "greet"]


def test_a_simulated_user_of_verls_speaks_until_the_answer_is_right(folder):
    row = {"interaction_kwargs": {"name": "coach", "ground_truth": 4}}
    key = f"interaction_config_path={file_of('36', 'yaml')}"
    said, earned, columns, _ = conversation(row, ["it is 5", "it is 4"], key)
    assert (said, earned, columns["turn_scores"]) == (["Again."], [0.0, 1.0], [0.0, 1.0])


def test_a_subclass_of_the_mcp_tool_reads_results_its_own_way(folder, monkeypatch):
    """A stand-in for the server's client lists and calls tools; extras/tools/tests has a real server."""
    part, schema = SimpleNamespace(type="text", text="seven"), {"type": "object", "properties": {}}

    class Client:
        async def list_tools(self):
            add, other = (SimpleNamespace(name=name, description="", input_schema=schema) for name in ("add", "other"))
            return SimpleNamespace(tools=[add, other])

        async def call_tool(self, name, arguments):
            return SimpleNamespace(is_error=False, content=[part])

    monkeypatch.setattr(tool_files, "client_of", lambda server: nullcontext(Client()))
    (folder / "servers.json").write_text('{"mcpServers": {"sums": {"url": "http://127.0.0.1:1"}}}')
    said, _, _, tools = conversation({}, [call("add")], f"tool_config_path={file_of('34', 'yaml')}")
    assert (said, [*tools]) == (['{"result": "SEVEN"}'], ["add"])
    (folder / "servers.json").unlink()
    with pytest.raises(ValueError, match=r"mcp_servers_config_path: there is no file servers.json"):
        conversation({}, [], f"tool_config_path={file_of('34', 'yaml')}")


def test_a_tool_parser_of_verls_finds_calls_in_token_ids():
    load_module(file_of("35"))
    tokenizer = build_tokenizer()
    tokenizer.add_tokens(["«", "»"])
    parser = ToolParser.get_tool_parser("angle", tokenizer)
    found = parser.parse('so «add {"by": 2}»«add [»', {})
    assert (found.text.strip(), found.calls) == ("so «add [»", [ToolCall("add", {"by": 2})])
    ours = ToolParser.get_tool_parser("hermes", TOKENIZER)  # as an agent loop of verl's asks it
    ids = TOKENIZER.encode('so <tool_call>{"name": "add", "arguments": {"by": 2}}</tool_call>')
    assert asyncio.run(ours.extract_tool_calls(ids)) == ("so", [FunctionCall("add", '{"by": 2}')])


# Supervised training


@pytest.mark.parametrize(("form", "name"), [("53", "LastAnswer"), ("54", "Alpaca")])
def test_a_data_set_for_supervised_training_of_verls_teaches_what_it_teaches_there(form, name, folder):
    said = [{"role": role, "content": text} for role, text in (("user", "1+1="), ("assistant", "2"))]
    rows = [{"messages": said * 2, "instruction": "1+1=", "output": "2"}]
    (folder / "rows.jsonl").write_text(json.dumps(rows))
    keys = [f"data.custom_cls.path={file_of(form)}", f"data.custom_cls.name={name}", "data.train_files=rows.jsonl"]
    keys += ["data.prompt_key=instruction", "data.response_key=output", "data.max_length=64"]
    keys += ["data.messages_key=none"] * (form == "54") + ["+data.mine=3"]
    config = load_config(parse_arguments(keys, "sft", None, yaml_folder(SFTConfig)), SFTConfig).data
    assert config.get("mine") == config.mine == 3
    [row] = create_sft_dataset(config.train_files, TOKENIZER, config, answer_end(TOKENIZER))
    prompt = [SYSTEM, *said * 2][:-1] if form == "53" else said[:1]
    assert row["sample"].prompt_ids == encode_prompt(prompt, TOKENIZER)
    assert row["sample"].token_ids == [*TOKENIZER.encode("2"), answer_end(TOKENIZER)]
    assert all(row["sample"].policy_mask)


def test_of_a_conversation_what_is_not_trainable_is_read_and_of_all_rows_the_first_are_taken(folder):
    chat = [("user", "1+1="), ("assistant", "2"), ("user", "2+2="), ("assistant", "4")]
    said = [{"role": role, "content": text, "trainable": text != "2"} for role, text in chat]
    (folder / "rows.jsonl").write_text(json.dumps([{"messages": said, "prompt": "1", "response": "2"}]))
    config = load_config(parse_arguments(["data.max_length=64"], "sft", None, yaml_folder(SFTConfig)), SFTConfig).data
    row = MultiTurnSFTDataset("rows.jsonl", TOKENIZER, config)[0]
    assert TOKENIZER.decode(row["input_ids"][row["loss_mask"] == 1]) == "4<|end|>"
    arguments = parse_arguments(["data.messages_key=none"], "sft", None, yaml_folder(SFTConfig))
    config = load_config(arguments, SFTConfig).data
    assert len(VerlSFTDataset(["rows.jsonl"] * 3, TOKENIZER, config, max_samples=2)) == 2


def test_a_name_of_an_extra_that_is_gone_is_an_import_error_that_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(extras, "FOLDER", tmp_path)
    (tmp_path / "mine.py").write_text("from verl.trainer.ppo.rollout_corr_helper import compute_offpolicy_metrics")
    with pytest.raises((ImportError, RuntimeError), match="rollout_correction is not in this copy"):
        load_module(str(tmp_path / "mine.py"))


def test_the_hook_of_single_messages_is_refused_by_name(tmp_path):
    (tmp_path / "mine.py").write_text(
        "from verl.utils.dataset.multiturn_sft_dataset import MultiTurnSFTDataset\n"
        "class Mine(MultiTurnSFTDataset):\n"
        "    def _process_single_message(self, index, message): ...\n"
    )
    with pytest.raises(ValueError, match=r"Mine._process_single_message is not called here: choose what is learnt"):
        load_subclass(f"{tmp_path}/mine.py", "Mine", Dataset, "data.custom_cls.name")
