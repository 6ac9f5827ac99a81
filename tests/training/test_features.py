"""What the drafter reads of its target, on the fly and from a cache."""

import json

import pytest
import torch
from generation import hybrids
from safetensors.torch import load_file
from transformers import DynamicCache

import tiny
from dspark_hf import Eagle3Config
from dspark_hf.storage.single_writer import single_writer
from dspark_hf.tapping import Tap
from dspark_hf.training.collator import DSparkCollator
from dspark_hf.training.features import CachedFeatureDataset, CachePlan, cache_features, target_features
from dspark_hf.training.target_logits import logit_rule
from dspark_hf.transformers_names import CACHE_KEY


@pytest.mark.parametrize("name", ["qwen3", "mistral", "gemma3", "gemma4", "gpt_oss", "qwen3_5"])
def test_taps_are_layer_outputs_and_the_last_state_makes_the_logits(name):
    target = tiny.TARGETS[name]()
    config = tiny.drafter_config(target, target_layer_ids=[-1, 0, 2])
    ids = tiny.prompt(11, num_rows=2)["input_ids"]
    outputs, found = {}, []
    hooks = [
        layer.register_forward_hook(lambda m, i, o, k=k: outputs.update({k: o[0] if isinstance(o, tuple) else o}))
        for k, layer in enumerate(target.get_decoder().layers)
    ]
    found = target_features(target, config.hidden_state_indices, ids)
    for hook in hooks:
        hook.remove()
    expected = torch.cat([target.get_input_embeddings()(ids), outputs[0], outputs[2]], dim=-1)
    torch.testing.assert_close(found.context_features, expected)
    logits = target(ids).logits
    mine = target.get_output_embeddings()(found.last_hidden_states)
    if (cap := getattr(target.config, "final_logit_softcapping", None)) is not None:
        mine = torch.tanh(mine / cap) * cap
    torch.testing.assert_close(mine, logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["qwen3", "gemma3", "qwen3_5"])
def test_rows_of_a_padded_batch_have_the_features_of_rows_alone(name):
    target = tiny.TARGETS[name]()
    config = tiny.drafter_config(target)
    prompts = [tiny.prompt(length, seed=length)["input_ids"] for length in (5, 9, 14)]
    padded = torch.cat([torch.nn.functional.pad(ids, (0, 14 - ids.shape[1])) for ids in prompts])
    together = target_features(target, config.hidden_state_indices, padded)
    for index, ids in enumerate(prompts):
        for found, expected in zip(together, target_features(target, config.hidden_state_indices, ids), strict=True):
            torch.testing.assert_close(found[index, : ids.shape[1]], expected[0], rtol=1e-4, atol=1e-5)


@pytest.mark.integration
@pytest.mark.parametrize("family", [name for name in hybrids.FAMILIES if hybrids.exists(name)])
def test_features_of_hybrid_targets_are_those_of_decoding_token_by_token(family):
    """What a drafter learns from is what it reads in `generate`."""
    target = hybrids.target(family)
    last = target.config.num_hidden_layers
    tap, ids = Tap(target, [1, last]), tiny.prompt(19)["input_ids"]
    features = target_features(target, tap.indices, ids)
    model_kwargs = {CACHE_KEY: DynamicCache(config=target.config), "use_cache": True}
    model_kwargs |= {"attention_mask": torch.ones_like(ids), "position_ids": torch.arange(19)[None]}
    decoded = []
    for length in range(1, 20):
        covering = {n: v[:, :length] if isinstance(v, torch.Tensor) else v for n, v in model_kwargs.items()}
        inputs = target.prepare_inputs_for_generation(ids[:, :length], next_sequence_length=1, **covering)
        with torch.no_grad(), tap.reading():
            decoded.append(tap.features(target(**(inputs | {"output_hidden_states": tap.argument}))))
    tolerance = 0.1 if family == "nemotron_h" else 2e-3  # Its norm divides very small numbers.
    torch.testing.assert_close(features.context_features, torch.cat(decoded, 1), atol=tolerance, rtol=1e-3)
    rule = logit_rule(target)
    logits = rule(target.get_output_embeddings()(features.last_hidden_states))
    torch.testing.assert_close(logits, target(ids).logits.float(), atol=2e-3, rtol=1e-3)


