"""Options of training an adapter (LoRA); names and defaults are TRL's, but for the dropout, which is 0."""

import logging
from typing import Any

from ..models.adapter_config import ALL_LINEAR, TARGETS, AdapterConfig, chosen_targets
from ..options import Options, check_range, option, require, say_once

logger = logging.getLogger(__name__)


class LoraOptions(Options):
    """A low-rank adapter beside frozen weights; see docs/LORA.md."""

    group = "adapter"
    use_peft: bool = option(False, "train a LoRA adapter; the model's own weights stay as they are")
    lora_r: int = option(16, "rank of the adapter")
    lora_alpha: float = option(32.0, "the adapter is multiplied with lora_alpha / lora_r")
    lora_dropout: float = option(0.0, "must be 0: sampling and training compute the same numbers")
    lora_target_modules: list[str] | None = option(
        None, f"{ALL_LINEAR}, or some of {', '.join(TARGETS)}; default: q_proj v_proj, as in PEFT"
    )
    use_rslora: bool = option(False, "rank-stabilised: multiply with lora_alpha / sqrt(lora_r)")
    lora_way: str = option(
        "beside",
        "how adapted layers are computed: with the adapter's products beside the weight's, or with one merged copy of "
        "the weight, which is faster and takes its memory",
        ("beside", "merged"),
    )
    lora_base_on_host: bool = option(
        False,
        "with lora_way=merged: keep the adapted weights of the base in the host's memory, so that the GPU holds the "
        "merged copies alone",
    )

    lora_adapter_path: str | None = option(
        None,
        "begin with the adapter of this folder instead of a new one; its rank, scale and layers hold",
        is_place=True,
    )

    def __post_init__(self) -> None:
        check_range(self, "lora_r", 1)
        check_range(self, "lora_alpha", 0, open_low=True)
        require(
            self.lora_dropout == 0 or not self.use_peft,
            f"lora_dropout must be 0, got {self.lora_dropout:g}: with dropout, training would compute other numbers "
            "than sampling",
        )
        chosen_targets(self.lora_target_modules, "lora_target_modules")
        require(
            self.lora_way == "merged" or not self.lora_base_on_host,
            "lora_base_on_host=true needs lora_way=merged: beside multiplies with the base's weights all the time",
        )
        if not self.use_peft:
            idle = sorted(name for name in self.given if name not in ("use_peft", "lora_dropout"))
            changed = [name for name in idle if getattr(self, name) not in (type(self).options()[name].default, None)]
            names = ", ".join(changed)
            # TRL's files keep the adapter's options where they say use_peft: false; a folder to begin with is not TRL's
            if changed and "use_peft" in self.given and self.lora_adapter_path is None:
                say_once(logger, f"use_peft is false: nothing is done with {names}")
            else:
                require(not changed, f"without use_peft there is no use for {names}: give use_peft=true too")

    def adapter(self, base: str | None, head: str = "lm_head") -> AdapterConfig:
        """The adapter that the options ask for. base: the name of its model; head: what it ends with."""
        targets = chosen_targets(self.lora_target_modules, "lora_target_modules")
        return AdapterConfig(self.lora_r, self.lora_alpha, targets, self.use_rslora, base, head == "score")


def peft_options(config: Any, head: str = "lm_head") -> dict[str, Any]:
    """A peft.LoraConfig (or a dict of its fields) as these options; peft itself is not needed. head: of the model that
    is trained. ValueError in one line for what is not there.
    """
    require(
        isinstance(config, dict) or (hasattr(config, "__dict__") and not isinstance(config, type)),
        f"peft_config must be a peft.LoraConfig or a dict of its fields, got {config!r:.100}",
    )
    values = config if isinstance(config, dict) else config.to_dict() if hasattr(config, "to_dict") else vars(config)
    adapter = AdapterConfig.from_peft(values, "peft_config")
    require(
        head == "score" or not adapter.with_score,
        "peft_config: a score head (task_type SEQ_CLS, or modules_to_save) is a reward model's: use RewardTrainer, or "
        "task_type CAUSAL_LM",
    )
    start = values.get("init_lora_weights", True)
    require(start is True, f"peft_config: init_lora_weights={start!r} is not there: true is (Kaiming uniform, B zeros)")
    return {
        "use_peft": True,
        "lora_r": adapter.r,
        "lora_alpha": adapter.alpha,
        "lora_dropout": values.get("lora_dropout") or 0.0,
        "lora_target_modules": list(adapter.targets),
        "use_rslora": adapter.use_rslora,
    }
