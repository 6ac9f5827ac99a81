"""Which answered prompts train a drafter, which choose its best checkpoint, and which compare it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from ..storage.atomic import write_text
from ..storage.json_lines import written_lines

TRAIN, CHOOSE, COMPARE = "train", "choose", "compare"


def share_of(row: dict[str, Any], held_out: float) -> str:
    """
    The share that an answered prompt belongs to. It depends on the prompt alone, so a prompt that occurs twice is never both
    trained on and compared with, and more prompts can be added later.

    Args:
        row: A row with `prompt` or `messages`.
        held_out: What is not trained on; one half of it chooses, the other half compares.
    """
    asked = row["messages"] if "messages" in row else [{"role": "user", "content": row["prompt"]}]
    first = next((message["content"] for message in asked if message["role"] == "user"), "")
    digest = hashlib.blake2b(str(first).encode(), digest_size=8).digest()
    place = int.from_bytes(digest, "little") / 2**64
    return TRAIN if place >= held_out else CHOOSE if place < held_out / 2 else COMPARE


def write_shares(responses: Path, folder: Path, held_out: float) -> dict[str, Path]:
    """
    Sorts answered prompts into one file per share.

    Returns:
        The file of each share, also of one without rows.
    """
    rows: dict[str, list[dict[str, Any]]] = {TRAIN: [], CHOOSE: [], COMPARE: []}
    for row in sorted(written_lines(responses), key=lambda row: row["id"]):
        rows[share_of(row, held_out)].append(row)
    files = {}
    for share, chosen in rows.items():
        files[share] = folder / f"{responses.stem}.{share}.jsonl"
        write_text(files[share], "".join(json.dumps(row) + "\n" for row in chosen))
    return files


def read_rows(file: Path) -> list[dict[str, Any]]:
    """The rows of a share."""
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def single_answers(rows: Iterable[dict[str, Any]]) -> Iterator[dict[str, torch.Tensor]]:
    """
    One row per answer: the tokens up to its end, and a mask that is True on this answer only.

    Args:
        rows: Rows with `input_ids` and `loss_mask`, `[T]` each, that may hold several answers.
    """
    for row in rows:
        ids, mask = torch.as_tensor(row["input_ids"]), torch.as_tensor(row["loss_mask"]).bool()
        starts = (mask & ~torch.cat([mask.new_zeros(1), mask[:-1]])).nonzero().flatten().tolist()
        for start in starts:
            gaps = (~mask[start:]).nonzero()
            end = start + int(gaps[0]) if len(gaps) else len(mask)
            answer = torch.zeros(end, dtype=torch.bool)
            answer[start:] = True
            yield {"input_ids": ids[:end], "loss_mask": answer}
