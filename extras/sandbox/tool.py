"""The tool that runs a program that a policy writes, in a sandbox."""

import signal
from typing import Any

from configs.errors import notice_once
from configs.process import available_cores
from extras.sandbox.run import check_fences, run_python
from extras.tools.tool_classes import BaseTool, ToolResponse, ToolSchema, schema_of_text


class PythonSandbox(BaseTool):
    """Runs `code`, and shows what it prints.

    `config`: `seconds` (5) of a call, on the clock, `memory_mb` (512), `output_chars` (4000) that are shown at most,
    `name` (python), `sandbox` (closed; open: also where the system has too few fences).
    """

    blocks, max_concurrent = True, available_cores()[0]  # a program's seconds are those of the clock

    def __init__(self, config: dict[str, Any], tool_schema: dict[str, Any] | None = None) -> None:
        super().__init__(config, tool_schema)
        self.limits = self.settings(name="python", seconds=5.0, memory_mb=512, output_chars=4000, sandbox="closed")
        notice_once(check_fences(self.limits["sandbox"], "the tool's config.sandbox"))

    def get_openai_tool_schema(self) -> ToolSchema:
        name, description = self.config.get("name", "python"), "Runs a Python program and shows what it prints."
        return schema_of_text(name, description, "code", "a Python program; print what you want to see")

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float, dict[str, Any]]:
        seconds, most = self.limits["seconds"], self.limits["output_chars"]
        limits = {"memory_mb": self.limits["memory_mb"], "anyway": self.limits["sandbox"] == "open"}
        done = run_python(parameters["code"], seconds=seconds, **limits)
        text = done.output + done.errors
        shown = text if len(text) <= most else text[: most // 2] + "\n…\n" + text[-most // 2 :]
        if done.status is None:
            shown += f"\nEnded: it took more than {seconds:g} seconds."
        elif done.status < 0:
            shown += f"\nEnded by signal {signal.Signals(-done.status).name}."
        return ToolResponse(text=shown.strip() or "(no output)"), 0.0, {"status": done.status}
