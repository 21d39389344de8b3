"""Golden runs: short runs of `python main.py`, whose metrics are compared with those in tests/golden/.

    python -m tests.test_golden --write [RUN …]     records all runs, or those that are named, anew

Each run takes three steps, and validates before the first and after the last. Every metric of every step is compared,
but those of the clock (`CLOCK`). With kernels=off all are equal to the last digit on a machine like the one that
recorded them, and up to `CLOSE` on others; with kernels=auto up to `CLOSE`. Tests use only what users have (overrides,
files of their own, metrics.jsonl), so that the code behind it can move. A change that is meant to change numbers
records them anew, in its own commit.

The runs are forks of one process (tests/forked.py), one after the other, in the environment `EXACT`, which takes away
what numbers owe to the machine. Models are tiny, and biased to the answers of their task, so that rewards differ and
tools are called.
"""

import json
import math
import os
import re
import string
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.forked import python, python_command

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[1]
GOLDEN = ROOT / "tests/golden"
CLOCK = ("timing", "perf/time_per_step", "perf/throughput", "perf/max_memory", "perf/cpu_memory", "training/seconds")
OF_EXTRAS = re.compile("action/|.*/random_player/")  # which a copy without the extra does not have
CLOSE = 1e-5  # relative, and absolute below 1
EXACT = {  # one thread, and the instructions that all machines have
    "ATEN_CPU_CAPABILITY": "avx2",
    "MKL_CBWR": "COMPATIBLE",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "OPENBLAS_CORETYPE": "Haswell",
    "NPY_DISABLE_CPU_FEATURES": "AVX512F AVX512CD AVX512_SKX AVX512_CLX AVX512_CNL AVX512_ICL AVX512_SPR",
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
}
PASSED_ON = ("PATH", "HOME", "TMPDIR", "LANG", "LD_LIBRARY_PATH", "VIRTUAL_ENV", "USER")

# Which tokens each model is biased to: pairs of tokens and of those that are likely to follow them.
DIGITS = [*string.digits]
MODELS = {
    "sums": [(["=", "<|assistant|>"], DIGITS), (DIGITS, [*DIGITS, "<|end|>"])],
    "moves": [(["<|assistant|>"], "LDRU"), ("LDRU", ["<|end|>"])],
    "calls": [
        *[(["<|assistant|>"], "cd5"), ("c", "a("), ("a", "l"), ("l", "c"), ("d", "("), ("(*", "1234"), ("1234", "*)")],
        *[("5)", ["<|end|>"])],
    ],
}
SUMS = {"1+2=": "3", "2+2=": "4", "3+5=": "8", "4+2=": "6"}
PRODUCTS = {f"{a}*{b}=?": str(a * b) for a, b in [(2, 3), (4, 2), (3, 3), (5, 1), (7, 8), (6, 4)]}
FILES = {
    "sums.jsonl": "".join(
        json.dumps({"prompt": prompt, "reward_model": {"ground_truth": answer}, "data_source": "sums"}) + "\n"
        for prompt, answer in SUMS.items()
    ),
    "products.jsonl": "".join(
        json.dumps({"prompt": [{"role": "user", "content": prompt}], "ground_truth": answer, "data_source": "products"})
        + "\n"
        for prompt, answer in PRODUCTS.items()
    ),
    "rewards.py": '''
import re

def right(data_source, solution_str, ground_truth, extra_info=None):
    return float(solution_str.strip() == ground_truth)

def near(data_source, solution_str, ground_truth, extra_info=None):
    """How near the last number of the answer is, and a number of each answer's own, so that few groups tie."""
    numbers, own = re.findall("[0-9]+", solution_str)[-1:], sum(map(ord, solution_str))
    error = min([abs(int(number) - int(ground_truth)) for number in numbers], default=10)
    return {"score": max(0.0, 1 - error / 10) + own % 7 / 20, "acc": float(error == 0), "even": own % 2}

def brevity(response, most=4):
    return 1 - min(len(response), most) / most
''',
    "my_tools.py": '''
def d(number: int) -> str:
    """Twice the number.

    Args:
        number: what is doubled.
    """
    return str(2 * int(number))
''',
    "my_engine.py": '''
import torch
from workers.rollout import Completion, Rollout

class Sharper(Rollout):
    """Samples at a temperature that is not the trainer's, so that there is something to correct."""

    @torch.no_grad()
    def generate(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        sampling, ids, log_probs = request.sampling, list(request.prompt_ids), []
        stops = self.all_stop_ids(sampling)
        generator = torch.Generator().manual_seed(request.seed)
        while len(log_probs) < sampling.max_tokens and (not log_probs or ids[-1] not in stops):
            choices = (1.05 * self.module(torch.tensor([ids])).logits[0, -1].float()).log_softmax(-1)
            token = choices.exp().multinomial(1, generator=generator) if sampling.do_sample else choices.argmax()[None]
            ids.append(token.item())
            log_probs.append(choices[token].item())
        reason = "stop" if ids[-1] in stops else "length"
        return Completion(request.id, ids[len(request.prompt_ids) :], log_probs, reason, self.weight_version)
''',
}

