"""verl's tool that checks an answer to a GSM8K question."""

import re
from typing import Any
from uuid import uuid4

from extras.tools.tool_classes import BaseTool, ToolResponse, ToolSchema, schema_of_text

NUMBER = re.compile(r"-?[\d.,]+")
NO_PROGRESS = -0.05  # what a further answer costs that scores no better than the best before


class Gsm8kTool(BaseTool):
    """Scores `answer` against the row's create_kwargs.ground_truth, and says so."""

    def __init__(self, config: dict[str, Any], tool_schema: dict[str, Any] | None = None) -> None:
        self.truths: dict[str, str] = {}
        self.best: dict[str, float] = {}
        super().__init__(config, tool_schema)

    def get_openai_tool_schema(self) -> ToolSchema:
        description = "Checks an answer: its reward is 1.0 if it is right, else 0.0."
        return schema_of_text("calc_gsm8k_reward", description, "answer", "the answer, a number")

    async def create(
        self, instance_id: str | None = None, ground_truth: str | None = None, **kwargs: Any
    ) -> tuple[str, ToolResponse]:
        instance_id = instance_id or str(uuid4())
        truth = ground_truth or kwargs.get("create_kwargs", {}).get("ground_truth")
        if truth is None:
            raise ValueError("the row has no extra_info.tools_kwargs.calc_gsm8k_reward.create_kwargs.ground_truth")
        self.truths[instance_id], self.best[instance_id] = str(truth), 0.0
        return instance_id, ToolResponse()

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float, dict[str, Any]]:
        answer = parameters["answer"]
        numbers = [number for number in NUMBER.findall(answer) if number != "."]
        score = float(numbers[-1:] == [self.truths[instance_id]])
        reward = 0.0 if score > self.best[instance_id] else NO_PROGRESS
        self.best[instance_id] = max(score, self.best[instance_id])
        return ToolResponse(text=f"The answer is read as {answer!r}; its reward is {score}."), reward, {}

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        return self.best[instance_id]

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        del self.truths[instance_id], self.best[instance_id]
