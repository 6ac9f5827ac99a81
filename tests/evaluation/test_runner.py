"""Methods are compared on equal terms, what is measured survives, and a wrong greedy answer does not go unnoticed."""

import itertools
import json
from dataclasses import replace

import pytest
import tiny_folders
import torch

import tiny
from dspark_hf.evaluation import BenchSettings, Method, Prompt, Task, dspark_method, plain_method, run_bench, runner
from dspark_hf.evaluation.document import build_document
from dspark_hf.evaluation.methods import dflash_method, is_dflash, prompt_lookup_method, schedule_method
from dspark_hf.evaluation.profiling import PARTS, PYTHON, profile_methods
from dspark_hf.evaluation.records import RecordFile
from dspark_hf.evaluation.runner import answer, check_greedily, common_length, prompts_of, rotated, run_settings
from dspark_hf.scheduling import ThroughputCurve

GREEDY = BenchSettings(max_new_tokens=12, temperature=0.0)
TASKS = [
    Task("sums", "math", [Prompt(["1 + 1?"]), Prompt(["2 + 2?"])]),
    Task("talk", "chat", [Prompt(["Hi", "Why?"])]),
]


@pytest.fixture(scope="module")
def target():
    return tiny.bigram()


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_folders.tokenizer()


def bench(target, tokenizer, path, methods, settings=GREEDY, tasks=TASKS, on_progress=lambda progress: None):
    file = RecordFile(path, run_settings("tiny", tasks, settings, methods=[method.name for method in methods]))
    try:
        run_bench(target, tokenizer, methods, tasks, settings, file, on_progress)
    finally:
        file.close()
    return file


def test_methods_side_by_side(target, tokenizer, tmp_path):
    methods = [
        plain_method(),
        prompt_lookup_method(),
        dspark_method(tiny.perfect_drafter(target)),
        dspark_method(tiny.random_drafter(target), "random"),
    ]
    seen = []
    file = bench(target, tokenizer, tmp_path / "r.jsonl", methods, on_progress=seen.append)
    assert len(file.records) == 12 and len(file.checked) == 9 and not file.differences
    assert [p.done for p in seen] == list(range(1, 13)) and seen[-1].left_s == 0
    document = build_document(methods, TASKS, {}, file)
    assert json.loads(json.dumps(document)) == document
    found = {(r["group"], r["method"]): r for r in document["results"]}
    assert {group for group, _ in found} == {"sums", "talk", "all"}
    perfect = found["all", "dspark"]
    # 11 tokens after the first: rounds of 5, 5 and 1, as nothing is ever rejected.
    assert perfect["estimates"]["acceptance_length"]["value"] == pytest.approx(11 / 3)
    assert perfect["estimates"]["acceptance_rate"]["value"] == 1
    assert perfect["confidence"]["brier"] < 0.01
    assert found["all", "plain"]["estimates"]["acceptance_length"]["value"] == 1
    assert document["identity"]["random"] == {"checked": 3, "different": 0, "differences": []}


SAMPLED = BenchSettings(max_new_tokens=12, temperature=1.0)


def checked(target, tokenizer, path, method, num_prompts=2):
    """The file of a run that measures sampling, after its greedy check; and how many answers the check made."""
    methods, seen = [plain_method(), method], []
    file = RecordFile(path, run_settings("tiny", TASKS, SAMPLED))
    try:
        check_greedily(
            target, tokenizer, methods, TASKS, SAMPLED, file, num_prompts, lambda *progress: seen.append(progress)
        )
    finally:
        file.close()
    assert seen == [(done, num_prompts) for done in range(1, num_prompts + 1)]
    return file, build_document(methods, TASKS, {"temperature": 1.0}, file)


def test_greedy_answers_are_checked_where_sampling_is_measured(target, tokenizer, tmp_path):
    file, document = checked(target, tokenizer, tmp_path / "r.jsonl", dspark_method(tiny.random_drafter(target)))
    assert document["identity"]["dspark"] == {"checked": 2, "different": 0, "differences": []}
    assert document["identity_note"].startswith("2 prompts were also answered greedily, with at most 128 tokens")
    assert file.checked == {("sums", 0, "dspark"), ("talk", 0, "dspark")} and not file.records


