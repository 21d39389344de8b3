from typing import Any, Optional
from uuid import uuid4

from verl.tools.base_tool import BaseTool
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse


class Counter(BaseTool):
    def __init__(self, config: dict, tool_schema: OpenAIFunctionToolSchema):
        super().__init__(config, tool_schema)
        self.totals, self.released = {}, 0

    def get_openai_tool_schema(self) -> OpenAIFunctionToolSchema:
        return self.tool_schema

    async def create(self, instance_id: Optional[str] = None, **kwargs) -> tuple[str, ToolResponse]:
        instance_id = instance_id or str(uuid4())
        self.totals[instance_id] = kwargs.get("create_kwargs", {}).get("start", 0)
        return instance_id, ToolResponse()

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs) -> tuple[ToolResponse, float, dict]:
        self.totals[instance_id] += parameters["by"]
        return ToolResponse(text=str(self.totals[instance_id])), self.config.get("pays", 0.1), {"total": 1}

    async def calc_reward(self, instance_id: str, **kwargs) -> float:
        return float(self.totals[instance_id] > 3)

    async def release(self, instance_id: str, **kwargs) -> None:
        self.released += 1
        del self.totals[instance_id]
