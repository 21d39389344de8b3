import json
import re

from verl.experimental.agent_loop.tool_parser import FunctionCall, ToolParser


@ToolParser.register("angle")
class AngleParser(ToolParser):
    def __init__(self, tokenizer) -> None:
        super().__init__(tokenizer)
        self.pattern = re.compile(r"«(\w+) (\{.*?\})»")

    async def extract_tool_calls(self, responses_ids: list[int], tools=None) -> tuple[str, list[FunctionCall]]:
        text = self.tokenizer.decode(responses_ids)
        calls = [FunctionCall(name=name, arguments=json.dumps(json.loads(body))) for name, body in self.pattern.findall(text)]
        return self.pattern.sub("", text), calls
