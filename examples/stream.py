"""A conversation of two turns, streamed, with drafted tokens tinted and the cache kept between the turns.

Usage:
    python examples/stream.py
    python examples/stream.py "Tell me about whales." "How large do they get?"
"""

import argparse
from pathlib import Path

from smollm2 import ensure_target
from transformers import AutoModelForCausalLM, AutoTokenizer

from dspark_hf import DSparkDrafter
from dspark_hf.conversations import Chat
from dspark_hf.generation import DraftTintStreamer
from dspark_hf.transformers_names import CACHE_KEY  # "cache", or "past_key_values" in older transformers

TURNS = ["Name a famous mathematician and a result of theirs.", "When did they live?"]

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("turns", nargs="*", default=TURNS)
parser.add_argument("--target", help="folder or Hub name; SmolLM2-135M-Instruct out of a PyPI wheel by default")
parser.add_argument("--drafter", default=Path(__file__).parent / "quickstart_drafter", help="folder or Hub name")
parser.add_argument("--max-new-tokens", type=int, default=96)
args = parser.parse_args()

name = args.target or ensure_target()
target = AutoModelForCausalLM.from_pretrained(name, dtype="auto")
drafter = DSparkDrafter.from_pretrained(args.drafter, dtype=target.dtype)
tokenizer = AutoTokenizer.from_pretrained(name)

chat, cache = Chat(tokenizer), None
for turn in args.turns:
    print(f"> {turn}")
    output = target.generate(
        input_ids=chat.ask(turn),
        **{CACHE_KEY: cache},
        assistant_model=drafter,
        streamer=DraftTintStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True),
        do_sample=False,
        max_new_tokens=args.max_new_tokens,
        return_dict_in_generate=True,
    )
    # The next prompt continues exactly these ids, so what the cache holds of them stays valid.
    chat.add_answer(output.sequences[0])
    cache = output[CACHE_KEY]
