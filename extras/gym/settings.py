"""Settings of processes for environments: env.processes."""

from dataclasses import dataclass

from configs.settings import Frozen, setting


@dataclass
class Settings(Frozen):
    switches = "id: processes"
    processes: int = setting(
        0,
        "Processes that episodes are played in, for environments that are slow, hang or crash; 0: in the run's own.",
        ge=0,
        factory=True,
    )

    @property
    def in_processes(self) -> bool:
        return self.processes > 0
