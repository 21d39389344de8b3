"""A calculator: arithmetic as Python writes it, computed without running any of it as code."""

import ast
import math
import operator
from typing import Any

from extras.tools.tool_classes import BaseTool, ToolResponse, ToolSchema, schema_of_text

LONGEST = 200  # characters of an expression
LARGEST = 10**30  # of any number on the way, so that no call takes long
OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}
FUNCTIONS = {"sqrt": math.sqrt, "abs": abs, "round": round, "min": min, "max": max}


def calculate(expression: str) -> int | float:
    """Returns the value of numbers, + - * / // % **, parentheses, sqrt, abs, round, min and max.

    Raises:
        ValueError: anything else, a division by zero, or a number that is too large.
    """
    if len(expression) > LONGEST:
        raise ValueError(f"the expression is longer than {LONGEST} characters")
    try:
        tree = ast.parse(expression.strip().replace("^", "**").replace("×", "*"), mode="eval")
        return evaluate(tree.body)
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError(f"{expression!r} is no arithmetic expression") from error
    except ZeroDivisionError as error:
        raise ValueError("division by zero") from error
    except (OverflowError, TypeError) as error:
        raise ValueError(f"{expression!r} has no value") from error


def evaluate(node: ast.expr) -> int | float:
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            result = number
        case ast.UnaryOp() if type(node.op) in OPERATORS:
            result = OPERATORS[type(node.op)](evaluate(node.operand))
        case ast.BinOp() if type(node.op) in OPERATORS:
            left, right = evaluate(node.left), evaluate(node.right)
            if isinstance(node.op, ast.Pow) and abs(right) > 100:  # before it is computed: 9**9**9 never ends
                raise ValueError("the exponent is too large")
            result = OPERATORS[type(node.op)](left, right)
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]) if name in FUNCTIONS:
            result = FUNCTIONS[name](*map(evaluate, arguments))
        case _:
            raise ValueError("only numbers, + - * / // % ** ( ) and " + ", ".join(FUNCTIONS) + " are known")
    if isinstance(result, complex) or not abs(result) <= LARGEST:
        raise ValueError("the result is too large, or no number")
    return result


def as_text(number: int | float) -> str:
    """Writes whole numbers without a point, others with up to ten digits that count."""
    if isinstance(number, float) and number.is_integer():
        number = int(number)
    return str(number) if isinstance(number, int) else f"{number:.10g}"


class Calculator(BaseTool):
    """`expression` in, its value out. `config.name` is another name for it than calculator: calls cost tokens."""

    def get_openai_tool_schema(self) -> ToolSchema:
        name, description = self.settings(name="calculator")["name"], "Computes the value of an arithmetic expression."
        return schema_of_text(name, description, "expression", "arithmetic, e.g. (3+4)*12")

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float, dict[str, Any]]:
        try:
            text = as_text(calculate(parameters["expression"]))
        except ValueError as error:
            text = f"Error: {error}"
        return ToolResponse(text=text), 0.0, {}