@pytest.mark.parametrize("draft_vocab_size", [None, 40])
@pytest.mark.parametrize("name", ["qwen3", "gemma4"])
def test_a_cache_gives_back_what_went_in(name, draft_vocab_size, rows, tmp_path):
    target = tiny.TARGETS[name]()
    config = tiny.drafter_config(target, draft_vocab_size=draft_vocab_size)
    data = rows(7)
    cache_features(target, config, data, tmp_path, batch_size=3, shard_rows=4, dtype=torch.float32, progress=False)
    cached = CachedFeatureDataset(tmp_path, config)
    assert len(cached) == 7
    for row, original in zip((cached[i] for i in range(7)), data, strict=True):
        ids = torch.tensor([original["input_ids"]])
        assert row["input_ids"].tolist() == original["input_ids"]
        assert row["loss_mask"].long().tolist() == original["loss_mask"]
        features = target_features(target, config.hidden_state_indices, ids)
        torch.testing.assert_close(row["context_features"], features.context_features[0], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(row["last_hidden_states"], features.last_hidden_states[0], rtol=1e-4, atol=1e-5)
        assert ("log_normalizers" in row) == (draft_vocab_size is not None)
        if draft_vocab_size is not None:
            mask, logits = row["loss_mask"].bool(), target(ids).logits[0]
            torch.testing.assert_close(row["log_normalizers"][mask], logits.logsumexp(-1)[mask], rtol=1e-4, atol=1e-4)
            assert torch.equal(row["greedy_ids"][mask], logits.argmax(-1)[mask])
    DSparkCollator(config, num_anchors=4)([cached[0], cached[6]])
    with pytest.raises(IndexError):
        cached[7]


def test_caching_resumes_and_adds_new_rows(rows, tmp_path, monkeypatch):
    target = tiny.qwen3()
    config = tiny.drafter_config(target)
    data = rows(9)
    cache_features(target, config, data[:4], tmp_path, shard_rows=4, progress=False)
    kept = (tmp_path / "shard-00000.safetensors").stat().st_mtime_ns
    cache_features(target, config, data, tmp_path, shard_rows=4, progress=False)
    assert (tmp_path / "shard-00000.safetensors").stat().st_mtime_ns == kept
    cached = CachedFeatureDataset(tmp_path, config)
    assert [cached[i]["input_ids"].tolist() for i in range(9)] == [row["input_ids"] for row in data]
    monkeypatch.setattr(target, "base_model_prefix", "nothing runs")
    cache_features(target, config, data, tmp_path, shard_rows=4, progress=False)


def test_a_cache_knows_on_which_side_of_the_final_norm_the_last_layer_was_read(rows, tmp_path):
    target, data = tiny.qwen3(), rows(2)
    before = tiny.drafter_config(target, target_layer_ids=[1, 3], tap_before_norm=True)
    after = tiny.drafter_config(target, target_layer_ids=[1, 3])
    for name, config in (("before", before), ("after", after)):
        cache_features(target, config, data, tmp_path / name, dtype=torch.float32, progress=False)
        features = target_features(target, config.hidden_state_indices, torch.tensor([data[0]["input_ids"]]))
        cached = CachedFeatureDataset(tmp_path / name, config)
        cached.check_target(target)
        torch.testing.assert_close(cached[0]["context_features"], features.context_features[0], rtol=1e-4, atol=1e-5)
    for name, config in (("before", after), ("after", before)):
        with pytest.raises(ValueError, match=f"last layer {name} the final norm"):
            CachedFeatureDataset(tmp_path / name, config)


def test_features_for_taps_that_follow_from_the_targets_depth(rows, tmp_path):
    target = tiny.llama(num_hidden_layers=8)
    config = Eagle3Config.for_target(target.config, target_layer_ids=[], taps_from_depth=True)
    cache_features(target, config, rows(2), tmp_path, progress=False)
    assert CachedFeatureDataset(tmp_path, config).index["target_layer_ids"] == [1, 3, 4]


def test_dtype_on_disk_is_the_one_asked_for(rows, tmp_path):
    target = tiny.qwen3()
    config = tiny.drafter_config(target)
    cache_features(target, config, rows(2), tmp_path, progress=False)
    row = CachedFeatureDataset(tmp_path)[0]
    assert row["context_features"].dtype == row["last_hidden_states"].dtype == torch.bfloat16


def test_other_rows_other_taps_and_a_full_disk_are_refused(rows, tmp_path, monkeypatch):
    target = tiny.qwen3()
    config = tiny.drafter_config(target)
    cache_features(target, config, rows(3), tmp_path / "cache", progress=False)
    with pytest.raises(ValueError, match="other conversations"):
        cache_features(target, config, rows(4), tmp_path / "cache", progress=False)
    other = tiny.drafter_config(target, target_layer_ids=[0])
    with pytest.raises(ValueError, match="target_layer_ids"):
        cache_features(target, other, rows(3), tmp_path / "cache", progress=False)
    with pytest.raises(ValueError, match="the drafter taps"):
        CachedFeatureDataset(tmp_path / "cache", other)
    with pytest.raises(ValueError, match="no feature cache"):
        CachedFeatureDataset(tmp_path / "nothing")
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 10}))
    with pytest.raises(ValueError, match="Train without a cache"):
        cache_features(target, config, rows(3), tmp_path / "full", progress=False)


