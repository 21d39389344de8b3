"""Rules that score the responses to public data sets, and which of them a row's data source means."""

import threading
from contextlib import AbstractContextManager
from functools import cache
from typing import Any

from training.reward_score import (
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

GSM8K = ("openai/gsm8k",)
MATH = ("lighteval/MATH", "DigitalLearningGmbH/MATH-lighteval", "HuggingFaceH4/MATH-500")
DAPO = ("math_dapo", "math", "math_dapo_reasoning")
DAPO_PREFIX = "aime"
NUMINA = tuple(
    f"numina_{name}" for name in ("aops_forum", "synthetic_math", "amc_aime", "synthetic_amc", "cn_k12", "olympiads")
)
CODE = ("codecontests", "apps", "codeforces", "taco")
GEOMETRY = ("hiyouga/geometry3k",)
QUESTIONS = tuple(
    f"searchR1_{name}" for name in ("nq", "triviaqa", "popqa", "hotpotqa", "2wikimultihopqa", "musique", "bamboogle")
)
COUNTDOWN = ("countdown",)
GYM_PREFIX = "reasoning_gym/"
KNOWN = (*COUNTDOWN, f"{GYM_PREFIX}…", *GSM8K, *MATH, *DAPO, f"{DAPO_PREFIX}…", *NUMINA, *CODE, *GEOMETRY, *QUESTIONS)


def default_compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any] | None = None,
    sandbox_fusion_url: str | None = None,
    *,
    concurrent_semaphore: AbstractContextManager | int | None = None,
    memory_limit_mb: int | None = None,
    **kwargs: Any,
) -> float | dict[str, Any]:
    """The score of a response by the rule of its data source: a number, or a dict with it as `score`.

    Code is run on a sandbox-fusion server where there is a url, else in a sandbox of our own. `concurrent_semaphore`
    limits the requests to that server; a number means so many of this process.

    Raises:
        NotImplementedError: no rule for `data_source`; lists those that have one.
    """
    if data_source in CODE:
        if sandbox_fusion_url:
            numbered = isinstance(concurrent_semaphore, int)
            semaphore = semaphore_of(concurrent_semaphore) if numbered else concurrent_semaphore
            server = (sandbox_fusion_url, semaphore, memory_limit_mb)
            result = sandbox_fusion.compute_score(*server, solution_str, ground_truth, continuous=True)
        else:
            result = prime_code.compute_score(
                solution_str, ground_truth, continuous=True, memory_mb=memory_limit_mb or prime_code.MEMORY_MB
            )
    else:
        result = rule_of(data_source)(solution_str, ground_truth)
    if isinstance(result, dict):
        return result
    return float(result[0] if isinstance(result, tuple) else result)


@cache
def semaphore_of(places: int) -> threading.BoundedSemaphore:
    """This process's semaphore with so many places."""
    return threading.BoundedSemaphore(places)


def has_rule(data_source: Any) -> bool:
    """Whether `default_compute_score` knows `data_source`."""
    return isinstance(data_source, str) and (data_source in KNOWN or data_source.startswith((DAPO_PREFIX, GYM_PREFIX)))


def rule_of(data_source: str) -> Any:
    """The function of (response, ground truth) for a data source that is not code."""
    rules = {
        GSM8K: gsm8k.compute_score,
        MATH: math_reward.compute_score,
        DAPO: math_dapo.compute_score,
        NUMINA: prime_math.compute_score,
        GEOMETRY: geo3k.compute_score,
        QUESTIONS: search_r1_like_qa_em.compute_score,
        COUNTDOWN: countdown.compute_score,
    }
    for sources, rule in rules.items():
        if data_source in sources:
            return rule
    for prefix, rule in ((DAPO_PREFIX, math_dapo.compute_score), (GYM_PREFIX, reasoning_gym.compute_score)):
        if isinstance(data_source, str) and data_source.startswith(prefix):
            return rule
    raise NotImplementedError(
        f"Reward function is not implemented for data_source={data_source!r}. There are rules for {', '.join(KNOWN)}; "
        "for other data set reward.custom_reward_function.path to a function of yours."
    )
