"""Writes `docs/targets.md` from `docs/results/targets.json`, which `benchmarks/families.py` measures.

python docs/targets.py
"""

import json
import textwrap
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
RESULTS, PAGE = ROOT / "docs" / "results" / "targets.json", ROOT / "docs" / "targets.md"

# Outcomes, the best first, as the page calls them. What follows a colon is the reason.
WORDS = {
    "equal": "equal",
    "refused": "refused",
    "plain generate fails": "plain fails",
    "untested": "untested",
    "crashed": "**crashes**",
    "wrong": "**wrong**",
}
HEADINGS = {"causal": "Causal language models", "image-text": "Image-text models"}
COLUMNS = ("one row", "several rows", "static cache", "second turn", "image", "rows with images")
LONGEST_REASON = 220  # Characters.
# What all refusals end with.
ENDINGS = (" Generate without assistant_model=.", " Generate for each row alone.")

INTRODUCTION = """# Supported targets

<!-- Written by docs/targets.py from docs/results/targets.json. -->

A target is any decoder-only model of transformers that

- has an LM head and an embedding (`AutoModelForCausalLM`, and the image-text classes that work with `generate`),
- returns its hidden states, and
- has a cache that can be rolled back. Keys and values of full or sliding attention, and convolution states, are cropped;
  [recurrent states](recurrent_state.md) are copied.

No code here is written for a single family. Instead, a model is asked what it does: whether its layers mask what its
configuration says, whether several tokens in one pass get the logits that each gets alone, whether rows of different lengths can
share a pass. What cannot be exact is refused with a [message](limits.md#targets). A target that gives other tokens than plain
`generate` is a fault: please report it.

## Tested

`benchmarks/families.py` builds a tiny random model of every class in transformers' causal and image-text mappings and decodes
{tokens} tokens greedily in float32, once with a drafter that is nearly always wrong, and once with one that is right about two
times in three. A sample of the classes is part of the tests that run with every change.

- **equal**: the tokens are those of plain `generate`. Several rows are three left-padded prompts of different lengths; a second
  turn continues from the cache of the first; an image is one whose pixels change the answer.
- **refused**: with a `ValueError` that says why. The reason is in the last column.
- **plain fails**: the tiny model does not generate this way without a drafter either.
- **untested**: there is no tiny model or no image for the class yet.

A class may belong to several families; it counts once, with the worst of what happened with one row and with several. HRM is
tested in float64: its loops amplify rounding so much that in float32 its output depends on how many tokens a pass has.

"""

HOWEVER_LOADED = """
## However it is loaded

Each of these is part of the test suite, with transformers 5.17 and 5.24, with Qwen3 and, where it says so, a target with recurrent state (Qwen3.5). [Quantized targets](quantized.md#as-loaded) have a table of their own.

| Target | With a drafter |
| --- | --- |
| Offloaded: `cpu_offload`, `disk_offload`, `device_map` with `"disk"`; recurrent state too | exact |
| Compiled: `torch.compile(model)`, `model.compile()`, its `forward`, its layers; recurrent state too | exact |
| `cache_implementation=` `"static"`, `"sliding_window"`, `"hybrid"`, `"dynamic"`, with and without `prefill_chunk_size`; recurrent state too | exact, where the version of transformers can crop them |
| `cache_implementation="quantized"` | refused |
| bfloat16 and float16, with a drafter of any of the three dtypes; recurrent state too | runs; greedy output is subject to [rounding](losslessness.md#rounding) |
| Training mode without dropout, gradient checkpointing on; recurrent state too | exact; refused where transformers then leaves out the cache |
| Training mode with dropout | refused |
| LoRA, also on embedding or LM head, several adapters, `disable_adapter()`, `merge_adapter()`, `adapter_names=` for one row; recurrent state too | exact |
| `modules_to_save`, `trainable_token_indices`, prefix tuning | exact |
| `adapter_names=` for several rows, activated LoRA (aLoRA), prompt tuning, P-tuning | refused |
| `pipeline(..., assistant_model=drafter)` | exact |

Offloaded caches (`"offloaded"`, `"offloaded_static"`) need a GPU in plain `generate` as well.
"""  # noqa: E501

