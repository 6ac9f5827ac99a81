"""vLLM itself, on this CPU: it drafts from our files, block by block, what the drafter drafts here."""

from __future__ import annotations

import contextlib
import json
import os
import runpy
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="`make engine` makes an environment with vLLM")

import openai
import vllm_on_cpu
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

import dspark_hf
import tiny
from dspark_hf import DSparkConfig, DSparkDrafter
from dspark_hf.checkpoints import export
from dspark_hf.checkpoints.engines import CHECKED, launch_command
from dspark_hf.checkpoints.writing import FORMAT_NAMES
from dspark_hf.draft_cache import DraftCache
from dspark_hf.training.draft_vocab import set_draft_vocabulary
from dspark_hf.training.features import target_features

pytestmark = pytest.mark.engine

EXAMPLES = Path(__file__).parents[2] / "examples"
MASK, NEW_TOKENS = 319, 24
DFLASH = {"markov_rank": 0, "enable_confidence_head": False, "sample_from_anchor": False}
MIXED = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8}
SLIDING = {"layer_types": ["sliding_attention"] * 2, "sliding_window": 8}

# What a drafter is, and in which formats vLLM is given it.
CASES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "DSpark": ({}, ("vllm-sglang", "speculators", "deepspec")),
    "DFlash": (DFLASH, ("vllm-sglang", "speculators")),
    "embedding tapped": ({"target_layer_ids": [-1, 2, 4]}, ("vllm-sglang", "speculators")),
    "reduced vocabulary": ({"draft_vocab_size": 64}, ("vllm-sglang", "speculators")),
    "fill-in": ({"sample_from_anchor": False}, ("vllm-sglang", "speculators")),
    "window and full": (MIXED, ("vllm-sglang", "speculators")),
    "windows": (SLIDING, ("vllm-sglang", "speculators")),
    "windows both ways": ({**SLIDING, "is_causal": False}, ("vllm-sglang", "speculators")),
    "DFlash, windows": ({**DFLASH, **SLIDING}, ("vllm-sglang", "speculators")),
    "DFlash, windows both ways": ({**DFLASH, **SLIDING, "is_causal": False}, ("vllm-sglang", "speculators")),
    "DFlash, window and full": ({**DFLASH, **MIXED}, ("vllm-sglang",)),
}


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=320,
        hidden_size=128,
        intermediate_size=192,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,  # vLLM's attention on CPUs takes no fewer.
        max_position_embeddings=512,
        tie_word_embeddings=False,
        initializer_range=0.08,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    Qwen3ForCausalLM(config).float().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def target(target_folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(target_folder, dtype=torch.float32)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(0, MASK, (length,), generator=generator).tolist() for length in (12, 9, 15)]


def new_drafter(target: Any, **changes: Any) -> DSparkDrafter:
    """A drafter with random weights that differ in every layer, norms included."""
    torch.manual_seed(1)
    fields = {"block_size": 5, "num_hidden_layers": 2, "target_layer_ids": [0, 2, 4], "markov_rank": 24} | changes
    config = DSparkConfig.for_target(target.config, mask_token_id=MASK, **fields)
    config.target_name_or_path = str(target.config.name_or_path)
    drafter = DSparkDrafter(config).float()
    with torch.no_grad():
        for name, parameter in drafter.named_parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.2 + ("norm" in name))
    if config.draft_vocab_size:
        set_draft_vocabulary(drafter, torch.arange(config.draft_vocab_size) * 3 + 1)
    drafter.bind(target)
    return drafter.eval()


@torch.no_grad()
def block_here(drafter: Any, target: Any, ids: list[int], position: int) -> tuple[list[int], list[float] | None, float]:
    """
    The block whose anchor is `ids[position]`: drafts, confidences, and by how much the least certain draft won.
    """
    config, embeddings = drafter.config, drafter.bind(target)
    context = target_features(target, config.hidden_state_indices, torch.tensor([ids[:position]])).context_features
    slots = config.block_size
    block = torch.full((1, slots), config.mask_token_id)
    block[0, 0] = ids[position]
    cache = DraftCache(len(drafter.layers))
    drafter.extend_cache(cache, context, torch.arange(position)[None])
    hidden = drafter(
        block, torch.arange(position, position + slots)[None], draft_cache=cache, embeddings=embeddings
    ).last_hidden_state[:, -config.num_draft_tokens :]
    token, drafts, confidences, margin = ids[position], [], [], float("inf")
    for slot in hidden.split(1, dim=1):
        features = drafter.sequential_features(torch.tensor([[token]]), slot)
        logits = drafter.draft_logits(slot, features, embeddings)[0, 0]
        best = logits.topk(2)
        margin = min(margin, float(best.values[0] - best.values[1]))
        if drafter.confidence_head is not None:
            confidences.append(float(drafter.confidence_logits(slot, torch.tensor([[token]])).sigmoid()))
        token = int(best.indices[0] if drafter.draft_token_ids is None else drafter.draft_token_ids[best.indices[0]])
        drafts.append(token)
    return drafts, confidences or None, margin


