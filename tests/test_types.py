"""What a user's type checker learns from cukit: a script is checked as mypy checks any program with --strict."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
# A line that ends in "#: type" must be revealed as that type, one that ends in "#! code" must be that error.
SCRIPT = """
from typing import Any

from cukit import LLM, GRPOConfig, GRPOTrainer, SamplingParams, SFTConfig, SFTTrainer, Tensor, TrainerCallback
from cukit.trainers.batch import Rows
from cukit.trainers.callbacks import RunningTrainer

llm = LLM("folder", max_model_len=64)
params = SamplingParams(n=2, temperature=0.7)
conversation = [{"role": "user", "content": "x"}]

reveal_type(llm.generate(["x"])[0].outputs[0].text)  #: str
reveal_type(llm.generate(["x"])[0].outputs[0].logprobs)  #: list[float] | None
reveal_type(llm.generate([[1, 2], [3]], params))  #: list[RequestOutput]
reveal_type(llm.generate([1, 2], [params], stream=False))  #: list[RequestOutput]
reveal_type(llm.generate("x", params, stream=True))  #: Iterator[RequestOutput]
reveal_type(llm.generate("x", stream=len("x") > 0))  #: list[RequestOutput] | Iterator[RequestOutput]
reveal_type(llm.chat(conversation, params, enable_thinking=False))  #: list[RequestOutput]
reveal_type(llm.chat([conversation], stream=True))  #: Iterator[RequestOutput]
reveal_type(llm.stats.num_requests)  #: int
reveal_type(params.temperature)  #: float
for scores in llm.score([[1, 2]]):
    reveal_type(scores.tolist())  #: Any

llm.generate(5)  #! call-overload
llm.generate(["x"], "greedy")  #! call-overload
llm.generate(["x"]).text  #! attr-defined
llm.generate(["x"], stream=True)[0]  #! index
llm.chat("x")  #! call-overload
LLM.from_model("folder")  #! arg-type


def reward(completions: list[str], **columns: object) -> list[float]:
    return [0.0 for _ in completions]


class Callback(TrainerCallback):
    def on_log(self, trainer: RunningTrainer, row: dict[str, float]) -> None:
        reveal_type(trainer.global_step)  #: int
        trainer.stop()
        trainer.halt()  #! attr-defined


class Reinforce(GRPOTrainer):
    def policy_loss(self, logprobs: Tensor, rows: Rows) -> tuple[Tensor, dict[str, Any]]:
        reveal_type(-(1.0 - logprobs * 2.0).sum() / 2.0)  #: Tensor
        return -(logprobs * rows.advantages * rows.weights).sum(), {}


rows = [{"prompt": "x"}]
trainer = GRPOTrainer("folder", reward, GRPOConfig(max_steps=1), rows, callbacks=[Callback()])
GRPOTrainer("folder", reward_funcs=["exact", reward], train_dataset="rows.jsonl")
reveal_type(trainer.train())  #: dict[Any, Any]
reveal_type(trainer.args)  #: GRPOConfig
reveal_type(trainer.model.vocab_size)  #: int
reveal_type(trainer.run_folder)  #: Path | None
reveal_type(SFTTrainer("folder", SFTConfig(), rows).args.packing)  #: bool
trainer.train(resume_from_checkpoint="latest")
trainer.train(resume=True)  #! call-arg
GRPOTrainer("folder", reward_funcs=1)  #! arg-type
GRPOTrainer("folder", reward, SFTConfig(), rows)  #! arg-type
GRPOTrainer("folder", reward, train_dataset=5)  #! arg-type
"""


def checked(path: Path, *options: str) -> str:
    """What mypy says of a file outside the checkout, which finds cukit as an installed package would be found."""
    command = [sys.executable, "-m", "mypy", "--config-file=", f"--cache-dir={path.parent / 'cache'}", *options]
    environment = os.environ | {"MYPYPATH": str(ROOT)}
    done = subprocess.run(
        [*command, "--follow-imports=silent", "--no-pretty", str(path)],
        capture_output=True,
        text=True,
        cwd=path.parent,
        env=environment,
    )
    assert done.returncode in (0, 1) and not done.stderr, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_types_reach_a_user(tmp_path):
    pytest.importorskip("mypy")
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    wanted = {
        number: match[1]
        for number, line in enumerate(SCRIPT.splitlines(), 1)
        if (match := re.search(r"  #[:!] (.*)", line))
    }
    found: dict[int, str] = {}
    for line in checked(script, "--strict").splitlines():
        if match := re.fullmatch(r'.*script\.py:(\d+): note: Revealed type is "(.*)"', line):
            found[int(match[1])] = re.sub(r"\b(\w+\.)+", "", match[2])
        elif match := re.fullmatch(r".*script\.py:(\d+): error: .*\[(.*)\]", line):
            found[int(match[1])] = match[2]
    assert found == wanted


@pytest.mark.slow
def test_the_example_of_a_loss_passes_a_type_checker(tmp_path):
    pytest.importorskip("mypy")
    example = tmp_path / "custom_loss.py"
    example.write_text((ROOT / "docs/examples/custom_loss.py").read_text())
    assert checked(example, "--check-untyped-defs").startswith("Success")


def test_a_package_says_that_it_has_types():
    """Without py.typed a type checker takes every name of an installed package for Any."""
    assert (ROOT / "cukit/py.typed").is_file()
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    assert {"py.typed", "*.pyi"} <= set(setuptools["package-data"]["cukit"])
