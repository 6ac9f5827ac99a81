"""Ours against other loops over the same weights: transformers' DFlash generator, and the loop of the PyPI package `dflash`.

Every loop drafts with the same backbone, LM head and sequential head, so that tokens a pass agree and what differs is the
loop. The order of the loops rotates from prompt to prompt. Ends with one JSON line.

    python benchmarks/overhead.py --target TARGET --drafter DRAFTER --prompts prompts.jsonl
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationMixin, LogitsProcessor, LogitsProcessorList
from transformers.generation import DFlashTokenCandidateGenerator
from transformers.modeling_outputs import BaseModelOutput

import dspark_hf
from dspark_hf.conversations import Chat
from dspark_hf.evaluation import load_task
from dspark_hf.evaluation.environment import environment
from dspark_hf.evaluation.meter import measured
from dspark_hf.evaluation.methods import DFlashView

Loop = Callable[[torch.Tensor], torch.Tensor]


class DraftHead(nn.Module):
    """What turns slots into logits over the target's vocabulary, in place of the target's LM head."""

    def __init__(self, drafter: dspark_hf.DSparkDrafter):
        super().__init__()
        self.drafter = drafter
        self.weight = drafter.fc.weight  # Asked for its device only.

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """`[1, G, D]` -> `[1, G, V]`."""
        return over_full_vocabulary(self.drafter, self.drafter.base_logits(hidden_states, self.drafter.bind()))


class SequentialHead(LogitsProcessor):
    """Adds the transition bias of the slots, one call after the other."""

    def __init__(self, drafter: dspark_hf.DSparkDrafter):
        self.drafter = drafter

    def begin_block(self, hidden_states: torch.Tensor) -> None:
        """Starts a block of slots `[1, G, D]`."""
        self._hidden_states, self._state, self._slot = hidden_states, None, 0

    def __call__(self, input_ids: torch.LongTensor, scores: torch.Tensor) -> torch.Tensor:
        head, hidden_states = self.drafter.markov_head, self._hidden_states[:, self._slot]
        features, self._state = head.step(input_ids[:, -1], hidden_states, self._state)
        self._slot += 1
        return scores + over_full_vocabulary(self.drafter, head.markov_w2(features), fill=0.0)


class View(DFlashView):
    """A drafter as transformers' generator sees one, with its sequential head told of each block."""

    def __init__(self, drafter: dspark_hf.DSparkDrafter):
        super().__init__(drafter, heads_elsewhere=True)
        self.head = SequentialHead(drafter) if drafter.markov_head is not None else None

    def forward(self, *args, **kwargs) -> BaseModelOutput:
        output = super().forward(*args, **kwargs)
        if self.head is not None:
            self.head.begin_block(output.last_hidden_state[:, 1:])
        return output


def transformers_loop(target, drafter, settings: dict) -> Loop:
    """`generate` with transformers' own DFlash generator, whose logits come from the drafter's heads."""
    view, original = View(drafter), GenerationMixin._get_candidate_generator

    def get_candidate_generator(self, *args, **kwargs):
        if kwargs.get("assistant_model") is not view:
            return original(self, *args, **kwargs)
        heads = [] if view.head is None else [view.head]
        return DFlashTokenCandidateGenerator(
            assistant_model=view,
            main_model_input_embeddings=target.get_input_embeddings(),
            main_model_output_embeddings=DraftHead(drafter),
            generation_config=kwargs["generation_config"],
            logits_processor=LogitsProcessorList([*heads, *kwargs["logits_processor"]]),
        )

    GenerationMixin._get_candidate_generator = get_candidate_generator
    return lambda ids: generate(target, ids, settings, assistant_model=view, speculation_type="dflash")


def dflash_package_loop(target, drafter, settings: dict, eos_ids: list[int] | None) -> Loop:
    """
    The loop of the package `dflash`.

    Raises:
        ImportError: when it is not installed.
    """
    from dflash.model import DFlash2DraftModel, _sampling_probs, dflash_generate

    view = View(drafter)
    cut = {"top_p": settings.get("top_p", 1.0), "top_k": settings.get("top_k", 0)}
    draft_head = DraftHead(drafter)

    class PackageView(DFlash2DraftModel):
        """A drafter as that package sees one. Its own constructor is left out: it would build layers."""

        block_size = view.config.block_size
        mask_token_id = view.config.mask_token_id
        target_layer_ids = list(drafter.config.target_layer_ids)

        def __init__(self):
            nn.Module.__init__(self)
            self.config = view.config

        def forward(self, target_hidden, noise_embedding, position_ids, past_key_values, use_cache=True):
            output = view(noise_embedding, target_hidden, position_ids, cache=past_key_values)
            return output.last_hidden_state

        def propose(self, hidden, anchor_ids, output_head, temperature):
            """Draws left to right: ids `[1, G]`, nothing, and the distributions they were drawn from `[1, G, V]`."""
            scores, ids, probs = draft_head(hidden), [anchor_ids[:, None]], []
            for slot in range(scores.shape[1]):
                now = scores[:, slot]
                if view.head is not None:
                    now = view.head(ids[-1], now)
                if temperature > 0:
                    probs.append(_sampling_probs(now, temperature, **cut))
                    ids.append(torch.multinomial(probs[-1], 1))
                else:
                    ids.append(now.argmax(-1, keepdim=True))
            return torch.cat(ids[1:], dim=1), None, torch.stack(probs, dim=1) if probs else None

    model = PackageView()

    def loop(ids: torch.Tensor, generate=dflash_generate) -> torch.Tensor:
        return generate(
            model,
            target,
            ids,
            settings["max_new_tokens"],
            eos_ids,
            temperature=settings.get("temperature", 1.0) if settings["do_sample"] else 0.0,
            **cut,
        )

    # It runs in inference mode, which hides operations inside others from whoever counts them.
    loop.outside_inference_mode = functools.partial(loop, generate=dflash_generate.__wrapped__)
    return loop


