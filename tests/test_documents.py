"""Every form of the design documents: the extraction guide step by step, and the table of docs/from_documents.md."""

import re
import shutil
from pathlib import Path

import pytest

from configs.checks import check_config
from configs.errors import ConfigError
from configs.loader import Arguments, load_config, yaml_folder
from configs.schema import Config
from custom.env_dataset import CustomEnvDataset
from custom.env_wrapper import make_env
from custom.tiny_model import build_tokenizer
from data.rl_dataset import RLHFDataset
from extras.evaluation.settings import EvaluationConfig, GenerationConfig, check_evaluation, check_generation
from tests.documents.parts import Market, MarketDataset, MarketReward
from tests.forked import python
from tests.runs import ROOT, learning_metrics, run_main, short_run
from training.api import GRPOTrainer
from training.plan import check_algorithm
from training.ray_trainer import RayPPOTrainer

STEP = {"data.train_batch_size": 4, "data.max_response_length": 1, "trainer.logger": []}
FILES = ROOT / "tests/documents"
SETTINGS = """
actor_rollout_ref:
  model: {{path: {model}}}
  rollout: {{n: 2}}
algorithm: {{adv_estimator: grpo}}
data: {{train_batch_size: 4, max_prompt_length: 16, max_response_length: 2}}
trainer: {{total_training_steps: 2, default_local_dir: {folder}/run, logger: []}}
"""


@pytest.fixture
def guide(tmp_path: Path, tiny_model: Path) -> Path:
    """A folder of a user's with the guide's files, beside a copy of nothing: our modules are on the path."""
    for file in FILES.glob("*.py"):
        shutil.copy(file, tmp_path)
    (tmp_path / "config").mkdir()
    (tmp_path / "config/test_config.yaml").write_text(SETTINGS.format(model=tiny_model, folder=tmp_path))
    return tmp_path


def rewards_of(folder: Path) -> list[float]:
    steps = learning_metrics(folder / "run")
    return [metrics["critic/score/mean"] for step, metrics in steps.items() if step]


def test_a_main_of_the_users_own_trains_on_its_objects(guide):
    done = python("main.py", "trainer.total_training_steps=3", cwd=guide)
    assert done.returncode == 0, done.stderr
    assert len(rewards_of(guide)) == 3 and all(-1 <= reward <= 1 for reward in rewards_of(guide))
    again = python("main.py", "trainer.sed=1", cwd=guide)
    assert again.returncode == 1 and "trainer.sed" in again.stderr


def settings_of(folder: Path) -> list[str]:
    """Names the guide's classes as settings."""
    named = {"data.custom_cls": "MarketDataset", "reward.reward_manager": "MarketReward"}
    return [
        f"env={{id: Market, path: {folder}/parts.py, name: make_market, val_episodes: 0, val_size: 4}}",
        *(f"{key}={{path: {folder}/parts.py, name: {name}}}" for key, name in named.items()),
    ]


def test_its_classes_train_by_settings(guide):
    command = "--config-path=config", "--config-name=test_config", "+reward.reward_kwargs.fee=1"
    done = python(ROOT / "main.py", *command, *settings_of(guide), cwd=guide)
    assert done.returncode == 0, done.stderr
    assert len(rewards_of(guide)) == 2
    assert "MarketDataset takes no `first`" in done.stderr and "could not be closed" not in done.stderr


def test_the_data_set_by_hand_and_the_reward_by_hand(guide):
    for tokenizer in (None, build_tokenizer()):
        dataset = CustomEnvDataset(make_env("FrozenLake-v1"), tokenizer=tokenizer)
        row = dataset[0]
        assert len(dataset) == 10_000 and row["prompt"][0]["role"] == "user"
        assert ("raw_prompt_ids" in row) == (tokenizer is not None)
    snippets = {
        "from parts import *; d = MarketDataset(Market()); print(len(d), d[3]['prompt'])": "20 3=",
        "from data.protocol import DataProto; from parts import *; m = MarketReward(Market()); print(m(DataProto"
        ".from_single_dict({'responses': ['B', 'S'], 'state': [{'price': 1}] * 2})))": "tensor([ 1., -1.])",
    }
    for snippet, printed in snippets.items():
        done = python("-c", snippet, cwd=guide)
        assert done.stdout.strip() == printed, done.stderr


