"""Prompts are read from files and from rows of the Hub's data sets, in the format that drafters are measured with."""

import json

import pytest

from dspark_hf.evaluation.tasks import HUB_TASKS, TASK_NAMES, Prompt, load_task, sampled, to_prompt

ROWS = {
    "gsm8k": {"question": "1 + 1?"},
    "math500": {"problem": "1 + 1?"},
    "aime25": {"problem": "1 + 1?"},
    "humaneval": {"prompt": "def f():\n    pass\n"},
    "mbpp": {"prompt": "Write f.", "test_list": ["assert f() == 1"]},
    "livecodebench": {"question_content": "Sort.", "starter_code": ""},
    "mt-bench": {"prompt": ["One.", "Two."]},
    "alpaca": {"instruction": "Add.", "input": "1, 1"},
    "arena-hard": {"prompt": "Why?"},
}


class Rows(list):
    def select(self, indices):
        return Rows(self[i] for i in indices)


@pytest.mark.parametrize(
    ("row", "prompt"),
    [
        ({"turns": ["a", "b"]}, Prompt(["a", "b"])),
        ({"prompt": "a"}, Prompt(["a"])),
        (
            {
                "messages": [
                    {"role": "system", "content": "s"},
                    {"role": "user", "content": "a"},
                    {"role": "assistant", "content": "not asked"},
                    {"role": "user", "content": "b"},
                ]
            },
            Prompt(["a", "b"], "s"),
        ),
    ],
    ids=["turns", "prompt", "messages"],
)
def test_a_row_becomes_a_prompt(row, prompt):
    assert to_prompt(row) == prompt


def test_a_file_named_after_a_task_counts_to_its_domain(tmp_path):
    for name in ("gsm8k", "mine"):
        (tmp_path / f"{name}.jsonl").write_text('{"prompt": "a"}\n\n{"prompt": "b"}\n')
    known, mine = (load_task(str(tmp_path / f"{name}.jsonl")) for name in ("gsm8k", "mine"))
    assert (known.name, known.domain, mine.domain) == ("gsm8k", "math", "other")
    assert [p.turns for p in mine.prompts] == [["a"], ["b"]]


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("{}", r"there is no prompt in row 2\."),
        ('{"turns": []}', r"there is no prompt in row 2\."),
        ('{"prompt": 3}', r"there is no prompt in row 2\."),
        ("not json", "line 2, is not valid JSON"),
        ("[1]", r"line 2, holds \[1\]"),
    ],
)
def test_lines_without_a_prompt_are_named(tmp_path, line, told):
    path = tmp_path / "file.jsonl"
    path.write_text('{"prompt": "a"}\n' + line + "\n")
    with pytest.raises(ValueError, match=told):
        load_task(str(path))


def test_an_unknown_task_names_the_known_ones():
    with pytest.raises(ValueError, match="arena-hard"):
        load_task("gsm9k")


def test_a_sample_is_drawn_once_and_keeps_the_order():
    prompts = [Prompt([str(i)]) for i in range(50)]
    chosen = sampled(prompts, 10, seed=1)
    assert chosen == sampled(prompts, 10, seed=1) != sampled(prompts, 10, seed=2)
    assert [int(p.turns[0]) for p in chosen] == sorted(int(p.turns[0]) for p in chosen)
    assert sampled(prompts, 50, seed=1) is prompts


@pytest.mark.parametrize("name", TASK_NAMES)
def test_the_nine_tasks_are_read_from_the_hub(monkeypatch, name):
    datasets = pytest.importorskip("datasets")
    calls = []

    def load_dataset(*args, **kwargs):
        calls.append((args, kwargs))
        return Rows([ROWS[name]] * 600)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    task = load_task(name)
    assert len(calls) == 1
    assert len(task.prompts) == HUB_TASKS[name].num_rows
    assert task.domain == HUB_TASKS[name].domain
    assert task.prompts[0].turns and all(task.prompts[0].turns)


def test_a_task_that_cannot_be_downloaded_says_what_to_do():
    pytest.importorskip("datasets")
    with pytest.raises(
        OSError, match=r"openai/gsm8k.* cannot be read \(.*\)\. Check .* or give a JSONL file\.$"
    ) as error:
        load_task("gsm8k")  # Tests have no network.
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("name", "field", "row"), [("gsm8k", "question", 0), ("humaneval", "prompt", 0)])
def test_the_format_is_that_of_the_reference_prompts(shared, name, field, row):
    reference = json.loads((shared / "data" / "eval" / f"{name}.jsonl").read_text().splitlines()[row])["turns"]
    before, after = HUB_TASKS[name].to_turns({field: "\0"})[0].split("\0")
    inner = reference[0].removeprefix(before).removesuffix(after)
    assert HUB_TASKS[name].to_turns({field: inner}) == reference
    assert len(inner) == len(reference[0]) - len(before) - len(after)
