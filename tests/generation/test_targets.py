"""Targets that are more than a causal language model: placed, compiled, multimodal, of other families."""

import pytest
import target_families
import torch
import transformers
from generation import rig
from transformers import LogitsProcessor, LogitsProcessorList

import tiny
from dspark_hf import record_speculation
from dspark_hf.generation.dspark_candidate_generator import DSparkCandidateGenerator

GREEDY = {"do_sample": False, "max_new_tokens": 12}

# ---------------------------------------------------------------------- families

FAMILIES = {
    "GPT2": {},  # Learned positions.
    "GPTNeoX": {},  # Attention and MLP side by side.
    "Bloom": {},  # ALiBi.
    "Falcon": {"multi_query": True},
    "OPT": {"word_embed_proj_dim": 32, "ffn_dim": 64},
    "Gemma": {},
    "Gemma2": {"sliding_window": 8},  # Soft caps and windows.
    "Qwen2": {},
    "Phi3": {"original_max_position_embeddings": 512},
    "Cohere2": {"sliding_window": 8},
    "Granite": {},
    "Mixtral": {"num_local_experts": 4},
    "DeepseekV3": {  # Compressed keys and values.
        "num_key_value_heads": 4,
        "q_lora_rank": 8,
        "kv_lora_rank": 8,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "moe_intermediate_size": 16,
        "first_k_dense_replace": 1,
    },
    "Lfm2": {"layer_types": ["conv", "full_attention"], "conv_L_cache": 3, "block_multiple_of": 8},  # Convolutions.
    "Starcoder2": {"sliding_window": 8},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_other_families(family):
    fields = {"num_hidden_layers": 2} | FAMILIES[family]
    if family == "Falcon":  # Its `head_dim` cannot be given.
        fields |= {"vocab_size": tiny.VOCAB_SIZE, "hidden_size": 32, "num_attention_heads": 4, "initializer_range": 0.4}
        config = transformers.FalconConfig(**fields, bos_token_id=None, eos_token_id=None, pad_token_id=0)
    else:
        config = tiny.target_config(family, **fields)
    rig.compare(tiny.build_target(config), max_new_tokens=10, drafter_fields={"target_layer_ids": [-1, 0]})


# ---------------------------------------------------------------------- multimodal classes


def vision(**fields):
    common = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 32}
    return common | {"patch_size": 4, "spatial_merge_size": 1, "temporal_patch_size": 1} | fields


def qwen2_5_vl():
    text = tiny.target_config("Qwen2_5_VLText", num_hidden_layers=2).to_dict()
    text["rope_parameters"] = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [1, 1, 2]}
    config = transformers.Qwen2_5_VLConfig(
        text_config=text,
        vision_config=vision(fullatt_block_indexes=[0], window_size=8),
        image_token_id=120,
        video_token_id=121,
        vision_start_token_id=122,
        vision_end_token_id=123,
    )
    return transformers.Qwen2_5_VLForConditionalGeneration, config


def qwen3_vl():
    text = tiny.target_config("Qwen3VLText", num_hidden_layers=2).to_dict()
    text["rope_parameters"] = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [2, 1, 1]}
    config = transformers.Qwen3VLConfig(
        text_config=text,
        vision_config=vision(deepstack_visual_indexes=[0], num_position_embeddings=16),
        image_token_id=120,
        video_token_id=121,
        vision_start_token_id=122,
        vision_end_token_id=123,
    )
    return transformers.Qwen3VLForConditionalGeneration, config


def gemma3():
    text = tiny.target_config(
        "Gemma3Text", num_hidden_layers=2, layer_types=tiny.ALTERNATING[:2], sliding_window=8, query_pre_attn_scalar=8
    ).to_dict()
    vision_config = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 8,
        "patch_size": 4,
    }
    config = transformers.Gemma3Config(
        text_config=text, vision_config=vision_config, mm_tokens_per_image=1, image_token_index=120
    )
    return transformers.Gemma3ForConditionalGeneration, config