@pytest.mark.parametrize("positions", ["all", "anchors"])
def test_a_cache_of_another_target_is_refused(positions, make_trainer, rows, tmp_path):
    """Also one of the same shape and name, with other weights; another number type is no other target."""
    target = tiny.qwen3()
    drafter = tiny.random_drafter(target)
    cache_features(target, drafter.config, rows(3), tmp_path, progress=False, positions=positions, num_anchors=2)
    cached = CachedFeatureDataset(tmp_path, drafter.config)
    cached.check_target(tiny.qwen3().bfloat16())
    make_trainer(drafter, target, rows=cached)
    torch.manual_seed(1)
    other = tiny.qwen3()
    for parameter in other.parameters():
        parameter.data = torch.randn_like(parameter) * parameter.std()
    for refused in (other, tiny.qwen3(hidden_size=48)):
        with pytest.raises(ValueError, match="features of another target"):
            cached.check_target(refused)
    with pytest.raises(ValueError, match="features of another target"):
        make_trainer(drafter, other, rows=cached)
    more = rows(3) + rows(1)
    with pytest.raises(ValueError, match="features of another target"):
        cache_features(other, drafter.config, more, tmp_path, progress=False, positions=positions, num_anchors=2)


def test_one_process_writes_a_cache(rows, tmp_path):
    target = tiny.qwen3()
    config = tiny.drafter_config(target)
    with single_writer(tmp_path / "cache"), pytest.raises(ValueError, match="Another process is writing"):
        cache_features(target, config, rows(2), tmp_path / "cache", progress=False)
    cache_features(target, config, rows(2), tmp_path / "cache", progress=False)


def test_the_index_is_readable(rows, tmp_path):
    target = tiny.qwen3()
    config = tiny.drafter_config(target)
    cache_features(target, config, rows(3), tmp_path, progress=False)
    index = json.loads((tmp_path / "index.json").read_text())
    assert index["target_layer_ids"] == config.target_layer_ids
    assert [len(row["input_ids"]) for row in rows(3)] == index["shards"][0]["lengths"]


@pytest.mark.parametrize("draft_vocab_size", [None, 40])
@pytest.mark.parametrize("positions", ["response", "anchors"])
def test_leaving_out_what_no_block_reads_changes_no_loss(positions, draft_vocab_size, make_trainer, rows, tmp_path):
    target = tiny.qwen3()
    drafter = tiny.random_drafter(target, draft_vocab_size=draft_vocab_size)
    losses, sizes = [], []
    for kind in ("all", positions):
        folder, plan = tmp_path / kind, CachePlan(drafter.config, torch.float32, kind, num_anchors=3)
        cache_features(target, drafter.config, rows(5), folder, dtype=torch.float32, progress=False,
                       positions=kind, num_anchors=3)  # fmt: skip
        size = sum(tensor.nbytes for tensor in load_file(folder / "shard-00000.safetensors").values())
        assert size == plan.num_bytes(rows(5))
        sizes.append(size)
        data = CachedFeatureDataset(folder, drafter.config)
        trainer = make_trainer(drafter, target, rows=data, num_anchors=3, anchor_seed=0)
        batch = trainer.data_collator([trainer.train_dataset[i] for i in range(5)])
        losses.append(float(trainer.compute_loss(drafter, batch).detach()))
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    assert sizes[1] < sizes[0]


def test_a_damaged_cache_is_found(rows, tmp_path):
    target = tiny.qwen3()
    cache_features(target, tiny.drafter_config(target), rows(3), tmp_path, progress=False)
    CachedFeatureDataset(tmp_path).verify()
    file = tmp_path / "shard-00000.safetensors"
    content = bytearray(file.read_bytes())
    content[-3] ^= 1
    file.write_bytes(content)
    with pytest.raises(ValueError, match=r"shard-00000\.safetensors"):
        CachedFeatureDataset(tmp_path).verify()


def test_states_too_large_for_float16_are_refused(rows, tmp_path):
    target = tiny.qwen3()
    target.model.norm.weight.mul_(1e6)
    with pytest.raises(ValueError, match="too large for float16"):
        cache_features(target, tiny.drafter_config(target), rows(2), tmp_path, dtype=torch.float16, progress=False)
