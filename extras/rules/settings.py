"""Settings of the rules of public data sets."""

from dataclasses import dataclass

from configs.settings import Frozen, group, setting


@dataclass
class SandboxFusionConfig(Frozen):
    switches = "url: max_concurrent"
    url: str | None = setting(None, "A sandbox-fusion server's /run_code; null: our own sandbox.")
    max_concurrent: int = setting(64, "Requests to the server at once, per scoring process.", ge=1)
    memory_limit_mb: int = setting(1024, "MiB that a program may take on the server.", ge=1)


@dataclass
class Settings(Frozen):
    """Stand in the section `reward`."""

    sandbox_fusion: SandboxFusionConfig = group(
        SandboxFusionConfig, "Where the default reward runs code (data sources codecontests, apps, codeforces, taco)."
    )
