"""The configuration dataclasses: both styles of config.json, what is refused, and the checks' one-line errors."""

import json
from dataclasses import replace

import pytest

from cukit.engine.config import EngineConfig, SamplingParams
from cukit.models.config import ModelConfig
from cukit.trainers.config import SFTConfig
from cukit.trainers.grpo_config import GRPOConfig

MODELS = ["qwen3_tiny", "qwen2_tiny", "llama_tiny", "llama3_rope_tiny"]


def read(path) -> dict:
    return json.loads(path.read_text(encoding="utf-8"))


@pytest.fixture
def qwen3(golden) -> dict:
    return read(golden / "qwen3_tiny/config.json")


# ---- models ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_both_styles_of_config_json_mean_the_same(golden, name):
    hub, transformers5 = (
        ModelConfig.from_json(read(golden / name / file)) for file in ("config.json", "config_transformers5.json")
    )
    assert hub == transformers5
    assert hub.raw == read(golden / name / "config.json")


def test_architectures_differ_where_the_files_are_silent(golden):
    qwen3, qwen2, llama, llama3 = (ModelConfig.from_json(read(golden / name / "config.json")) for name in MODELS)
    assert (qwen3.qk_norm, qwen3.attention_bias, qwen3.head_dim, qwen3.tie_word_embeddings) == (True, False, 16, True)
    assert (qwen2.qk_norm, qwen2.attention_bias, qwen2.head_dim) == (False, True, 12)
    assert (llama.qk_norm, llama.attention_bias, llama.tie_word_embeddings, llama.rope_scaling) == (
        False,
        False,
        False,
        None,
    )
    assert llama3.rope_scaling == {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    }


def test_missing_keys_take_the_defaults_of_transformers(qwen3):
    for name in ("head_dim", "num_key_value_heads", "torch_dtype", "rope_theta", "rms_norm_eps"):
        del qwen3[name]
    config = ModelConfig.from_json(qwen3)
    assert (config.head_dim, config.num_key_value_heads, config.torch_dtype, config.rope_theta) == (
        128,
        4,
        "float32",
        10000.0,
    )


@pytest.mark.parametrize(
    "change, named",
    [
        ({"architectures": ["MistralForCausalLM"]}, "architectures"),
        ({"architectures": ["Qwen3MoeForCausalLM"]}, "architectures"),
        ({"architectures": None, "model_type": "gemma"}, "gemma"),
        ({"num_experts": 8}, "num_experts"),
        ({"use_sliding_window": True, "sliding_window": 4096}, "use_sliding_window"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "yarn"),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, "linear"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 4.0}}, "dynamic"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "rope_parameters"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"attention_bias": True}, "attention_bias"),
        ({"architectures": ["LlamaForCausalLM"], "mlp_bias": True}, "mlp_bias"),
        ({"torch_dtype": "float8_e4m3fn"}, "float8_e4m3fn"),
        ({"num_key_value_heads": 3}, "4 % 3 = 1"),
        ({"hidden_size": None}, "hidden_size"),
        ({"vocab_size": "many"}, "vocab_size"),
        ({"head_dim": 15}, "head_dim"),
        ({"rope_theta": 0}, "rope_theta"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(qwen3, change, named):
    with pytest.raises(ValueError, match=named) as error:
        ModelConfig.from_json(qwen3 | change)
    assert "\n" not in str(error.value)


# ---- engine and sampling ---------------------------------------------------------------------------------------------


def test_sampling_params_take_short_forms():
    params = SamplingParams(stop="END", top_k=-1)
    assert (params.stop, params.top_k, params.stop_token_ids) == (["END"], 0, [])
    assert SamplingParams(temperature=0).temperature == 0


@pytest.mark.parametrize(
    "options, message",
    [
        ({"temperature": -0.1}, "temperature must be at least 0, got -0.1"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": 0.0}, "top_p must be above 0 and at most 1, got 0.0"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"top_k": 1.5}, "top_k must be a whole number, got 1.5"),
        ({"min_p": 2}, "min_p"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"max_tokens": 0}, "max_tokens must be at least 1, got 0"),
        ({"max_tokens": 4, "min_tokens": 5}, "min_tokens=5 must not exceed max_tokens=4"),
        ({"n": 0}, "n must"),
        ({"stop": ""}, "stop"),
        ({"stop": ["a", ""]}, "stop"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"seed": -1}, "seed"),
    ],
)
def test_sampling_params_are_checked(options, message):
    with pytest.raises(ValueError, match=message):
        SamplingParams(**options)