ALL = """trainer.total_training_steps=3 trainer.test_freq=3 trainer.save_freq=-1 trainer.logger=[]
    trainer.n_gpus_per_node=0 actor_rollout_ref.actor.optim.lr=1e-3
    actor_rollout_ref.actor.optim.lr_warmup_steps=0 actor_rollout_ref.actor.calculate_entropy=true
    actor_rollout_ref.actor.entropy_coeff=0.1"""  # or GRPO's gradients cancel, and AdamW makes steps of their rounding
ROWS = """actor_rollout_ref.model.path=FILES/sums data.train_files=FILES/sums.jsonl data.val_files=FILES/sums.jsonl
    data.train_batch_size=4 data.max_prompt_length=8 data.max_response_length=4 actor_rollout_ref.rollout.n=4
    reward.custom_reward_function.path=FILES/rewards.py reward.custom_reward_function.name=near"""
GAME = """actor_rollout_ref.model.path=FILES/moves data.train_batch_size=4 actor_rollout_ref.rollout.n=4
    env.val_episodes=3 env.max_turns=4"""
LAKE = f"{GAME} env.kwargs.size=2"
PPO = """recipe=ppo actor_rollout_ref.rollout.n=2 actor_rollout_ref.actor.entropy_coeff=0 critic.optim.lr=1e-3
    algorithm.gamma=0.99 algorithm.lam=0.9 algorithm.use_kl_in_reward=true algorithm.kl_ctrl.type=adaptive
    algorithm.kl_ctrl.kl_coef=0.1 algorithm.kl_ctrl.horizon=50"""
LORA = "actor_rollout_ref.model.lora_rank=4 actor_rollout_ref.actor.entropy_coeff=0"
TWO_UPDATES = "actor_rollout_ref.actor.ppo_mini_batch_size=2"
RUNS = {
    "sums": f"""{ROWS} algorithm.adv_estimator=grpo data.max_response_length=1 actor_rollout_ref.rollout.n=8
        reward.custom_reward_function.name=right actor_rollout_ref.actor.entropy_coeff=0.2""",
    "frozenlake": f"--config-name frozenlake {LAKE} env.val_size=4",
    "episodes": f"--config-name frozenlake_multiturn {LAKE} {TWO_UPDATES}",
    "turns": f"--config-name cliffwalking {GAME} env.max_turns=3",
    "tools": """--config-name calculator_tool actor_rollout_ref.model.path=FILES/calls data.train_batch_size=4
        data.train_files=FILES/products.jsonl data.val_files=FILES/products.jsonl actor_rollout_ref.rollout.n=4
        reward.custom_reward_function.path=FILES/rewards.py reward.custom_reward_function.name=near
        actor_rollout_ref.rollout.multi_turn.function_tool_path=FILES/my_tools.py""",
    "ppo": f"""{ROWS} {PPO} {TWO_UPDATES} actor_rollout_ref.actor.ppo_epochs=2 actor_rollout_ref.actor.shuffle=true
        trainer.save_freq=2""",
    "remax": f"{ROWS} recipe=remax actor_rollout_ref.rollout.n=2",
    "dapo": f"""{ROWS} recipe=dapo data.train_batch_size=2 actor_rollout_ref.rollout.n=2
        algorithm.filter_groups.metric=even algorithm.filter_groups.max_num_gen_batches=3
        reward.reward_kwargs.overlong_buffer_cfg.len=2""",
    "gspo": f"""{ROWS} recipe=gspo {TWO_UPDATES} actor_rollout_ref.rollout.n=4 reward.custom_reward_function.path=null
        reward.functions=[{{path:FILES/rewards.py,name:near}},{{path:FILES/rewards.py,name:brevity,weight:0.2}}]""",
    "lora": f"{ROWS} recipe=rloo actor_rollout_ref.rollout.n=4 {LORA} {TWO_UPDATES}",
    "reward_model": f"--config-name frozenlake_rm {LAKE} reward.reward_model.model.path=FILES/reward_model",
    "pf_ppo": f"{ROWS} recipe=pf_ppo",
    "correction": f"""{ROWS} algorithm.adv_estimator=grpo actor_rollout_ref.rollout.name=FILES/my_engine.py
        algorithm.rollout_correction=decoupled_geo_rs_token_tis
        algorithm.rollout_correction.rollout_rs_threshold="0.97_1.03" """,
    "bypass": f"{ROWS} algorithm.adv_estimator=grpo {TWO_UPDATES} algorithm.rollout_correction=bypass_pg_is",
    "ray": f"{ROWS} {PPO} trainer.n_workers_per_node=2",
    "ray_lora": f"{ROWS} recipe=rloo actor_rollout_ref.rollout.n=4 {LORA} trainer.n_workers_per_node=2",
}
KERNELS = ("off", "auto")
ONCE = dict.fromkeys(("remax", "gspo", "pf_ppo", "correction", "bypass", "ray"), "off") | {"ray_lora": "auto"}
PLAYED = [f"{run}.{kernels}" for run in RUNS for kernels in KERNELS if kernels == ONCE.get(run, kernels)]
RESUMED = "ppo.resumed"  # from what ppo.off has saved after step 2

