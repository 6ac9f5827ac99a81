"""For each serving engine, the reasons why it cannot serve a drafter's file, or the command that serves it."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from ..configuration_drafter import DrafterConfig
from ..kinds.dspark.configuration_dspark import DSparkConfig

# The format names of `reading.FORMATS`, and of files written for the engines.
DEEPSPEC, ENGINE_FILE, SPECULATORS, MODELOPT = "DeepSpec", "vLLM and SGLang", "speculators", "ModelOpt"
ZLAB, SPECFORGE, GGUF = "z-lab DFlash", "SpecForge", "GGUF"


# The keys of the formats that are written for engines.
ENGINE_FORMATS = {"deepspec", "vllm-sglang", "speculators", "modelopt"}


class Checked(NamedTuple):
    """
    How the rules for an engine were checked.

    Args:
        rules: The version whose source the rules were taken from.
        run: The version that `make engine` runs, if any.
        formats: The formats whose files it runs with.
    """

    rules: str
    run: str | None = None
    formats: tuple[str, ...] = ()


CHECKED = {
    "vLLM": Checked("0.33.0", run="0.32.0", formats=(DEEPSPEC, ENGINE_FILE, SPECULATORS)),
    "SGLang": Checked("0.5.23"),
    "TensorRT-LLM": Checked("of October 2026"),
    "llama.cpp": Checked("of October 2026"),
}


def evidence(engine: str, format_name: str) -> str:
    """Whether tests run this engine with files of this format, or only the rules in its source are known."""
    checked = CHECKED[engine]
    if format_name in checked.formats:
        return f"drafts compared with {engine} {checked.run}"
    return f"by the rules of {engine} {checked.rules}, not run"


def is_plain_dflash(config: DSparkConfig) -> bool:
    return not config.markov_rank and not config.enable_confidence_head


def obstacles(config: DrafterConfig, format_name: str) -> dict[str, list[str]]:
    """
    For each engine, the reasons why it cannot serve a drafter with this configuration in this format; an empty list if it can.
    The dictionary is empty for kinds of drafter that cannot be exported, because engine support for them is not known here.
    """
    if not ENGINE_FORMATS & set(config.export_formats):
        return {}
    return {engine: list(test(config, format_name)) for engine, test in TESTS.items()}


def _vllm(config: DSparkConfig, format_name: str) -> Iterator[str]:
    if format_name not in (DEEPSPEC, ENGINE_FILE, SPECULATORS, ZLAB):
        yield f"it does not read {format_name} files: convert to vllm-sglang or speculators"
    # Its reader of speculators files makes all layers of a DFlash drafter alike.
    mixes = not (format_name == SPECULATORS and is_plain_dflash(config))
    yield from unknown_to_engines(config, mixed_causality=mixes)
    yield from _activation(config)
    if config.markov_rank and config.markov_head_type != "vanilla":
        yield f"it only supports vanilla sequential heads, not {config.markov_head_type} ones"
    if not config.markov_rank and config.sample_from_anchor:
        yield "it does not support drafters without a sequential head whose anchor predicts"
    if config.layer_family == "gemma4" and config.draft_vocab_size:
        yield "it only supports Gemma 4 drafters with the full vocabulary"
    if config.layer_family == "gemma4" and format_name not in (DEEPSPEC, ENGINE_FILE):
        yield "it only reads Gemma 4 drafters in DeepSpec's format"


def _sglang(config: DSparkConfig, format_name: str) -> Iterator[str]:
    if format_name not in (DEEPSPEC, ENGINE_FILE, ZLAB):
        yield f"it does not read {format_name} files: convert to vllm-sglang"
    yield from unknown_to_engines(config, mixed_causality=True)
    if config.layer_family == "gemma4":
        yield "it does not support Gemma 4 drafters"
    yield from _activation(config)
    if config.draft_vocab_size:
        yield "it has no reduced draft vocabulary"
    if not config.markov_rank and config.sample_from_anchor:
        yield "its DFLASH method assumes that the anchor's slot predicts nothing, and its DSPARK method needs a sequential head"
    if min(config.target_layer_ids or [0]) < 0:
        yield "it cannot tap the embedding output (layer id -1)"
    if (config.num_target_layers or 0) - 1 in (config.target_layer_ids or []):
        yield "it cannot tap the target's last layer"
    if (config.rope_parameters or {}).get("partial_rotary_factor", 1.0) != 1.0:
        yield "it rotates the whole head, this drafter a part"


def _activation(config: DSparkConfig) -> Iterator[str]:
    if config.layer_family != "gemma4" and config.hidden_act != "silu":
        yield f"its draft layers have silu as their activation, this drafter's {config.hidden_act}"


def unknown_to_engines(config: DSparkConfig, mixed_causality: bool = False) -> Iterator[str]:
    """Features of a drafter that no engine supports."""
    family = config.layer_family
    if family not in ("qwen3", "gemma4"):
        yield f"it supports Qwen3 and Gemma 4 draft layers, not {family or 'this combination of layer options'}"
    if family != "gemma4" and config.embedding_scale != 1.0:
        yield "it does not scale embedding rows, as this drafter does"
    if family != "gemma4" and config.final_logit_softcapping is not None:
        yield "it does not soft-cap base logits, as this drafter does"
    changed = {"logit_scale": 1.0, "value_scale": 1.0, "has_mask_embedding": False, "raw_embeddings": False}
    changed |= {"fc_norm": False, "norm_context": False}
    if odd := [name for name, value in config.named(changed).items() if value != changed[name]]:
        yield f"it has no {', '.join(odd)}"
    if config.uniformly_causal is None and not mixed_causality:
        yield "some draft layers are causal and some are not"


def _tensorrt(config: DSparkConfig, format_name: str) -> Iterator[str]:
    if format_name != MODELOPT:
        yield f"it does not read {format_name} files: convert to modelopt"
    yield from unknown_to_engines(config)
    if config.layer_family == "gemma4":
        yield "it does not support Gemma 4 drafters"
    if config.markov_head_type == "rnn" and config.markov_rank:
        yield "it loads no rnn heads"
    if config.enable_confidence_head and not config.confidence_head_with_markov:
        yield "its confidence head reads the Markov embedding, this one does not"
    if config.draft_vocab_size:
        yield "ModelOpt files have no reduced draft vocabulary"


def _llama_cpp(config: DSparkConfig, format_name: str) -> Iterator[str]:
    if format_name not in (DEEPSPEC, ENGINE_FILE, SPECULATORS, SPECFORGE, ZLAB, GGUF):
        yield f"its converter does not read {format_name} files: convert to vllm-sglang or speculators first"
    yield from unknown_to_engines(config)
    if config.layer_family == "gemma4":
        yield "it does not support Gemma 4 drafters"
    if config.markov_rank and config.markov_head_type != "vanilla":
        yield f"it only supports vanilla sequential heads, not {config.markov_head_type} ones"


TESTS: dict[str, Callable[[Any, str], Iterator[str]]] = {
    "vLLM": _vllm,
    "SGLang": _sglang,
    "TensorRT-LLM": _tensorrt,
    "llama.cpp": _llama_cpp,
}


def launch_command(engine: str, config: Any, path: Any) -> str:
    """The command that serves the drafter's target with the drafter at `path`."""
    target, path = shlex.quote(config.target_name_or_path or "TARGET"), str(path)
    drafts, plain = config.num_draft_tokens, is_plain_dflash(config)
    if engine == "vLLM":
        method = {"method": "dflash" if plain else "dspark", "model": path, "num_speculative_tokens": drafts}
        if not plain:
            method |= {"draft_sample_method": "greedy"}
        method |= {"attention_backend": "FLASH_ATTN"}
        return f"vllm serve {target} --speculative-config {shlex.quote(json.dumps(method))}"
    if engine == "SGLang":
        return (
            f"python -m sglang.launch_server --model-path {target} --speculative-algorithm {'DFLASH' if plain else 'DSPARK'} "
            f"--speculative-draft-model-path {shlex.quote(path)} --speculative-num-draft-tokens {drafts + 1}"
        )
    if engine == "TensorRT-LLM":
        options = {
            "speculative_config": {"decoding_type": "DSpark", "speculative_model": path, "max_draft_len": drafts}
        }
        return f"echo {shlex.quote(json.dumps(options))} > dspark.yml && trtllm-serve {target} --extra_llm_api_options dspark.yml"
    kind = "draft-dflash" if plain else "draft-dspark"
    return (
        f"python convert_hf_to_gguf.py {shlex.quote(path)} --target-model-dir TARGET_DIR --outfile draft.gguf && "
        f"llama-server -m TARGET.gguf -md draft.gguf --spec-type {kind} --spec-draft-n-max {drafts}"
    )
