"""EAGLE-3 drafters whose files name no target layers, and the variants of their layer: as found in public repositories."""

import json
import shlex
import subprocess
import sys

import pytest
import tiny_folders
import torch
from replicas import eagle3 as specforge
from spellings import write
from training.runs import trained
from typer.testing import CliRunner

import tiny
from dspark_hf import Drafter, Eagle3Config
from dspark_hf.checkpoints import inspect_checkpoint
from dspark_hf.kinds.eagle3.configuration_eagle3 import depth_taps
from dspark_hf.kinds.eagle3.tap_probe import TapProbe, probe_taps
from dspark_hf_cli.app import app

pytestmark = pytest.mark.integration

DEPTH = 8


def drafter_for(target, **fields):
    own = {"qk_norm": False, "target_layer_ids": depth_taps(DEPTH)}
    return tiny.eagle3_drafter(target, **(own | fields))


@pytest.fixture(scope="module")
def target():
    return tiny.llama(num_hidden_layers=DEPTH)


@pytest.fixture
def folder(target, tmp_path):
    return write(tmp_path / "files", *specforge(drafter_for(target)))


def same_as_plain(target, drafter):
    inputs, settings = tiny.prompt(), {"max_new_tokens": 12, "do_sample": False}
    plain = target.generate(**inputs, **settings)
    return torch.equal(target.generate(**inputs, **settings, assistant_model=drafter.eval()), plain)


# ------------------------------------------------------------------ taps that follow from the depth


