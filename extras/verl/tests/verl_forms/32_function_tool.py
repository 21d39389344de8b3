from verl.tools.function_tool import function_tool


def helper(number):
    return number / 2


@function_tool
def half(number: float) -> float:
    """Half of a number.

    Args:
        number: which one
    """
    return helper(number)


@function_tool
async def greet(name: str) -> dict:
    """Greets.

    Args:
        name: who
    """
    return {"text": f"Hello {name}"}
