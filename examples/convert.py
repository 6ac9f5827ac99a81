"""Says what a drafter's files are, writes them for other software, and reads them back.

Usage:
    python examples/convert.py --output runs/converted
    python examples/convert.py z-lab/Qwen3-8B-DFlash-b16 --format speculators --output runs/converted
"""

import argparse
from pathlib import Path

from smollm2 import ensure_target
from transformers import AutoModelForCausalLM

from dspark_hf import DSparkDrafter
from dspark_hf.checkpoints import EXPORT_FORMATS, export, inspect_checkpoint

QUICKSTART = Path(__file__).parent / "quickstart_drafter"

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("drafter", nargs="?", default=QUICKSTART, help="folder or Hub name")
parser.add_argument("--target", help="its target, whose name, embedding or LM head some files hold")
parser.add_argument("--output", type=Path, required=True, help="new folder; each format gets one of its own in it")
parser.add_argument("--format", choices=EXPORT_FORMATS, action="append", help="may be repeated; vllm-sglang by default")
args = parser.parse_args()

print(inspect_checkpoint(args.drafter))
drafter = DSparkDrafter.from_pretrained(args.drafter)
if args.target or args.drafter == QUICKSTART:
    target = AutoModelForCausalLM.from_pretrained(args.target or ensure_target(), dtype=drafter.dtype)
    drafter.bind(target)
if args.target:
    drafter.config.target_name_or_path = args.target  # Some formats name it.
for format in args.format or ["vllm-sglang"]:
    print()
    print(export(drafter, args.output / format, format))  # Checked, and with the command that serves it.
    again = DSparkDrafter.from_pretrained(args.output / format)
    print(f"read back: {again.num_parameters():,} parameters, {again.config.num_draft_tokens} drafts a round")
