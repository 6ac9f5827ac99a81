"""Which hidden states a drafter reads: those of the named layers, and the mean of the streams where there are several."""

import pytest
import torch
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


def test_streams_in_front_of_the_rows():
    """Gemma 3n."""
    target = tiny.build_target(
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
    outputs = []
    hook = target.model.layers[0].register_forward_hook(lambda m, a, output: outputs.append(output))
    features = features_of(target, [1])
    hook.remove()
    assert outputs[0].shape == (4, 1, 9, tiny.HIDDEN_SIZE)
    torch.testing.assert_close(features, outputs[0].mean(0))