def test_the_greedy_check_notices_a_wrong_answer(target, tokenizer, tmp_path, monkeypatch):
    genuine = runner.answer

    def wrong(target, tokenizer, method, *args):
        turns = genuine(target, tokenizer, method, *args)
        turns[0].output_ids[3] ^= method.name == "dspark"
        return turns

    monkeypatch.setattr(runner, "answer", wrong)
    method = dspark_method(tiny.perfect_drafter(target))
    _, document = checked(target, tokenizer, tmp_path / "r.jsonl", method)
    assert document["identity"]["dspark"]["different"] == 2
    assert [d["position"] for d in document["identity"]["dspark"]["differences"]] == [3, 3]


def test_a_resumed_run_checks_only_what_is_missing(target, tokenizer, tmp_path, monkeypatch):
    method = dspark_method(tiny.random_drafter(target))
    checked(target, tokenizer, tmp_path / "r.jsonl", method, num_prompts=1)
    asked, genuine = [], runner.answer
    monkeypatch.setattr(runner, "answer", lambda *args: (asked.append(args[2].name), genuine(*args))[1])
    file, _ = checked(target, tokenizer, tmp_path / "r.jsonl", method, num_prompts=2)
    assert asked == ["plain", "dspark"] and len(file.checked) == 2


def test_a_killed_run_goes_on_where_it_was(target, tokenizer, tmp_path):
    methods = [plain_method(), dspark_method(tiny.perfect_drafter(target))]

    def killed(progress):
        if progress.done == 3:
            raise KeyboardInterrupt

    path = tmp_path / "r.jsonl"
    with pytest.raises(KeyboardInterrupt):
        bench(target, tokenizer, path, methods, on_progress=killed)
    before = path.read_bytes()
    path.write_bytes(before + b'{"record": {"task"')
    seen = []
    file = bench(target, tokenizer, path, methods, on_progress=seen.append)
    assert path.read_bytes().startswith(before)
    assert [p.done for p in seen] == [4, 5, 6]
    assert len(file.records) == 6 and len(file.checked) == 3
    seen.clear()
    bench(target, tokenizer, path, methods, on_progress=seen.append)
    assert not seen


def wrong_processor(start):
    def processor(input_ids, scores):
        if input_ids.shape[1] == start:
            scores = scores.clone()
            scores[:, scores.argmax(-1)] = -1e9
        return scores

    return processor


def test_a_wrong_greedy_answer_is_counted_with_its_gap(target, tokenizer, tmp_path):
    tasks = [Task("sums", "math", [Prompt(["1 + 1?"])])]
    prompt_length = len(tokenizer("<user>1 + 1?<end><assistant>")["input_ids"])
    wrong = Method("wrong", {"logits_processor": [wrong_processor(prompt_length + 4)]})
    seen = []
    file = bench(target, tokenizer, tmp_path / "r.jsonl", [plain_method(), wrong], tasks=tasks, on_progress=seen.append)
    (difference,) = file.differences
    assert (difference.method, difference.turn, difference.position) == ("wrong", 0, 4)
    assert difference.gap > 1e-3
    assert seen[-1].difference == difference
    logits = tiny.transition_logits(target)
    before = file.records["sums", 0, "plain"].turns[0].output_ids[3]
    top = logits[before].topk(2).values
    assert difference.gap == pytest.approx(float(top[0] - top[1]), rel=1e-4)


def test_an_answer_that_ends_early_is_a_difference(target, tokenizer, tmp_path):
    tasks = [Task("sums", "math", [Prompt(["1 + 1?"])])]
    short = Method("short", {"max_new_tokens": 5})
    file = bench(target, tokenizer, tmp_path / "r.jsonl", [plain_method(), short], tasks=tasks)
    (difference,) = file.differences
    assert (difference.position, difference.got, difference.gap) == (5, None, None)


def test_sampled_answers_depend_on_seed_and_prompt_alone(target, tokenizer):
    def ids(seed, index):
        torch.manual_seed(123)
        turns = answer(target, tokenizer, plain_method(), Prompt(["Hi"]), BenchSettings(8, 1.0, seed), index)
        return turns[0].output_ids

    assert ids(0, 0) == ids(0, 0) != ids(0, 1)
    assert ids(0, 0) != ids(1, 0)


