"""Writes the card of an exported model, README.md, from the files of its run, and pushes the folder to the Hub."""

import json
import platform
import re
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from huggingface_hub import HfApi, ModelCard, ModelCardData
from huggingface_hub.errors import HTTPError

from configs.paths import find_path
from data.files import headline_means, read_metrics
from training.checkpoint import CONFIG_FILE, FILE_ERRORS, settings_of
from training.tracking import METRICS_FILE

TEMPLATE = Path(__file__).with_name("card.md")
ROWS = 12  # of the table of validations
LOGIN = "`hf auth login`, or HF_TOKEN, with a token that may write there"


def write_card(local_dir: Path, target_dir: Path, name: str | None) -> None:
    """Writes the README.md of the model in `target_dir`, merged from `local_dir`; for a verl run it says less."""
    checkpoint = next((path for path in (local_dir, local_dir.parent) if (path / CONFIG_FILE).exists()), None)
    settings = settings_of(checkpoint / CONFIG_FILE) if checkpoint else {}
    step = int(checkpoint.name.rpartition("_")[2]) if checkpoint and checkpoint.name[-1:].isdigit() else None
    base = settings.get("actor_rollout_ref.model.path", settings.get("model.path"))
    tags = ["nano-verl", "sft" if "model.path" in settings else settings.get("algorithm.adv_estimator", "rl")]
    data = ModelCardData(library_name="transformers", pipeline_tag="text-generation", tags=tags, **origin(base))
    card = ModelCard.from_template(
        data,
        template_path=str(TEMPLATE),
        name=name or target_dir.name,
        base=data.base_model or (base and Path(base).name),
        step=step,
        settings={key: without_folders(value) for key, value in settings.items()},
        curve=validations(checkpoint.parent / METRICS_FILE, step) if checkpoint else [],
        versions=", ".join(f"{name} {number}" for name, number in versions(local_dir).items()),
    )
    card.save(target_dir / "README.md")


def origin(base: str | None) -> dict[str, str]:
    """Returns the base model's name at the Hub, if it is in the Hub's cache, and its license, if it has a card."""
    if base is None:
        return {}
    known = re.search(r"models--([\w.-]+?)--([\w.-]+)", base)
    fields = {"base_model": f"{known[1]}/{known[2]}"} if known else {}
    try:
        license = ModelCard.load(find_path(base) / "README.md").data.license
    except FILE_ERRORS:
        license = None
    return fields | ({"license": license} if license else {})


def without_folders(value: Any) -> Any:
    """Keeps only the last part of file names: a card may be public."""
    names = value if isinstance(value, list) else [value]
    names = [name.rpartition("/")[2] if isinstance(name, str) else name for name in names]
    return ", ".join(map(str, names)) if isinstance(value, list) else names[0]


def validations(record: Path, last: int | None) -> list[tuple[int, dict[str, float]]]:
    """Returns (step, {metric: value}) of evenly spread validations up to step `last`."""
    entries = [entry for entry in read_metrics(record) if last is None or entry["step"] <= last]
    rows = [(entry["step"], means) for entry in entries if (means := headline_means(entry["data"]))]
    picked = np.linspace(0, len(rows) - 1, min(ROWS, len(rows))).round().astype(int)
    return [rows[index] for index in picked]


def versions(local_dir: Path) -> dict[str, str]:
    """Returns the versions in the run's run.json; the installed ones if it has none."""
    for folder in local_dir.parents[:2]:
        if (path := folder / "run.json").exists():
            return json.loads(path.read_text())["starts"][-1]["versions"]
    return {"python": platform.python_version(), **{name: version(name) for name in ("torch", "transformers")}}


def push(folder: Path, name: str, private: bool) -> str:
    """Uploads a folder as the model `name`, USER/NAME, which is created if missing; returns its address.

    Raises:
        ValueError: the Hub refuses, or cannot be reached.
    """
    try:
        address = HfApi().create_repo(name, private=private, exist_ok=True)
        HfApi().upload_folder(repo_id=name, folder_path=folder, commit_message="Upload by nano-verl")
    except (OSError, HTTPError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(f"--push_to_hub {name}: {reason}. {folder} is whole. Needed: {LOGIN}.") from error
    return str(address)
