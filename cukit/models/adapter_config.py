"""What a LoRA adapter is, by PEFT's names: its rank, its scale, the linear layers that it stands at."""

import math
from dataclasses import dataclass
from typing import Any

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
ALL_LINEAR = "all-linear"
DEFAULT_TARGETS = ("q_proj", "v_proj")  # PEFT's for llama, qwen2 and qwen3
# Fields of PEFT's LoraConfig that say nothing about what the adapter computes here, whatever their value.
IDLE = (
    *("peft_type", "task_type", "auto_mapping", "peft_version", "revision", "inference_mode", "megatron_core"),
    *("lora_dropout", "init_lora_weights", "qalora_group_size", "base_model_name_or_path", "ensure_weight_tying"),
    *("runtime_config", "alora_invocation_tokens", "loftq_config", "layers_pattern"),
)
READ = ("r", "lora_alpha", "target_modules", "use_rslora", "modules_to_save")
SCORE = "score"  # a reward model's head, which is trained whole
HEADS = (SCORE, "classifier")  # PEFT lists both for every sequence classifier
# How A and B may begin: those that leave the base's weights as they are.
PLAIN_STARTS = (None, True, False, "gaussian", "orthogonal")
WAY_OUT = {
    "use_dora": "DoRA is not there: plain LoRA or rsLoRA is",
    "target_parameters": "adapters stand at linear layers alone",
    "bias": "biases stay frozen beside an adapter",
}


@dataclass(frozen=True)
class AdapterConfig:
    """targets: those of TARGETS with an adapter, in that order. base: base_model_name_or_path, None if not known.
    with_score: the score head is trained beside the factors, of a reward model (PEFT's task SEQ_CLS).
    """

    r: int
    alpha: float
    targets: tuple[str, ...] = DEFAULT_TARGETS
    use_rslora: bool = False
    base: str | None = None
    with_score: bool = False

    @property
    def scale(self) -> float:
        """What B·A is multiplied with: alpha/r, or alpha/√r with rank-stabilised scaling (Kalajdzievski 2023)."""
        return self.alpha / (math.sqrt(self.r) if self.use_rslora else self.r)

    @classmethod
    def from_peft(cls, values: dict[str, Any], where: str) -> "AdapterConfig":
        """PEFT's fields, those of adapter_config.json or of a LoraConfig. ValueError in one line, which begins with
        `where`, for what does not exist here.
        """
        kind = str(getattr(values.get("peft_type"), "value", values.get("peft_type") or "LORA"))
        _require(kind == "LORA", f"{where}: peft_type {kind} is not there; LORA is")
        for name, value in values.items():
            if name not in READ + IDLE and value and value != "none":
                reason = WAY_OUT.get(name, f"no {name} is there")
                raise ValueError(f"{where}: {name}={value!r:.60} cannot be taken: {reason}")
        modules = values.get("modules_to_save") or ()
        _require(
            set(modules) <= set(HEADS) and (SCORE in modules or not modules),
            f"{where}: modules_to_save={modules!r:.60} cannot be taken: whole modules are not trained beside an "
            f"adapter, but for a reward model's {SCORE} head",
        )
        task = getattr(values.get("task_type"), "value", values.get("task_type"))
        start = values.get("init_lora_weights")
        _require(start in PLAIN_STARTS, f"{where}: init_lora_weights={start!r} changes the base's weights: use true")
        rank, alpha = values.get("r", 8), values.get("lora_alpha", 8)
        whole = isinstance(rank, int) and not isinstance(rank, bool) and rank >= 1
        _require(whole, f"{where}: r must be a whole number of at least 1, got {rank!r}")
        number = isinstance(alpha, (int, float)) and not isinstance(alpha, bool) and math.isfinite(alpha)
        _require(number, f"{where}: lora_alpha must be a number, got {alpha!r}")
        targets = chosen_targets(values.get("target_modules"), f"{where}: target_modules")
        rest = bool(values.get("use_rslora")), values.get("base_model_name_or_path")
        return cls(rank, alpha, targets, *rest, with_score=bool(modules) or task == "SEQ_CLS")

    def to_peft(self) -> dict[str, Any]:
        """adapter_config.json, as PEFT writes it."""
        return {
            "alpha_pattern": {},
            "auto_mapping": None,
            "base_model_name_or_path": self.base,
            "bias": "none",
            "fan_in_fan_out": False,
            "inference_mode": True,
            "init_lora_weights": True,
            "layers_pattern": None,
            "layers_to_transform": None,
            "lora_alpha": int(self.alpha) if float(self.alpha).is_integer() else self.alpha,
            "lora_dropout": 0.0,
            "modules_to_save": [SCORE] if self.with_score else None,
            "peft_type": "LORA",
            "r": self.r,
            "rank_pattern": {},
            "revision": None,
            "target_modules": list(self.targets),
            "task_type": "SEQ_CLS" if self.with_score else "CAUSAL_LM",
            "use_dora": False,
            "use_rslora": self.use_rslora,
        }


def chosen_targets(given: Any, where: str) -> tuple[str, ...]:
    """Names of TARGETS, also with commas between them, "all-linear" among them or alone, in the order of TARGETS; None:
    PEFT's default.
    """
    if given is None:
        return DEFAULT_TARGETS
    texts = [given] if isinstance(given, str) else given
    names = {name.strip() for text in texts for name in str(text).split(",") if name.strip()}
    _require(names, f"{where} is empty: give {ALL_LINEAR} or some of {', '.join(TARGETS)}")
    if ALL_LINEAR in names:
        return TARGETS
    unknown = sorted(str(name) for name in names if name not in TARGETS)
    _require(not unknown, f"{where} has {', '.join(unknown)}: give {ALL_LINEAR} or some of {', '.join(TARGETS)}")
    return tuple(name for name in TARGETS if name in names)


def _require(condition: object, message: str) -> None:
    if not condition:
        raise ValueError(message)
