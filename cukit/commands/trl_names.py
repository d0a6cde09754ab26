"""TRL's and transformers' option names that are no options of cukit: what to write instead, or why there is none.

From TRL 1.x (GRPOConfig, SFTConfig, ModelConfig, ScriptArguments) and transformers 5 (TrainingArguments).
"""

from collections.abc import Iterable, Mapping
from typing import Any

from ..options import nearest

TAKEN = {  # another name for the same thing: accepted
    "model_name_or_path": "model",
    "dataset_name": "data",
    "torch_dtype": "dtype",
    "vllm_max_model_length": "max_model_len",
    "max_seq_length": "max_length",
    "evaluation_strategy": "eval_strategy",
    "environment_factory": "environment",
}

_ENGINE = "the engine is part of cukit and shares the trainer's weights"
_WEIGHTS = "models are plain safetensors folders"
_PACKED = "rows are always packed without padding"
_EXACT = "sampling and training have the same log-probabilities (exact)"
_KERNELS = "the kernels are cukit's own"
_OPTIMIZER = "AdamW with float32 master weights is the one optimizer"
_LOADING = "rows are read and tokenised once, before the run"
_LAST = "the last checkpoint and the final model are always saved"
_DETERMINISTIC = "runs are deterministic"

NOT_NEEDED = {
    **dict.fromkeys(("use_vllm", "vllm_mode", "vllm_enable_sleep_mode", "vllm_model_impl"), _ENGINE),
    **dict.fromkeys(("use_transformers_continuous_batching", "cache_implementation", "use_cache"), _ENGINE),
    "vllm_gpu_memory_utilization": "gpu_memory_utilization is the share of the whole process",
    **dict.fromkeys(("vllm_importance_sampling_correction", "vllm_importance_sampling_mode"), _EXACT),
    **dict.fromkeys(("vllm_importance_sampling_clip_max", "vllm_importance_sampling_clip_min"), _EXACT),
    **dict.fromkeys(("vllm_importance_sampling_cap", "off_policy_mask_threshold"), _EXACT),
    **dict.fromkeys(("trust_remote_code", "model_revision", "model_init_kwargs", "low_cpu_mem_usage"), _WEIGHTS),
    **dict.fromkeys(("padding_free", "group_by_length", "pad_to_multiple_of", "packing_strategy"), _PACKED),
    **dict.fromkeys(("padding_side", "eval_packing", "pad_token", "truncation_mode"), _PACKED),
    **dict.fromkeys(("attn_implementation", "use_liger_kernel", "tf32", "torch_compile"), _KERNELS),
    **dict.fromkeys(("torch_compile_backend", "torch_compile_mode", "liger_kernel_config"), _KERNELS),
    **dict.fromkeys(("cast_lm_head_to_fp32", "bf16_full_eval", "fp16_full_eval", "half_precision_backend"), _KERNELS),
    "disable_dropout": "there is no dropout",
    **dict.fromkeys(("optim", "optim_args", "optim_target_modules"), _OPTIMIZER),
    **dict.fromkeys(("dataloader_num_workers", "dataloader_pin_memory", "dataloader_drop_last"), _LOADING),
    **dict.fromkeys(("dataloader_prefetch_factor", "dataloader_persistent_workers", "dataset_num_proc"), _LOADING),
    **dict.fromkeys(("remove_unused_columns", "label_names", "dataset_kwargs"), _LOADING),
    "gradient_checkpointing_kwargs": "gradient_checkpointing has no variants",
    **dict.fromkeys(("save_strategy", "save_safetensors", "save_only_model", "save_on_each_node"), _LAST),
    **dict.fromkeys(("logging_strategy", "logging_first_step"), "logging_steps says it all"),
    **dict.fromkeys(("logging_dir", "logging_nan_inf_filter"), "metrics.jsonl lies in the run folder"),
    **dict.fromkeys(("full_determinism", "data_seed", "jit_mode_eval"), _DETERMINISTIC),
    "overwrite_output_dir": "a run folder is never overwritten: choose another, or resume_from_checkpoint",
    **dict.fromkeys(("do_train", "do_eval", "do_predict"), "the command says what is done"),
    **dict.fromkeys(("use_cpu", "no_cuda", "use_mps_device"), "device says where to run"),
    "per_device_eval_batch_size": "max_num_seqs (grpo) and max_tokens_per_batch (sft) split evaluations",
    **dict.fromkeys(("disable_tqdm", "log_level", "log_level_replica"), "a display is drawn only on a terminal"),
    "run_name": "output_dir names the run",
    "average_tokens_across_devices": "means are over the whole optimizer batch",
    "eval_accumulation_steps": "evaluations keep no logits",
    "prediction_loss_only": "evaluations keep no logits",
    "auto_find_batch_size": "max_tokens_per_batch splits the work",
}

