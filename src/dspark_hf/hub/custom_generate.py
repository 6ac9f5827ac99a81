"""The code that a repository can hold for those who import nothing: `generate(custom_generate="owner/drafter")`."""

from __future__ import annotations

import shutil
from os import PathLike
from pathlib import Path

from ..storage.atomic import whole_files

FOLDER = "custom_generate"
TEMPLATE = Path(__file__).parent / "templates" / "generate.py"

# The first version that has what the template imports.
REQUIREMENTS = "dspark-hf>=0.1.0\n"


def write_custom_generate(folder: str | PathLike[str]) -> None:
    """Writes `custom_generate/generate.py` and its `requirements.txt` beside a drafter's weights."""
    with whole_files(Path(folder) / FOLDER) as part:
        shutil.copyfile(TEMPLATE, part / "generate.py")
        (part / "requirements.txt").write_text(REQUIREMENTS, encoding="utf-8")