EPISODES = ("episodes", "turns", "tools")  # their turns meet in the engine's batches as time has it, which rounds
ENGINE = ("rollout_mismatch/", "rollout_corr/", "rollout/sync", "training/rollout_")  # what compares its log-probs
ROUNDED = 3e-6

Record = dict[str, list[float | str | None]]  # of each metric, a value a step; None: it has none there


def words_of(name: str, folder: Path) -> list[str]:
    """Returns the words after `python` that play a run into `folder`/NAME."""
    run, variant = name.split(".")
    kernels = f"actor_rollout_ref.model.kernels={'auto' if variant == 'auto' else 'off'}"
    more = [f"trainer.default_local_dir=FILES/{name}", kernels]
    if name == RESUMED:
        more += ["trainer.resume_mode=resume_path", f"trainer.resume_from_path=FILES/{run}.off/global_step_2"]
    words = RUNS[run].split()
    config = [words.pop(0), words.pop(0)] if words[0] == "--config-name" else []
    return ["main.py", *config, *(word.replace("FILES", str(folder)) for word in [*ALL.split(), *words, *more])]


def play(folder: Path, names: list[str]) -> None:
    """Plays runs in forks; writes of each `folder`/NAME.json, its record, or NAME.failed, its last output."""
    for name, text in FILES.items():
        (folder / name).write_text(text)
    python("-m", "custom.tiny_model", folder / "tiny", "--hidden-size", "64", "--layers", "2", check=True)
    python("-m", "tests.test_golden", "--models", folder, check=True)
    forks = {"runtime_env": {"py_executable": python_command()}}
    os.environ["RAY_JOB_CONFIG_JSON_ENV_VAR"] = json.dumps(forks)  # what Ray starts with: its workers are forks, too
    for name in names:
        done = python(*words_of(name, folder))
        if done.returncode == 0:
            (folder / f"{name}.json").write_text(json.dumps(record(folder / name / "metrics.jsonl")))
        else:
            (folder / f"{name}.failed").write_text(done.stdout[-2000:] + done.stderr[-4000:])