def multimodal(make):
    model_class, config = make()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        target = model_class(config).eval().requires_grad_(False)
        for name, weight in target.named_parameters():
            if weight.dim() > 1 and "language_model" in name:
                weight.normal_(0, 0.4)
    return target


@pytest.mark.parametrize("make", [qwen2_5_vl, qwen3_vl, gemma3], ids=lambda f: f.__name__)
def test_text_through_a_multimodal_class(make, monkeypatch):
    """Positions of such targets have an axis more; the drafter's are those of the text."""
    target = multimodal(make)
    inputs = tiny.prompt()
    if make is gemma3:
        inputs["token_type_ids"] = torch.zeros(1, 9, dtype=torch.long)
    blocks, run = [], DSparkCandidateGenerator.backbone_pass

    def spy(self, input_ids, num_drafts):
        blocks.append(self.context.next_positions(rig.BLOCK_SIZE)[0].tolist())
        return run(self, input_ids, num_drafts)

    monkeypatch.setattr(DSparkCandidateGenerator, "backbone_pass", spy)
    rig.compare(target, inputs)
    for positions in blocks:
        assert positions == list(range(positions[0], positions[0] + rig.BLOCK_SIZE))
    assert blocks[0][0] == 9

    drafter = tiny.random_drafter(target)
    seen, forward = [], drafter.forward
    drafter.forward = lambda ids, positions, **kwargs: (
        seen.append(tuple(positions.shape)),
        forward(ids, positions, **kwargs),
    )[1]
    target.generate(**inputs, **GREEDY, assistant_model=drafter)
    assert set(seen) == {(1, rig.BLOCK_SIZE)}


@pytest.mark.parametrize("make", [qwen2_5_vl, qwen3_vl], ids=lambda f: f.__name__)
def test_a_prompt_with_an_image(make):
    """The image goes through the prompt's pass; positions after it jump, and the next tokens are at the target's own."""
    target = multimodal(make)
    ids = torch.tensor([[5, 9, 122, *[120] * 4, 123, 7, 33, 21]])
    inputs = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "mm_token_type_ids": (ids == 120).long(),
        "pixel_values": torch.randn(4, 3 * 4 * 4),
        "image_grid_thw": torch.tensor([[1, 2, 2]]),
    }
    outcome = rig.compare(target, inputs)
    other = target.generate(
        **(inputs | {"pixel_values": torch.randn(4, 3 * 4 * 4)}), max_new_tokens=16, do_sample=False
    )
    assert rig.ids_of(other) != rig.ids_of(outcome.plain), "the image is not seen"


def test_left_padding_through_a_multimodal_class():
    padded = tiny.left_padded(tiny.prompt(9), tiny.prompt(4, seed=1))
    rig.compare(multimodal(qwen2_5_vl), {name: value[1:] for name, value in padded.items()})


# ---------------------------------------------------------------------- placement


def test_a_target_with_layers_on_disk(tmp_path):
    accelerate = pytest.importorskip("accelerate")
    plain = rig.target().generate(**tiny.prompt(), **GREEDY)
    for on_disk in (["model.layers.1"], ["lm_head"], ["model.embed_tokens"], ["model.norm", "model.layers.0"]):
        target = tiny.qwen3(num_hidden_layers=2)
        names = ["model.embed_tokens", "model.layers.0", "model.layers.1", "model.norm", "model.rotary_emb", "lm_head"]
        device_map = {name: "disk" if name in on_disk else "cpu" for name in names}
        target = accelerate.dispatch_model(
            target, device_map, main_device="cpu", offload_dir=tmp_path / "_".join(on_disk), force_hooks=True
        )
        for drafter in (
            tiny.random_drafter(rig.target()),
            tiny.random_drafter(rig.target(), draft_vocab_size=60),
            rig.scripted(rig.target(), rig.ids_of(plain)),
        ):
            assert torch.equal(target.generate(**tiny.prompt(), **GREEDY, assistant_model=drafter), plain)


