r"""The last \boxed{…} of a response, which is where LaTeX answers stand."""


def last_boxed(text: str, commands: tuple[str, ...] = (r"\boxed", r"\fbox")) -> str | None:
    r"""The last boxed expression with its command, "\boxed{…}", up to the brace that balances the first; None: none.

    The first of `commands` that occurs counts. A brace that is never closed makes it None, as in verl.
    """
    start = next((place for command in commands if (place := text.rfind(command)) >= 0), -1)
    if start < 0:
        return None
    depth = 0
    for place in range(start, len(text)):
        depth += (text[place] == "{") - (text[place] == "}")
        if depth == 0 and text[place] == "}":
            return text[start : place + 1]
    return None


def boxed_content(text: str) -> str | None:
    r"""The content of the last \boxed{…}; None: there is none."""
    found = last_boxed(text, (r"\boxed{",))
    return None if found is None else found[len(r"\boxed{") : -1]
