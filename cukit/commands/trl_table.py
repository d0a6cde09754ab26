"""What becomes of each option of TRL that is no option of cukit under the same name.

The names are those of TRL 1.x (GRPOConfig, PPOConfig, SFTConfig, RewardConfig, ModelConfig, ScriptArguments,
TrlParser's YAML) and transformers 4.4x to 5 (TrainingArguments). A name that is an option of the command needs no row,
and a row for it is not looked at. docs/MIGRATION.md shows this table.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

TAKEN, NOT_NEEDED, NOT_YET = "taken as", "not needed", "not there yet"


@dataclass(frozen=True)
class Row:
    """One name. Values that only switch it off (None, false, no, …) are accepted in every row."""

    name: str
    kind: str
    text: str  # TAKEN: the option it is taken as; NOT_NEEDED: why; NOT_YET: what is missing
    accepted: tuple | None = ()  # further values that ask for nothing cukit lacks; None: all
    becomes: tuple[tuple[Any, Any], ...] = ()  # TAKEN: (value, the option's value), if values are not taken as they are
    note: str = ""  # what the page says besides
    options: tuple[tuple[Any, str, Any], ...] = ()  # (value, an option, its value): values that an option stands for


def _taken(option: str, *names: str, note: str = "") -> Iterator[Row]:
    return (Row(name, TAKEN, option, note=note) for name in names)


def _not_needed(why: str, *names: str, **values: Any) -> Iterator[Row]:
    """names: whatever their value; values: the ones that are accepted."""
    yield from (Row(name, NOT_NEEDED, why, None) for name in names)
    yield from (Row(name, NOT_NEEDED, why, _tuple(accepted)) for name, accepted in values.items())


def _not_yet(what: str, *names: str, **defaults: Any) -> Iterator[Row]:
    """defaults: TRL's default, if it is not None or false: a value that asks for nothing."""
    yield from (Row(name, NOT_YET, what) for name in names)
    yield from (Row(name, NOT_YET, what, _tuple(default)) for name, default in defaults.items())


def _tuple(values: Any) -> tuple:
    return values if isinstance(values, tuple) else (values,)


