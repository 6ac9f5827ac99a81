"""Draws the picture of `dspark-hf chat` in the README: the screen of a real session with the quickstart pair.

    python docs/terminal_picture.py

What is typed is below; everything else on the picture, its figures included, is what the terminal showed on this machine.
"""

import io
import re
import sys
from itertools import groupby
from pathlib import Path

from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "examples"), str(ROOT / "tests")]

from smollm2 import ensure_target  # noqa: E402
from terminal import Terminal  # noqa: E402

PICTURE = ROOT / "docs" / "images" / "chat.svg"
COLUMNS, ROWS = 84, 30
TYPED = (
    "Write a Python function that adds two numbers.",
    "/plain",
    "Name three colors.",
)


def record() -> Terminal:
    """A session with everything typed, at its last prompt."""
    models = ["--target", str(ensure_target()), "--drafter", str(ROOT / "examples" / "quickstart_drafter")]
    terminal = Terminal(["chat", *models, "--dtype", "float32", "--max-new-tokens", "60"], COLUMNS, ROWS, timeout_s=900)
    terminal.read_answer()
    for line in TYPED:
        terminal.say(line)
        terminal.read_answer()
    return terminal


def as_text(row: list) -> Text:
    """A line of the terminal with its colours."""
    styles = ((cell.data, "" if cell.fg == "default" else f"#{cell.fg}") for cell in row)
    return Text.assemble(
        *(("".join(data for data, _ in run), style) for style, run in groupby(styles, key=lambda cell: cell[1]))
    )


def main() -> None:
    terminal = record()
    lines = [as_text(row) for row in terminal.rows]
    terminal.end()
    # From what the program says first; how the weights were loaded is of no interest.
    start = next(i for i, line in enumerate(lines) if line.plain.startswith("drafted tokens"))
    end = max(i for i, line in enumerate(lines) if line.plain.strip())
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    console.print(Text("$ dspark-hf chat -t smollm2-135m-instruct -d examples/quickstart_drafter"))
    console.print(*lines[start : end + 1], sep="\n")
    PICTURE.parent.mkdir(exist_ok=True)
    # Without the fonts it would fetch: those of the reader serve.
    svg = re.sub(r"@font-face {.*?}\s*", "", console.export_svg(title="dspark-hf chat"), flags=re.DOTALL)
    PICTURE.write_text(svg, encoding="utf-8")
    print(f"{PICTURE}\n" + "\n".join(line.plain for line in lines))


if __name__ == "__main__":
    main()