def test_the_python_face_takes_states_as_an_object(tiny_model, tmp_path):
    settings = {**STEP, "trainer.default_local_dir": str(tmp_path / "run")}
    states = CustomEnvDataset(make_env("FrozenLake-v1"))
    for rows, reward, name in (MarketDataset(Market()), MarketReward(Market()), None), (states, None, "FrozenLake-v1"):
        trainer = GRPOTrainer(str(tiny_model), reward, rows, environment=name, settings=settings)
        assert len(trainer.train(total_steps=1).metrics) == 1
        shutil.rmtree(tmp_path / "run")


REFUSED = {  # what is wrong: the class, further settings, and what the message names
    "no __len__": ("class Mine(Dataset):\n    def __init__(self, env): ...", [], "Mine has no __len__"),
    "other names": (
        "class Mine(Dataset):\n    def __init__(self, env, tok): ...",
        [],
        "data.custom_cls.name=Mine: .*'tok'.*It is given environment by position and what it names of tokenizer",
    ),
    "no rows": ("class Mine(RLHFDataset):\n    def __init__(self, env): super().__init__()", [], "Mine has no rows"),
    "episodes": (
        "from parts import MarketDataset as Mine",
        ["env.mode=episode", "env.val_size=0"],
        r"env\.mode=episode: row 0 of MarketDataset has no extra_info\['state'\]",
    ),
}


@pytest.mark.parametrize("wrong", REFUSED)
def test_a_data_set_that_cannot_be_one_is_refused_in_a_line(wrong, guide, tiny_model):
    text, settings, expected = REFUSED[wrong]
    imports = "from torch.utils.data import Dataset\nfrom data.rl_dataset import RLHFDataset\n"
    (guide / "mine.py").write_text(imports + text)
    mine = [f"data.custom_cls={{path: {guide}/mine.py, name: Mine}}"]
    done = run_main(*short_run(tiny_model, guide / "run", *settings_of(guide), *mine, *settings))
    [line] = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert done.returncode == 2 and re.search(expected, line), line


def test_objects_that_workers_cannot_have_are_refused(tiny_model, tmp_path):
    model = {"actor_rollout_ref.model.path": str(tiny_model), "trainer.default_local_dir": str(tmp_path)}
    episodes = {**model, "env.id": "FrozenLake-v1", "env.val_episodes": 2}
    with pytest.raises(ConfigError, match=r"env\.val_episodes=2: .*MarketDataset"):
        RayPPOTrainer(episodes, MarketDataset(Market()), MarketReward(Market()))
    with pytest.raises(ConfigError, match="role_worker_mapping"):
        RayPPOTrainer(config=model, train_dataset=None, reward_fn=None, role_worker_mapping={})
    with pytest.raises(ValueError, match="give a tokenizer"):
        RLHFDataset("rows.jsonl")


# The table of docs/from_documents.md, by its first column: what is tried here, a command's settings and what is said of
# them (a pattern); or the test that tries the form.

