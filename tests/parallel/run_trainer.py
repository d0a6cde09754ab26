"""One rank of small runs: python run_trainer.py FOLDER '{"case": {"method": "sft", "option": value}}'. Started by
mpirun, or alone.

It writes what each run left behind to FOLDER/CASE/rank-R.npz and .json, for test_ranks.py to compare.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT)]

from cukit import Environment, GRPOConfig, GRPOTrainer, PPOConfig, PPOTrainer, SFTConfig, SFTTrainer  # noqa: E402
from cukit.backend import backend_for  # noqa: E402
from cukit.models.config import ModelConfig  # noqa: E402
from cukit.models.decoder import Decoder  # noqa: E402
from cukit.models.weights import whole_parts  # noqa: E402
from cukit.parallel import watch  # noqa: E402
from cukit.parallel.world import world  # noqa: E402
from cukit.tokenizer import Tokenizer  # noqa: E402
from cukit.trainers import dealing  # noqa: E402
from cukit.trainers.reward import RewardTrainer  # noqa: E402
from cukit.trainers.reward_config import RewardConfig  # noqa: E402

TINY = ROOT / "data" / "tiny-qwen3"
SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
         "num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 96}  # fmt: skip
SHARED = dict(
    learning_rate=1e-2,
    max_steps=3,
    logging_steps=1,
    lr_scheduler_type="constant",
    gradient_checkpointing=False,
    max_tokens_per_batch=64,
    save_steps=0,
    adam_epsilon=1e-4,  # above rounding, so that Adam does not make it as large as the learning rate
)
COLUMNS = (
    "advantages",
    "weights",
    "logprobs",
    "sampled",
    "corrections",
    "ref_logprobs",
    "values",
    "returns",
    "chosen",
    "ids",
)
DRAWN = dict(max_completion_length=6, temperature=1.0)
PROMPTS = [
    {"prompt": [{"role": "user", "content": "+".join(map(str, range(i % 5 + 1)))}], "answer": str(i)} for i in range(12)
]
DEMONSTRATIONS = [{"prompt": "1" + "+1" * (i % 4) + "=", "completion": str(i % 4 + 1) * (i % 3 + 1)} for i in range(14)]
PAIRS = [{"prompt": "1" + "+1" * (i % 4) + "=", "chosen": str(i % 4 + 1), "rejected": "7" * (i % 3 + 1)}
         for i in range(14)]  # fmt: skip


def tokenizer():
    return Tokenizer.from_folder(TINY)


def model(dtype="float64", head="lm_head", seed=0, device="cpu", shape=()):
    raw = json.loads((TINY / "config.json").read_text()) | SMALL | dict(shape)
    if head == "score":
        raw |= {"architectures": ["Qwen3ForSequenceClassification"], "num_labels": 1}
    made = Decoder(ModelConfig.from_json(raw), backend_for(device), dtype, head)
    made.init_weights(seed)
    return made


def share_of_ones(completions, log_metric=None, log_extra=None, **_):
    texts = [one[0]["content"] if isinstance(one, list) else one for one in completions]
    if log_extra is not None:
        log_extra("ones", [text.count("1") for text in texts])
        log_metric("three", 3)
    return [text.count("1") / max(len(text), 1) + 0.1 * (text[:1] == "2") for text in texts]


class TwoTurns(Environment):
    def reset(self, **columns):
        self.reward = 0.0

    def respond(self, conversation):
        self.reward += len(conversation[-1]["content"]) % 3
        return None if len(conversation) > 3 else [{"role": "user", "content": "7"}]


def make_trainer(method, dtype="float64", device="cpu", shape=(), **options):
    world()  # before anything of CUDA
    given = model(dtype, "score" if method == "reward" else "lm_head", device=device, shape=shape)
    if method == "sft":
        args = SFTConfig(**SHARED | {"per_device_train_batch_size": 6} | options)
        return SFTTrainer(given, args, DEMONSTRATIONS, DEMONSTRATIONS[:5], tokenizer())
    if method == "reward":
        args = RewardConfig(**SHARED | {"per_device_train_batch_size": 6} | options)
        return RewardTrainer(given, args, PAIRS, PAIRS[:5], tokenizer())
    if method == "ppo":
        args = PPOConfig(**SHARED | DRAWN | {"per_device_train_batch_size": 12, "num_ppo_epochs": 2} | options)
        return PPOTrainer(given, share_of_ones, args, PROMPTS, PROMPTS[:5], tokenizer())
    factory = TwoTurns if options.pop("plays", False) else None
    args = GRPOConfig(**SHARED | DRAWN | {"per_device_train_batch_size": 24, "num_generations": 4} | options)
    return GRPOTrainer(given, share_of_ones, args, PROMPTS, PROMPTS[:5], tokenizer(),
                       environment_factory=factory)  # fmt: skip


def wholes(model, views):
    """Copies on the host; of parts that ranks share out, wholes on the first of them and nothing on the others."""
    if getattr(model, "tensor", None) is None:
        return {part: model.backend.to_numpy(view).copy() for part, view in views.items()}
    shared = {part: view for part, view in views.items() if model.tensor.axis_of(part) is not None}
    return whole_parts(model, shared) | {
        part: model.backend.to_numpy(view).copy() for part, view in views.items() if part not in shared
    }


class Recorder:
    """Keeps the gradients and the advantages of each step, and does what a test asks of one rank in the middle."""

    def __init__(self, trainer, does=None, at=2, which=1):
        self.arrays, self.trainer, self.does, self.at, self.which = {}, trainer, does, at, which
        accumulate, make_batch = trainer._accumulate, trainer.make_batch
        to_numpy = trainer.model.backend.to_numpy

        def kept(*given):
            found = accumulate(*given)
            for name, one in trainer.models.items():
                views = one.model.trained_store.part_views(lambda bucket: bucket.grad)
                for part, array in wholes(one.model, views).items():
                    self.arrays[f"gradient/{trainer.global_step}/{name}/{part}"] = array
            return found

        def acting(step):
            if step == at and trainer.ranks.rank == which:
                self.act()
            found = make_batch(step)
            if (batch := getattr(trainer, "_batch", None)) is not None:
                for column in COLUMNS:
                    if (values := getattr(batch, column)) is not None:
                        self.arrays[f"batch/{step}/{column}"] = to_numpy(values).copy()
            return found

        trainer._accumulate, trainer.make_batch = kept, acting

    def act(self):
        if self.does is None:
            return
        print(f"rank {self.which} acts at {time.time()}", flush=True)
        if self.does in ("kill", "stop"):
            os.kill(os.getpid(), signal.SIGKILL if self.does == "kill" else signal.SIGSTOP)
        elif self.does == "fail":
            raise OSError("the disk of this rank is broken")
        elif self.does == "term":
            os.kill(os.getpid(), signal.SIGTERM)
        elif self.does.endswith(" in rollout"):
            trainer, go_on, early = self.trainer, self.trainer.raise_if_stopped, iter(range(6))
            self.does = self.does.split()[0]
            trainer.raise_if_stopped = lambda: (go_on(), next(early, None) is None and self.act())
        elif self.does == "pass":  # in its second pass, while the others sum gradients
            compute, passes = self.trainer.compute_loss, iter((False, True))

            def failing(rows):
                if next(passes):
                    raise OSError("this rank cannot compute")
                return compute(rows)

            self.trainer.compute_loss = failing
        elif self.does == "save alone":
            self.trainer.save_checkpoint()
        elif self.does == "ask alone":
            self.trainer.stop_requested()
        elif self.does == "linger":
            time.sleep(60)
        elif self.does == "reward":

            def broken(completions, **_):
                raise RuntimeError("no such answer")

            self.trainer.scorer.functions[0] = broken


def make_slow(trainer, rank):
    """A step of this rank's engine takes longer, and groups that move need not be large."""
    dealing.PERIOD, dealing.LEAST_GAP, dealing.ROW = 0.01, 1, 1
    go_on = trainer.raise_if_stopped
    if trainer.ranks.rank == rank:
        trainer.raise_if_stopped = lambda: (time.sleep(0.01), go_on())


def run_case(folder, method, resume=None, does=None, silent=None, slow=None, **options):
    folder = Path(folder)
    watch.SILENT = silent or watch.SILENT
    folder.mkdir(parents=True, exist_ok=True)
    trainer = make_trainer(method, **{"output_dir": str(folder / "run")} | options)
    if slow is not None and trainer.ranks.size > 1:
        make_slow(trainer, slow)
    recorder = Recorder(trainer, does)
    last = trainer.train(resume)
    rank = world().rank
    arrays = dict(recorder.arrays)
    for name, one in trainer.models.items():
        found = wholes(one.model, one.model.trained_store.part_views())
        arrays |= {f"weights/{name}/{part}": array.astype(np.float64) for part, array in found.items()}
    np.savez(folder / f"rank-{rank}.npz", **arrays)
    evaluations = [metrics for _, metrics in trainer.evaluations]
    told = {"last": last, "evaluations": evaluations, "step": trainer.global_step, "run": str(trainer.run_folder)}
    (folder / f"rank-{rank}.json").write_text(json.dumps(told, default=float))


if __name__ == "__main__":
    for name, case in json.loads(sys.argv[2]).items():
        run_case(Path(sys.argv[1]) / name, **case)
