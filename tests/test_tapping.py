"""Which hidden states a drafter reads: those of the named layers, and the mean of the streams where there are several."""

import pytest
import torch
import transformers
from generation import hybrids, rig

import tiny
from dspark_hf.tapping import Tap

pytestmark = pytest.mark.integration


def features_of(target, indices):
    tap = Tap(target, indices)
    with torch.no_grad(), tap.reading():
        return tap.features(target(tiny.prompt()["input_ids"], output_hidden_states=tap.argument))


def test_only_the_wanted_hidden_states_are_read():
    target = rig.target()
    everything = target(tiny.prompt()["input_ids"], output_hidden_states=True).hidden_states
    torch.testing.assert_close(features_of(target, [1, 2]), torch.cat([everything[1], everything[2]], dim=-1))


@pytest.mark.skipif(not hybrids.exists("deepseek_v4"), reason="this transformers does not have the family")
def test_streams_are_averaged_and_the_last_layer_is_read_before_they_are_joined():
    target, outputs = hybrids.target("deepseek_v4"), []
    hooks = [layer.register_forward_hook(lambda m, a, output: outputs.append(output)) for layer in target.model.layers]
    features = features_of(target, [1, 6])
    for hook in hooks:
        hook.remove()
    assert outputs[0].shape == (1, 9, 4, tiny.HIDDEN_SIZE)
    torch.testing.assert_close(features, torch.cat([outputs[0].mean(2), outputs[5].mean(2)], dim=-1))
    hooked = len(target.model.layers[-1]._forward_hooks)  # transformers has one of its own.
    features_of(target, [6])
    assert len(target.model.layers[-1]._forward_hooks) == hooked


def gemma3n():
    return tiny.build_target(
        tiny.target_config(
            "Gemma3nText",
            vocab_size_per_layer_input=tiny.VOCAB_SIZE,
            hidden_size_per_layer_input=8,
            laurel_rank=4,
            num_kv_shared_layers=0,
            sliding_window=tiny.SLIDING_WINDOW,
            activation_sparsity_pattern=None,
        )
    )


def test_streams_in_front_of_the_rows():
    target = gemma3n()
    outputs = []
    hook = target.model.layers[0].register_forward_hook(lambda m, a, output: outputs.append(output))
    features = features_of(target, [1])
    hook.remove()
    assert outputs[0].shape == (4, 1, 9, tiny.HIDDEN_SIZE)
    torch.testing.assert_close(features, outputs[0].mean(0))


@pytest.mark.parametrize("family", ["qwen3", "gemma3", "gpt_oss"])
def test_the_last_layer_before_the_final_norm(family):
    target, outputs = tiny.TARGETS[family](), []
    hook = target.model.layers[-1].register_forward_hook(lambda m, a, output: outputs.append(output))
    features = features_of(target, [1, tiny.NUM_LAYERS, tiny.NUM_LAYERS + 1])
    hook.remove()
    raw = outputs[0][0] if isinstance(outputs[0], tuple) else outputs[0]
    everything = target(tiny.prompt()["input_ids"], output_hidden_states=True).hidden_states
    torch.testing.assert_close(features, torch.cat([everything[1], target.model.norm(raw), raw], dim=-1))


def test_a_target_without_a_list_of_layers_is_refused():
    target = tiny.build_target(transformers.GPT2Config(vocab_size=128, n_embd=32, n_layer=4, n_head=4))
    with pytest.raises(ValueError, match="decoder has no list of layers"):
        Tap(target, [5])


@pytest.mark.parametrize("before", [True, False])
def test_a_drafter_reads_the_last_layer_on_the_side_it_was_trained_on(before):
    target, read = tiny.qwen3(), []
    drafter = tiny.random_drafter(target, target_layer_ids=[1, 3], tap_before_norm=before)
    hook = drafter.fc.register_forward_pre_hook(lambda m, args: read.append(args[0].reshape(-1, 64)))
    inputs, settings = tiny.prompt(), {"max_new_tokens": 6, "do_sample": False}
    output = target.generate(**inputs, **settings, assistant_model=drafter)
    hook.remove()
    assert torch.equal(output, target.generate(**inputs, **settings))
    wanted = features_of(target, [2, 5 if before else 4])[0]
    torch.testing.assert_close(read[0][: len(wanted)], wanted[: len(read[0])])
    assert ("the last before the final norm" in drafter.config.describe()["taps"]) == before


def test_hidden_states_with_streams_are_returned_as_by_plain_generate():
    wanted = {"return_dict_in_generate": True, "output_hidden_states": True}
    for target in (gemma3n(), *([hybrids.target("deepseek_v4")] if hybrids.exists("deepseek_v4") else [])):
        outcome = rig.compare(target, **wanted)
        for drafted in outcome.drafted.values():
            for ours, plain in zip(drafted.hidden_states, outcome.plain.hidden_states, strict=True):
                torch.testing.assert_close(ours, plain, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_hidden_states_with_streams_of_as_many_rows_as_streams(layout, monkeypatch):
    """Four streams `[4, B, T, D]` and four rows: the axes can be told apart by the configuration alone."""
    target, lengths = gemma3n(), (9, 6, 4, 7)
    if layout == "padded":
        monkeypatch.setattr("dspark_hf.ragged.target.can_exchange_attention", lambda model: False)
    batch = tiny.left_padded(*(tiny.prompt(length, seed=length) for length in lengths))
    settings = {"max_new_tokens": 6, "do_sample": False, "return_dict_in_generate": True, "output_hidden_states": True}
    plain = target.generate(**batch, **settings)
    drafted = target.generate(**batch, **settings, assistant_model=tiny.random_drafter(target))
    assert torch.equal(drafted.sequences, plain.sequences)
    for ours, theirs in zip(drafted.hidden_states[1:], plain.hidden_states[1:], strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-3, rtol=1e-3)
