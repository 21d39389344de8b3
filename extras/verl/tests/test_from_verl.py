"""Commands for verl, read from scripts of all kinds and from yamls: the fate of each setting, and what runs here."""

import shlex
import subprocess
from pathlib import Path

import pytest

from configs import extras
from configs.errors import ConfigError
from configs.paths import ROOT
from extras.sandbox import child
from extras.sandbox.run import Call, fences, run_shell
from extras.verl import __main__ as from_verl
from extras.verl.__main__ import MISSING, NO_EFFECT, RENAMED, WORKS, Reading, in_lines, read_source, readings_of

pytestmark = pytest.mark.skipif(not child.is_closed(fences()), reason="scripts are read in a closed sandbox alone")
PPO, HOME = "python3 -m verl.trainer.main_ppo", Path.home()
ROWS = "data.train_files=rows.parquet actor_rollout_ref.model.path=m"

SCRIPTS = {
    "plain, as in 0.2": (
        f"""set -x
        export VLLM_ATTENTION_BACKEND=XFORMERS
        {PPO} data.train_files=$HOME/gsm8k.parquet data.val_files="['~/a b.parquet']" \\
            actor_rollout_ref.model.path=m actor_rollout_ref.actor.fsdp_config.grad_offload=False \\
            trainer.logger=['console','wandb'] $@ 2>&1 | tee -i verl.log
        """,
        ["trainer.total_epochs=2"],
        [
            f"main.py data.train_files={HOME}/gsm8k.parquet \"data.val_files=['~/a b.parquet']\" "
            "actor_rollout_ref.model.path=m 'trainer.logger=[console,wandb]' trainer.total_epochs=2"
        ],
    ),
    "Ray, and a yaml of verl's": (
        f"""set -euxo pipefail
        WORKING_DIR=${{WORKING_DIR:-"${{PWD}}"}}; size=$((1024 * 4))
        RAY_ADDRESS=http://localhost:8265 ray job submit --no-wait --runtime-env="$WORKING_DIR/env.yaml" \\
            -- python3 -u -m recipe.dapo.main_dapo --config-path=./config --config-name='ppo_megatron_trainer' \\
            {ROWS} custom_reward_function.overlong_buffer.len=$size trainer.project_name="${{PROJECT:-dapo}}"
        """,
        [], [f"main.py {ROWS} reward.reward_kwargs.overlong_buffer_cfg.len=4096 trainer.project_name=dapo"],
    ),
    "torchrun and its workers, then the merger": (
        """if [ "$#" -lt 2 ]; then echo "Usage: run.sh <nproc> <path>"; exit 1; fi
        save_path=$2; COMMAND="torchrun --standalone --nnodes=1 --nproc_per_node=$1 -m verl.trainer.fsdp_sft_trainer"
        shift 2
        $COMMAND data.train_files=rows.parquet model.partial_pretrain=m trainer.default_local_dir=$save_path "$@" \\

            # trainer.total_epochs=3
        python3 -m verl.model_merger merge --backend fsdp --local_dir $save_path/actor --target_dir merged
        """,
        ["4", "/there", "optim.lr=1e-4"],
        [
            "-m extras.sft data.train_files=rows.parquet model.path=m trainer.default_local_dir=/there "
            "optim.lr=1e-4 trainer.n_gpus_per_node=4 trainer.nnodes=1",
            "-m extras.merge merge --backend fsdp --local_dir /there/actor --target_dir merged",
        ],
    ),
    "arrays, questions to the machine, servers, as in 0.9": (
        """set -xeuo pipefail
        source ~/.bashrc; . ./not_there.sh; ulimit -n 65535; cd /workspace/verl; mkdir -p logs $HOME/ckpts
        DEVICE=${DEVICE:-$(python3 -c 'import torch_npu' 2>/dev/null && echo npu || echo gpu)}
        name=$(python3 - <<END
from verl.utils.device import get_device_name
print(get_device_name())
END
)
        tokens=$(python3 -c "print(3 * 1024)")
        if command -v npu-smi; then DEVICE=npu; fi
        MODEL=(actor_rollout_ref.model.path="it's") EXTRA=(trainer.n_gpus_per_node=$(nvidia-smi -L | wc -l))
        uv sync --frozen && LAUNCH=(uv run --no-sync python3)
        vllm serve judge & server=$!; trap 'kill $server' EXIT
        until curl -s localhost:8000/health; do sleep 5; done
        until [ "$(ray status | grep -c node_)" -ge 2 ]; do sleep 5; done
        unknown_tool --now
        cat > "logs/notes.yaml" <<END
a: 1
END
        "${LAUNCH[@]}" -m verl.trainer.main_ppo data.train_files=rows.parquet "${MODEL[@]}" "${EXTRA[@]}" \\
            data.max_prompt_length=$tokens trainer.experiment_name=$DEVICE-$name > logs/x.log 2>&1
        """,
        [],
        [
            'main.py data.train_files=rows.parquet "actor_rollout_ref.model.path=it\'s" trainer.n_gpus_per_node=8 '
            "data.max_prompt_length=3072 trainer.experiment_name=gpu-cuda"
        ],
    ),
    "what ends early for lack of data and of a folder goes on": (
        f"""set -e
        [ -f /no/data.parquet ] || {{ echo "no data"; exit 1; }}
        nohup $CONDA_PREFIX/bin/python3 -m verl.trainer.main_ppo {ROWS} > /workspace/logs/x.log 2>&1 &
        wait
        """,
        [], [f"main.py {ROWS}"],
    ),
    "several commands, in other scripts and in one word": (
        """for lr in 1e-5 1e-6; do
            bash -c "env A=1 python3 -m verl.trainer.main_ppo data.train_files=a actor_rollout_ref.model.path=m \\
                actor_rollout_ref.actor.optim.lr=$lr"
        done
        ssh node "cd /x; python3 -m verl.trainer.main_eval data.path=a.parquet 2>&1 | tee log
            python3 -m verl.trainer.main_eval data.path=b.parquet && sync"
        python3 -m verl.trainer.main_generation model.path=m data.path=a.parquet data.output_path=b.parquet \\
            rollout.response_length=8
        python3 examples/data_preprocess/gsm8k.py --local_dir x
        """,
        [],
        [
            *(f"main.py data.train_files=a actor_rollout_ref.model.path=m actor_rollout_ref.actor.optim.lr={lr}"
              for lr in ("1e-5", "1e-6")),
            *(f"-m extras.evaluation.main_eval data.path={name}.parquet" for name in "ab"),
            "-m extras.evaluation.main_generation model.path=m data.path=a.parquet data.output_path=b.parquet "
            "data.max_response_length=8",
        ],
    ),
}  # fmt: skip


