"""Our defaults beside verl's, verl_defaults.txt: each that differs is a row of docs/differences.md."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from omegaconf import OmegaConf

from configs.schema import Config
from configs.settings import defaults, keys_of
from extras.sft.settings import SFTConfig
from extras.verl.keys import Verdict, judge
from tests.runs import ROOT

SCHEMAS = {"": Config, "sft/": SFTConfig}  # by the entry, with which keys begin
PAGE = (ROOT / "docs/differences.md").read_text()


def read_facts(text: str) -> dict[str, Any]:
    """Reads sections of name=value, the value as yaml, under the names of those that have them; @key stays a text."""
    found = {}
    for names, body in re.findall(r"^\[([^\]=]+)\]$\n(.*?)(?=^\[|\Z)", text, re.MULTILINE | re.DOTALL):
        for name, value in (pair.split("=", 1) for pair in body.split()):
            default = value if value.startswith("@") else yaml.safe_load(value)
            found |= {f"{section}.{name}": default for section in names.split()}
    return found


VERLS = read_facts(Path(__file__).with_name("verl_defaults.txt").read_text())


def parted(key: str) -> tuple[str, str]:
    entry, slash, name = key.rpartition("/")
    return entry + slash, name


def judged(key: str) -> Verdict:
    """Judges verl's default where it is spelt out."""
    entry, name = parted(key)
    return judge(name, VERLS.get(origin(key, VERLS.get)), SCHEMAS[entry])


def today(key: str) -> str:
    return parted(key)[0] + judged(key).key


def ours(key: str) -> Any:
    """The default here; @key where it is another setting's."""
    entry, name = parted(key)
    section, _, last = name.rpartition(".")
    node = OmegaConf.select(defaults(SCHEMAS[entry]), section)._get_node(last)
    follows = node._is_interpolation() and re.fullmatch(r"\$\{([\w.]+)\}", node._value())
    if follows:
        return f"@{entry}{follows[1]}"
    return OmegaConf.to_container(node) if OmegaConf.is_config(node) else node._value()


def origin(key: str, default_of: Callable[[str], Any]) -> str:
    """The setting whose default is that of `key`."""
    value = default_of(key)
    return origin(value[1:], default_of) if isinstance(value, str) and value.startswith("@") else key


def shown(value: Any) -> str:
    if isinstance(value, str) and value.startswith("@"):
        return f"that of `{value[1:]}`"
    written = yaml.safe_dump(value, default_flow_style=True, width=1000).removesuffix("...\n")
    return f"`{written.strip()}`"


def settings_of_both(entry: str) -> list[str]:
    """Keys of verl's that are settings here; null under an old name sets nothing, and some values have another name."""
    found = {key: judged(key) for key in VERLS if parted(key)[0] == entry}
    return [
        key
        for key, verdict in found.items()
        if verdict.key in keys_of(SCHEMAS[entry]) and verdict.kind in ("works", "renamed")
        if verdict.kind == "works" or verdict.value == VERLS.get(origin(key, VERLS.get)) is not None
    ]


def differing(entry: str) -> list[str]:
    """Lists those whose default is neither equal nor that of the same other setting; nothing is written in two ways."""
    nothing, found = (None, [], {}), []
    for key in settings_of_both(entry):
        verls, here = origin(key, VERLS.get), origin(today(key), ours)
        follows = today(verls) == here != today(key)
        values = VERLS[verls], ours(here)
        if not follows and values[0] != values[1] and not all(value in nothing for value in values):
            found.append(key)
    return found


@pytest.mark.parametrize(
    ("entry", "heading"), [("", "## Defaults\n"), ("sft/", "### Defaults of supervised training\n")]
)
def test_each_default_that_differs_from_verls_has_its_row_with_a_reason(entry: str, heading: str):
    """The page is written by hand: the message of a failure is what its table has to say."""
    both, differ = settings_of_both(entry), differing(entry)
    wanted = {f"`{parted(key)[1]}`": [shown(ours(today(key))), shown(VERLS[key])] for key in differ}
    table = PAGE.partition(heading)[2].partition("\n##")[0]
    rows = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("| `")]
    assert {key: values for key, *values, _ in rows} == wanted and len(rows) == len(wanted)
    assert all(len(row) == 4 and len(row[3]) > 7 for row in rows)
    counts = f"{len(both)} of verl's keys are settings here: {len(both) - len(differ)} with its default, {len(differ)}"
    assert counts in " ".join(table.split())


def test_what_verl_sets_by_default_is_known_and_accepted():
    assert not {key for key in VERLS if judged(key).kind in ("unknown", "refused")}
