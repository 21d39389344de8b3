"""Makes a model that has learnt an environment: python -m scripts.learn my_game.py:Game-v0 [key=value …]

1. Look: what a random player earns, and whether single moves can be judged: by a search, or by playouts.
2. A tiny language model with random weights, unless actor_rollout_ref.model.path names one.
3. It imitates the best moves that are known, in states from all over the game; where none are, any legal move. Where
   playouts judge moves, it then imitates those that are best if it plays on itself, as long as that gains.
4. Reinforcement learning on single states, 5. in whole episodes: each is kept only where the held-out return gains.
The held-out return is measured after each stage. Each stage is an ordinary command, which is printed before it runs
here; one that is done is not run again by the same command.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # as a file it runs like as a module
    from configs.process import prepare_process

    prepare_process()  # before torch is loaded

import argparse
import itertools
import json
import re
import shlex
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from hashlib import sha256
from typing import Any

from transformers import AutoTokenizer

import main as rl
from configs.errors import late_refusals, refusals
from configs.loader import compose
from configs.schema import Config, EnvConfig
from configs.settings import with_settings
from custom.tiny_model import save_tiny_model
from data.files import sole_run
from extras.imitate.__main__ import write_demonstrations
from extras.imitate.demonstrations import PLAYERS
from extras.imitate.look import Look, look
from extras.report.__main__ import write_report
from extras.sft import trainer as sft_trainer
from extras.sft.settings import SFTConfig
from scripts.quickstart import compose as compose_sft
from workers.ray_group import start_command

MODEL, ROLLOUT, HORIZON = "actor_rollout_ref.model.path=", "actor_rollout_ref.rollout", "env.kwargs.horizon="
EPISODES = 100  # held-out ones
CHOSEN_BY = "env.val_seed=2000000"  # of the episodes by which stages are kept, so that the held-out ones choose nothing
ROWS, LEAST_ROWS = 12000, 1000  # to imitate in a round
FOR_LABELS = 0.1  # part of the time in which the rows of a round are made
IDLE = 2, 5  # rounds without a gain that end imitation: after some with one, and before any
FEW = 200  # moves, of which a model learns nothing
SHORT = 10  # moves of an episode that a model plays on to its end, and not to the horizon of random playouts
LEAST_LEFT = 0.1  # part of the time with which reinforcement begins
RATES = {"random": ("1e-3", "2e-4"), "trained": ("1e-4", "1e-5")}  # of imitation and of RL, by the model's weights
SFT = ["data.train_batch_size=32", "optim.lr_scheduler_type=cosine", "optim.min_lr_ratio=0.05"]
GENTLE = [  # what imitation has taught is kept: without it few moves survive
    "actor_rollout_ref.actor.use_kl_loss=true", "actor_rollout_ref.actor.kl_loss_coef=0.3",
    "actor_rollout_ref.actor.optim.lr_scheduler_type=cosine",
    "actor_rollout_ref.actor.optim.lr_warmup_steps=5", "actor_rollout_ref.rollout.n=8",
    "algorithm.adv_estimator=grpo", "env.train_size=1000000", "trainer.save_freq=last",
    "trainer.val_before_train=false",
]  # fmt: skip
STATES = ["data.train_batch_size=32", "trainer.total_training_steps=40"]
WHOLE_EPISODES = [
    "env.mode=episode", "env.history=turns", "env.invalid_action=end", "data.train_batch_size=16",
    "trainer.total_training_steps=30",
]  # fmt: skip


@dataclass
class Course:
    """The stages of one environment: their commands, and what came of them.

    Attributes:
        folder: of all files.
        settings: key=value, of every command.
        minutes: after which no stage begins.
        rows, labels: most states that are imitated in a round, and which moves.
        weights: of the model at the start, random or trained; they decide learning rates.
        results: by stage, its command, its result, and its seconds; those of earlier commands, too.
        done: names of the stages that this command has done, or done before.
        model: the best model so far; `value` is its held-out return.
    """

    folder: Path
    settings: list[str]
    minutes: float
    rows: int = ROWS
    labels: str = "best"
    weights: str = "random"
    model: str = ""
    value: float = -float("inf")
    results: dict[str, dict[str, Any]] = field(default_factory=dict)
    done: list[str] = field(default_factory=list)

    @property
    def record(self) -> Path:
        return self.folder / "stages.json"

    def path(self, name: str, settings: Sequence[str]) -> Path:
        """Returns the path of what a stage leaves: other settings have another, and never go on from there."""
        return self.folder / f"{name}_{digest(settings)}"

    def run(self, name: str, command: Sequence[str], work: Callable[[], Any]) -> Any:
        """Runs a stage, or reads what it gave when the same command ran it before."""
        text = shlex.join(["python", *command])
        before = self.results.get(name)
        self.done.append(name)
        if before and before["command"] == text:
            print(f"{name}: done before, in {before['seconds']:.0f} s")
            return before["result"]
        print(f"\n{name}: {text}", flush=True)
        wall, cpu = time.monotonic(), time.process_time()
        result = work()
        seconds, cpu = time.monotonic() - wall, time.process_time() - cpu
        self.results[name] = {"command": text, "result": result, "seconds": round(seconds, 1), "cpu": round(cpu, 1)}
        self.record.write_text(json.dumps(self.results, indent=2) + "\n")
        print(f"{name}: {seconds:.0f} s")
        return result

    def train(self, name: str, settings: Sequence[str]) -> Any:
        """Runs main.py; returns the metrics of the last validation."""
        overrides = [*settings, *self.settings]
        return self.run(name, ["main.py", *overrides], partial(train, overrides))

    @property
    def seconds_left(self) -> float:
        return 60 * self.minutes - sum(self.results[name]["seconds"] for name in self.done)

    @property
    def has_time(self) -> bool:
        """Says whether there is time for stages of another kind."""
        return self.seconds_left > LEAST_LEFT * 60 * self.minutes

    def is_short_of(self, *stages: str) -> bool:
        """Says whether there is too little time to run these stages again, and prints it."""
        needed = sum(self.results[name]["seconds"] for name in stages)
        if is_short := self.seconds_left < needed:
            print(f"{self.seconds_left:.0f} s are left, and another round takes {needed:.0f} s.")
        return is_short


def digest(settings: Sequence[str]) -> str:
    return sha256(shlex.join(settings).encode()).hexdigest()[:6]


def train(overrides: Sequence[str]) -> dict[str, float]:
    return rl.run(compose("ppo_trainer", overrides))


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("environment", metavar="ENV", help="env.id: a gymnasium id, or my_game.py:Game-v0")
    parser.add_argument("--minutes", type=float, default=10, help="after which no stage begins (%(default)g)")
    parser.add_argument(
        "--rows", type=int, default=ROWS, help="most that are imitated in a round; 0: none (%(default)s)"
    )
    parser.add_argument("--labels", default="best", help="whose moves to imitate: best, random, file.py:player")
    parser.add_argument("--seed", type=int, default=0, help="seed of everything: weights, states, sampling (0)")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings of main.py")
    arguments = parser.parse_intermixed_args(argv)
    with refusals():
        config, course = enrol(arguments)
    start_command(config)
    with late_refusals(), sole_run(course.folder):
        summary = learn(config, course)
    print_summary(summary, course)


def enrol(arguments: argparse.Namespace) -> tuple[Config, Course]:
    """Returns the config that the user's settings make, and the course, with what was done before."""
    name = Path(arguments.environment.rpartition(":")[2]).name
    settings = [f"env.id={arguments.environment}", f"trainer.seed={arguments.seed}", *arguments.overrides]
    options = [*settings[1:], str(arguments.rows), arguments.labels]
    if options != ["trainer.seed=0", str(ROWS), "best"]:  # others go on in a folder of their own
        name = f"{name}_{digest(options)}"
    config = compose("ppo_trainer", [f"trainer.default_local_dir=outputs/learn/{name}", *settings], takes_objects=True)
    if config.actor_rollout_ref.model.path is None and config.env.path == EnvConfig().path:
        settings.append("env.kwargs.instruction=")  # a model of random weights cannot read one
        config = with_settings(config, {"env.kwargs": {**config.env.kwargs, "instruction": ""}})
    course = Course(
        Path(config.trainer.default_local_dir),
        [each for each in settings if not each.startswith(("trainer.default_local_dir=", MODEL))],
        arguments.minutes,
        arguments.rows,
        arguments.labels,
        "trained" if config.actor_rollout_ref.model.path else "random",
    )
    if course.record.exists():
        course.results = json.loads(course.record.read_text())
    return config, course