def write(folder: Path, text: str, name: str = "run.sh") -> Path:
    (folder / name).write_text(text)
    return folder / name


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_is_read_as_it_would_run(name: str, tmp_path: Path):
    text, arguments, expected = SCRIPTS[name]
    readings, notes = read_source(write(tmp_path, text.replace("\n", "\r\n") if "0.2" in name else text), arguments)
    assert any(note.startswith(from_verl.EARLY) for note in notes) == ("ends early" in name)
    assert [shlex.join(reading.command) for reading in readings] == [shlex.join(shlex.split(one)) for one in expected]
    assert not [setting for reading in readings for setting in reading.settings if setting.fate == MISSING]
    if "0.2" in name:
        assert readings[0].variables == {"VLLM_ATTENTION_BACKEND": "XFORMERS"}


def test_what_else_a_script_does_is_told(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(from_verl, "LOG_WIDTH", 400)
    text, *_ = SCRIPTS["what ends early for lack of data and of a folder goes on"]
    calls = "pip install verl\npython3 preprocess.py --local_dir x\ncd /workspace\nunknown_tool\n"
    assert from_verl.main([str(write(tmp_path, calls + text))]) == 0
    said = capsys.readouterr().out
    assert from_verl.main(["--run", str(tmp_path / "run.sh")]) == 2
    for words in (
        "ended with status 1, after: no data, and was read as if it went on",
        "folders that are not here: /workspace.",
        "commands that are not here: unknown_tool.",
        "by hand if need be: pip install verl; python3 preprocess.py --local_dir x.",
    ):
        assert words in said


def test_a_scripts_own_flags_are_its_own(tmp_path: Path, capsys: pytest.CaptureFixture):
    path = write(tmp_path, f'{PPO} {ROWS} trainer.experiment_name="$1$2"')
    assert from_verl.main([str(path), "--name", "x"]) == 0
    assert "trainer.experiment_name=--namex" in capsys.readouterr().out
    assert from_verl.main([str(path)]) == 2  # no run has an empty name
    assert "Nothing is given to trainer.experiment_name=: is a variable not set?" in capsys.readouterr().out


UNREADABLE = [
    ("run.sh", "echo hello; pip install verl", "no command of verl's: it ended with status 0, after: hello"),
    ("run.sh", "set -u\nx=${MODEL:?name one}", "MODEL: name one.*NAME=value python -m extras.verl"),
    ("run.sh", "read -p 'which model? ' x; while :; do :; done", "it ran for 1 seconds"),
    ("run.sh", "a\0b", "all of them text"),
    ("run.yml", "a: 1", "ends in .yaml"),
    ("run.yaml", "a: [", "cannot be read"),
]


@pytest.mark.parametrize(("name", "text", "words"), UNREADABLE, ids=range(len(UNREADABLE)))
def test_what_cannot_be_read_is_refused_in_a_line(name, text, words, tmp_path, monkeypatch):
    monkeypatch.setattr(from_verl, "SECONDS", 1.0)
    if words == "cannot be read":
        [reading], _ = read_source(write(tmp_path, text, name), [])
        assert reading.settings[0].fate == MISSING and words in reading.settings[0].reason
    else:
        with pytest.raises(ValueError, match=words):
            read_source(write(tmp_path, text, name), [])


def test_a_script_changes_nothing_and_has_no_network(tmp_path: Path):
    (tmp_path / "here").mkdir()
    (secret := tmp_path / "secret").write_text("key")
    text = f"""
        echo x > {tmp_path}/made; touch {tmp_path}/touched; rm -rf {tmp_path}/here {secret}; /bin/rm -f {secret}
        echo x > inside; echo x > $HOME/inside
        net=no; (echo x > /dev/tcp/127.0.0.1/80) 2>&1 | grep -q 'not permitted' && net=refused
        space=no; unshare -r true 2>/dev/null && space=yes
        read=no; [ "$(cat {secret})" = key ] && read=yes
        started | (sleep 100 &)
        torchrun "$net" "$space" "$read" "$(cat inside)"
    """
    calls, done = run_shell(text, ["run.sh"], {}, tmp_path / "here", readable=(), seconds=20)
    assert done.status == 0 and Call(["torchrun", "refused", "no", "no", "x"], {}) in calls
    assert sorted(path.name for path in tmp_path.iterdir()) == ["here", "secret"] and secret.read_text() == "key"
    assert not [*(tmp_path / "here").iterdir()] and not (HOME / "inside").exists()


def settings(command: str) -> Reading:
    [reading] = readings_of([Call(shlex.split(command), {})])
    return reading


SETTINGS = [
    ("data.train_batch_size=8", WORKS, "data.train_batch_size=8"),
    ("hydra.run.dir=x", NO_EFFECT, "trainer.default_local_dir is the folder of the run"),
    ("+actor_rollout_ref.actor.grad_clip=0.5", RENAMED, "actor_rollout_ref.actor.optim.clip_grad=0.5"),
    ("actor_rollout_ref.rollout.mode=async", NO_EFFECT, "engines live in the process of their worker"),
    ("data.train_batch_sise=8", MISSING, "unknown key 'data.train_batch_sise'. Did you mean 'data.train_batch_size'?"),
    ("+data.mine=8", MISSING, "kept where data.custom_cls.path names your file"),
    ("data.train_batch_size=many", MISSING, "could not be converted"),
    ("data.train_batch_size", MISSING, "not of the form key=value"),
    ("--local_dir=x", MISSING, "settings are key=value"),
    ("trainer.val_only=true", MISSING, "nothing to validate on"),
    ("data.val_files=not/here.parquet", WORKS, "data.val_files=not/here.parquet"),
]


@pytest.mark.parametrize(("given", "fate", "said"), SETTINGS, ids=[one for one, *_ in SETTINGS])
def test_what_becomes_of_a_setting(given: str, fate: str, said: str):
    reading = settings(f"{PPO} {ROWS} {given}")
    setting = next(setting for setting in reading.settings if setting.fate == fate and setting.original not in ROWS)
    assert said in f"{setting.now} {setting.reason}"
    kept = [said] if fate in (WORKS, RENAMED) else [given] if "val_only" in given else []
    assert reading.command == ["main.py", *ROWS.split(), *kept]


@pytest.mark.parametrize(("program", "extra"), [("fsdp_sft_trainer", "sft"), ("main_eval", "evaluation")])
def test_a_command_of_an_extra_that_is_gone_is_refused_by_name(program, extra, monkeypatch, tmp_path):
    monkeypatch.setattr(extras, "FOLDER", tmp_path)
    with pytest.raises(ConfigError, match=f"{extra} is not in this copy; extras/{extra} was removed"):
        settings(f"python3 -m verl.trainer.{program} data.path=x")
    with pytest.raises(ConfigError, match="merge is not in this copy"):
        settings("python3 -m verl.model_merger merge --local_dir x")


SFT = "torchrun --nproc_per_node=4 --nnodes=2 -m verl.trainer.fsdp_sft_trainer trainer.n_gpus_per_node=1"
MIXED = "'+actor_rollout_ref.actor.fsdp_config.mixed_precision={param_dtype: bf16, buffer_dtype: fp32}'"
WHOLE = [  # (command, how the one for it ends): a user's own keys, workers that are set, a section's settings
    (f"{PPO} {ROWS} +data.mine=1 data.custom_cls.path=f.py", ["+data.mine=1", "data.custom_cls.path=f.py"]),
    (SFT, ["trainer.n_gpus_per_node=1", "trainer.nnodes=2"]),
    ("python3 -m verl.trainer.main_generation_server server.port=8000", ["-m", "extras.server", "server.port=8000"]),
    (f"{PPO} {MIXED}", ["actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype=bfloat16"]),
]


@pytest.mark.parametrize(("command", "end"), WHOLE)
def test_what_a_command_becomes_as_a_whole(command: str, end: list[str]):
    assert settings(command).command[-len(end) :] == end


SECTIONS = [
    ("optim: {lr: 1.0e-5}\nmodel: {path: m}", "extras.sft"),
    ("model: {path: m}\nrollout: {temperature: 0.5}", "extras.evaluation.main_generation"),
    ("optim: {lr: 1.0e-5}\nalgorithm: {gamma: 1.0}", "main.py"),
]


@pytest.mark.parametrize(("sections", "command"), SECTIONS)
def test_a_yaml_is_for_the_command_whose_sections_it_has(sections: str, command: str, tmp_path: Path):
    [reading], _ = read_source(write(tmp_path, sections, "mine.yaml"), [])
    assert command in reading.command[:2]


def test_a_yaml_is_judged_by_what_it_composes(tmp_path: Path, capsys: pytest.CaptureFixture):
    shared = "data: &shared {max_prompt_length: 64}\nactor_rollout_ref:\n  model: {path: '${oc.env:NONE,m}'}\n"
    text = f"{shared}  rollout: {{n: 4, mode: async, prompt_length: '${{data.max_prompt_length}}'}}\ncopied: *shared\n"
    path = write(tmp_path, text, "mine.yaml")
    rows = "data.train_files=a.parquet"
    assert from_verl.main([str(path), rows]) == 2
    said = capsys.readouterr().out
    assert "copied.max_prompt_length=64" in said and "actor_rollout_ref.rollout.mode=async" in said
    path.write_text(text.replace("copied: *shared\n", ""))
    assert from_verl.main([str(path), rows]) == 0
    command = f"python main.py --config-path={tmp_path} --config-name=mine {rows}"
    assert " ".join(capsys.readouterr().out.replace("\\\n", " ").split()).endswith(command)


@pytest.mark.parametrize("above", [False, True])
def test_a_script_of_a_checkout_names_a_yaml_in_it(above: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """verl's multi-turn examples do; its own yamls, which that one takes over, are ours. It is read in the checkout,
    from a folder beside it or above it."""
    if above:
        monkeypatch.chdir(tmp_path.parent)
    (config := tmp_path / "examples/config").mkdir(parents=True)
    (tmp_path / ".git").mkdir()
    write(config, "- {name: tool}", "tools.yaml")
    base = "ppo_megatron_trainer" if above else "ppo_trainer"
    search = f"hydra: {{searchpath: [file://verl/trainer/config]}}\ndefaults: [{base}, _self_]\n"
    write(config, f"{search}data: {{max_prompt_length: 64, return_raw_chat: true, no_such: 1}}", "mine.yaml")
    script = f"""PROJECT_DIR="$(pwd)"
    {PPO} --config-path="$PROJECT_DIR/examples/config" --config-name='mine' {ROWS} \
        actor_rollout_ref.rollout.multi_turn.tool_config_path="$PROJECT_DIR/examples/config/tools.yaml"
    """
    [reading], _ = read_source(write(tmp_path / "examples", script), [])
    key = "actor_rollout_ref.rollout.multi_turn.tool_config_path"
    flags = [f"--config-path={config}", "--config-name=mine"]
    assert reading.command == ["main.py", *flags, "~data.no_such", *ROWS.split(), f"{key}={config}/tools.yaml"]
    fates = {setting.original: setting.fate for setting in reading.settings}
    assert fates["data.max_prompt_length=64"] == WORKS and fates["data.return_raw_chat=True"] == NO_EFFECT
    assert fates["data.no_such=1"] == MISSING


def test_run_runs_the_commands_until_one_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    ran = []
    monkeypatch.setattr(subprocess, "run", lambda words, env, check: ran.append((words[1:], env["A"])) or done)
    done = subprocess.CompletedProcess([], 0)
    one, other = (["--run", "--", *shlex.split(f"{PPO} {ROWS} {more}")] for more in ("", "no_such=1"))
    readings = [settings(f"{PPO} {ROWS} data.seed={seed}")._replace(variables={"A": str(seed)}) for seed in (1, 2)]
    commands = [[str(ROOT / "main.py"), *reading.command[1:]] for reading in readings]  # from any folder
    assert from_verl.run(readings) == 0 and ran == [*zip(commands, "12", strict=True)]
    done.returncode = 3
    assert from_verl.run(readings) == 3 and len(ran) == 3
    monkeypatch.setattr(from_verl, "run", lambda readings: 7)
    assert from_verl.main(one) == 7 and from_verl.main(other) == 2


def test_a_command_is_written_so_that_a_shell_reads_it_back():
    words = ["python", "main.py", "a=['x y']", 'b="q"', "c=it's $HOME", "d=", *["data.train_batch_size=8"] * 9]
    written = in_lines(words)
    assert shlex.split(written.replace("\\\n", " ")) == words and max(map(len, written.splitlines())) <= 120