@pytest.mark.parametrize("temperature", [0.0, 1.0], ids=["greedy", "sampling"])
def test_the_second_turn_keeps_the_cache(target, tokenizer, temperature):
    fed = []
    hook = target.register_forward_pre_hook(
        lambda _, args, kwargs: fed.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    method = dspark_method(tiny.perfect_drafter(target))
    answer(target, tokenizer, method, Prompt(["Hi", "Why?"]), BenchSettings(7, temperature))
    hook.remove()
    prompt_length = len(tokenizer("<user>Hi<end><assistant>")["input_ids"])
    added = len(tokenizer("<end><user>Why?<end><assistant>")["input_ids"])
    # Each turn: the prompt's pass, then rounds. The second prompt's starts at the last token of the first answer.
    assert fed[0] == prompt_length
    assert added <= fed[len(fed) // 2] <= added + 1


def test_transformers_dflash_runs_the_same_drafter(target, tokenizer):
    for sample_from_anchor in (False, True):
        drafter = tiny.random_drafter(
            target, markov_rank=0, confidence_head_with_markov=False, sample_from_anchor=sample_from_anchor
        )
        prompt = Prompt(["Tell me."])
        ours, theirs, plain = (
            answer(target, tokenizer, method, prompt, replace(GREEDY, max_new_tokens=20))[0]
            for method in (dspark_method(drafter), dflash_method(drafter), plain_method())
        )
        assert ours.output_ids == theirs.output_ids == plain.output_ids
        assert len(ours.passes) == len(theirs.passes)


def test_dflash_is_for_plain_dflash_drafters(target):
    drafter = tiny.random_drafter(target)
    assert not is_dflash(drafter)
    with pytest.raises(ValueError, match="a sequential head"):
        dflash_method(drafter)


def test_schedules_by_name(target):
    drafter = tiny.random_drafter(target)
    assert schedule_method(drafter, "fixed:2").arguments["num_assistant_tokens"] == 2
    assert schedule_method(drafter, "threshold:0.5").arguments["assistant_confidence_threshold"] == 0.5
    curve = ThroughputCurve([1, 2], [1.0, 1.1])
    by_cost = schedule_method(drafter, "throughput", curve=curve).arguments
    assert by_cost["verify_scheduler"].curve is curve and by_cost["drafting_backoff"]
    assert schedule_method(drafter, "fixed").arguments["drafting_backoff"] is False
    with pytest.raises(ValueError, match="Unknown schedule"):
        schedule_method(drafter, "fixed:x")
    headless = tiny.random_drafter(target, enable_confidence_head=False)
    with pytest.raises(ValueError, match="confidence head"):
        schedule_method(headless, "threshold:0.5")


def test_each_method_takes_each_place():
    methods = [Method(name) for name in "abc"]
    orders = [[m.name for m in rotated(methods, i)] for i in range(6)]
    for place in range(3):
        assert sorted(order[place] for order in orders) == list("aabbcc")
    followers = [pair for order in orders for pair in itertools.pairwise(order)]
    assert all(followers.count((a, b)) == followers.count((b, a)) for a, b in itertools.combinations("abc", 2))


def test_tasks_take_turns():
    order = [(task.name, index) for task, index, _ in prompts_of(TASKS)]
    assert order == [("sums", 0), ("talk", 0), ("sums", 1)]


def test_two_methods_of_one_name_are_refused(target, tokenizer, tmp_path):
    with pytest.raises(ValueError, match="different names"):
        bench(target, tokenizer, tmp_path / "r.jsonl", [plain_method(), plain_method()])


def test_common_length():
    assert common_length([1, 2, 3], [1, 2, 4]) == 2
    assert common_length([1, 2], [1, 2, 4]) == 2


def test_a_profile_accounts_for_the_whole_round(target, tokenizer):
    method = dspark_method(tiny.perfect_drafter(target))
    profile = profile_methods(target, tokenizer, [plain_method(), method], TASKS, BenchSettings(20, 1.0))
    assert list(profile) == ["dspark"]
    parts = profile["dspark"]["parts"]
    assert set(parts) == set(PARTS)
    assert sum(part["share"] for part in parts.values()) == pytest.approx(1)
    for name in (
        "target pass",
        "backbone",
        "draft LM head",
        "sequential stage",
        "confidence",
        "acceptance",
        "cache handling",
    ):
        assert parts[name]["ms"] > 0, name
    assert parts[PYTHON]["share"] < 0.9