@pytest.mark.parametrize(
    "options",
    [
        {"max_num_seqs": 0},
        {"gpu_memory_utilization": 0},
        {"gpu_memory_utilization": 1.1},
        {"block_size": 0},
        {"max_model_len": -5},
    ],
)
def test_engine_options_are_checked(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        EngineConfig(**options)


# ---- trainers --------------------------------------------------------------------------------------------------------


def test_defaults_are_those_of_trl():
    grpo, sft = GRPOConfig(), SFTConfig()
    assert (grpo.learning_rate, grpo.num_generations, grpo.loss_type, grpo.beta, grpo.epsilon) == (
        1e-6,
        8,
        "dapo",
        0.0,
        0.2,
    )
    assert (grpo.epsilon_high, grpo.scale_rewards, grpo.generation_batch_size) == (None, "group", None)
    assert (grpo.generation_size, grpo.num_slices, grpo.sampling_params().temperature) == (8, 1, 1.0)
    assert (sft.learning_rate, sft.max_length, sft.packing, sft.completion_only_loss) == (2e-5, 1024, False, None)
    assert (sft.seed, sft.lr_scheduler_type, sft.logging_steps, sft.num_train_epochs) == (42, "linear", 10, 3.0)


def test_generation_batch_follows_from_either_option():
    by_steps = GRPOConfig(per_device_train_batch_size=4, gradient_accumulation_steps=2, steps_per_generation=4)
    by_size = GRPOConfig(per_device_train_batch_size=4, gradient_accumulation_steps=2, generation_batch_size=16)
    assert (by_steps.generation_size, by_steps.num_slices) == (by_size.generation_size, by_size.num_slices) == (16, 2)
    assert GRPOConfig(per_device_train_batch_size=4, gradient_accumulation_steps=6).generation_size == 24


def test_short_forms_of_trainer_options():
    assert GRPOConfig(scale_rewards=True).scale_rewards == "group"
    assert GRPOConfig(scale_rewards=False).scale_rewards == "none"
    assert GRPOConfig(reward_funcs="gsm8k").reward_funcs == ["gsm8k"]
    assert SFTConfig(bf16=True).dtype == "bfloat16"
    assert SFTConfig(bf16=False).dtype == "float32"  # as TRL
    assert SFTConfig(eval_steps=5).evaluates == "steps" and SFTConfig().evaluates == "no"


@pytest.mark.parametrize(
    "options, message",
    [
        ({"num_generations": 1}, "num_generations=1"),
        ({"num_generations": 3}, r"per_device_train_batch_size=8 \* steps_per_generation=1.*8 % 3 = 2"),
        ({"generation_batch_size": 12}, "12 % 8 = 4"),
        ({"generation_batch_size": 16, "steps_per_generation": 3}, "give only one"),
        ({"gradient_accumulation_steps": 2, "steps_per_generation": 3}, "3 % 2 = 1"),
        ({"loss_type": "ppo"}, "loss_type must be one of dapo, grpo"),
        ({"scale_rewards": "both"}, "scale_rewards"),
        ({"importance_sampling_level": "word"}, "importance_sampling_level"),
        ({"temperature": 0}, "temperature"),
        ({"beta": -1}, "beta"),
        ({"max_completion_length": 0}, "max_completion_length|max_tokens"),
        ({"reward_funcs": ["exact"], "reward_weights": [1.0, 2.0]}, "reward_weights has 2 values for 1 reward_funcs"),
        ({"sync_ref_model": True}, "beta"),
        ({"learning_rate": float("nan")}, "learning_rate"),
        ({"max_steps": 0}, "max_steps"),
        ({"warmup_ratio": 1.5}, "warmup_ratio"),
        ({"lr_scheduler_type": "square"}, "lr_scheduler_type"),
        ({"adam_beta2": 1.0}, "adam_beta2"),
        ({"bf16": True, "dtype": "float32"}, "contradict"),
        ({"eval_strategy": "steps"}, "eval_steps"),
        ({"save_total_limit": 0}, "save_total_limit"),
    ],
)
def test_trainer_options_are_checked(options, message):
    with pytest.raises(ValueError, match=message) as error:
        GRPOConfig(**options)
    assert "\n" not in str(error.value)


def test_rollout_sampling_is_the_trainers():
    params = GRPOConfig(temperature=0.7, top_k=5, max_completion_length=9).sampling_params(n=4)
    assert params == replace(SamplingParams(), temperature=0.7, top_k=5, max_tokens=9, logprobs=True, n=4)


@pytest.mark.parametrize("config", [EngineConfig, SamplingParams, SFTConfig, GRPOConfig])
def test_every_option_has_a_help_text(config):
    assert [name for name, item in config.options().items() if not item.help or not item.group] == []
