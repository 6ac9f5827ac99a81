"""What happens when a tiny target of every family of transformers decodes with a drafter.

    python benchmarks/families.py            # every class that has no result in docs/results/targets.json yet
    python benchmarks/families.py --again    # every class, for the installed version of transformers
    python docs/targets.py                   # then writes docs/targets.md

Each result is written at once, so an interrupted run resumes. Classes that a newer transformers brings are untested until this
has run. The families run one after the other in another process, which is replaced when one of them ends it or takes too long.
Ends with one line of JSON. Some families need the packages timm and torchvision.
"""

import argparse
import json
import multiprocessing
import sys
from pathlib import Path

import transformers
from tqdm import tqdm

from dspark_hf.storage.atomic import write_text

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "docs")]
import family_outcomes  # noqa: E402
import target_families  # noqa: E402
import targets  # noqa: E402

RESULTS = ROOT / "docs" / "results" / "targets.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", help="model types; all of both mappings by default")
    parser.add_argument("--again", action="store_true", help="also those that have a result")
    parser.add_argument("--timeout", type=float, default=240, help="seconds for one family")
    parser.add_argument("--output", type=Path, default=RESULTS)
    arguments = parser.parse_args()

    results = json.loads(arguments.output.read_text()) if arguments.output.exists() else {}
    of_version = with_every_class(results.get(transformers.__version__, {}))
    results[transformers.__version__] = of_version
    chosen = [
        (mapping, family)
        for mapping, families in of_version.items()
        for family, columns in families.items()
        if (not arguments.families or family in arguments.families)
        and (arguments.again or arguments.families or columns.get("model") == family_outcomes.UNTESTED)
    ]
    context = multiprocessing.get_context("spawn")
    pool = context.Pool(1)
    for mapping, family in tqdm(chosen, unit="family"):
        try:
            found = pool.apply_async(family_outcomes.outcomes, (mapping, family)).get(arguments.timeout)
        except multiprocessing.TimeoutError:  # Also when the process has ended.
            found = {"model": f"{family_outcomes.UNTESTED}: no answer within {arguments.timeout:.0f} seconds"}
            pool.terminate()
            pool = context.Pool(1)
        of_version[mapping][family] = {"class": target_families.class_of(mapping, family), **found}
        write_text(arguments.output, json.dumps(results, indent=1) + "\n")
    pool.terminate()
    counts = {mapping: targets.counts(families) for mapping, families in of_version.items()}
    print(json.dumps({"transformers": transformers.__version__, **counts}))


def with_every_class(of_version: dict) -> dict:
    """The results of one version of transformers, by mapping and family, with an entry for each class that has none."""
    return {
        mapping: {
            family: of_version.get(mapping, {}).get(
                family, {"class": target_families.class_of(mapping, family), "model": family_outcomes.UNTESTED}
            )
            for family in sorted(families)
        }
        for mapping, families in target_families.MAPPINGS.items()
    }


if __name__ == "__main__":
    main()
