import json

from verl.tools.mcp_base_tool import MCPBaseTool


class Shouting(MCPBaseTool):
    def _parse_tool_result(self, content: list) -> tuple[str, dict]:
        text = " ".join(part.text for part in content if part.type == "text")
        return json.dumps({"result": text.upper()}), {"parts": len(content)}
