"""Makes a drafter's confidence mean what it says, and measures what a target pass costs on this machine.

    python examples/calibrate.py --output runs/calibrated

Both are what a throughput scheduler weighs: `calibrated/` is the drafter with its temperatures, `curve.json` the costs.
"""

import argparse
from pathlib import Path

from smollm2 import ensure_target
from transformers import AutoModelForCausalLM, AutoTokenizer

from dspark_hf import DSparkDrafter, record_speculation
from dspark_hf.conversations import Chat
from dspark_hf.scheduling import ConfidenceRounds, ThroughputCurve, ThroughputScheduler, fit_temperatures

SUBJECTS = ("the moon", "bread", "rivers", "chess", "bees", "glass", "maps", "trains")
QUESTIONS = ("Explain {} in simple words.", "Write a short story about {}.", "List five facts about {}.")

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--output", type=Path, required=True, help="new folder")
parser.add_argument("--target", help="folder or Hub name; SmolLM2-135M-Instruct out of a PyPI wheel by default")
parser.add_argument("--drafter", default=Path(__file__).parent / "quickstart_drafter", help="folder or Hub name")
parser.add_argument("--max-prompts", type=int, help="of the built-in questions")
parser.add_argument("--max-new-tokens", type=int, default=128)
args = parser.parse_args()

name = args.target or ensure_target()
target = AutoModelForCausalLM.from_pretrained(name, dtype="auto")
drafter = DSparkDrafter.from_pretrained(args.drafter, dtype=target.dtype)
tokenizer = AutoTokenizer.from_pretrained(name)
prompts = [question.format(subject) for subject in SUBJECTS for question in QUESTIONS][: args.max_prompts]

# 1. Rounds that verify every draft, so that the outcome of each slot is known as often as can be.
with record_speculation() as stats:
    for prompt in prompts:
        ids = Chat(tokenizer).ask(prompt)
        target.generate(
            ids,
            assistant_model=drafter,
            assistant_confidence_threshold=0.0,
            drafting_backoff=False,
            max_new_tokens=args.max_new_tokens,
        )

# 2. Sequential Temperature Scaling; slots seen too rarely keep their temperature of 1, and the table says so.
rounds = ConfidenceRounds.from_records(
    stats.rounds, drafter.config.num_draft_tokens, drafter.config.confidence_temperatures
)
calibration = fit_temperatures(rounds)
print(calibration)
drafter.config.confidence_temperatures = calibration.temperatures
drafter.save_pretrained(args.output / "calibrated")

# 3. Seconds of a pass over each number of tokens; the scheduler verifies the drafts that are worth theirs.
curve = ThroughputCurve.measure(target, range(1, drafter.config.num_draft_tokens + 2))
curve.save(args.output / "curve.json")
with record_speculation() as stats:
    ids = Chat(tokenizer).ask(prompts[0])
    target.generate(
        ids,
        assistant_model=drafter,
        verify_scheduler=ThroughputScheduler(curve),
        max_new_tokens=args.max_new_tokens,
    )
print(f"\nWith the scheduler: {stats.acceptance_length:.2f} tokens a pass, {stats.acceptance_rate:.0%} accepted")
