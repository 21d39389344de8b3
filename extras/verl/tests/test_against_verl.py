"""Holds our functions against verl 0.9.1's own: equal on random batches, or in `DIFFERENCES` with the reason.

`make test` brings verl's wheel; without it these tests are skipped. `python -m extras.verl.tests.test_against_verl`
counts what is compared.
"""

import importlib
from collections.abc import Iterator
from fnmatch import fnmatchcase
from operator import attrgetter

import pytest

from configs.import_utils import Imports
from extras.verl.imports import names_of_verl
from extras.verl.tests.versus import (
    CASES,
    FOLDER,
    REGISTRIES,
    SEEDS,
    differing,
    of_registry,
    of_verl,
    outcome,
    sides,
    verl_itself,
)
from training import core_algos, losses

SLOW = pytest.param("utils.reward_score.prime_code.compute_score", marks=pytest.mark.slow)  # runs 70 programs
COMPARED = [*(f"{registry}.{name}" for registry, (_, _, names) in REGISTRIES.items() for name in names), *CASES]

# Where we are not as verl on purpose: (functions, kinds of calls, parts of the results, reason), the first three as
# patterns between bars. Nothing else may differ, and a row has to hold for each of its functions.
# docs/differences.md says more.
DIFFERENCES = [
    ("estimator.g[rdp]*|estimator.rloo*|estimator.*_baseline", "failed*", "/result/*",
     "failed rows leave their group; verl: they count with their scores"),
    ("estimator.grpo|estimator.grpo_vectorized|estimator.gdpo", "equal*", "/result/*",
     "equal scores give exactly 0; verl: the rounding of their mean, over 1e-6"),
    ("estimator.grpo_passk", "lone*", "/*", "a sample alone leads by nothing; verl: raises"),
    ("estimator.gpg", "*alpha", "/result/*", "alpha is read; verl: is not"),
    ("estimator.*optimal_token_baseline", "*epsilon", "/result/0", "epsilon is of each energy; verl: of their sum"),
    ("estimator.optimal_token_baseline", "holes*|lone*", "/result/0",
     "the k-th policy tokens are compared; verl: columns, whatever observations stand before them"),
    ("loss.dppo_*|loss.cispo", "no advantage*", "/result/1/actor/pg_clipfrac*",
     "a token without an advantage is not clipped; verl: it counts, though it has no gradient"),
    ("loss.geo_mean", "failed*|*counts", "/result/0|/gradient/0",
     "averages over the mini-batch's rows with tokens; verl: over all rows of the call"),
    ("loss.bypass_mode|*rollout_corr_helper.*", "failed*", "*/*_fraction*|*/rollout_is_*|*ppl*|*/chi2_seq",
     "failed rows leave the statistics of drift; verl: they count as 0"),
    ("loss.bypass_mode|*rejection_mask", "*", "*k[23]_seq_fraction_low",
     "is 0 where a statistic has no lower bound; verl: is not logged"),
    ("loss.bypass_mode|*correction_weights|*correction_and_rejection_mask", "far*", "*/rollout_is_eff_sample_size",
     "is at most 1 where all weights are tiny; verl: adds 1e-8 to their mean"),
    ("loss.bypass_mode", "far*", "/result/0", "is 0 if all tokens are rejected; verl: 0 / 0"),
    ("*correction_weights", "far*", "/*", "no weight in IcePop's band is a sample size of 0; verl: ZeroDivisionError"),
    ("*pf_ppo_reweight_data", "failed", "/result*", "a failed row is never drawn; verl: is, by its score"),
    ("*compute_data_metrics", "failed", "/result/num_turns/*|/result/tool_call_counts/*",
     "failed rows leave the statistics; verl: they count"),
    ("*process_validation_metrics", "an answer is None", "*/maj@*",
     "an answer that could not be read is a vote; verl: the prompt has no maj@n"),
    ("*prime_code.compute_score", "1  2 for *|3.0 0.5 for *|Case 1: * for *", "/result",
     "words are compared, and numbers among them; verl: lines"),
    ("*prime_code.compute_score", "1.0 for 1", "/result", "integers are compared as texts; verl: all within 1e-5"),
    ("*process_validation_metrics", "a value is None", "*/acc/*",
     "the n of mean@n counts all answers; verl: those that have a value"),
]  # fmt: skip