ROWS: tuple[Row, ...] = (
    *_taken("model", "model_name_or_path"),
    *_taken("data", "dataset_name", note="with dataset_config and dataset_train_split: NAME:CONFIG:SPLIT"),
    *_taken("data", "dataset_config", "dataset_train_split", note="part of dataset_name's NAME:CONFIG:SPLIT"),
    *_taken("eval_data", "dataset_test_split", note="NAME:CONFIG:SPLIT, if eval_strategy asks for evaluations"),
    *_taken("model", "model_revision", note="NAME@REVISION, unless it is main"),
    *_taken("dtype", "torch_dtype"),
    *_taken("max_model_len", "vllm_max_model_length"),
    *_taken("max_length", "max_seq_length"),
    *_taken("eval_strategy", "evaluation_strategy"),
    *_taken("gradient_checkpointing", "activation_checkpointing"),
    *_taken("environment", "environment_factory"),
    *_taken("max_completion_length", "response_length"),
    *_taken("model", "sft_model_path"),
    *_taken("reward_funcs", "reward_model_path", "reward_model_name_or_path", note="one more reward"),
    *_taken("stop_token_ids", "stop_token_id"),
    *_taken("vllm_importance_sampling_clip_max", "vllm_importance_sampling_cap"),
    Row("use_cpu", TAKEN, "device", becomes=((True, "cpu"),), note="true: cpu"),
    Row("no_cuda", TAKEN, "device", becomes=((True, "cpu"),), note="true: cpu"),
    Row("save_strategy", TAKEN, "save_steps", ("steps",), (("no", 0), (False, 0)), note="no: 0"),
    Row(
        "train_sampling_strategy",
        TAKEN,
        "shuffle_dataset",
        ("group_by_length", "batch_rebalance"),
        (("sequential", False), ("random", True)),
        note="sequential: false; rows are always packed without padding",
    ),
    # ---- generation ----
    *_not_needed(
        "the engine is part of cukit and shares the trainer's weights",
        *("use_vllm", "vllm_model_impl", "vllm_enable_sleep_mode", "cache_implementation", "use_cache"),
        *("use_transformers_continuous_batching", "transformers_continuous_batching_config", "use_transformers_paged"),
        vllm_mode="colocate",
    ),
    *_not_needed("gpu_memory_utilization is the share of the whole process", "vllm_gpu_memory_utilization"),
    *_not_needed("sampling and training have the same log-probabilities (exact)", "cast_lm_head_to_fp32"),
    *_not_needed(
        "only vllm_mode=server uses it",
        *("vllm_server_base_url", "vllm_server_host", "vllm_server_port", "vllm_server_timeout", "vllm_group_port"),
    ),
    *_not_needed("a completion ends at the model's end tokens", stop_token="eos"),
    *_not_yet("guided decoding", "vllm_structured_outputs_regex", "vllm_guided_decoding_regex"),
    # ---- models ----
    *_not_needed(
        "models are plain safetensors folders, and no code of theirs is run", "trust_remote_code", "low_cpu_mem_usage"
    ),
    *_not_needed("there is no dropout", "disable_dropout"),
    *_not_needed("mixtures of experts are refused with their model", "router_aux_loss_coef"),
    *_not_needed(
        "the kernels are cukit's own",
        *("attn_implementation", "use_liger_kernel", "liger_kernel_config", "tf32", "jit_mode_eval"),
        *("torch_compile", "torch_compile_backend", "torch_compile_mode", "half_precision_backend"),
    ),
    *_not_needed("evaluations run in dtype", "bf16_full_eval", "fp16_full_eval"),
    *_not_yet("other arguments of the model's loader", "model_init_kwargs"),
    *_not_needed("the command says it: of a reward model the score head is trained too", lora_task_type="CAUSAL_LM"),
    *_not_yet("DoRA (LoRA and rsLoRA are)", "use_dora"),
    *_not_yet("adapters beyond linear layers", "lora_target_parameters", "lora_modules_to_save"),
    *_not_yet("several adapters", "model_adapter_name", "ref_adapter_name"),
    *_not_yet("peft's object in YAML (give use_peft and the lora_ options)", "peft_config"),
    *_not_yet("quantised weights", "load_in_4bit", "load_in_8bit"),
    *_not_needed("only load_in_4bit uses it", "bnb_4bit_quant_type", "bnb_4bit_quant_storage", "use_bnb_nested_quant"),
    *_not_yet("another chat template than the tokenizer's", "chat_template_path", "eos_token"),
    # ---- rows ----
    *_not_needed(
        "rows are always packed without padding",
        *("padding_free", "group_by_length", "length_column_name", "pad_to_multiple_of", "padding_side"),
        *("pad_token", "eval_packing"),
        packing_strategy="bfd",
        truncation_mode="keep_start",
    ),
    *_not_needed(
        "rows are read and tokenised once, before the run",
        *("dataloader_num_workers", "dataloader_pin_memory", "dataloader_prefetch_factor", "dataset_num_proc"),
        *("dataloader_persistent_workers", "dataloader_multiprocessing_context", "dataloader_in_order"),
    ),
    *_not_needed("rewards get every column", "remove_unused_columns", "label_names"),
    *_not_needed("rows are text", "log_multimodal"),
    *_not_needed("of messages, what the assistant says is learnt", "assistant_only_loss"),
    *_not_yet("streams of rows", "dataset_streaming", "streaming"),
    *_not_yet("mixtures of data sets", "datasets", "test_split_size"),
    *_not_yet("these arguments of the data set", "dataset_kwargs"),
    *_not_yet("leaving out the last, short batch", "dataloader_drop_last"),
    *_not_yet("a resume from the first row", "ignore_data_skip"),
    # ---- training ----
    Row(
        "optim",
        NOT_NEEDED,
        "AdamW with float32 master weights is the one optimizer",
        ("adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw_apex_fused"),
        options=(
            *((name, "optimizer_state", "int8") for name in ("adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit")),
            *((name, "offload_optimizer", True) for name in ("paged_adamw", "paged_adamw_32bit")),
        ),
    ),
    *_not_yet("other optimizers", "optim_args", "optim_target_modules"),
    *_not_needed(
        "gradient checkpointing has levels, and no variants besides",
        *("gradient_checkpointing_kwargs", "activation_checkpointing_kwargs"),
    ),
    *_not_needed("the mean over all learnt tokens of an optimizer batch is the loss", loss_type=("nll", "chunked_nll")),
    *_not_needed("means are over the whole optimizer batch", "average_tokens_across_devices"),
    *_not_needed("max_tokens_per_batch splits the work", "auto_find_batch_size", "local_rollout_forward_batch_size"),
    *_not_needed(
        "TRL computes it too, whatever is given",
        *("world_size", "num_total_batches", "micro_batch_size", "local_batch_size", "batch_size"),
        *("local_mini_batch_size", "mini_batch_size"),
    ),
    *_not_needed("memory is planned before the run", "torch_empty_cache_steps", "skip_memory_metrics"),
    *_not_needed("runs are deterministic, and seed is the one seed", "full_determinism", "data_seed"),
    *_not_yet("this loss", "dft", label_smoothing_factor=0.0),
    *_not_yet("this way to add rewards up", multi_objective_aggregation="sum_then_normalize"),
    *_not_yet("this way of training", "neftune_noise_alpha", "activation_offloading"),
    *_not_yet("this schedule", "lr_scheduler_kwargs", eval_delay=0),
    # ---- devices ----
    *_not_needed(
        "mpirun or srun starts the ranks, which exchange gradients by NCCL or MPI",
        *("ddp_find_unused_parameters", "ddp_backend", "ddp_bucket_cap_mb", "ddp_broadcast_buffers"),
        *("ddp_static_graph", "local_rank", "ds3_gather_for_generation", "ignore_bias_buffers"),
    ),
    *_not_needed("device says where to run", "use_mps_device"),
    *_not_yet(
        "weights that several GPUs share",
        *("deepspeed", "fsdp", "fsdp_config", "parallelism_config", "accelerator_config"),
    ),
    *_not_yet(
        "an engine alone that several GPUs share (tensor_parallel_size shares all models)",
        vllm_tensor_parallel_size=1,
    ),
    # ---- logs, evaluations, checkpoints ----
    *_not_needed("logging_steps says it all", "logging_first_step", "log_on_each_node", logging_strategy="steps"),
    *_not_needed("logs lie in the run folder", "logging_dir", "logging_nan_inf_filter"),
    *_not_needed(
        "one completion is printed, a group is in completions.jsonl", "num_completions_to_print", "log_unique_prompts"
    ),
    *_not_needed("completions.jsonl has some of every rollout", "num_sample_generations"),
    *_not_needed("run_name names a run", "exp_name"),
    *_not_needed("tokens are always counted", "include_num_input_tokens_seen", "include_tokens_per_second"),
    *_not_needed("a display is drawn only on a terminal", "disable_tqdm", "log_level", "log_level_replica"),
    *_not_needed(
        "max_num_seqs (grpo, ppo) and max_tokens_per_batch (sft, reward) split evaluations",
        "per_device_eval_batch_size",
    ),
    *_not_needed(
        "evaluations keep no logits",
        *("eval_accumulation_steps", "prediction_loss_only", "eval_do_concat_batches", "eval_use_gather_object"),
        *("batch_eval_metrics", "include_for_metrics"),
    ),
    *_not_needed("the command says what is done", "do_train", "do_eval", "do_predict"),
    *_not_needed(
        "a checkpoint is a model folder in safetensors with what an exact resume needs; the last is always saved",
        *("save_safetensors", "save_only_model", "save_on_each_node"),
    ),
    *_not_needed("a run that is stopped saves its state", "enable_jit_checkpoint"),
    *_not_needed(
        "a run folder is never overwritten: choose another, or resume_from_checkpoint", "overwrite_output_dir"
    ),
    *_not_yet("pushing to the hub", "push_to_hub", "log_completions_hub_repo"),
    *_not_needed(
        "only push_to_hub uses it",
        *("hub_model_id", "hub_token", "hub_strategy", "hub_private_repo", "hub_always_push", "hub_revision"),
        *("push_to_hub_model_id", "push_to_hub_token"),
    ),
    *_not_yet(
        "trackio on the hub (set TRACKIO_SPACE_ID)", "trackio_space_id", "trackio_bucket_id", "trackio_static_space_id"
    ),
    *_not_yet("states of callbacks", "restore_callback_states_from_checkpoint"),
    *_not_yet("torch's debugging", "debug"),
    *_not_yet("environment variables in YAML (set them in the shell)", "env"),
)
TABLE = {row.name: row for row in ROWS}
