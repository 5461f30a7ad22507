"""Reads the python blocks of a page."""

import re

FENCE = re.compile(r"^(?P<indent> *)```(?P<info>[^\n`]*)$")


def python_blocks(text: str) -> list[tuple[int, str]]:
    """Returns (line of the opening fence, code) of each python block.

    Raises:
        ValueError: a fence says python with anything added to it (such as "no-run"), is indented,
            or is never closed. There is no way to leave an example untested.
    """
    blocks: list[tuple[int, str]] = []
    opened: tuple[int, str] | None = None
    code: list[str] = []
    for number, line in enumerate(text.splitlines(), start=1):
        fence = FENCE.match(line)
        if fence is None:
            code.append(line)
        elif opened is None:
            info = fence["info"].strip()
            if re.match(r"\{?\.?(py|python|pycon)\b", info, re.IGNORECASE) and (
                info != "python" or fence["indent"]
            ):
                raise ValueError(f"line {number}: open it with exactly ```python, not {line!r}")
            opened, code = (number, info), []
        else:
            if opened[1] == "python":
                blocks.append((opened[0], "\n".join(code)))
            opened = None
    if opened is not None:
        raise ValueError(f"line {opened[0]}: the block is never closed")
    return blocks