_HUB = "the hub"
_PEFT = "adapters (LoRA)"
_GPUS = "several GPUs"
_QUANTISED = "quantised weights"
_REPORTERS = "reporters beyond metrics.jsonl"
_LOSSES = "this loss"
_SCHEDULES = "this schedule"

NOT_YET = {
    **dict.fromkeys(("push_to_hub", "hub_model_id", "hub_token", "hub_strategy", "hub_private_repo"), _HUB),
    **dict.fromkeys(("hub_always_push", "hub_revision", "log_completions_hub_repo"), _HUB),
    **dict.fromkeys(("dataset_config", "dataset_train_split", "dataset_test_split", "dataset_streaming"), _HUB),
    **dict.fromkeys(("datasets", "streaming"), _HUB),
    **dict.fromkeys(("use_peft", "lora_r", "lora_alpha", "lora_dropout", "lora_target_modules"), _PEFT),
    **dict.fromkeys(("lora_modules_to_save", "lora_task_type", "use_rslora", "use_dora", "peft_config"), _PEFT),
    **dict.fromkeys(("load_in_4bit", "load_in_8bit", "bnb_4bit_quant_type", "use_bnb_nested_quant"), _QUANTISED),
    **dict.fromkeys(("deepspeed", "fsdp", "fsdp_config", "parallelism_config", "accelerator_config"), _GPUS),
    **dict.fromkeys(("ddp_find_unused_parameters", "ddp_backend", "ddp_timeout", "ds3_gather_for_generation"), _GPUS),
    **dict.fromkeys(("local_rank", "vllm_tensor_parallel_size", "ddp_bucket_cap_mb"), _GPUS),
    **dict.fromkeys(
        ("vllm_server_host", "vllm_server_port", "vllm_server_base_url", "vllm_server_timeout"), "a server"
    ),
    "vllm_group_port": "a server",
    **dict.fromkeys(("vllm_structured_outputs_regex", "vllm_guided_decoding_regex"), "guided decoding"),
    **dict.fromkeys(("report_to", "trackio_space_id", "project"), _REPORTERS),
    **dict.fromkeys(("num_completions_to_print", "log_unique_prompts", "include_num_input_tokens_seen"), _REPORTERS),
    **dict.fromkeys(("load_best_model_at_end", "metric_for_best_model", "greater_is_better"), "the best checkpoint"),
    **dict.fromkeys(("top_entropy_quantile", "entropy_coef", "use_adaptive_entropy"), _LOSSES),
    **dict.fromkeys(("sapo_temperature_neg", "sapo_temperature_pos", "label_smoothing_factor"), _LOSSES),
    **dict.fromkeys(("multi_objective_aggregation", "router_aux_loss_coef", "dft"), _LOSSES),
    **dict.fromkeys(("neftune_noise_alpha", "assistant_only_loss", "activation_offloading"), "this way of training"),
    **dict.fromkeys(("lr_scheduler_kwargs", "eval_delay", "torch_empty_cache_steps"), _SCHEDULES),
    **dict.fromkeys(("max_prompt_length",), "cutting prompts (what is too long is refused with its row)"),
    **dict.fromkeys(("chat_template_path", "eos_token"), "another chat template than the tokenizer's"),
    "reward_model_name_or_path": "reward models",
}


def asks_for_nothing(name: str, value: Any) -> bool:
    """Whether a known name of TRL is only switched off, which is what cukit does anyway."""
    return name in NOT_NEEDED | NOT_YET and (value in (None, "none", "no", "", [], {}) or value is False)


def explain(
    unknown: Mapping[str, Any], known: Iterable[str], where: str, prefix: str, renamed: Iterable[str] = ()
) -> str:
    """One line for all names that are no options: taken as …, not needed because …, not there yet, unknown."""
    known = list(known)
    strange = [name for name in unknown if name not in NOT_NEEDED | NOT_YET]
    if len(unknown) == len(strange) == 1:
        shown = prefix + strange[0] if prefix else repr(strange[0])
        return f"unknown option {shown}{where}{nearest(strange[0], known, prefix)}"
    parts = []
    if renamed := sorted(renamed):
        parts.append("taken as: " + ", ".join(f"{name} as {TAKEN[name]}" for name in renamed))
    for title, table in (("not needed", NOT_NEEDED), ("not there yet", NOT_YET)):
        reasons: dict[str, list[str]] = {}
        for name in sorted(unknown.keys() & table.keys()):
            reasons.setdefault(table[name], []).append(prefix + name)
        if reasons:
            parts.append(f"{title}: " + ", ".join(f"{', '.join(names)} ({why})" for why, names in reasons.items()))
    if strange:
        parts.append("unknown: " + ", ".join(prefix + name + _hint(name, known, prefix) for name in sorted(strange)))
    return f"options{where} to leave out; " + "; ".join(parts)


def _hint(name: str, known: list[str], prefix: str) -> str:
    found = nearest(name, known, prefix).removeprefix("; ")
    return f" ({found})" if found else ""
