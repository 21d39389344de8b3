"""Rules that score the responses to public data sets, and which of them a row's data source means."""

import threading
from contextlib import AbstractContextManager
from functools import cache
from types import ModuleType
from typing import Any

from extras.rules import (
    countdown,
    geo3k,
    gsm8k,
    math_dapo,
    math_reward,
    prime_code,
    prime_math,
    reasoning_gym,
    sandbox_fusion,
    search_r1_like_qa_em,
)

RULES: dict[str, ModuleType] = {  # by data source; a name with … stands for all that begin so
    "countdown": countdown,
    "reasoning_gym/…": reasoning_gym,
    "openai/gsm8k": gsm8k,
    **dict.fromkeys(("lighteval/MATH", "DigitalLearningGmbH/MATH-lighteval", "HuggingFaceH4/MATH-500"), math_reward),
    **dict.fromkeys(("math_dapo", "math", "math_dapo_reasoning", "aime…"), math_dapo),
    **{
        f"numina_{name}": prime_math
        for name in ("aops_forum", "synthetic_math", "amc_aime", "synthetic_amc", "cn_k12", "olympiads")
    },
    **dict.fromkeys(("codecontests", "apps", "codeforces", "taco"), prime_code),
    "hiyouga/geometry3k": geo3k,
    **{
        f"searchR1_{name}": search_r1_like_qa_em
        for name in ("nq", "triviaqa", "popqa", "hotpotqa", "2wikimultihopqa", "musique", "bamboogle")
    },
}
KNOWN = tuple(RULES)
BUDGET_SHARE = 0.8  # of a response's time, for its programs: the rest is for their starts and ends


def default_compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any] | None = None,
    sandbox_fusion_url: str | None = None,
    *,
    concurrent_semaphore: AbstractContextManager | int | None = None,
    memory_limit_mb: int | None = None,
    timeout: float | None = None,
    sandbox: str = "closed",
    **kwargs: Any,
) -> float | dict[str, Any]:
    """Scores a response by the rule of its data source: returns a number, or a dict with it as `score`.

    Code is run on a sandbox-fusion server where there is a url, else in a sandbox of our own. `concurrent_semaphore`
    limits the requests to that server; a number means so many of this process. `timeout`: seconds after which the
    caller gives up; programs of a response have four fifths of it together. `sandbox`: "open" runs them without fences.

    Raises:
        NotImplementedError: no rule for `data_source`.
    """
    rule = find_rule(data_source)
    if rule is None:
        raise NotImplementedError(
            f"Reward function is not implemented for data_source={data_source!r}: set reward.custom_reward_function."
            f"path. Rules are there for {', '.join(KNOWN)}."
        )
    if rule is not prime_code:
        result = rule.compute_score(solution_str, ground_truth)
    elif sandbox_fusion_url:
        numbered = isinstance(concurrent_semaphore, int)
        semaphore = semaphore_of(concurrent_semaphore) if numbered else concurrent_semaphore
        server = (sandbox_fusion_url, semaphore, memory_limit_mb)
        result = sandbox_fusion.compute_score(*server, solution_str, ground_truth, continuous=True)
    else:
        limits = {"memory_mb": memory_limit_mb or prime_code.MEMORY_MB, "anyway": sandbox == "open"}
        limits |= {"budget": BUDGET_SHARE * timeout} if timeout else {}
        result = prime_code.compute_score(solution_str, ground_truth, continuous=True, **limits)
    if isinstance(result, dict):
        return result
    return float(result[0] if isinstance(result, tuple) else result)


semaphore_of = cache(threading.BoundedSemaphore)  # one a process, by its number of places


def runs_programs(data_source: Any) -> bool:
    """Says whether the responses to `data_source` are programs."""
    return find_rule(data_source) is prime_code


def find_rule(data_source: Any) -> ModuleType | None:
    """Returns the module whose compute_score(response, ground truth) scores `data_source`; None if there is none."""
    if not isinstance(data_source, str):
        return None
    prefixes = (name for name in RULES if name.endswith("…") and data_source.startswith(name[:-1]))
    return RULES.get(data_source) or RULES.get(next(prefixes, ""))
