"""Names what tools are made of, for users' files: classes and functions that the policy may call."""

from configs.import_utils import find

NAMES = ("BaseTool", "FunctionTool", "ToolResponse", "ToolSchema", "function_tool", "schema_of_text")
BaseTool, FunctionTool, ToolResponse, ToolSchema, function_tool, schema_of_text = (
    find("optional", name) for name in NAMES
)