def learn(config: Config, course: Course) -> dict[str, Any]:
    """Runs all stages; returns the summary, and writes it to summary.json in the course's folder."""
    with refusals():
        command = ["-m", "extras.imitate.look", "--player", course.labels, *course.settings]
        seen = Look(**course.run("look", command, partial(look, config, EPISODES, course.labels)))
    course.model = start_model(config, course)
    rows = demonstrations(course, seen, 1)
    course.settings += [f"env.val_episodes={EPISODES}", *measure(rows, course.model)]
    before = evaluate(course, "untrained", course.model)
    course.value = before
    if course.rows:
        imitate_in_rounds(course, seen, rows)
        if course.has_time and "env.kwargs.reward=playouts" in seen.settings and seen.player == "best":
            improve_in_rounds(course, seen)
    stages = {"states": [*STATES, *seen.settings], "episodes": WHOLE_EPISODES}
    for name, settings in stages.items():
        if course.has_time and (name == "episodes" or seen.repeatable):
            reinforce_in_rounds(course, seen, name, settings)
    return summarise(course, seen, before)


def summarise(course: Course, seen: Look, before: float) -> dict[str, Any]:
    """Plays the held-out episodes by the best model, greedy and sampled; writes and returns what came of all stages."""
    after = evaluate(course, "held-out return", course.model, shown=1)
    sampled = evaluate(course, "sampled", course.model, f"{ROLLOUT}.val_kwargs.do_sample=true")
    summary = {
        "random": seen.random,
        "teacher": seen.teacher,
        "labels": " ".join(seen.settings),
        "before": before,
        "after": after,
        "sampled": sampled,
        "model": course.model,
        "verdict": verdict(seen, after, sampled),
        "seconds": {name: course.results[name]["seconds"] for name in course.done},
        "cpu": {name: course.results[name]["cpu"] for name in course.done},
    }
    (course.folder / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    return summary


def imitate_in_rounds(course: Course, seen: Look, rows: Path) -> None:
    """Imitates more and more rows, until the game is mastered, two rounds in a row gain no more, or time is short.

    Where the best moves are known for sure, time alone ends it: nothing else could teach better ones.
    """
    model, files, idle, started_as = course.model, [rows], 0, course.model
    for number in itertools.count(1):
        model = imitate(course, model, files, number)
        gains = consider(course, f"imitation {number}", model)
        idle = 0 if gains or seen.is_sure else idle + 1
        is_last = course.is_short_of(f"demonstrations {number}", f"imitation {number}") or seen.player == "random"
        if idle == IDLE[course.model == started_as] or is_last or seen.is_mastered_by(course.value):
            return
        files.append(demonstrations(course, seen, number + 1))


def improve_in_rounds(course: Course, seen: Look) -> None:
    """Imitates the moves after which the best model earns most by its own play, as long as that gains."""
    for number in itertools.count(1):
        rows = demonstrations(course, seen, number, by_policy=True)
        if course.results[f"moves by policy {number}"]["result"] < min(course.rows, FEW):  # the model answers slowly
            return
        gains = consider(course, f"improvement {number}", imitate(course, course.model, [rows], number, "improvement"))
        if not gains or course.is_short_of(f"moves by policy {number}", f"improvement {number}"):
            return


def reinforce_in_rounds(course: Course, seen: Look, name: str, settings: Sequence[str]) -> None:
    """Reinforces the best model as long as that gains and there is time, unless no better play is to be expected."""
    for number in itertools.count(1):
        if (seen.is_sure or seen.error == 0) and seen.is_mastered_by(course.value):  # or all episodes are alike
            return
        if name == "states" and seen.settings:
            print("\nThe reward in single states is no return: 1 for the best move of a state, 0 for the worst.")
        stage = f"{name} {number}"
        gains = consider(course, stage, reinforce(course, stage, settings))
        if not gains or course.is_short_of(stage):
            return


def start_model(config: Config, course: Course) -> str:
    if path := config.actor_rollout_ref.model.path:
        return path
    seed = config.trainer.seed
    folder = course.path("random_model", [str(seed)])
    course.run(
        "model",
        ["-m", "custom.tiny_model", str(folder), "--seed", str(seed)],
        lambda: save_tiny_model(folder, seed),
    )
    return str(folder)


def demonstrations(course: Course, seen: Look, number: int, by_policy: bool = False) -> Path:
    """Writes what is imitated in a round, other states in each: the best moves known, or if the model plays on.

    There are as many as the time allows, by the seconds that a row took in the round before, or a move in the look.
    """
    kind, allowed = "moves by policy" if by_policy else "demonstrations", FOR_LABELS * 60 * course.minutes
    settings = [*course.settings, *seen.settings]
    if by_policy:
        is_cut = any(each.startswith(HORIZON) for each in seen.settings)  # by the look, and not by the user
        settings += [f"{MODEL}{course.model}", *([f"{HORIZON}null"] if is_cut and seen.turns <= SHORT else [])]
    before = course.results.get(f"{kind} {number - 1}")
    seconds = max(before["seconds"], 0.1) / before["result"] if before else seen.seconds
    count = course.rows if by_policy else max(LEAST_ROWS, min(course.rows, int(allowed / seconds)))
    options = ["--player", seen.player, "--rows", str(count), "--round", str(number)]
    options += ["--by-policy", f"{allowed:g}"] if by_policy else []
    rows = course.path(f"{kind.replace(' ', '_')}_{number}", [*options, *settings]).with_suffix(".jsonl")
    given, allowed = (seen.player, count, rows, "turns", number), allowed if by_policy else None
    course.run(
        f"{kind} {number}",
        ["-m", "extras.imitate", *options, "--output", str(rows), *settings],
        lambda: write_demonstrations(compose("ppo_trainer", settings, takes_objects=True), *given, by_policy=allowed),
    )
    return rows


def measure(rows: Path, model: str) -> list[str]:
    """Returns the settings that give room for a prompt, twice the longest, and for an answer."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    parsed = map(json.loads, rows.read_text().splitlines())
    prompts, answers = zip(*((row["prompt"], row["response"]) for row in parsed), strict=True)
    longest = max(prompts, key=lambda messages: sum(len(message["content"]) for message in messages))
    prompt = len(tokenizer.apply_chat_template(longest, add_generation_prompt=True, return_dict=False))
    answer = max(len(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in set(answers))
    room = answer + (answer > 1)  # one token needs no end
    return [f"data.max_prompt_length={2 * prompt}", f"data.max_response_length={room}"]


def imitate(course: Course, model: str, files: Sequence[Path], number: int, kind: str = "imitation") -> str:
    """Trains a model on the newest rows, as many as the course's, and as often as makes about so many."""
    count = len(files[-1].read_text().splitlines())
    newest = files[-max(1, -(-course.rows // count)) :]
    settings = [
        f"data.train_files=[{','.join(map(str, newest))}]",
        f"model.path={model}",
        f"trainer.total_epochs={max(1, round(course.rows / (count * len(newest))))}",
        f"optim.lr={RATES[course.weights][0]}",
        *SFT,
        *(each for each in course.settings if each.startswith("trainer.seed=")),
    ]
    settings.append(f"trainer.default_local_dir={course.path(f'{kind}_{number}', settings)}")
    return course.run(
        f"{kind} {number}",
        ["-m", "extras.sft", *settings],
        lambda: str(sft_trainer.run(compose_sft(SFTConfig, "sft", settings))),
    )


def reinforce(course: Course, name: str, settings: Sequence[str]) -> str:
    rate = f"actor_rollout_ref.actor.optim.lr={RATES[course.weights][1]}"
    settings = [f"{MODEL}{course.model}", rate, *GENTLE, *settings]
    folder = course.path(name.replace(" ", "_"), [*settings, *course.settings])
    course.train(name, [*settings, f"trainer.default_local_dir={folder}"])
    step = (folder / "latest_checkpointed_iteration.txt").read_text().strip()
    return str(folder / f"global_step_{step}" / "actor" / "huggingface")


def consider(course: Course, name: str, model: str) -> bool:
    """Keeps a model that earns more in held-out episodes than the best before; returns whether it does."""
    value = evaluate(course, f"return of {name}", model, CHOSEN_BY)
    gains = value > course.value
    kept = "kept" if gains else "not kept"
    print(f"{name} is {kept}: it earns {value:.3g}, and the model before {course.value:.3g}")
    if gains:
        course.model, course.value = model, value
    return gains


def evaluate(course: Course, name: str, model: str, *settings: str, shown: int = 0) -> float:
    """Returns the mean return of a model's greedy answers in the held-out episodes, or as `settings` say."""
    settings = (f"{MODEL}{model}", "trainer.val_only=true", f"trainer.log_val_generations={shown}", *settings)
    return return_of(course.train(name, settings))


def return_of(metrics: dict[str, float]) -> float:
    return next(value for name, value in metrics.items() if re.search("(?<!/random_player)/return/mean@1$", name))


def verdict(seen: Look, greedy: float, sampled: float) -> str:
    """Says how far it was learnt, and whether to play it sampled, which explores where something is hidden."""
    if seen.share(sampled) - seen.share(greedy) > 0.1:
        return f"{how_far(seen, sampled)} Play it sampled, and not greedy: that earns more here."
    return how_far(seen, greedy)


def how_far(seen: Look, value: float) -> str:
    """Says how far it was learnt; where it was not, what stood in the way, and what would help."""
    share, judged = seen.share(value), " ".join(seen.settings) if seen.player in PLAYERS else seen.player
    hint = "a better player to imitate: `--labels file.py:player` (docs/learn.md)"
    if not judged:
        learnt = "better than the random player" if value > seen.random else "not learnt"
        return (
            f"{learnt}: no player of search or playouts is better than the random one here, so only its moves could be "
            f"imitated. Give it {hint}."
        )
    if seen.is_mastered_by(value):
        as_good = f"as good as the player that it imitates ({judged}), who earns {seen.teacher:.3g}"
        return f"mastered: {as_good}." if seen.is_sure else f"learnt: {as_good}. Where you know better, give it {hint}."
    learnt = "learnt" if share >= 0.9 else "partly learnt" if share > 0.1 else "not learnt"
    return (
        f"{learnt}: {max(share, 0):.0%} of the way from the random player to the one that it imitates ({judged}), who "
        f"earns {seen.teacher:.3g}. What may help: more --minutes; a state that is easier to read "
        f"(docs/environments.md); a pretrained actor_rollout_ref.model.path; {hint}."
    )


def print_summary(summary: dict[str, Any], course: Course) -> None:
    print(
        f"\nreturn on {EPISODES} held-out episodes: random {summary['random']:.3g}, before {summary['before']:.3g}, "
        f"after {summary['after']:.3g} (sampled {summary['sampled']:.3g})\n{summary['verdict']}"
    )
    page = write_report(
        sorted(file.parent for file in course.folder.glob("*/metrics.jsonl")), course.folder / "report.html"
    )
    print(f"the model: {summary['model']}\nall about its training, to open in a browser: {page}")


if __name__ == "__main__":
    main()