def method_of(config: DSparkConfig, folder: Path) -> dict[str, Any]:
    """The speculative configuration in the command that `convert` prints, without what a CPU has not."""
    words = shlex.split(launch_command("vLLM", config, folder))
    method = json.loads(words[words.index("--speculative-config") + 1])
    return {name: value for name, value in method.items() if name not in ("model", "attention_backend")}


def check_blocks(answers: list[vllm_on_cpu.Answer], drafter: Any, target: Any) -> int:
    """Compares every block with the drafter's; returns their number."""
    blocks = 0
    for answer in answers:
        ids = answer.prompt + answer.output
        for block in answer.blocks:
            if block.position >= len(ids):
                continue  # Drafted after the last token that was asked for.
            assert ids[block.position] == block.anchor
            drafts, confidences, margin = block_here(drafter, target, ids, block.position)
            assert block.drafts == drafts or margin < 1e-4, (block.position, margin)
            if block.drafts == drafts and confidences is not None:
                torch.testing.assert_close(torch.tensor(block.confidence), torch.tensor(confidences), atol=1e-4, rtol=0)
            blocks += 1
    return blocks


@torch.no_grad()
def plain(target: Any, prompt: list[int]) -> list[int]:
    found = target.generate(
        torch.tensor([prompt]), max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS, do_sample=False
    )
    return found[0, len(prompt) :].tolist()


def test_this_is_the_version_that_convert_names():
    assert CHECKED["vLLM"].run == vllm_on_cpu.VERSION
    assert {FORMAT_NAMES[format] for _, formats in CASES.values() for format in formats} == set(CHECKED["vLLM"].formats)


@pytest.mark.parametrize(
    ("case", "format"), [(case, format) for case, (_, formats) in CASES.items() for format in formats]
)
def test_drafts_block_by_block(case, format, target, target_folder, prompts, tmp_path):
    drafter = new_drafter(target, **CASES[case][0])
    written = export(drafter, tmp_path / "drafter", format)
    assert "vLLM" in written.launch, written.refused
    with vllm_on_cpu.served(target_folder, written.path, method_of(drafter.config, written.path)) as engine:
        answers = engine.answer(prompts, NEW_TOKENS)
    assert check_blocks(answers, drafter, target) > 2 * len(prompts)
    assert [answer.output for answer in answers] == [plain(target, prompt) for prompt in prompts]


def test_several_requests_decode_together(target, target_folder, prompts, tmp_path):
    drafter = new_drafter(target)
    written = export(drafter, tmp_path / "drafter", "vllm-sglang")
    with vllm_on_cpu.served(target_folder, written.path, method_of(drafter.config, written.path), rows=3) as engine:
        answers = engine.answer(prompts, NEW_TOKENS, together=True)
    assert [answer.output for answer in answers] == [plain(target, prompt) for prompt in prompts]


def test_bfloat16(target_folder, prompts, tmp_path):
    target = AutoModelForCausalLM.from_pretrained(target_folder, dtype=torch.bfloat16)
    drafter = new_drafter(target).bfloat16()
    drafter.bind(target)
    written = export(drafter, tmp_path / "drafter", "vllm-sglang")
    method = method_of(drafter.config, written.path)
    with vllm_on_cpu.served(target_folder, written.path, method, dtype="bfloat16") as engine:
        answers = engine.answer(prompts, NEW_TOKENS)
    same = total = 0
    for answer in answers:
        ids = answer.prompt + answer.output
        for block in answer.blocks:
            if block.position < len(ids):
                drafts, _, _ = block_here(drafter, target, ids, block.position)
                same, total = same + (block.drafts[0] == drafts[0]), total + 1
    # Rounding to 8 bits decides between near ties: a wrong tap or a wrong slot agrees in one block of 320.
    assert same >= 0.6 * total > 10


@pytest.mark.statistical
def test_sampling_follows_the_target(target, target_folder, prompts, tmp_path):
    """Second tokens, drawn through a draft, against the target's probabilities; those of another prompt must not pass."""
    drafter = new_drafter(target)
    written = export(drafter, tmp_path / "drafter", "vllm-sglang")
    method = method_of(drafter.config, written.path)
    prompt, draws = prompts[0], 600
    with vllm_on_cpu.served(target_folder, written.path, method, rows=64) as engine:
        answers = engine.answer([prompt] * draws, 2, together=True, temperature=1.0)
        rounds, _ = engine.accepted()
    assert rounds > 0

    @torch.no_grad()
    def second_token(start: list[int]) -> torch.Tensor:
        first = target(torch.tensor([start])).logits[0, -1].softmax(-1)
        rows = torch.tensor([[*start, token] for token in range(target.config.vocab_size)])
        return first @ target(rows).logits[:, -1].softmax(-1)

    drawn = torch.tensor([answer.output[1] for answer in answers])
    found = torch.bincount(drawn, minlength=target.config.vocab_size).double()

    def p_value(expected: torch.Tensor) -> float:
        bins = expected.argsort().chunk(12)  # Similar tokens together, so that every bin is expected often.
        expected_counts = torch.stack([expected[b].sum() for b in bins]).double() * draws
        counts = torch.stack([found[b].sum() for b in bins])
        statistic = float(((counts - expected_counts) ** 2 / expected_counts).sum())
        return float(torch.special.gammaincc(torch.tensor((len(bins) - 1) / 2), torch.tensor(statistic / 2)))

    assert p_value(second_token(prompt)) > 1e-3
    assert p_value(second_token(prompts[1])) < 1e-3