COMMANDS = {
    "main": ("ppo_trainer", Config, check_config),
    "eval": ("evaluation", EvaluationConfig, check_evaluation),
    "generate": ("generation", GenerationConfig, check_generation),
}
ROLLOUT, ACTOR = "actor_rollout_ref.rollout", "actor_rollout_ref.actor"
SAID = {
    "2, 13": [("main", f"{ROLLOUT}.name=sglang data.chat_template=chatml", "notice: data.chat_template")],
    "4": [("main", "algorithm.adv_estimator=grpo", "rollout.n=1.*at least 2")],
    "14": [("main", "data.dataloader_num_workers=0", "notice: data.dataloader_num_workers=0 has no effect")],
    "24, 116": [("main", f"{ROLLOUT}.name=trtllm", "trtllm is none of hf, vllm, sglang")],
    "37": [("main", f"{ROLLOUT}.mode=async {ROLLOUT}.n=2 {ROLLOUT}.temperature=0.9", "notice: .*mode")],
    "38": [("main", f"{ROLLOUT}.name=naive", "notice: .*naive")],
    "40": [("main", f"{ACTOR}.strategy=fsdp {ACTOR}.use_kl_loss=true", "notice: .*strategy")],
    "41": [("main", f"{ACTOR}.optim.beta1=0.8", "set optim.betas")],
    "43": [("main", f"{ACTOR}.loss_agg_mode=token_level", "token-mean")],
    "49, 55": [("main", "reward_model.custom_reward_function.path=a.py", "notice: reward_model")],
    "51": [
        ("main", "reward_model.reward_manager=limited", "notice: .*max_rpm"),
        ("main", "reward_model.reward_format=math", "docs/rewards.md"),
    ],
    "54": [
        ("main", "data.chat_template=alpaca", "custom_chat_template"),
        ("main", f"{ROLLOUT}.interactions=[a]", "interaction_config_path"),
    ],
    "77": [
        ("eval", "data.val_files=rows.jsonl", "notice: data.val_files"),
        ("eval", "data.path=rows.jsonl reward_model.enable=true", "custom_reward_function"),
    ],
    "78": [
        (
            "generate",
            "data.input_files=rows.jsonl actor_rollout_ref.model.path=m data.output_path=o.jsonl",
            "notice: .*data.path",
        )
    ],
    "101": [("main", "algorithm.kl_ctrl.type=adaptive", "notice: .*use_kl_in_reward")],
    "102": [("main", "algorithm.rollout_correction.enable=true", "rollout_correction=PRESET")],
    "109, 110": [("main", "actor_rollout_ref.actor.use_prefix_grouper=true", "notice: .*use_prefix_grouper")],
    "119": [("main", "trainer.balance_batch=true", "notice: trainer.balance_batch=True has no effect")],
    "122, 123, 124": [
        ("main", f"recipe={name}", name) for name in ("retool", "gkd", "r1", "collabllm", "langgraph_agent")
    ],
}
RUN = "data.train_files=rows.jsonl actor_rollout_ref.model.path=m trainer.test_freq=-1"
PACKED, OF_VERL = "tests/test_packaging.py", "extras/verl/tests/test_verl"
OF_CURRICULA = "extras/curriculum/tests/test_curriculum.py"
PLACES = {  # where forms are tried
    "core": "tests/test_core_algos.py::test_ppos_loss",
    "rewards": "tests/test_reward.py::test_a_file_alone_gives_its_only_reward_or_lists_its_functions",
    "by hand": "tests/test_reward.py::test_without_a_run_scores_of_tokens_are_summed_and_what_is_not_scored_is_nan",
    "data": "tests/test_user_contracts.py::test_a_dataset_in_verls_form",
    "loss": "tests/test_user_contracts.py::test_a_policy_loss_in_the_older_form",
    "imports": "tests/test_imports.py::test_a_name_that_users_import_is_there",
    "names": f"{OF_VERL}_compat.py::test_every_name_of_verl_in_the_table_is_there",
    "not here": f"{OF_VERL}_compat.py::test_a_name_that_is_not_here_is_an_import_error_of_one_line",
    "programs": f"{OF_VERL}_root.py::test_a_program_of_verls_is_a_command_of_ours_and_says_so",
    "scripts": f"{OF_VERL}_root.py::test_a_users_script_imports_verl",
    "keys": f"{OF_VERL}_commands.py::test_every_key_of_a_command_acts_or_says_why_not_and_they_agree",
    "spellings": f"{OF_VERL}_spellings.py::test_an_old_spelling_acts_as_todays_and_says_so_in_one_line",
    "managers": f"{OF_VERL}_spellings.py::test_managers_of_verl_are_accepted_with_what_is_done_here",
    "trains": "tests/test_recipes.py::test_every_estimator_and_every_loss_trains",
    "recipes": "tests/test_recipes.py::test_a_recipe_brings_the_roles_it_needs_and_no_others_and_nothing_is_told",
    "pages": "tests/test_docs.py::test_the_files_and_commands_of_a_page_work",
    "python": "extras/python/tests/test_trainer.py::test_the_spelling_of_the_design_documents",
    "mistakes": "tests/test_bad_inputs.py::test_ends_with_code_2_and_one_helpful_line_before_a_worker_starts",
    "templates": "tests/test_reward_template.py::test_a_template_scores_its_two_answers_in_any_folder",
    "engines": "tests/test_rollout_contract.py::test_texts_messages_and_ids_are_answered_without_a_run",
    "packages": f"{PACKED}::test_an_editable_install_has_extras_and_leaves_the_repository_what_is_imported",
    "curricula": f"{OF_CURRICULA}::test_a_curriculum_by_the_loss_of_rows_moves_by_what_they_scored",
    "columns": "tests/test_protocol.py::test_an_object_column_is_true_if_it_has_rows_and_else_an_array_of_numpys",
    "settings": "tests/test_config.py::test_what_is_no_setting_cannot_be_set",
    "losses": "tests/test_policy_losses.py::test_a_loss_is_given_what_it_takes_in_every_form",
    "loops": f"{OF_VERL}_forms.py::test_an_agent_loop_of_verls_plays_rows",
    "engine": f"{OF_VERL}_forms.py::test_an_engine_of_verls_is_built_and_answers",
    "estimator": f"{OF_VERL}_forms.py::test_an_estimator_of_verls_is_given_groups",
    "tools": "extras/tools/tests/test_tool_files.py::test_a_yaml_may_list_parameters_as_guides_do",
    "golden": "tests/test_golden.py::test_a_run_has_the_numbers_that_were_recorded",
    "batches": "tests/test_protocol.py::test_short_scripts_read_columns_as_attributes",
    "sft": "extras/sft/tests/test_sft_trainer.py::test_it_memorises_64_conversations_and_the_result_says_them",
    "guide": "tests/test_documents.py::test_a_main_of_the_users_own_trains_on_its_objects",
    "classes": "tests/test_documents.py::test_its_classes_train_by_settings",
    "snippets": "tests/test_documents.py::test_the_data_set_by_hand_and_the_reward_by_hand",
    "refused": "tests/test_documents.py::test_a_data_set_that_cannot_be_one_is_refused_in_a_line",
}
TRIED = {
    "3, 6": "data", "5, 46": "refused", "7-9": "templates", "10": "names", "11": "rewards", "12, 17": "programs",
    "15": "spellings", "16": "scripts", "18": "golden", "20, 22, 26": "imports", "21": "core", "23": "engines",
    "25": "by hand", "27, 28": "imports", "29": "guide", "30": "guide", "31": "guide", "32": "packages",
    "33, 34": "snippets", "35": "classes", "36": "keys", "39": "engine", "42, 44": "estimator", "45, 53": "data",
    "47": "refused", "48, 57": "curricula", "50": "managers", "52, 66": "columns", "56": "trains", "58": "tools",
    "59": "mistakes", "60": "batches", "61": "batches", "62": "losses", "63": "settings", "64, 65": "settings",
    "67": "loss", "68": "mistakes", "69": "packages", "71": "guide", "72-74": "programs", "76": "programs",
    "79": "programs", "81, 82": "not here", "83, 84": "golden", "85": "keys", "86": "keys", "87-99": "trains",
    "100": "trains", "103, 104": "recipes", "105": "recipes", "106": "keys", "107": "sft", "108": "loops",
    "111, 112": "pages", "113, 114": "pages", "115": "pages", "118": "loops", "121": "recipes", "125": "recipes",
    "126": "pages", "129, 130": "python", "131": "python", "132": "python", "133-135": "python", "137": "not here",
    "138": "golden", "139": "mistakes", "140": "golden", "141": "keys", "142": "recipes",
}  # fmt: skip
ROW = re.compile(r"^\| ([\d, -]+) \| (.+) \| (runs|told|not here)(.*) \|$", re.MULTILINE)


