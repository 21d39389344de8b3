"""The settings of LoRA, among those of a model and of a rollout."""

from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

from configs.errors import ConfigError
from configs.paths import find_path
from configs.settings import Frozen, setting


@dataclass
class Settings(Frozen):
    switches = "lora_rank: lora_alpha target_modules exclude_modules"
    lora_rank: int = setting(0, "Rank of LoRA's matrices, the only weights trained; 0: no LoRA.", ge=0)
    lora_alpha: int = setting(16, "LoRA's scale: matrices times lora_alpha / lora_rank; 0 only without LoRA.", ge=0)
    target_modules: Any = setting(
        "all-linear", "Layers with LoRA, by name; all-linear: every linear layer but the head.", texts=True
    )
    exclude_modules: Any = setting(None, "Layers without LoRA, by name; null: no exception.", texts=True)
    lora_adapter_path: str | None = setting(
        None, "Folder of a peft adapter to continue from, with its own rank, scale and layers."
    )

    @property
    def adapter(self) -> str:
        return "lora" if self.lora_rank or self.lora_adapter_path else super().adapter

    @property
    def shaped_by(self) -> tuple[str, ...]:
        """Names the settings, beside the path, that decide which weights a checkpoint holds."""
        layers = ("target_modules", "exclude_modules") if self.lora_rank else ()
        return () if self.lora_adapter_path else ("lora_adapter_path", "lora_rank", *layers)  # it has its own

    def without_adapter(self) -> Any:
        return replace(self, lora_rank=0, lora_adapter_path=None)


@dataclass
class RolloutSettings(Frozen):
    load_lora: str = setting(
        "merge",
        "What an engine gets of LoRA: merge: the whole model, the matrices added. With vllm, adapter: the matrices "
        "alone, after the first time, which it adds itself: much less to send, and slower to generate.",
        choices=("merge", "adapter"),
    )

    def check(self, config: Any, key: str) -> None:
        super().check(config, key)
        model = config.get("actor_rollout_ref", config).model
        if self.load_lora == "adapter" and (self.name != "vllm" or model.adapter != "lora"):
            raise ConfigError(
                f"{key}.load_lora=adapter with name={self.name}, lora_rank={model.lora_rank}: it takes vllm and LoRA."
            )


def check_settings(model: Settings, key: str) -> None:
    """Raises ConfigError if `model`, the section `key`, asks for an adapter and its folder or peft is missing."""
    path = model.lora_adapter_path
    setting = f"{key}.lora_adapter_path={path}" if path else f"{key}.lora_rank={model.lora_rank}"
    if path and not (find_path(path) / "adapter_config.json").is_file():
        raise ConfigError(f"{setting}: it has no adapter_config.json, which peft writes into an adapter's folder.")
    if model.lora_rank and not model.lora_alpha:
        raise ConfigError(f"{key}.lora_alpha=0 with {key}.lora_rank={model.lora_rank}: set it above 0.")
    if find_spec("peft") is None:
        raise ConfigError(f"{setting} needs the package peft, which is not installed: pip install peft.")