@pytest.mark.parametrize("format", ["deepspec", "vllm-sglang"])
def test_gemma4(format, prompts, tmp_path):
    sizes = {
        "hidden_size": 128,
        "head_dim": 32,
        "global_head_dim": 64,
        "intermediate_size": 192,
        "num_hidden_layers": 6,
    }
    types = (tiny.ALTERNATING * 2)[:6]
    tiny.gemma4(vocab_size=MASK + 1, vocab_size_per_layer_input=MASK + 1, layer_types=types, **sizes).save_pretrained(
        tmp_path / "target"
    )
    target = AutoModelForCausalLM.from_pretrained(tmp_path / "target", dtype=torch.float32)
    layers = DSparkConfig.layer_families["gemma4"] | {
        "attention_k_eq_v": True,
        "head_dim": 64,
        "num_key_value_heads": 1,
    }
    drafter = new_drafter(target, **layers)
    written = export(drafter, tmp_path / format, format)
    with vllm_on_cpu.served(tmp_path / "target", written.path, method_of(drafter.config, written.path)) as engine:
        answers = engine.answer(prompts[:1], NEW_TOKENS)
    assert check_blocks(answers, drafter, target) > 2
    assert answers[0].output == plain(target, prompts[0])


# ---------------------------------------------------------------------- the quickstart pair


@pytest.fixture(scope="module")
def smollm2() -> Any:
    folder = runpy.run_path(str(EXAMPLES / "smollm2.py"))["ensure_target"]()
    target = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    question = [{"role": "user", "content": "Write one sentence about the sea."}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_dict=True)["input_ids"]
    return folder, target, tokenizer, question, prompt


@pytest.fixture(scope="module")
def quickstart(smollm2: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    drafter = DSparkDrafter.from_pretrained(EXAMPLES / "quickstart_drafter", dtype=torch.float32).eval()
    drafter.bind(smollm2[1])
    return drafter, export(drafter, tmp_path_factory.mktemp("quickstart") / "served", "vllm-sglang")


def test_the_quickstart_pair_takes_as_many_rounds(smollm2, quickstart):
    folder, target, _, _, prompt = smollm2
    drafter, written = quickstart
    method = method_of(drafter.config, written.path)
    with vllm_on_cpu.served(folder, written.path, method, max_model_len=512) as engine:
        answers = engine.answer([prompt], NEW_TOKENS)
        rounds, accepted = engine.accepted()
    check_blocks(answers, drafter, target)
    ids = torch.tensor([prompt])
    with dspark_hf.record_speculation() as stats:
        found = target.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            assistant_model=drafter,
            assistant_confidence_threshold=0.0,
            drafting_backoff=False,
            do_sample=False,
            max_new_tokens=NEW_TOKENS,
            min_new_tokens=NEW_TOKENS,
        )
    assert answers[0].output == found[0, len(prompt) :].tolist()
    # vLLM drafts whole blocks at the end of the output, where fewer drafts can be used here, or none.
    drafted = [one for one in stats.rounds if one.verified]
    assert abs(rounds - len(drafted)) <= 1
    assert accepted > 0


def test_the_server_answers_as_generate_does(smollm2, quickstart, tmp_path):
    folder, target, tokenizer, question, prompt = smollm2
    drafter, written = quickstart
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    method = method_of(drafter.config, written.path) | {"model": str(written.path)}
    command = [sys.executable, vllm_on_cpu.__file__, "--model", str(folder), "--speculative-config", json.dumps(method)]
    command += ["--host", "127.0.0.1", "--port", str(port), "--served-model-name", "smollm2", "--dtype", "float32"]
    command += ["--enforce-eager", "--max-model-len", "512", "--max-num-seqs", "2"]
    log, address = tmp_path / "server.log", f"http://127.0.0.1:{port}"
    with log.open("w") as output:
        server = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        for _ in range(240):
            assert server.poll() is None, log.read_text()
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"{address}/health", timeout=5)
                break
            time.sleep(1)
        client = openai.OpenAI(base_url=f"{address}/v1", api_key="none", timeout=240)
        answer = client.chat.completions.create(
            model="smollm2", messages=question, temperature=0, max_tokens=NEW_TOKENS
        )
        metrics = urllib.request.urlopen(f"{address}/metrics", timeout=30).read().decode()
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGTERM)
        server.wait(60)
    ids = torch.tensor([prompt])
    found = target.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=NEW_TOKENS)
    assert answer.choices[0].message.content == tokenizer.decode(found[0, len(prompt) :], skip_special_tokens=True)
    accepted = [line for line in metrics.splitlines() if line.startswith("vllm:spec_decode_num_accepted_tokens_total")]
    assert float(accepted[0].split()[-1]) > 0
