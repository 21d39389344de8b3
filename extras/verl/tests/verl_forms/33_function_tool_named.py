from verl.tools.function_tool import function_tool
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse


@function_tool("calc")
def calculator(expression: str):
    """Works out sums.

    Args:
        expression: such as 3+4
    """
    return ToolResponse(text=str(sum(int(part) for part in expression.split("+")))), 0.25, {"sums": 1}


@function_tool("roll", schema=OpenAIFunctionToolSchema.model_validate({
    "type": "function",
    "function": {"name": "roll", "description": "A die.", "parameters": {"type": "object", "properties": {}, "required": []}},
}))
def roll_a_die():
    return "4", None
