"""Does a dry run: one step on two prompts that changes nothing and is shown whole (trainer.dry_run=true).

What the policy is shown, what it says, which tokens are trained, what they score, and what looks wrong.
"""

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from configs.schema import Config
from configs.settings import with_settings
from data.protocol import DataProto
from extras.watch.health import compare_moves, likeliest_cause, teaches_nothing
from training.episode_rows import EpisodeRows
from training.mini_batches import rows_by_prompt
from training.run import Training
from training.tracking import short_number

if TYPE_CHECKING:
    from training.ray_trainer import RayPPOTrainer

PROMPTS = 2
SHOWN_ROWS = 4  # of each prompt
SHOWN_IDS = 12  # at either end of a list of token ids
FEW_READABLE = 0.5  # of the answers, below which what never ends by itself may be cut

Metrics = dict[str, float]


class DryRun(Training):
    """Does one small step in place of a training."""

    writes = False

    @staticmethod
    def settle(config: Config) -> Config:
        """Reduces a config to one step on two prompts, or one a worker, at a learning rate of 0."""
        prompts = max(PROMPTS, -(-config.trainer.workers // config.actor_rollout_ref.rollout.n))
        learns = {"ppo_mini_batch_size": prompts, "ppo_epochs": 1, "optim.lr": 0.0}
        settings = {
            f"{role}.{name}": value for role in ("actor_rollout_ref.actor", "critic") for name, value in learns.items()
        }
        settings |= {
            "data.train_batch_size": prompts,
            "trainer.critic_warmup": 0,
            "trainer.total_training_steps": 1,
            "trainer.resume_mode": "disable",
        }
        if "filter_groups" in config.algorithm:
            settings["algorithm.filter_groups.max_num_gen_batches"] = 1
        return with_settings(config, settings)

    @staticmethod
    def act(trainer: "RayPPOTrainer") -> Metrics:
        """Does one step; prints its batch, the metrics that a run would log, and likely mistakes."""
        trainer.global_step = 1
        batch, metrics = trainer.step()
        console, groups = Console(), rows_by_prompt(batch)
        for number, rows in enumerate(groups, start=1):
            title = Text(f"prompt {number} of {len(groups)}, with {len(rows)} rows")
            console.print(Panel(prompt_view(batch, rows, trainer.tokenizer), title=title, title_align="left"))
        logged = fields_table({name: metrics[name] for name in sorted(metrics)})
        console.print(Panel(logged, title="what would be logged", title_align="left"))
        seen = findings(batch, metrics, trainer.config, trainer.tokenizer, compare_moves(trainer))
        lines = [Text(f"- {line}") for line in seen]
        shown = Group(*lines or [Text("nothing that a dry run can see")])
        style = "yellow" if lines else "green"
        console.print(Panel(shown, title="what looks wrong", title_align="left", border_style=style))
        print("dry run: no weight has changed, and nothing was written.")
        return metrics


def fields_table(fields: dict[str, Any]) -> Table:
    """Lays names and values out as two columns; colours in texts are shown, and no markup."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in fields.items():
        table.add_row(name, Text.from_ansi(short_number(value) if isinstance(value, float) else str(value)))
    return table


def prompt_view(batch: DataProto, rows: list[int], tokenizer: PreTrainedTokenizerBase) -> Group:
    """Lays out the prompt as text and ids, and below it the first of its rows; a turn's own prompt before it."""
    parts: list[RenderableType] = []
    shown: list[int] = []
    for row in rows[:SHOWN_ROWS]:
        if (ids := prompt_ids(batch, row)) != shown:
            parts += [Text(tokenizer.decode(ids), "dim"), Text(f"{len(ids)} tokens: {brief_ids(ids)}", "cyan")]
            shown = ids
        parts += [Text(), row_view(batch, row, tokenizer), Text()]
    if len(rows) > SHOWN_ROWS:
        parts.append(Text(f"… and {len(rows) - SHOWN_ROWS} more", style="dim"))
    return Group(*parts)


def row_view(batch: DataProto, row: int, tokenizer: PreTrainedTokenizerBase) -> Group:
    """Lays out a response, bold where it is trained, with its ids, scores and end."""
    attended = batch.batch["attention_mask"][row].bool()
    width = batch.batch["responses"].shape[1]
    ids, trained = (batch.batch[name][row][attended[-width:]].tolist() for name in ("responses", "loss_mask"))
    fields: dict[str, Any] = {
        "trained": f"{sum(map(bool, trained))} of {len(ids)} tokens: {brief_ids(ids)}",
        "score": batch.batch["token_level_scores"][row].sum().item(),
        "reward": batch.batch["token_level_rewards"][row].sum().item(),
        "advantage": value_range(batch.batch["advantages"][row][batch.batch["loss_mask"][row].bool()]),
    }
    columns = ("end_reason", "failure", *batch.meta_info.get("reward_extra_keys", ()))
    fields |= {name: batch.get(name)[row] for name in columns if name in batch and batch.get(name)[row] is not None}
    return Group(highlight_trained(ids, trained, tokenizer), fields_table(fields))


def highlight_trained(ids: list[int], trained: list[int], tokenizer: PreTrainedTokenizerBase) -> Text:
    """Decodes tokens, special ones included: bold green where they are trained, dim elsewhere."""
    text, start = Text(), 0
    for end in range(1, len(ids) + 1):
        if end == len(ids) or bool(trained[end]) != bool(trained[start]):
            text.append(tokenizer.decode(ids[start:end]), "bold green" if trained[start] else "dim")
            start = end
    return text


def value_range(values: Tensor) -> str:
    """Formats the least and the greatest of some values, once if they are equal; "none" of no values."""
    if len(values) == 0:
        return "none"
    least, greatest = short_number(values.min().item()), short_number(values.max().item())
    return least if least == greatest else f"{least} to {greatest}"


def brief_ids(ids: list[int]) -> str:
    """Formats a list of ids, without its middle if it is long."""
    if len(ids) <= 2 * SHOWN_IDS:
        return str(ids)
    return f"{str(ids[:SHOWN_IDS])[:-1]}, …, {str(ids[-SHOWN_IDS:])[1:]}"


def prompt_ids(batch: DataProto, row: int) -> list[int]:
    """Returns the ids of a row's prompt, without padding."""
    prompts = batch.batch["prompts"]
    return prompts[row][batch.batch["attention_mask"][row, : prompts.shape[1]].bool()].tolist()


def findings(
    batch: DataProto, metrics: Metrics, config: Config, tokenizer: PreTrainedTokenizerBase, moves: Any | None = None
) -> Iterator[str]:
    """Yields likely mistakes in the batch of a step, each with the remedy; `moves` are of training states."""
    prompts = [prompt_ids(batch, rows[0]) for rows in rows_by_prompt(batch)]
    yield from prompt_findings(prompts, config, tokenizer)
    if untrained := (batch.batch["loss_mask"].sum(1) == 0).sum().item():
        yield f"{untrained} of {len(batch)} rows have no token that is trained: see end_reason above."
    yield from response_findings(batch, config, metrics.get("reward/valid_action/mean", 0.0) < FEW_READABLE)
    if moves is not None and moves.teach_nothing:
        yield moves.advice("training states")
    elif teaches_nothing(metrics):
        yield likeliest_cause(metrics, config.actor_rollout_ref.actor.entropy_coeff, moves)


def prompt_findings(prompts: list[list[int]], config: Config, tokenizer: PreTrainedTokenizerBase) -> Iterator[str]:
    """Yields likely mistakes in the token ids of the prompts."""
    limit, total = config.data.max_prompt_length, len(prompts)
    full = sum(len(ids) >= limit for ids in prompts)
    if full and config.data.truncation != "error":
        yield (
            f"{full} of {total} prompts fill data.max_prompt_length={limit} and may have been cut "
            f"(data.truncation={config.data.truncation}): raise it."
        )
    if twice := sum(is_templated_twice(tokenizer.decode(ids), tokenizer) for ids in prompts):
        yield (
            f"{twice} of {total} prompts seem to be in the chat template twice: a message opens inside another. Give "
            "the rows plain messages, not text that a template has been applied to."
        )


def response_findings(batch: DataProto, config: Config, may_be_cut: bool = True) -> Iterator[str]:
    """Yields likely mistakes in the responses: none ends by itself, none has a second turn, one ended without room."""
    length = config.actor_rollout_ref.rollout.response_length
    if "episode" in batch:
        tools, game = config.actor_rollout_ref.rollout.multi_turn, config.env
        most = tools.get("max_assistant_turns") if game.id is None else game.max_turns  # None: as many as they like
        if "__num_turns__" in batch and max(batch.non_tensor_batch["__num_turns__"]) <= 1 != most:
            yield "no episode has a second turn: is the game over after one answer, or are answers not understood?"
        ends = batch.end_reason[EpisodeRows(batch).last_row]
        if short := sum(reason in ("context_full", "max_tokens") for reason in ends):
            room = f"data.max_response_length={length}, which holds all of its turns"
            if config.env.history == "turns":
                room = f"data.max_prompt_length={config.data.max_prompt_length}, which holds what is shown at a turn"
            yield f"{short} of {len(ends)} episodes ended for want of room: raise {room}."
    elif may_be_cut and length > 1 and {*batch.get("end_reason", ())} == {"max_tokens"}:
        yield (
            f"no response ends by itself, all reach data.max_response_length={length}: raise it, or the model does "
            "not write the token that its tokenizer calls eos."
        )


def is_templated_twice(text: str, tokenizer: PreTrainedTokenizerBase) -> bool:
    """Says whether a token that opens a message, and is followed by a role at most, is followed by itself."""
    specials = {*tokenizer.all_special_tokens} - {tokenizer.pad_token, tokenizer.eos_token}
    if not specials:
        return False
    special = "|".join(map(re.escape, sorted(specials, key=len, reverse=True)))
    return re.search(rf"({special})\w{{0,20}}(?:{special})?\s*\1", text) is not None