def test_the_target_gives_what_enters_the_layers_that_engines_tap(target, folder):
    """vLLM and SGLang: the inputs of layers 2, N // 2 and N - 3, taken with hooks on the target."""
    drafter, entered, read = Drafter.from_pretrained(folder).eval(), {}, []

    def see(layer_id):
        def hook(module, args, kwargs):
            entered.setdefault(layer_id, args[0] if args else kwargs["hidden_states"])

        return hook

    layers = target.get_decoder().layers
    hooks = [layers[i].register_forward_pre_hook(see(i), with_kwargs=True) for i in (2, DEPTH // 2, DEPTH - 3)]
    hooks.append(drafter.fc.register_forward_pre_hook(lambda module, args: read.append(args[0]) or None))
    target.generate(**tiny.prompt(), max_new_tokens=2, do_sample=False, assistant_model=drafter)
    for hook in hooks:
        hook.remove()
    assert torch.equal(read[0], torch.cat([entered[i][0] for i in (2, DEPTH // 2, DEPTH - 3)], dim=-1))


def test_it_is_the_drafter_whose_taps_were_named(target, folder):
    drafter = Drafter.from_pretrained(folder)
    assert drafter.config.taps_from_depth and drafter.config.target_layer_ids == []
    assert drafter.config.taps_for(DEPTH) == [1, 3, 4]
    with pytest.raises(ValueError, match=r"call drafter\.bind"):
        _ = drafter.config.hidden_state_indices
    assert same_as_plain(target, drafter)
    assert drafter.config.target_layer_ids == [1, 3, 4]


def test_it_is_saved_with_its_taps_once_they_are_known(target, folder, tmp_path):
    drafter = Drafter.from_pretrained(folder)
    drafter.save_pretrained(tmp_path / "before")
    assert Drafter.from_pretrained(tmp_path / "before").config.target_layer_ids == []
    drafter.bind(target)
    drafter.save_pretrained(tmp_path / "after")
    again = Drafter.from_pretrained(tmp_path / "after")
    assert again.config.target_layer_ids == [1, 3, 4] and again.config.hidden_state_indices == [2, 4, 5]
    assert same_as_plain(target, again)


def test_another_target_has_other_taps(target, folder):
    drafter = Drafter.from_pretrained(folder)
    drafter.bind(target)
    drafter.bind(tiny.llama(num_hidden_layers=12))
    assert drafter.config.target_layer_ids == [1, 5, 8]


def test_a_shallow_target_is_refused(folder):
    with pytest.raises(ValueError, match="need 7 layers or more; this target has 4"):
        Drafter.from_pretrained(folder).bind(tiny.llama())


@pytest.mark.parametrize(
    ("section", "taps"),
    [([1, 3, 4], [1, 3, 4]), ([2, 4, 5], [1, 3, 4]), ([4, 5, 6], [3, 4, 5])],
    ids=["outputs, as SpecForge names them", "inputs, as engines derive them", "inputs, as ModelOpt names them"],
)
def test_taps_in_a_section_of_their_own(target, section, taps, tmp_path):
    named = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": section, "use_aux_hidden_state": True}}
    loaded = Drafter.from_pretrained(write(tmp_path, *specforge(drafter_for(target), **named)))
    assert loaded.config.target_layer_ids == taps and not loaded.config.taps_from_depth


def test_taps_at_the_top_level_are_inputs(target, tmp_path):
    named = {"eagle_aux_hidden_state_layer_ids": [1, 3, 4]}
    loaded = Drafter.from_pretrained(write(tmp_path, *specforge(drafter_for(target), **named)))
    assert loaded.config.target_layer_ids == [0, 2, 3]


def test_modelopts_last_tap_is_before_the_final_norm(target, tmp_path):
    """nvidia/gpt-oss-120b-Eagle3-v3 taps 24, 30 and 36 of 36 layers."""
    section = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [5, 6, DEPTH], "norm_before_fc": True}}
    made = drafter_for(target, norm_before_fc=True)
    loaded = Drafter.from_pretrained(write(tmp_path, *specforge(made, **section)))
    assert same_as_plain(target, loaded)
    assert loaded.config.target_layer_ids == [4, 5, 7] and loaded.config.taps_unnormed_state
    assert loaded.config.hidden_state_indices == [5, 6, DEPTH + 1]
    prompts = [tiny.prompt(seed=seed)["input_ids"] for seed in range(2)]
    assert (4, 5, 7) in probe_taps(loaded, target, prompts, max_new_tokens=8).acceptance


def test_another_number_of_unnamed_taps_is_refused(target, tmp_path):
    drafter = drafter_for(target, target_layer_ids=[1, 2, 3, 4])
    with pytest.raises(ValueError, match="fc reads 128 values where three layers of width 32 have 96"):
        Drafter.from_pretrained(write(tmp_path, *specforge(drafter)))


def test_inspect_says_that_the_depth_decides(folder):
    found = inspect_checkpoint(folder)
    assert "layers 2, N // 2 and N - 3 of a target with N layers" in str(found)
    assert found.to_dict()["hidden_state_indices"] is None
    assert any("follow from the target's depth" in oddity for oddity in found.oddities)


def test_it_trains_and_is_saved_with_its_taps(target, folder, tmp_path):
    drafter = Drafter.from_pretrained(folder)
    before = drafter.fc.weight.detach().clone()
    again = trained(target, drafter, tmp_path, num_tokens=19)
    assert not torch.equal(before, again.fc.weight) and again.config.target_layer_ids == [1, 3, 4]


@pytest.mark.parametrize(
    "variant",
    [
        {"norm_before_fc": True, "norm_output": True},
        {"fc_norm": True, "norm_before_residual": True},
        {"use_aux_hidden_state": False, "target_layer_ids": [DEPTH - 1]},
        {"target_layer_ids": [1, 3, DEPTH - 1], "tap_before_norm": True},
        {"draft_vocab_size": 40, "has_lm_head": True, "has_embed_tokens": True},
    ],
    ids=str,
)
def test_every_variant_trains_in_all_its_parts(target, variant, tmp_path):
    drafter = drafter_for(target, **variant)
    before = {name: parameter.clone() for name, parameter in drafter.named_parameters() if parameter.requires_grad}
    again = trained(target, drafter, tmp_path, num_tokens=19)
    state = again.state_dict()
    assert not [name for name, parameter in before.items() if torch.equal(state[name], parameter)]
    assert {name: getattr(again.config, name) for name in variant} == variant
    assert same_as_plain(target, again)


# ------------------------------------------------------------------ the probe


def reading_drafter(target, taps):
    """A drafter that drafts right from one layer only: its state is the tap at `taps[1]`, carried through unchanged."""
    drafter = drafter_for(target, target_layer_ids=list(taps))
    size = target.config.hidden_size
    with torch.no_grad():
        for name, parameter in drafter.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight", "fc.weight")):
                parameter.zero_()
        drafter.fc.weight[:, size : 2 * size] = torch.eye(size)
    return drafter


def test_the_probe_tries_the_neighbouring_layers(target):
    drafter = drafter_for(target)
    prompts = [tiny.prompt(seed=seed)["input_ids"] for seed in range(3)]
    probe = probe_taps(drafter, target, prompts, max_new_tokens=12)
    assert probe.declared == (1, 3, 4)
    assert set(probe.acceptance) == {(1, 3, 4), (0, 2, 3), (2, 4, 5)}
    assert probe.num_chains == 3 * (12 - 4)


@pytest.mark.parametrize("shift", [0, 1])
def test_the_probe_tells_shifted_taps_apart(shift):
    """A target of which only one layer says the last token, and a drafter that repeats what that layer says."""
    target = counting_target(told_by=3 + shift)
    drafter = reading_drafter(target, (1, 3, 4))
    prompts = [tiny.prompt(seed=seed)["input_ids"] for seed in range(2)]
    probe = probe_taps(drafter, target, prompts, max_new_tokens=16)
    assert probe.best == ((1, 3, 4) if shift == 0 else (2, 4, 5))
    assert probe.is_misread == (shift == 1)
    assert ("misread" in str(probe)) == (shift == 1)
    json.dumps(probe.to_dict())


def counting_target(told_by):
    """
    A target that repeats one token for ever, and whose residual stream points to that token after layer `told_by` alone.
    """
    target = tiny.bigram(build=tiny.llama, num_hidden_layers=DEPTH)
    size = target.config.hidden_size
    answer = torch.zeros(size)
    answer[0] = 60.0
    with torch.no_grad():
        target.lm_head.weight.zero_()
        target.lm_head.weight[7, 0] = 1.0
        target.get_decoder().embed_tokens.weight[:, 0] = -0.2
    moves = {told_by: answer, told_by + 1: -answer, DEPTH - 1: answer}
    for layer_id, move in moves.items():
        layer = target.get_decoder().layers[layer_id]
        layer.register_forward_hook(lambda module, args, output, move=move: add(output, move))
    return target


def add(output, move):
    return (output[0] + move, *output[1:]) if isinstance(output, tuple) else output + move


def test_what_a_probe_says():
    choices = {(1, 3, 4): 1.0, (2, 4, 5): 2.0}
    assert "config.target_layer_ids = [2, 4, 5]" in str(TapProbe((1, 3, 4), choices, 0.1, 50))
    assert "does not tell" in str(TapProbe((1, 3, 4), choices, 1.0, 50))
    assert "fit best" in str(TapProbe((2, 4, 5), choices, 0.0, 50))
    assert "None accepts anything" in str(TapProbe((1, 3, 4), {(1, 3, 4): 0.0, (2, 4, 5): 0.01}, 0.0, 50))


def test_inspect_probes_the_taps(target, folder, tmp_path):
    target.save_pretrained(tmp_path / "target")
    tiny_folders.tokenizer().save_pretrained(tmp_path / "target")
    arguments = ["inspect", str(folder), "--target", str(tmp_path / "target"), "--max-new-tokens", "8"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert "with taps [1, 3, 4]" in result.output and "with taps [2, 4, 5]" in result.output
    result = CliRunner().invoke(app, [*arguments, "--json"])
    assert json.loads(result.stdout)["probe"]["declared"] == [1, 3, 4]


# ------------------------------------------------------------------ variants of the layer


def reference_state(drafter, features):
    """The fused state as vLLM computes it: norms, if any, then fc."""
    config, weights = drafter.config, drafter.state_dict()

    def norm(values, weight):
        return weight * values * torch.rsqrt(values.pow(2).mean(-1, keepdim=True) + config.rms_norm_eps)

    if config.norm_before_fc:
        features = norm(features, weights["input_norm.weight"])
    if config.fc_norm:
        parts = features.chunk(config.num_taps, dim=-1)
        features = torch.cat([norm(part, weights[f"fc_norm.{i}.weight"]) for i, part in enumerate(parts)], dim=-1)
    return features @ weights["fc.weight"].T


@pytest.mark.parametrize("variant", [{"norm_before_fc": True}, {"fc_norm": True}, {"norm_output": True}], ids=str)
def test_norms_around_the_chain(target, variant, tmp_path):
    """norm_before_fc: NVIDIA's and speculators' for gpt-oss; fc_norm and norm_output: EAGLE-3.1."""
    made = drafter_for(target, **variant)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
    section = {"eagle_config": variant | {"eagle_aux_hidden_state_layer_ids": [2, 4, 5]}}
    loaded = Drafter.from_pretrained(write(tmp_path, *specforge(made, **section)))
    assert {name: getattr(loaded.config, name) for name in variant} == variant
    features = torch.randn(1, 5, 3 * made.config.target_hidden_size)
    assert torch.allclose(loaded.project_context(features), reference_state(made, features), atol=1e-5)
    state = torch.randn(1, made.config.hidden_size)
    assert torch.equal(loaded.handed_on(state), loaded.norm(state) if "norm_output" in variant else state)
    assert same_as_plain(target, loaded)


@torch.no_grad()
def test_drafting_and_training_hand_on_the_same_state(target):
    """What a chain drafts step by step is what a training forward computes in one go."""
    drafter = drafter_for(target, norm_output=True, norm_before_fc=True, norm_before_residual=True)
    embeddings = drafter.bind(target)
    ids = torch.randint(1, 100, (1, 12))
    features = torch.randn(1, 12, 3 * drafter.config.target_hidden_size)
    trained = drafter(ids, torch.tensor([[6]]), features, embeddings=embeddings).last_hidden_state  # [1, G, D]
    states, cache = drafter.project_context(features), drafter.new_cache()
    drafter.extend_cache(cache, ids[:, 1:6], states[:, :5], torch.arange(5)[None], embeddings=embeddings)
    state, cache.num_steps = states[:, 5], 0
    for step in range(drafter.config.block_size):
        state = drafter.step(ids[:, 6 + step], state, torch.tensor([5 + step]), cache, embeddings)
        assert torch.allclose(drafter.norm(state)[0], trained[0, step], atol=1e-5)
        state = drafter.handed_on(state)


def test_a_drafter_of_the_last_state_alone(target, tmp_path):
    """nvidia/gpt-oss-120b-Eagle3-v2: no taps and no projection; the state is the target's normed last one."""
    made = drafter_for(target, target_layer_ids=[DEPTH - 1], use_aux_hidden_state=False)
    assert made.fc is None
    config, tensors = specforge(made, eagle_config={"use_aux_hidden_state": False})
    loaded = Drafter.from_pretrained(write(tmp_path, config, tensors))
    assert not loaded.config.use_aux_hidden_state and loaded.config.taps_for(DEPTH) == [DEPTH - 1]
    assert "last hidden state" in loaded.config.describe()["taps"]
    assert same_as_plain(target, loaded)
    state = torch.randn(1, 3, made.config.hidden_size)
    assert torch.equal(loaded.project_context(state), state)


def test_a_llama_4_drafter_has_the_width_of_its_dense_layers(target, tmp_path):
    config, tensors = specforge(drafter_for(target), model_type="llama4_text")
    config |= {"intermediate_size_mlp": config["intermediate_size"], "intermediate_size": 16}
    assert Drafter.from_pretrained(write(tmp_path, config, tensors)).config.intermediate_size == 64


LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize(
    ("rope", "kept"),
    [
        (LLAMA3 | {"rope_type": "llama3"}, "llama3"),
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}, "yarn"),
        ({"rope_type": "default", "mrope_section": [2, 1, 1]}, "default"),
    ],
    ids=["llama3", "yarn in the old spelling", "multimodal"],
)
def test_rope_fields(target, rope, kept, tmp_path):
    loaded = Drafter.from_pretrained(write(tmp_path, *specforge(drafter_for(target), rope_scaling=rope)))
    assert loaded.config.rope_parameters["rope_type"] == kept
    assert same_as_plain(target, loaded)


@pytest.mark.parametrize("convention", ["offsets", "ids"])
@pytest.mark.parametrize("marked", [True, False], ids=["with t2d", "without t2d"])
def test_draft_vocabularies(target, convention, marked, tmp_path):
    made = drafter_for(target, draft_vocab_size=40, has_lm_head=True, has_embed_tokens=True)
    made.draft_token_ids.copy_(torch.cat([torch.arange(20), torch.arange(20) * 3 + 40]))
    config, tensors = specforge(made)
    if convention == "ids":
        tensors["d2t"] = made.draft_token_ids.clone()
    if not marked:
        del tensors["t2d"]
    loaded = Drafter.from_pretrained(write(tmp_path, config, tensors))
    assert torch.equal(loaded.draft_token_ids, made.draft_token_ids)
    assert loaded.config.has_embed_tokens and loaded.config.has_lm_head
    assert same_as_plain(target, loaded)


def test_what_a_configuration_cannot_say():
    with pytest.raises(ValueError, match="takes no taps, which norm_before_fc=True speak of"):
        Eagle3Config.for_target(tiny.llama().config, use_aux_hidden_state=False, norm_before_fc=True)


@pytest.mark.parametrize("name", ["norm_before_fc", "fc_norm"])
def test_a_norm_without_its_weight_is_refused(target, name, tmp_path):
    with pytest.raises(ValueError, match=f"says {name}=True, but lacks"):
        Drafter.from_pretrained(write(tmp_path, *specforge(drafter_for(target), **{name: True})))


def reduced(target):
    made = drafter_for(target, draft_vocab_size=40, has_lm_head=True)
    made.draft_token_ids.copy_(torch.cat([torch.arange(20), torch.arange(20) * 3 + 40]))
    return specforge(made)


def edited(**changed):
    """Sets tensors; `None` takes one away."""

    def edit(config, tensors):
        for name, tensor in changed.items():
            name = name.replace("__", ".")
            tensors.pop(name, None)
            if tensor is not None:
                tensors[name] = tensor

    return edit


def fields(**changed):
    return lambda config, tensors: config.update(changed)


OFFSETS = torch.cat([torch.zeros(20), torch.arange(20) * 2 + 20]).long()
MALFORMED = {
    "d2t beyond the vocabulary": (edited(d2t=OFFSETS + 100, t2d=None), "draft vocabulary is damaged"),
    "d2t below zero": (edited(d2t=OFFSETS - 5, t2d=None), "draft vocabulary is damaged"),
    "d2t that repeats a token": (edited(d2t=torch.zeros(40, dtype=torch.long) - torch.arange(40), t2d=None), "damaged"),
    "d2t of another length": (edited(d2t=OFFSETS[:39], t2d=None), r"wrong shape: draft_token_ids is \[39\]"),
    "d2t of floats": (edited(d2t=OFFSETS.float()), "wrong type: draft_token_ids is F32"),
    "t2d that marks other tokens": (edited(t2d=torch.zeros(128, dtype=torch.bool)), "those of t2d"),
    "a head of the full vocabulary": (edited(lm_head__weight=torch.zeros(128, 32)), "wrong shape: lm_head.weight"),
    "no d2t": (edited(d2t=None), "missing: draft_token_ids"),
    "more drafts than tokens": (fields(draft_vocab_size=4096), "does not fit a vocabulary of 128"),
    "a wider target": (fields(target_hidden_size=48), "fc reads 96 values where three layers of width 48 have 144"),
    "another hidden size": (fields(hidden_size=64), "fc reads 96 values"),
    "heads that do not divide": (fields(num_key_value_heads=3), "not a multiple of num_key_value_heads=3"),
    "another head size": (fields(head_dim=16), "wrong shape: layers.0.self_attn.k_proj.weight"),
    "two layers": (fields(num_hidden_layers=2), "an EAGLE-3 drafter has one layer"),
    "no layer": (fields(num_hidden_layers=None), "lacks num_hidden_layers"),
    "an unknown activation": (fields(hidden_act="swish7"), "hidden_act='swish7'"),
    "an unknown rotation": (fields(rope_scaling={"type": "spiral", "factor": 2.0}), "rope_type must be one of"),
    "taps in words": (fields(eagle_aux_hidden_state_layer_ids=["low", "high"]), "must be layer ids"),
    "taps as one number": (fields(eagle_aux_hidden_state_layer_ids=7), "must be a list of layer ids, got 7"),
    "taps out of order": (fields(eagle_aux_hidden_state_layer_ids=[5, 4, 2]), "must be strictly increasing"),
    "taps before the embedding": (fields(eagle_aux_hidden_state_layer_ids=[-1, 2, 3]), "starts at -1"),
    "two taps for a projection of three": (fields(eagle_aux_hidden_state_layer_ids=[2, 4]), "wrong shape: fc.weight"),
    "two lists of taps": (
        fields(eagle_aux_hidden_state_layer_ids=[2, 4, 5], target_layer_ids=[2, 4, 5]),
        "do not name the same taps",
    ),
    "a projection without use": (fields(eagle_config={"use_aux_hidden_state": False}), "unexpected: fc.weight"),
    "another layer's tensors": (
        edited(layers__3__mlp__up_proj__weight=torch.zeros(2, 2)),
        "have 2 layers, num_hidden_layers is 1",
    ),
    "a lost norm": (edited(midlayer__hidden_norm__weight=None), "missing: layers.0.hidden_norm.weight"),
    "numbers that are none": (edited(norm__weight=torch.full((32,), torch.nan)), "hold NaN or infinite values"),
}


@pytest.mark.parametrize(("edit", "message"), MALFORMED.values(), ids=MALFORMED)
def test_malformed_files_are_refused(target, edit, message, tmp_path):
    config, tensors = reduced(target)
    edit(config, tensors)
    with pytest.raises(ValueError, match=message):
        Drafter.from_pretrained(write(tmp_path, {n: v for n, v in config.items() if v is not None}, tensors))


def test_taps_beyond_the_target_are_refused(target, tmp_path):
    config, tensors = reduced(target)
    folder = write(tmp_path, config | {"eagle_aux_hidden_state_layer_ids": [2, 16, 29]}, tensors)
    with pytest.raises(ValueError, match="taps target layer 28, but the target has 8 layers"):
        target.generate(**tiny.prompt(), max_new_tokens=2, assistant_model=Drafter.from_pretrained(folder))


def test_a_truncated_file_is_refused(folder):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(OSError, match="may be cut short"):
        Drafter.from_pretrained(folder)


def test_a_pickle_is_refused_with_its_conversion(target, tmp_path):
    config, tensors = specforge(drafter_for(target))
    (tmp_path / "config.json").write_text(json.dumps(config))
    torch.save(tensors, tmp_path / "pytorch_model.bin")
    with pytest.raises(OSError, match=r"save_file.*weights_only=True") as refused:
        Drafter.from_pretrained(tmp_path)
    command = str(refused.value).split("`")[1]
    words = shlex.split(command)
    subprocess.run([sys.executable, *words[1:]], check=True, cwd=tmp_path)
    assert same_as_plain(target, Drafter.from_pretrained(tmp_path))
