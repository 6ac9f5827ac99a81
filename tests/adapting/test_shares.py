"""Which prompts train, choose and compare; and one row per answer."""

import json

import torch

from dspark_hf.adapting.shares import CHOOSE, COMPARE, TRAIN, share_of, single_answers, write_shares
from dspark_hf.storage.json_lines import ResumableLines


def test_a_share_depends_on_the_question_alone():
    rows = [{"prompt": f"question {i}"} for i in range(2000)]
    shares = [share_of(row, 0.2) for row in rows]
    counts = {share: shares.count(share) for share in (TRAIN, CHOOSE, COMPARE)}
    assert 1500 < counts[TRAIN] < 1700 and 140 < counts[CHOOSE] < 260 and 140 < counts[COMPARE] < 260
    answered = [{"id": 5, "prompt": row["prompt"], "response": "yes"} for row in rows]
    conversations = [{"messages": [{"role": "user", "content": row["prompt"]}]} for row in rows]
    assert [share_of(row, 0.2) for row in answered] == shares
    assert [share_of(row, 0.2) for row in conversations] == shares


def test_every_answer_is_in_one_share(tmp_path):
    with ResumableLines(tmp_path / "responses.jsonl", {}) as lines:
        for i in reversed(range(40)):
            lines.append({"id": i, "prompt": f"question {i % 20}", "response": "yes"})
    files = write_shares(tmp_path / "responses.jsonl", tmp_path, 0.5)
    rows = {share: [json.loads(line) for line in file.read_text().splitlines()] for share, file in files.items()}
    assert sorted(row["id"] for chosen in rows.values() for row in chosen) == list(range(40))
    asked = [{row["prompt"] for row in chosen} for chosen in rows.values()]
    assert not (asked[0] & asked[1] or asked[0] & asked[2] or asked[1] & asked[2])


def test_one_row_per_answer():
    row = {"input_ids": torch.arange(9), "loss_mask": torch.tensor([0, 0, 1, 1, 0, 0, 1, 1, 1])}
    first, second = single_answers([row])
    assert first["input_ids"].tolist() == [0, 1, 2, 3] and first["loss_mask"].tolist() == [False, False, True, True]
    assert second["input_ids"].tolist() == list(range(9)) and second["loss_mask"].nonzero().flatten().tolist() == [
        6,
        7,
        8,
    ]
    assert not list(single_answers([{"input_ids": torch.arange(3), "loss_mask": torch.zeros(3)}]))