def generate(target, ids: torch.Tensor, settings: dict, **kwargs) -> torch.Tensor:
    return target.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **settings, **kwargs)


def over_full_vocabulary(drafter, scores: torch.Tensor, fill: float = float("-inf")) -> torch.Tensor:
    """Scores of the draft vocabulary `[..., V_draft]` among all tokens `[..., V]`."""
    if drafter.draft_token_ids is None:
        return scores
    full = scores.new_full((*scores.shape[:-1], drafter.config.vocab_size), fill)
    return full.index_copy_(-1, drafter.draft_token_ids, scores)


def loops_of(target, tokenizer, drafter, settings: dict) -> tuple[dict[str, Loop], dict[str, str]]:
    """The loops that run here by name, and why others do not."""
    # The other loops verify whole blocks; "as saved" is with the threshold that came with the drafter, and back-off.
    whole_blocks = {"drafting_backoff": False, "assistant_confidence_threshold": 0.0}
    loops: dict[str, Loop] = {
        "plain": lambda ids: generate(target, ids, settings),
        "dspark-hf": lambda ids: generate(target, ids, settings, assistant_model=drafter, **whole_blocks),
        "dspark-hf as saved": lambda ids: generate(target, ids, settings, assistant_model=drafter),
    }
    missing = {}
    others = {
        "transformers DFlash": lambda: transformers_loop(target, drafter, settings),
        "dflash (PyPI)": lambda: dflash_package_loop(
            target, drafter, settings, None if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
        ),
    }
    probe = torch.tensor([tokenizer("One, two, three.")["input_ids"]], device=target.device)
    for name, make in others.items():
        try:
            loops[name] = make()
            loops[name](probe)
        except Exception as error:  # Whatever another package raises here is its answer.
            loops.pop(name, None)
            missing[name] = f"{type(error).__name__}: {str(error)[:200]}"
    return loops, missing


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True)
    parser.add_argument("--drafter", required=True)
    parser.add_argument("--prompts", required=True, help="a task by name or a JSONL file")
    parser.add_argument("--max-prompts", type=int, default=8)
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)

    # 1. The models, and the loops that run here.
    target = AutoModelForCausalLM.from_pretrained(arguments.target, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(arguments.target)
    drafter = dspark_hf.DSparkDrafter.from_pretrained(arguments.drafter, dtype=torch.float32).eval()
    drafter.bind(target)
    sampling = {"do_sample": arguments.temperature > 0}
    if sampling["do_sample"]:
        sampling |= {"temperature": arguments.temperature, "top_k": 0, "top_p": 1.0}
    settings = {"max_new_tokens": arguments.max_new_tokens} | sampling
    loops, missing = loops_of(target, tokenizer, drafter, settings)
    for name, reason in missing.items():
        print(f"{name} does not run here: {reason}", file=sys.stderr)

    # 2. Every prompt through every loop, in rotating order.
    prompts = load_task(arguments.prompts, arguments.max_prompts).prompts
    ms_a_round: dict[str, list[float]] = {name: [] for name in loops}
    speeds: dict[str, list[float]] = {name: [] for name in loops}
    tokens_a_pass: dict[str, list[float]] = {name: [] for name in loops}
    same = dict.fromkeys(loops, 0)
    for index, prompt in enumerate(prompts):
        ids = Chat(tokenizer).ask(prompt.turns[0]).to(target.device)
        names = list(loops)[index % len(loops) :] + list(loops)[: index % len(loops)]
        outputs = {}
        for name in names:
            torch.manual_seed(index)
            with torch.no_grad(), measured(target) as meter:
                output = loops[name](ids)
            outputs[name] = output[0, ids.shape[1] :].tolist()
            decode_s = meter.seconds - meter.prefill_s
            speeds[name].append((len(outputs[name]) - 1) / decode_s)
            ms_a_round[name].append(1e3 * decode_s / max(len(meter.passes), 1))
            tokens_a_pass[name].append((len(outputs[name]) - 1) / max(len(meter.passes), 1))
        for name in names:
            length = min(len(outputs[name]), len(outputs["plain"]))
            same[name] += outputs[name][:length] == outputs["plain"][:length]

    # 3. Medians, and ratios to ours prompt by prompt.
    results = {
        name: {
            "tokens_per_second": statistics.median(speeds[name]),
            "ms_a_pass": statistics.median(ms_a_round[name]),
            "tokens_a_pass": statistics.mean(tokens_a_pass[name]),
            "ours_is_faster_by": statistics.median(
                o / t for o, t in zip(speeds["dspark-hf"], speeds[name], strict=True)
            ),
            "same_as_plain": f"{same[name]}/{len(prompts)}",
        }
        for name in loops
    }
    for name, result in results.items():
        print(
            f"{name:20} " + ", ".join(f"{k} {v:.2f}" if isinstance(v, float) else f"{k} {v}" for k, v in result.items())
        )
    print(
        json.dumps(
            {
                "benchmark": "overhead",
                "settings": settings | {"target": Path(arguments.target).name, "drafter": Path(arguments.drafter).name},
                "results": results,
                "do_not_run": missing,
                "environment": environment(),
                "finished": time.strftime("%Y-%m-%dT%H:%M:%S"),
            }
        )
    )


if __name__ == "__main__":
    main()
