"""Every key of a config.json is used, changes nothing, or is refused."""

import json

import pytest

from cukit.models.config import IGNORED, REFUSED, USED, ModelConfig

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3["original_max_position_embeddings"] = 32
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
# what PreTrainedConfig, Qwen3Config, Qwen2Config and LlamaConfig of transformers 4 and 5 write
TRANSFORMERS_KEYS = """
architectures model_type vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads
num_key_value_heads head_dim hidden_act max_position_embeddings initializer_range rms_norm_eps use_cache
tie_word_embeddings rope_parameters rope_theta rope_scaling attention_bias mlp_bias use_sliding_window sliding_window
max_window_layers layer_types attention_dropout pad_token_id bos_token_id eos_token_id pretraining_tp
output_hidden_states output_attentions return_dict torchscript torch_dtype dtype use_bfloat16 pruned_heads
chunk_size_feed_forward is_encoder_decoder is_decoder add_cross_attention tie_encoder_decoder finetuning_task
id2label label2id tokenizer_class prefix sep_token_id decoder_start_token_id task_specific_params problem_type
_name_or_path transformers_version auto_map quantization_config tf_legacy_loss is_causal
""".split()


@pytest.fixture(params=["qwen3_tiny", "qwen2_tiny", "llama_tiny", "llama3_rope_tiny"])
def raw(request, golden) -> dict:
    return json.loads((golden / request.param / "config.json").read_text())


@pytest.fixture
def qwen3(golden) -> dict:
    return json.loads((golden / "qwen3_tiny" / "config.json").read_text())


def refused(config: dict) -> str:
    with pytest.raises(ValueError) as error:
        ModelConfig.from_json(config)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_t8_the_table_is_complete_and_each_key_stands_once():
    places = [*USED, *IGNORED, *REFUSED]
    assert len(places) == len(set(places)) and set(TRANSFORMERS_KEYS) <= set(places)


def test_t8_two_rope_dicts_that_disagree_are_refused(qwen3):
    for other in (YARN, LLAMA3, {"rope_type": "linear", "factor": 2.0}):
        line = refused(qwen3 | {"rope_parameters": {"rope_type": "default"}, "rope_scaling": other})
        assert "rope_scaling" in line
        refused(qwen3 | {"rope_scaling": {"rope_type": "default"}, "rope_parameters": other})
    line = refused(qwen3 | {"rope_parameters": {"rope_type": "default"}, "rope_scaling": LLAMA3})
    assert "disagree; keep one of them" in line
    assert "disagree" in refused(qwen3 | {"rope_parameters": LLAMA3, "rope_scaling": LLAMA3 | {"factor": 9.0}})


def test_t8_what_agrees_is_taken(qwen3):
    theta = qwen3.pop("rope_theta", None) or qwen3.pop("rope_parameters")["rope_theta"]
    plain = ModelConfig.from_json(qwen3 | {"rope_theta": theta})
    for form in (
        {"rope_parameters": {"rope_type": "default", "rope_theta": theta}},
        {"rope_parameters": {"rope_type": "default", "rope_theta": theta}, "rope_theta": theta, "rope_scaling": None},
        {"rope_theta": theta, "rope_scaling": {"type": "default"}, "rope_parameters": {"rope_theta": theta}},
        {"rope_theta": theta, "rope_scaling": {}},
    ):
        assert ModelConfig.from_json(qwen3 | form) == plain, form
    both = ModelConfig.from_json(qwen3 | {"rope_parameters": LLAMA3, "rope_scaling": LLAMA3})
    beside = {key: value for key, value in LLAMA3.items() if not key.startswith("original")}
    one = {"rope_scaling": beside, "original_max_position_embeddings": 32}
    assert both.rope_scaling == ModelConfig.from_json(qwen3 | one).rope_scaling


@pytest.mark.parametrize(
    "change, named",
    [
        ({"rope_theta": 5.0, "rope_parameters": {"rope_theta": 6.0}}, "rope_theta is 6.0 in rope_parameters and 5.0"),
        ({"rope_scaling": {"rope_type": "default", "type": "yarn"}}, "rope_type is 'default'"),
        ({"rope_scaling": {"factor": 4.0}}, "factor=4.0 without a rope_type"),
        ({"rope_scaling": LLAMA3, "original_max_position_embeddings": 64}, "they must agree"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor=0.5"),
        ({"rope_parameters": [1]}, "must be one flat object"),
        ({"is_causal": False}, "is_causal=False: attention in both directions is not supported"),
        ({"is_causal": 0}, "is_causal"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ({"is_encoder_decoder": True}, "is_encoder_decoder"),
        ({"pruned_heads": {"0": [1]}}, "pruned_heads"),
        ({"layer_types": ["full_attention", 7]}, "layer_types"),
        ({"quantization_config": {}}, "quantization_config"),
        ({"logits_scaling": 8.0}, "logits_scaling"),
        ({"rope_interleaved": True}, "rope_interleaved"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
    ],
)
def test_t8_what_changes_the_computation_is_refused(qwen3, change, named):
    assert named in refused(qwen3 | change)


def test_t8_neutral_values_and_keys_that_change_nothing_are_taken(raw, caplog):
    plain = ModelConfig.from_json(raw)
    neutral = {name: values[0] if values else None for name, (values, _) in REFUSED.items()}
    ignored = dict.fromkeys(IGNORED, "x")
    assert ModelConfig.from_json(raw | neutral) == plain
    assert ModelConfig.from_json(raw | ignored | {"attention_dropout": 0.1, "pretraining_tp": 2}) == plain
    caplog.set_level("INFO", logger="cukit")
    assert ModelConfig.from_json(raw | {"a_key_of_someone": 1}) == plain
    assert "a_key_of_someone" in caplog.text
