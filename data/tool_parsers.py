"""Names what formats of tool calls are made of, for users' files: a parser of theirs reads such calls in answers."""

from configs.import_utils import find
from data.chat import Answer as Answer

NAMES = ("FunctionCall", "HermesParser", "ParsedAnswer", "ToolCall", "ToolParser", "parse_answer")
FunctionCall, HermesParser, ParsedAnswer, ToolCall, ToolParser, parse_answer = (
    find("optional", each) for each in NAMES
)