def test_a_target_with_offloaded_weights():
    accelerate = pytest.importorskip("accelerate")
    plain = rig.target().generate(**tiny.prompt(), **GREEDY)
    target = accelerate.cpu_offload(tiny.qwen3(num_hidden_layers=2), execution_device=torch.device("cpu"))
    assert next(target.parameters()).is_meta
    for drafter in (tiny.random_drafter(rig.target()), rig.scripted(rig.target(), rig.ids_of(plain))):
        assert torch.equal(target.generate(**tiny.prompt(), **GREEDY, assistant_model=drafter), plain)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "places", [("cuda", "cuda"), ("cuda", "cpu"), ("cpu", "cuda")], ids=" target, drafter on ".join
)
def test_target_and_drafter_on_different_devices(places):
    target = tiny.qwen3(num_hidden_layers=2).to(places[0])
    inputs = {name: value.to(places[0]) for name, value in tiny.prompt().items()}
    plain = target.generate(**inputs, **GREEDY)
    for fields in ({}, {"draft_vocab_size": 60}):
        drafter = tiny.random_drafter(rig.target(), **fields).to(places[1])
        assert torch.equal(target.generate(**inputs, **GREEDY, assistant_model=drafter), plain)
        target.generate(**inputs, **(GREEDY | {"do_sample": True}), assistant_model=drafter)


# ---------------------------------------------------------------------- compiled, autocast


def test_a_compiled_wrapper_of_a_drafter_is_refused():
    drafter = torch.compile(tiny.random_drafter(rig.target()), backend="eager")
    assert "drafter.compile()" in rig.refusing(rig.target(), drafter=drafter)


def test_a_drafter_compiled_in_place():
    drafter = tiny.random_drafter(rig.target(), num_hidden_layers=1)
    torch._dynamo.reset()
    drafter.compile(backend="eager", dynamic=True)
    try:
        drafted = rig.target().generate(**tiny.prompt(), **GREEDY, assistant_model=drafter)
    finally:
        torch._dynamo.reset()
    assert torch.equal(drafted, rig.target().generate(**tiny.prompt(), **GREEDY))


def test_autocast():
    """Keys, values and logits come in another type than the weights."""
    target = rig.target()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rig.compare(target, max_new_tokens=12)
        drafter = tiny.random_drafter(target, draft_vocab_size=60)
        settings = {"max_new_tokens": 12, "do_sample": True}
        assert target.generate(**tiny.prompt(), **settings, assistant_model=drafter).shape[1] == 21


@pytest.mark.slow
def test_a_compiled_target_is_not_compiled_again_and_again():
    """Lengths differ from round to round; that must not make a graph each."""
    from torch._dynamo.testing import CompileCounter

    target = tiny.qwen3(num_hidden_layers=1)
    settings = tiny.prompt() | {"do_sample": False, "max_new_tokens": 60}
    plain = target.generate(**settings)
    drafter = rig.scripted(target, rig.ids_of(plain), rig.WRONG)
    torch._dynamo.reset()
    counter = CompileCounter()
    target.forward = torch.compile(target.forward, dynamic=True, backend=counter)
    try:
        counts = []
        with record_speculation() as stats:
            for _ in range(2):
                assert torch.equal(target.generate(**settings, assistant_model=drafter), plain)
                counts.append(counter.frame_count)
    finally:
        torch._dynamo.reset()
    assert len(stats.rounds) > 30
    assert counts[0] == counts[1] <= 12


class Padding(LogitsProcessor):
    """Two of the answer's tokens are the padding token."""

    def __call__(self, input_ids, scores):
        if input_ids.shape[1] in (11, 14):
            scores[:, tiny.PAD_ID] = 1e4
        return scores


def test_a_target_that_does_not_count_padding_tokens():
    """The positions of a pass follow from its tokens, so nothing is drafted behind a padding token."""
    target = target_families.build("image-text", "kosmos-2").text_model
    outcome = rig.compare(
        target, None, lambda: {"logits_processor": LogitsProcessorList([Padding()])}, max_new_tokens=20
    )
    assert outcome.plain[0].tolist().count(tiny.PAD_ID) >= 2
