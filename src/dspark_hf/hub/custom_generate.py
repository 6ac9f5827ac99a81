"""Writes the code behind `generate(custom_generate="owner/drafter")`, for programs that do not import dspark_hf."""

from __future__ import annotations

from os import PathLike
from pathlib import Path

from ..storage.atomic import whole_files

FOLDER = "custom_generate"
TEMPLATE = Path(__file__).parent / "templates" / "generate.py"

# The first version of this package that has what the template imports.
REQUIREMENTS = "dspark-hf>=0.1.0\n"


def write_custom_generate(folder: str | PathLike[str], repo_id: str | None = None) -> None:
    """
    Writes `custom_generate/generate.py` and its `requirements.txt` into the folder of a drafter's weights.

    Args:
        folder: Where the weights are.
        repo_id: The repository of the drafter, `owner/name`. The code needs it to load the drafter, because transformers does not
            tell it which repository it came from. Without it, the caller has to pass `drafter=folder`.
    """
    code = TEMPLATE.read_text(encoding="utf-8")
    if repo_id is not None:
        code = code.replace("REPOSITORY = None", f'REPOSITORY = "{repo_id}"')
    with whole_files(Path(folder) / FOLDER) as part:
        (part / "generate.py").write_text(code, encoding="utf-8")
        (part / "requirements.txt").write_text(REQUIREMENTS, encoding="utf-8")