OWN_TARGET = """
## With your own target

`DSparkConfig.for_target(target.config)` gives the configuration of a drafter for any supported target;
[Training](training.md) has the rest. To see whether a target works before you train anything, use an untrained drafter, whose
drafts are all wrong: the output must be that of plain `generate`.

```python
import torch
from dspark_hf import DSparkConfig, DSparkDrafter
from transformers import AutoModelForCausalLM, AutoTokenizer

target = AutoModelForCausalLM.from_pretrained(
    "maker/target", dtype=torch.float32
)
tokenizer = AutoTokenizer.from_pretrained("maker/target")
config = DSparkConfig.for_target(
    target.config, tokenizer=tokenizer, num_hidden_layers=1
)
drafter = DSparkDrafter(config)
inputs = tokenizer("The capital of France is", return_tensors="pt")
plain = target.generate(**inputs, do_sample=False, max_new_tokens=32)
drafted = target.generate(
    **inputs, assistant_model=drafter, do_sample=False, max_new_tokens=32
)
assert torch.equal(plain, drafted)
```
"""

NEW_TOKENS = 24  # As in `tests/family_outcomes.py`.


def results():
    """By version of transformers (newest first), mapping and family: the class, and the outcome by column."""
    found = json.loads(RESULTS.read_text(encoding="utf-8"))
    return dict(sorted(found.items(), key=lambda item: [int(part) for part in item[0].split(".")], reverse=True))


def word(outcome):
    """The outcome without its reason."""
    return outcome.split(":")[0]


def counts(families):
    """How many classes have which outcome, the worse of one row and several rows."""
    worst = {}
    for columns in families.values():
        found = {word(columns[name]) for name in ("one row", "several rows", "model") if name in columns}
        worst[columns["class"]] = max(found | {worst.get(columns["class"], "equal")}, key=list(WORDS).index)
    return Counter(worst.values())


def page():
    """The whole page."""
    versions = results()
    newest, *older = versions
    text = INTRODUCTION.format(tokens=NEW_TOKENS) + counted(versions)
    for mapping, heading in HEADINGS.items():
        text += f"\n## {heading}\n\n" + table(mapping, newest, versions[newest][mapping], older, versions)
    return text + HOWEVER_LOADED + OWN_TARGET


def counted(versions):
    """A row of counts for each mapping and version."""
    text = f"| Classes | transformers | Total | {' | '.join(WORDS.values())} |\n| --- | --- |{' ---: |' * (1 + len(WORDS))}\n"
    for mapping, heading in HEADINGS.items():
        for version, mappings in versions.items():
            count = counts(mappings[mapping])
            numbers = " | ".join(str(count[outcome]) for outcome in WORDS)
            text += f"| {heading} | {version} | {count.total()} | {numbers} |\n"
    return text


def table(mapping, newest, families, older, versions):
    """A row for each family, with what is different in older versions."""
    names = [name for name in COLUMNS if mapping == "image-text" or "image" not in name]
    head = ["Family", *(name.capitalize() for name in names), *(f"In {version}" for version in older), "Why not"]
    text = f"With transformers {newest}:\n\n| {' | '.join(head)} |\n|{' --- |' * len(head)}\n"
    for family, columns in families.items():
        cells = [WORDS[word(outcome_of(columns, name))] for name in names]
        cells += [difference(columns, versions[version][mapping].get(family), names) for version in older]
        text += f"| `{family}` | {' | '.join(cells)} | {reasons(columns, names)} |\n"
    return text


def outcome_of(columns, name):
    """A family's outcome in one column. Where plain `generate` fails with one row, it fails with several too."""
    return columns.get(
        name, columns.get("model", "untested" if "image" in name else columns.get("one row", "untested"))
    )


def difference(columns, before, names):
    """What an older version does differently."""
    if before is None:
        return "not in it"
    found = {name: WORDS[word(outcome_of(before, name))] for name in names}
    other = {name: now for name, now in found.items() if now != WORDS[word(outcome_of(columns, name))]}
    if not other:
        return "the same"
    if len(set(found.values())) == 1:
        return found[names[0]]
    return ", ".join(f"{name} {now}" for name, now in other.items())


def reasons(columns, names):
    """Why columns are not equal, each reason once, with the columns that it is for."""
    by_reason = {}
    for name in ("model", *names):
        if ": " in (outcome := columns.get(name, "")):
            by_reason.setdefault(plainly(outcome.split(": ", 1)[1]), []).append(name)
    failing = sum(word(outcome_of(columns, name)) != "equal" for name in names)
    parts = []
    for reason, where in by_reason.items():
        is_of_all = where == ["model"] or len(where) == failing
        parts.append(reason if is_of_all else f"{', '.join(where)}: {reason}")
    return " ".join(parts)


def plainly(reason):
    """A message as a cell of a table."""
    for ending in ENDINGS:
        reason = reason.removesuffix(ending)
    reason = textwrap.shorten(reason, LONGEST_REASON, placeholder=" …")
    reason = reason.replace("|", "\\|").replace("<", "&lt;").replace("`", "'").replace("*", "\\*").strip().rstrip(".")
    return reason if reason.endswith("…") else f"{reason}."


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
