"""A head's loss in one pass on the GPU: the bits of two passes, near NumPy, and one chunk of logits at a time."""

import math
from pathlib import Path

import numpy as np
import pytest
from check import DTYPES, check_errors, normal, statistics
from head_cases import Case, assert_same_bits, cross_entropy, random_policy_loss, random_ppo_loss, scale_for

from cukit import GRPOConfig, GRPOTrainer, PPOConfig, PPOTrainer, SFTConfig, SFTTrainer
from cukit.autograd import Parameter, Tensor
from cukit.backend import backend_for
from cukit.bench.measure import memory_in_use, peak_memory
from cukit.models import heads
from cukit.ops import lm_head_loss
from cukit.runs.metrics import read_jsonl

pytestmark = pytest.mark.gpu
FOLDER = Path(__file__).parents[2] / "data" / "tiny-qwen3"
SIZES = [(1, 64, 211), (130, 64, 1024), (300, 128, 5003)]  # rows, width, vocabulary


@pytest.mark.parametrize("with_entropy", [False, True])
@pytest.mark.parametrize("width, vocab_size", [(1, 1), (211, 200), (4104, 4099), (151936, 151665)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_gradient_may_take_the_place_of_the_logits(dtype, width, vocab_size, with_entropy):
    cuda, rows = backend_for("cuda"), 5
    logits = cuda.array(normal(rows, width, scale=3.0).astype(cuda.dtype_of(dtype)))
    targets = cuda.array(np.random.default_rng(0).integers(0, vocab_size, rows).astype(np.int32))
    _, entropy, lse = cuda.token_logprobs_forward(logits, targets, 0.7, vocab_size)
    slopes = [cuda.array(statistics(rows, seed=seed)) for seed in (2, 3)]
    given = (targets, lse, entropy, slopes[0], slopes[1] if with_entropy else None, 0.7, vocab_size)
    apart = cuda.to_numpy(cuda.token_logprobs_backward(logits, *given))
    assert cuda.token_logprobs_backward(logits, *given, out=logits) is logits
    assert cuda.to_numpy(logits).tobytes() == apart.tobytes()


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_policy_losses_have_the_bits_of_two_passes(dtype, size):
    for seed in range(8):
        case = Case(seed, dtype, *size, device="cuda")
        loss_of, settings = random_policy_loss(case)
        options = dict(temperature=[1.0, 0.7][seed % 2], vocab_size=[None, size[2] - 3][seed // 2 % 2])
        options |= dict(chunk_rows=[100, 4096, 64][seed % 3])
        two, one = (case.run(loss_of, scale_for(dtype), one_pass, **options) for one_pass in (False, True))
        assert_same_bits(two, one, f"{seed} {settings} {options}")


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_cross_entropy_and_ppo_have_the_bits_of_two_passes(dtype, size):
    for seed in range(4):
        case = Case(seed, dtype, *size, device="cuda")
        loss_of, with_values = cross_entropy(case), random_ppo_loss(case, seed)
        values = case.array(case.rng.normal(size=(1, size[1])))
        for given in ((loss_of,), (with_values, values)):
            two, one = (
                case.run(given[0], scale_for(dtype), one_pass, *given[1:], chunk_rows=100) for one_pass in (False, True)
            )
            assert_same_bits(two, one, seed)


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_pass_is_as_near_to_the_truth_as_numpy(dtype):
    """The truth is NumPy in float64 on the same rounded inputs, the yardstick NumPy in the same type."""
    found = {}
    for name, device, precise in (("cuda", "cuda", False), ("near", "cpu", False), ("true", "cpu", True)):
        case = Case(0, dtype, *SIZES[1], device=device)
        if precise:
            case.dtype = case.precise = np.dtype(np.float64)
            for column in ("hidden", "weight", "before"):
                setattr(case, column, getattr(case, column).astype(np.float64))
        found[name] = case.run(
            cross_entropy(case), 1.0, True, temperature=0.8, vocab_size=SIZES[1][2] - 3, chunk_rows=50
        )
    for name in ("logprobs", "entropy", "dhidden", "dweight"):
        got, near, true = (found[key][name].astype(np.float64) for key in ("cuda", "near", "true"))
        check_errors(f"{name} in {dtype}", got, near, true, found["cuda"][name].dtype)


def trained(make, folder, monkeypatch, one_pass):
    """Every weight after a run, and its losses."""
    original, ways = heads.lm_head_loss, []

    def noted(hidden, weight, targets, loss_of, upstream=None, *options, **more):
        ways.append(upstream is not None)
        return original(
            hidden, weight, targets, loss_of, upstream if one_pass else None, *options, chunk_rows=48, **more
        )

    with monkeypatch.context() as patch:
        patch.setattr(heads, "lm_head_loss", noted)
        trainer = make(str(folder))
        trainer.train()
    assert any(ways)
    be = trainer.model.backend
    weights = {f"{name}.{key}": np.array(be.to_numpy(p.data)) for name, one in trainer.models.items()
               for key, p in one.model.named_parameters().items()}  # fmt: skip
    losses = [row["loss"] for row in read_jsonl(folder / "metrics.jsonl") if "loss" in row]
    return weights, losses


def sft(dtype, folder):
    args = SFTConfig(output_dir=folder, device="cuda", dtype=dtype, max_steps=3, logging_steps=1, save_steps=0,
                     per_device_train_batch_size=16, learning_rate=1e-3)  # fmt: skip
    rows = [{"prompt": f"{i % 10}+{i % 7}=", "completion": str(i % 10 + i % 7)} for i in range(64)]
    return SFTTrainer(FOLDER, args, rows)


def of_policy(trainer, config, dtype, folder, **options):
    args = config(output_dir=folder, device="cuda", dtype=dtype, max_steps=2, logging_steps=1, save_steps=0,
                  max_completion_length=12, per_device_train_batch_size=32, learning_rate=1e-3, **options)  # fmt: skip
    rows = [{"prompt": f"{number}+1="} for number in range(16)]
    reward = lambda completion_ids, **_: [sum(ids) % 101 / 101 for ids in completion_ids]  # noqa: E731
    return trainer(FOLDER, reward, args, rows)


RUNS = {
    "sft": sft,
    "grpo": lambda *a: of_policy(GRPOTrainer, GRPOConfig, *a, num_generations=8, beta=0.1, entropy_coef=0.01),
    "ppo shared": lambda *a: of_policy(PPOTrainer, PPOConfig, *a, critic="shared", entropy_coef=0.01),
    "ppo separate": lambda *a: of_policy(PPOTrainer, PPOConfig, *a, critic="separate"),
}


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_runs_in_one_pass_and_in_two_end_with_the_same_bits(tmp_path, monkeypatch, dtype, name):
    """float16 with its loss scale."""
    ends = []
    for one_pass in (False, True):
        folder = tmp_path / str(one_pass)
        ends.append(trained(lambda path: RUNS[name](dtype, path), folder, monkeypatch, one_pass))
    (first, losses), (second, other) = ends
    assert losses == other and all(math.isfinite(loss) for loss in losses)
    for key, x in first.items():
        assert x.tobytes() == second[key].tobytes(), key


@pytest.mark.parametrize("one_pass", [False, True])
def test_one_chunk_of_logits_is_held_at_a_time(one_pass):
    """As the planner's HEAD_CHUNKS says: in the backward pass of two passes too."""
    be, rows, width, vocabulary = backend_for("cuda"), 3000, 256, 32768
    dtype = be.dtype_of("bfloat16")
    hidden = Tensor(be.array(normal(rows, width).astype(dtype)), requires_grad=True)
    weight = Parameter(be.array(normal(vocabulary, width).astype(dtype)))
    targets = be.array(np.arange(rows, dtype=np.int32))

    def run():
        upstream = be.zeros((), "float32") + 1
        loss, *_ = lm_head_loss(
            hidden, weight, targets, lambda x, *_: (x.sum(), None), upstream if one_pass else None, chunk_rows=1024
        )
        loss.backward(upstream)
        hidden.grad = None

    run()  # compiles, compares products, and makes the weight's gradient
    chunk, before = 1024 * vocabulary * dtype.itemsize, memory_in_use(be)
    peak = peak_memory(be, run, before)
    assert chunk <= peak < 1.5 * chunk