@pytest.mark.parametrize("rows", SAID)
def test_what_a_form_is_told(rows, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+1"}\n')
    for command, settings, expected in SAID[rows]:
        name, schema, check = COMMANDS[command]
        words = f"{RUN} {settings}" if command == "main" else settings
        try:
            config = load_config(Arguments(name, yaml_folder(schema), words.split(), print_config=False), schema)
            check(config)
            if command == "main":
                check_algorithm(config)
            told = capsys.readouterr().err
        except ConfigError as error:
            told = f"{error}"
        assert re.search(expected, told), told


def numbers(text: str) -> list[int]:
    """Returns the numbers of "2, 13" or "87-99"."""
    ends = [[int(end) for end in part.split("-")] for part in text.split(", ")]
    return [number for first, *last in ends for number in range(first, (last or [first])[0] + 1)]


def test_each_form_has_one_row_and_each_row_that_runs_or_is_told_is_tried():
    rows = ROW.findall((ROOT / "docs/from_documents.md").read_text())
    assert sorted(number for row in rows for number in numbers(row[0])) == [*range(1, 143)]
    tried = {row[0] for row in rows if row[2] != "not here"}
    assert tried == {*SAID, *TRIED} and not {*SAID} & {*TRIED}, tried ^ {*SAID, *TRIED}
    assert all(reason.startswith(": ") for _, _, verdict, reason in rows if verdict != "runs")
    for place in {PLACES[name] for name in TRIED.values()}:
        file, _, test = place.partition("::")
        assert f"def {test}(" in (ROOT / file).read_text(), place