# What `import verl` serves of the modules of CASES, and is no calculation
NOT_COMPARED = (
    "register_adv_est", "register_policy_loss", "get_adv_estimator_fn", "get_policy_loss_fn", "AdvantageEstimator",
    "ADV_ESTIMATOR_REGISTRY", "POLICY_LOSS_REGISTRY", "PolicyLossFn", "AlgoConfig", "KLControlConfig",
    "FilterGroupsConfig", "CheckpointConfig", "PFPPOConfig",
)  # fmt: skip


if __name__ != "__main__" and not (FOLDER / ".ready").exists():
    reason = f"no verl 0.9.1 in {FOLDER}: make test puts it there, if a package index has it"
    pytest.skip(reason, allow_module_level=True)


@pytest.fixture(scope="module")
def verl() -> Iterator[None]:
    assert Imports.find_installed("verl") is None, "verl is for these tests alone"
    with verl_itself():
        assert Imports.find_installed("verl") is not None
        yield
    assert Imports.find_installed("verl") is None


pytestmark = pytest.mark.usefixtures("verl")


def matches(patterns: str, text: str) -> bool:
    return any(fnmatchcase(text, pattern) for pattern in patterns.split("|"))


def compare(name: str) -> tuple[set[tuple[str, str]], int]:
    """Returns (kind of call, part of the result) of all that differs, and how many calls were made."""
    ours, verls, calls_of = sides(name)
    calls = [call for seed in SEEDS for call in calls_of(seed)]
    return {
        (call.kind, part)
        for call in calls
        for part in differing(outcome(ours, call, ours=True), outcome(verls, call, ours=False))
    }, len(calls)


def unexplained(name: str) -> set[tuple[str, str]]:
    differences, _ = compare(name)
    return {one for one in differences if not any(explains(row, name, *one) for row in DIFFERENCES)}


def explains(row: tuple[str, ...], name: str, kind: str, part: str) -> bool:
    return all(map(matches, row[:3], (name, kind, part)))


@pytest.mark.parametrize("name", [SLOW if name in SLOW.values else name for name in COMPARED])
def test_equals_verls_but_for_what_the_table_says(name: str) -> None:
    differences, _ = compare(name)
    rows = [row for row in DIFFERENCES if matches(row[0], name)]
    assert not {one for one in differences if not any(explains(row, name, *one) for row in rows)}
    assert not [row for row in rows if not any(explains(row, name, *one) for one in differences)], "are equal now"


def test_all_names_of_verls_registries_are_compared() -> None:
    for registry, (module, attribute, names) in REGISTRIES.items():
        entries = of_verl(module, attribute)
        assert entries.keys() == {*names}, registry


def test_all_that_import_verl_serves_is_compared() -> None:
    registered = {of_registry(name).__name__: name for name in COMPARED if name.startswith(("estimator.", "loss."))}
    for module in {name.rpartition(".")[0] for name in CASES}:
        for name, home in names_of_verl()[f"verl.{module}"].items():
            if name in registered:
                path, _, attribute = home.partition(":")
                assert attrgetter(attribute)(importlib.import_module(path)) is sides(registered[name])[0], name
            elif hasattr(importlib.import_module(f"verl.{module}"), name):
                assert f"{module}.{name}" in CASES or name in NOT_COMPARED


@pytest.mark.parametrize(
    ("owner", "function", "wrong", "name"),
    [
        (core_algos.Groups, "standardize", lambda right: lambda *args: -right(*args), "estimator.grpo"),
        (losses, "masked_sum", lambda right: lambda x, mask, axis=None: right(x, mask * 0 + 1, axis), "loss.gspo"),
        (losses, "clip_bounds", lambda right: lambda config: right(config)[::-1], "loss.vanilla"),
    ],
    ids=["a sign", "a mask", "a clip bound"],
)
def test_a_planted_error_is_seen(monkeypatch: pytest.MonkeyPatch, owner, function, wrong, name) -> None:
    assert not unexplained(name)
    monkeypatch.setattr(owner, function, wrong(getattr(owner, function)))
    assert unexplained(name)


if __name__ == "__main__":
    with verl_itself():
        found = {name: compare(name) for name in COMPARED}
    differing_ones = [name for name, (differences, _) in found.items() if differences]
    calls, differ = sum(calls for _, calls in found.values()), len(differing_ones)
    print(
        f"{len(found)} functions of verl 0.9.1, {calls} calls: {len(found) - differ} functions are equal in all, "
        f"{differ} differ in some, by {len(DIFFERENCES)} rows of the table."
    )
