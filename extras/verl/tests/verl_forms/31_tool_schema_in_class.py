import json

from transformers.utils import get_json_schema

from verl.tools.base_tool import BaseTool, OpenAIFunctionToolSchema
from verl.tools.schemas import ToolResponse
from verl.utils.rollout_trace import rollout_trace_op


class Thermometer(BaseTool):
    def celsius_of(self, town: str):
        """Temperature of a town.

        Args:
            town: its name
        """
        return {"town": town, "celsius": 17.5}

    def get_openai_tool_schema(self) -> OpenAIFunctionToolSchema:
        return OpenAIFunctionToolSchema(**get_json_schema(self.celsius_of))

    @rollout_trace_op
    async def execute(self, instance_id, parameters, **kwargs):
        return ToolResponse(text=json.dumps(self.celsius_of(**parameters))), 0, {}
