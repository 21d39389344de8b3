"""The rules of public data sets as a run's reward."""

from collections.abc import Mapping
from typing import Any

from configs.errors import ConfigError, notice_once
from configs.schema import RewardFunctionConfig, ScoringConfig
from data.types import Row
from extras.rules.default import KNOWN, find_rule, runs_programs
from extras.rules.sandbox_fusion import try_server
from extras.rules.settings import SandboxFusionConfig
from extras.sandbox.run import check_fences
from training.reward_function import FORMS, FunctionReward, load_function


class RuleReward(FunctionReward):
    """Scores responses by the rules of their data sources."""

    def check(self, rows: Mapping[int, Row]) -> None:
        """Raises ConfigError if a row has no rule, or the server that is to run programs does not."""
        for position, row in rows.items():
            if find_rule(row.get("data_source")) is None:
                raise ConfigError(
                    f"nothing scores the responses: set reward.custom_reward_function.path to a function, {FORMS}; or "
                    f"env.id. The data source of row {position} is {row.get('data_source')!r}; rules are there for "
                    f"{', '.join(KNOWN)}."
                )
        if any(runs_programs(row["data_source"]) for row in rows.values()):
            if server := self.reward_kwargs["sandbox_fusion_url"]:
                try_server(server)
            else:
                notice_once(check_fences(self.reward_kwargs["sandbox"]))
            if asserts := sum(has_asserts(row) for row in rows.values()):
                notice_once(
                    f"{asserts} of {len(rows)} rows check programs by assert_case, in the program's own process: a "
                    "policy can learn to pass them by an object that equals everything. Inputs and outputs cannot be "
                    "cheated so."
                )


def has_asserts(row: Row) -> bool:
    """Says whether a program for this row is tried by asserts."""
    label = row.get("reward_model") or {}
    return runs_programs(row["data_source"]) and "assert_case" in str(label.get("ground_truth"))


def load(settings: ScoringConfig, run: Any) -> RuleReward:
    """Loads the rules; they run programs on the server reward.sandbox_fusion.url if there is one, else here."""
    server = settings.get("sandbox_fusion") or SandboxFusionConfig()
    kwargs = {"sandbox_fusion_url": server.url, "concurrent_semaphore": server.max_concurrent}
    kwargs |= {"memory_limit_mb": server.memory_limit_mb, "timeout": settings.timeout, "sandbox": settings.sandbox}
    entry = RewardFunctionConfig("extras.rules.default", "default_compute_score", kwargs)
    return load_function(entry, settings, run.tokenizer, kind=RuleReward, computes=server.url is None)
