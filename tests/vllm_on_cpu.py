"""
vLLM in this process, on a CPU, with every block that it drafts recorded.

Needs `TRITON_INTERPRET=1` from the start of the process, as `make engine` sets it: Triton has no compiler for CPUs, but its
interpreter runs the same kernels, slowly. As a program it is vLLM's server: `python tests/vllm_on_cpu.py --model TARGET ...`.
"""

# ruff: noqa: E402 -- settings come before the imports that read them
from __future__ import annotations

import gc
import os
import runpy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # The engine's objects are looked at.
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_USE_V2_MODEL_RUNNER": "1",  # The runner that knows DSpark.
}

import torch
import triton.backends
import triton.runtime.driver
from triton.backends.compiler import GPUTarget


class CpuDriver:
    """What Triton asks of a device. vLLM's second runner refuses to start on a device that Triton does not know."""

    @staticmethod
    def is_active() -> bool:
        return True

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cpu", 0, 0)

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_device_interface(self) -> Any:
        return torch.cpu

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: Any) -> int:
        return 0


triton.backends.backends["cpu"] = triton.backends.Backend(triton.backends.backends["nvidia"].compiler, CpuDriver)
triton.runtime.driver.set_active(CpuDriver())

import vllm
from vllm import LLM, SamplingParams, _custom_ops
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.model_executor.models.gemma4_dspark import Gemma4DSparkForCausalLM
from vllm.model_executor.models.qwen3_dflash import DFlashQwen3Model
from vllm.v1.worker.gpu.spec_decode.dflash.speculator import DFlashSpeculator
from vllm.v1.worker.gpu.spec_decode.dspark.speculator import DSparkSpeculator

VERSION = vllm.__version__.partition("+")[0]


def normalize_context_k(self: Any, keys: torch.Tensor) -> torch.Tensor:
    """
    The norm of the context's keys, layer by layer. vLLM gives all layers' weights to one call, which its CPU kernel reads as
    those of the first layer.
    """
    normed = torch.empty_like(keys)
    for layer, (out, given) in enumerate(zip(normed, keys, strict=True)):
        _custom_ops.rms_norm(out, given.contiguous(), self._k_norm_weights[layer], self._rms_norm_eps)
    return normed


DFlashQwen3Model._normalize_context_k = normalize_context_k


_gemma4_init = Gemma4DSparkForCausalLM.__init__


def gemma4_init(self: Any, *, vllm_config: Any, prefix: str = "") -> None:
    """
    Names the layers of a Gemma 4 drafter. vLLM gives them the names of a text-only target's and refuses the second of a name;
    published Gemma 4 targets take images too, so the names of their layers are longer.
    """
    _gemma4_init(self, vllm_config=vllm_config, prefix=prefix or "drafter")


Gemma4DSparkForCausalLM.__init__ = gemma4_init


class Block(NamedTuple):
    """
    Args:
        position: Index of the anchor in prompt and output.
        anchor: The token there.
        drafts: The drafted tokens.
        confidence: Probability of each draft; `None` where the drafter predicts none.
    """

    position: int
    anchor: int
    drafts: list[int]
    confidence: list[float] | None


class Answer(NamedTuple):
    """
    Args:
        prompt, output: Token ids.
        blocks: What was drafted, if this request ran alone.
    """

    prompt: list[int]
    output: list[int]
    blocks: list[Block]


class Engine:
    """A target that vLLM serves with a drafter; use `served`."""

    def __init__(self, llm: LLM, blocks: list[Block]):
        self.llm, self._blocks = llm, blocks

    def answer(
        self, prompts: list[list[int]], max_tokens: int, together: bool = False, **sampling: Any
    ) -> list[Answer]:
        """Continues prompts, one after the other unless `together`; greedily by default."""
        parameters = SamplingParams(
            **{"temperature": 0.0} | sampling, max_tokens=max_tokens, detokenize=False, ignore_eos=True
        )
        answers = []
        for group in [prompts] if together else [[prompt] for prompt in prompts]:
            self._blocks.clear()
            outputs = self.llm.generate([{"prompt_token_ids": p} for p in group], parameters, use_tqdm=False)
            for prompt, found in zip(group, outputs, strict=True):
                answers.append(Answer(prompt, list(found.outputs[0].token_ids), list(self._blocks)))
        return answers

    def accepted(self) -> tuple[int, int]:
        """Rounds so far, and drafts that were accepted in them."""
        found = {metric.name: getattr(metric, "value", 0) for metric in self.llm.get_metrics()}
        return found["vllm:spec_decode_num_drafts"], found["vllm:spec_decode_num_accepted_tokens"]


@contextmanager
def served(
    target: Any, drafter: Any, method: dict[str, Any], dtype: str = "float32", rows: int = 1, max_model_len: int = 256
) -> Iterator[Engine]:
    """
    A target with its drafter.

    Args:
        target, drafter: Folders.
        method: vLLM's `speculative_config`, without the drafter's folder.
        dtype: Of both.
        rows: Requests that decode together.
        max_model_len: Tokens of prompt and output.
    """
    blocks: list[Block] = []
    with recorded(blocks):
        llm = LLM(
            model=str(target),
            dtype=dtype,
            enforce_eager=True,
            max_model_len=max_model_len,
            max_num_seqs=rows,
            max_num_batched_tokens=1024,
            skip_tokenizer_init=True,
            disable_log_stats=False,
            enable_prefix_caching=False,
            speculative_config={"model": str(drafter), **method},
        )
        try:
            yield Engine(llm, blocks)
        finally:
            del llm
            cleanup_dist_env_and_memory()
            gc.collect()


@contextmanager
def recorded(blocks: list[Block]) -> Iterator[None]:
    """Records what the speculators draft for a single request."""
    dspark, dflash = DSparkSpeculator._sample_sequential, DFlashSpeculator._generate_draft

    def sample_sequential(self: Any, num_reqs: int, hidden_states: torch.Tensor) -> None:
        dspark(self, num_reqs, hidden_states)
        if num_reqs == 1:
            at = int(self._anchor_idx[0])
            anchor, drafts = int(self.input_buffers.input_ids[at]), self.draft_tokens[0]
            confidence = None
            if self.model.model.confidence_head is not None:
                states = hidden_states[self.sample_indices[: len(drafts)]]
                before = torch.cat([drafts.new_tensor([anchor]), drafts[:-1]])
                confidence = self.model.compute_confidence(states, self.model.markov_embed(before)).flatten().tolist()
            blocks.append(Block(int(self.input_buffers.positions[at]), anchor, drafts.tolist(), confidence))

    def generate_draft(self: Any, num_reqs: int, *args: Any, **kwargs: Any) -> Any:
        found = dflash(self, num_reqs, *args, **kwargs)
        if num_reqs == 1 and not isinstance(self, DSparkSpeculator):
            at = self.input_buffers
            blocks.append(Block(int(at.positions[0]), int(at.input_ids[0]), self.draft_tokens[0].tolist(), None))
        return found

    DSparkSpeculator._sample_sequential, DFlashSpeculator._generate_draft = sample_sequential, generate_draft
    try:
        yield
    finally:
        DSparkSpeculator._sample_sequential, DFlashSpeculator._generate_draft = dspark, dflash


if __name__ == "__main__":
    # A server. The command `vllm` looks for a distribution of that name; the one for CPUs has another. This file stays the main
    # module, so that the server's second process imports it and is set up like this one.
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__")
