"""Writes `docs/drafters.md` from `docs/results/drafters.csv`, a row for each public drafter.

    python docs/drafters.py

`packaging` names a tiny replica in `tests/replicas.py`, which `tests/checkpoints/test_replicas.py` reads, drafts with and saves,
or sees refused. `state` is one of STATES; `before` says which could be used in version 0.1.0.
"""

import csv
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
TABLE, PAGE = ROOT / "docs" / "results" / "drafters.csv", ROOT / "docs" / "drafters.md"

STATES = {
    "usable": "usable",
    "pickle": "usable once converted",
    "no target": "loads; its target is missing",
    "refused": "refused",
}

INTRODUCTION = """# Supported drafters

<!-- Written by docs/drafters.py from docs/results/drafters.csv. -->

Of the {total} public drafters listed here, **{usable} can be used** ({before} in version 0.1.0). {pickle} more are pickle files,
which are not opened: the error gives a command of one line that converts them. {missing} load, but transformers has no class for
their target. {refused} are refused, in a sentence that says what they are.

The list is of autumn 2026. Configurations and tensor names are those of the repositories; the files themselves were not all
downloaded. Instead there is a tiny replica of each packaging, with its real fields and tensor names, that a test reads, drafts
with (greedy output is that of plain `generate`) and saves again, or sees refused. The last column names it.
[Formats](formats.md) describes the packagings, [Supported targets](targets.md) the targets.

`dspark-hf inspect NAME` tells what any drafter is and whether it is read, from the headers of its files, without downloading the
weights. Load one with its kind's class, or with `Drafter` where the kind is not known:

```python
import dspark_hf

name = "deepseek-ai/dflash_qwen3_4b_block7"
drafter = dspark_hf.Drafter.from_pretrained(name)
print(type(drafter).__name__)
print(drafter.config.num_draft_tokens, "drafts per round")
```

**EAGLE-3 files that do not name their layers** (of SpecForge, AngelSlim, and of speculators in 2025): vLLM and SGLang take what
enters layers 2, N // 2 and N - 3 of a target with N layers, and so does dspark-hf. The layers are known once the drafter is bound
to its target, and saved with it from then on. `dspark-hf inspect DRAFTER --target MODEL` drafts from these and from neighbouring
layers and says which fit.

For SmolLM2-135M-Instruct there is `examples/quickstart_drafter` in this repository.
"""

METHODS = {name: name for name in ("DSpark", "DFlash", "DFlash2", "EAGLE-3")} | {"DFly": "Others", "P-EAGLE": "Others"}


def rows():
    with TABLE.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def page():
    """The whole page."""
    listed = rows()
    count = Counter(row["state"] for row in listed)
    text = INTRODUCTION.format(
        total=len(listed),
        usable=count["usable"],
        before=sum(row["before"] == "usable" for row in listed),
        pickle=count["pickle"],
        missing=count["no target"],
        refused=count["refused"],
    )
    for heading in dict.fromkeys(METHODS.values()):
        text += f"\n## {heading}\n\n| Drafter | Target | State | Replica |\n| --- | --- | --- | --- |\n"
        for row in listed:
            if METHODS[row["method"]] == heading:
                state = STATES[row["state"]] + (f": {row['note']}" if row["note"] and row["state"] != "pickle" else "")
                text += f"| {row['drafter']} | {row['target']} | {state} | {row['packaging']} |\n"
    return text


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