def make_models(folder: Path) -> None:
    """Makes the policies of `MODELS` and a reward model out of `folder`/tiny, and notes what machine this is."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForSequenceClassification

    tokenizer = AutoTokenizer.from_pretrained(folder / "tiny")
    for name, table in MODELS.items():
        model = AutoModelForCausalLM.from_pretrained(folder / "tiny")
        model.config.tie_word_embeddings = False
        inputs = model.get_input_embeddings().weight
        outputs = model.lm_head.weight = torch.nn.Parameter(inputs.detach().clone())
        with torch.no_grad():
            for channel, (tokens, followers) in enumerate(table):  # no layer writes to it
                for layer in model.model.layers:
                    layer.self_attn.o_proj.weight[channel] = layer.mlp.down_proj.weight[channel] = 0
                inputs[:, channel] = outputs[:, channel] = 0
                inputs[tokenizer.convert_tokens_to_ids([*tokens]), channel] = 4
                likely = tokenizer.convert_tokens_to_ids([*followers])
                outputs[likely, channel] = 0.6 if len(likely) > 3 else 0.9
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    config = AutoModelForCausalLM.from_pretrained(folder / "tiny").config
    config.num_labels = 1
    torch.manual_seed(1)
    LlamaForSequenceClassification(config).save_pretrained(folder / "reward_model")
    tokenizer.save_pretrained(folder / "reward_model")
    cpu = [line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "vendor_id" in line]
    machine = f"{(cpu or ['unknown'])[0]}, {torch.backends.cpu.get_cpu_capability()}, torch {torch.__version__}"
    (folder / "machine").write_text(machine)


def record(metrics: Path) -> Record:
    """Reads metrics.jsonl: of each metric that does not depend on the clock the values of steps 0 to 3."""
    lines = {line["step"]: line["data"] for line in map(json.loads, metrics.read_text().splitlines())}
    logged = {name for data in lines.values() for name in data if not name.startswith(CLOCK)}
    names = sorted(name for name in logged if not OF_EXTRAS.match(name))
    assert max(lines) == 3

    def value(step: int, name: str) -> float | str | None:
        data = lines.get(step, {})
        return "nan" if name in data and data[name] is None else data.get(name)

    return {name: [value(step, name) for step in range(4)] for name in names}


def differences(golden: Record, played: Record, tolerance: Callable[[str], float]) -> list[str]:
    """Says of each metric that differs where, from what to what, and by how much."""
    lines = [f"{name}: {'new' if name in played else 'gone'}" for name in sorted(golden.keys() ^ played.keys())]
    for name in sorted(golden.keys() & played.keys()):
        for step, (old, new) in enumerate(zip(golden[name], played[name], strict=True)):
            numbers = isinstance(old, float) and isinstance(new, float)
            allowed = tolerance(name)
            if not (math.isclose(old, new, rel_tol=allowed, abs_tol=allowed) if numbers else old == new):
                size = f", by {abs(old - new):.1e}" if numbers else ""
                lines.append(f"{name}, step {step}: {old} was recorded, {new} came{size}")
    return lines


def is_logged(metric: str) -> bool:
    """Says whether this copy has what logs the metric: rollout correction can be deleted (tests/test_extras.py)."""
    return (
        not metric.startswith(("rollout_corr/", "training/rollout_")) or (ROOT / "extras/rollout_correction").is_dir()
    )


def play_elsewhere(folder: Path, names: list[str]) -> None:
    """Plays runs in a process whose environment is `EXACT`, whatever this one's is."""
    environment = {name: os.environ[name] for name in PASSED_ON if name in os.environ} | EXACT
    command = [sys.executable, "-m", "tests.test_golden", "--play", str(folder), *names]
    subprocess.run(command, cwd=ROOT, env=environment, check=True, timeout=600)


@pytest.fixture(scope="module")
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Plays all runs that the chosen tests need, in this folder."""
    tests = [item for item in request.session.items if item.path == Path(__file__)]
    requested = {item.callspec.params["name"] for item in tests if hasattr(item, "callspec")}
    resumes = any(item.originalname.startswith("test_a_resumed") for item in tests)
    names = [name for name in PLAYED if name in requested or (resumes and name == "ppo.off")]
    folder = tmp_path_factory.mktemp("golden")
    play_elsewhere(folder, names + [RESUMED] * resumes)
    return folder


def read(folder: Path, name: str) -> Record:
    failed = folder / f"{name}.failed"
    assert not failed.exists(), failed.read_text()
    return json.loads((folder / f"{name}.json").read_text())


@pytest.mark.parametrize("name", PLAYED)
def test_a_run_has_the_numbers_that_were_recorded(folder, name):
    run, kernels = name.split(".")
    golden = json.loads((GOLDEN / f"{run}.json").read_text())
    exact = kernels == "off" and golden["machine"] == (folder / "machine").read_text()

    def tolerance(metric: str) -> float:
        if not exact:
            return CLOSE
        return ROUNDED if run in EPISODES and metric.startswith(ENGINE) else 0

    recorded = {metric: values for metric, values in golden[kernels].items() if is_logged(metric)}
    lines = differences(recorded, read(folder, name), tolerance)
    assert not lines, "\n".join(lines)


def test_a_resumed_run_is_the_unbroken_one(folder):
    unbroken, resumed = (
        {metric: values[3] for metric, values in read(folder, name).items() if values[3] is not None}
        for name in ("ppo.off", RESUMED)
    )
    assert resumed == unbroken


def write(folder: Path, runs: list[str]) -> None:
    """Records runs in tests/golden/, a line a metric."""
    play_elsewhere(folder, [name for name in PLAYED if name.split(".")[0] in runs])
    GOLDEN.mkdir(exist_ok=True)
    for run in runs:
        golden = {"machine": (folder / "machine").read_text()}
        golden |= {kernels: read(folder, f"{run}.{kernels}") for kernels in KERNELS if f"{run}.{kernels}" in PLAYED}
        text = json.dumps(golden, indent=1)
        text = re.sub(r"\[[^\[{]*?\]", lambda values: " ".join(values[0].split()), text)
        (GOLDEN / f"{run}.json").write_text(text + "\n")
    print(f"recorded {', '.join(runs)}")


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["--play", folder, *names]:
            play(Path(folder), names)
        case ["--models", folder]:
            make_models(Path(folder))
        case ["--write", *runs]:
            with TemporaryDirectory() as folder:
                write(Path(folder), runs or [*RUNS])
        case _:
            raise SystemExit(__doc__)
