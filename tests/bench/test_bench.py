"""The measurements: what they count, and that they run. Times are not judged."""

import json
from types import SimpleNamespace

import numpy as np
import pytest

import cukit_cli
from cukit.backend import backend_for
from cukit.bench import GenerateBench, KernelsBench, TrainBench
from cukit.bench.cases import Workbench, all_cases, visible_pairs
from cukit.bench.generate import workloads
from cukit.bench.grpo import by_place, number_tokenizer
from cukit.bench.kernels import CACHE_BYTES, chosen_cases
from cukit.bench.measure import Limits, peak_memory, random_array, time_calls
from cukit.bench.report import cells, headline
from cukit.bench.subject import SHAPES, choose_subject
from cukit.bench.train import make_step
from cukit.commands.parser import bundled
from cukit.models.config import ModelConfig
from cukit.models.weights import load_config

SMALL = [
    "--tokens",
    "24",
    "--sequences",
    "3",
    "--context",
    "20",
    "--batch",
    "4",
    "--repeats",
    "1",
    "--batch_milliseconds",
    "0.01",
]


def bench(dtype="float32", model="tiny", **sizes):
    subject = choose_subject(KernelsBench(model=model, device="cpu", dtype=dtype))
    return Workbench(subject, **({"tokens": 24, "sequences": 3, "context": 20, "batch": 4, "seed": 0} | sizes))


def cost(workbench, name, index=0):
    case = [case for case in all_cases(workbench) if case.name == name][index]
    return case.bytes, case.flops


def run(capsys, tmp_path, *argv):
    """(what was printed, the report written) of a bench command."""
    path = tmp_path / "report.json"
    assert cukit_cli.main(["bench", *argv, "--device", "cpu", "--output", str(path)]) == 0
    return capsys.readouterr().out, json.loads(path.read_text(encoding="utf-8"))


def is_shown(report, printed) -> bool:
    """Every cell of every row, in order, in one line of the table."""
    lines = [[cell.strip() for cell in line.split("│")[1:-1]] for line in printed.splitlines() if line.startswith("│")]
    return lines == [cells(report["benchmark"], row) for row in report["rows"]]


# ---- what is counted -------------------------------------------------------------------------------------------------


def test_bytes_and_flops_by_hand():
    """tiny in float32: C 128, F 256, H 4, K 2, D 32, W 256, V 64; 24 tokens in 3 sequences of 8."""
    b = bench()
    ids = len(np.unique(all_cases(b)[0].arguments()[1]))
    assert 1 < ids < 24
    assert cost(bench(), "embedding_forward") == ((24 + ids) * 128 * 4 + 24 * 4, 0)
    assert cost(b, "rms_norm_forward") == (2 * 24 * 128 * 4 + 24 * 4 + 128 * 4, 0)
    assert cost(b, "silu_mul_backward") == (5 * 24 * 256 * 4, 0)
    assert cost(b, "silu_mul_backward_remade") == (6 * 24 * 256 * 4, 0)
    assert cost(b, "attention_forward") == (24 * 256 * 4 + 24 * 128 * 4 + 24 * 4 * 4, 3 * 36 * 4 * 4 * 32)
    assert cost(b, "attention_backward")[1] == 3 * 36 * 10 * 4 * 32
    # two blocks a sequence; 4 queries and results of 128, 4 · 20 keys and values of 64, 4 lengths, 8 blocks
    assert cost(b, "paged_decode_attention") == (
        4 * 2 * 128 * 4 + 4 * 20 * 2 * 64 * 4 + 4 * 4 + 8 * 4,
        4 * 20 * 4 * 4 * 32,
    )
    # beside: a key and a value written, a position and a slot a row; one row of angles (cos and sin of 16), two weights
    assert cost(b, "rope_paged_decode_attention")[0] == (
        cost(b, "paged_decode_attention")[0] + 4 * (2 * 64 * 4 + 4 + 8) + 3 * 32 * 4
    )
    assert cost(b, "paged_prefill_attention", 1)[1] == 3 * (8 * 20 + 36) * 4 * 4 * 32
    assert cost(b, "linear_forward", 1) == (4 * (1 * 128 + 256 * 128 + 1 * 256), 2 * 128 * 256)
    assert cost(b, "linear_backward_weight") == (4 * 24 * (128 + 256) + 8 * 256 * 128, 2 * 24 * 128 * 256)
    assert cost(b, "adamw_step") == (512 * 128 * 28, 0)
    # three layers' buckets of 20,160 pieces of 8, and the embedding's of 1
    assert cost(b, "sums_of_squares") == (4 * (3 * 20_160 * 8 + 20_160), 0)


def test_half_precision_moves_half():
    b = bench("bfloat16")
    assert cost(b, "rms_norm_forward")[0] == 2 * 24 * 128 * 2 + 24 * 4 + 128 * 4
    assert cost(b, "adamw_step")[0] == 512 * 128 * 28  # parameter, remainder, m, v read and written, gradient read
    assert cost(b, "adamw_step", 1)[0] == 512 * 128 * 20 and cost(b, "adamw_step_blocks")[0] == 512 * 128 * 16
    assert cost(b, "linear_backward_weight")[0] == 2 * 24 * (128 + 256) + 8 * 256 * 128


def test_visible_pairs():
    assert visible_pairs([1, 2, 5]) == 1 + 3 + 15
    assert visible_pairs([2], cached=10) == 11 + 12


def test_packings_hold_all_tokens():
    b = bench(tokens=25, sequences=7)
    assert b.lengths.sum() == b.mixed_lengths.sum() == 25 and len(b.mixed_lengths) == 7
    assert b.lengths.max() - b.lengths.min() <= 1 and b.mixed_lengths.min() >= 1
    assert bench(sequences=1).mixed_lengths.tolist() == [24]


@pytest.mark.parametrize("model, dtype", [("smollm2-135m", "float32"), ("tiny", "bfloat16")])
def test_every_case_has_arguments_that_its_function_takes(model, dtype):
    """Llama has no q/k norm, and its shape is large: all but what holds a whole matrix of it."""
    b = bench(dtype, model, tokens=6, sequences=2, context=5, batch=2)
    for case in all_cases(b):
        if model == "tiny" or not case.name.startswith(("linear", "adamw", "sum", "embedding")):
            getattr(b.backend, case.name)(*case.arguments())
            assert case.bytes > 0


def test_shapes():
    tiny = load_config(bundled("data/tiny-qwen3"))
    ours = ModelConfig.from_json(SHAPES["tiny"])
    assert all(getattr(ours, name) == getattr(tiny, name) for name in SHAPES["tiny"] if name != "architectures")
    assert ModelConfig.from_json(SHAPES["smollm2-135m"]).head_dim == 64
    assert choose_subject(KernelsBench(model=bundled("data/tiny-qwen3"), device="cpu")).config.vocab_size == 64


def test_workloads_count_their_tokens():
    (n,) = workloads("N", 1.0, 0, 1000)
    assert len(n.prompts) == n.samples == 256
    assert all(
        100 <= len(prompt) <= 1024 and 100 <= params.max_tokens <= 1024 for prompt, params in zip(n.prompts, n.params)
    )
    assert n.prompt_tokens == sum(len(prompt) for prompt in n.prompts) and n.output_tokens == sum(
        params.max_tokens for params in n.params
    )
    (g,) = workloads("G", 1.0, 0, 1000)
    assert (len(g.prompts), g.samples, g.prompt_tokens, g.output_tokens, g.longest) == (64, 512, 12_800, 262_144, 712)
    assert [load.samples for load in workloads("decode", 1.0, 0, 1000)] == [1, 8]
    assert workloads("G", 1.0, 0, 1000)[0].prompts == g.prompts != workloads("G", 1.0, 1, 1000)[0].prompts


def test_a_training_step_counts_its_tokens():
    options = TrainBench(model="qwen3-0.6b", device="cpu", max_tokens_per_batch=16 * 712)
    step = make_step(options, choose_subject(options), 1.0)
    assert (step.tokens, step.completion_tokens, len(step.micro_batches)) == (32 * 712, 32 * 512, 2)
    rows = step.micro_batches[0]
    assert len(rows) == 16 and len(rows.tokens.ids) == 16 * 712 and rows.num_learnt == 16 * 512
    assert rows.tokens.predictors[:512].tolist() == list(range(199, 711))


# ---- clocks ----------------------------------------------------------------------------------------------------------


def test_limits_say_what_bounds():
    limits = Limits(bytes_per_second=100.0, flops_per_second=1000.0)
    assert limits.least_seconds(200, 1000) == (2.0, "memory")
    assert limits.least_seconds(200, 4000) == (4.0, "compute")


@pytest.mark.parametrize("name", ["cpu", "cuda"])
def test_copies_take_turns_and_a_batch_lasts(name):
    seen = []
    backend = SimpleNamespace(name=name, synchronize=lambda: None)
    timing = time_calls(backend, [lambda: seen.append(0), lambda: seen.append(1)], 0.001, 3)
    assert seen[:4] == [0, 1, 0, 1] and timing.calls > 100 and 0 < timing.seconds < 0.001 and timing.host_seconds > 0


def test_random_arrays_repeat_a_block(monkeypatch):
    monkeypatch.setattr("cukit.bench.measure.BLOCK_ELEMENTS", 8)
    x = random_array(backend_for("cpu"), np.random.default_rng(0), (3, 7), np.float32, 2.0)
    assert x.shape == (3, 7) and len(np.unique(x)) == 8 and np.array_equal(x.reshape(-1)[8:16], x.reshape(-1)[:8])


def test_peak_memory_looks_after_every_array_function():
    numpy_shelf, used = backend_for("cpu"), iter([30, 90, 40])
    fake = SimpleNamespace(name="cuda", __name__=numpy_shelf.__name__, memory_info=lambda: (100 - next(used), 100))

    def work():  # linear_forward calls other functions of its shelf: one look each nevertheless
        for _ in range(3):
            numpy_shelf.linear_forward(np.ones((2, 2), np.float32), np.ones((2, 2), np.float32))

    assert peak_memory(fake, work, 20) == 70 and next(used, None) is None


# ---- the commands ----------------------------------------------------------------------------------------------------


def test_kernels_writes_what_it_shows(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr("cukit.bench.kernels.MOST_COPIES", 2)
    printed, report = run(capsys, tmp_path, "kernels", *SMALL)
    assert is_shown(report, printed) and headline(report) in printed and "RANDOM weights" in printed
    assert (
        report["model"] == "tiny"
        and report["weights"] == "random"
        and report["dtype"] == "float32"
        and report["device_name"]
    )
    names = {row["name"] for row in report["rows"]}
    kept = {
        name for name in backend_for("cpu").__all__ if name.endswith(("_forward", "_backward", "_attention", "_step"))
    }
    assert kept | {"linear_backward_input", "linear_backward_weight", "sample", "store_kv", "sums_of_squares"} <= names
    for row in report["rows"]:
        assert (
            row["microseconds"] > 0
            and np.isclose(row["gb_per_s"], row["bytes"] / row["microseconds"] / 1e3)
            and row["copies"] == 2
        )
        assert not row["cold"] and "in cache" in row["note"]


def test_only_chooses(capsys, tmp_path):
    printed, report = run(capsys, tmp_path, "kernels", *SMALL, "--only", "attention_forward", "store_kv")
    assert [row["name"] for row in report["rows"]] == ["attention_forward", "attention_forward", "store_kv", "store_kv"]
    assert all(row["copies"] * 1000 < CACHE_BYTES for row in report["rows"])
    with pytest.raises(ValueError, match=r"only: 'attention' is not measured \(did you mean attention_"):
        chosen_cases(all_cases(bench()), ["attention"])


@pytest.mark.parametrize("workload, rows", [("N", 1), ("G", 1), ("decode", 2)])
def test_generate(capsys, tmp_path, workload, rows):
    printed, report = run(capsys, tmp_path, "generate", "--workload", workload, "--scale", "0.02", "--repeats", "1")
    assert is_shown(report, printed) and len(report["rows"]) == rows and report["scale"] == 0.02
    for row, load in zip(report["rows"], workloads(workload, 0.02, 0, 64)):
        first = load.samples if workload == "decode" else 0  # these come from the prompts' pass, which is not measured
        assert row["output_tokens"] == load.output_tokens - first and row["prompt_tokens"] == load.prompt_tokens
        assert (row["ms_per_token"] is None) == (workload != "decode")


def test_train(capsys, tmp_path):
    printed, report = run(
        capsys,
        tmp_path,
        "train",
        "--rows",
        "3",
        "--tokens_per_row",
        "12",
        "--completion",
        "7",
        "--repeats",
        "1",
        "--max_tokens_per_batch",
        "24",
    )
    assert is_shown(report, printed) and report["micro_batches"] == 2
    assert [(row["gradient_checkpointing"], row["tokens"], row["completion_tokens"]) for row in report["rows"]] == [
        (None, 36, 21),
        ("full", 36, 21),
        ("selective", 36, 21),
        ("none", 36, 21),
    ]
    assert all(row["tokens_per_s"] > 0 and row["peak_gb"] > 0 for row in report["rows"])


def test_grpo(capsys, tmp_path):
    shape = ["--prompts", "2", "--num_generations", "3", "--prompt_length", "5", "--max_completion_length", "7"]
    printed, report = run(capsys, tmp_path, "grpo", *shape, "--repeats", "2", "--beta", "0.1")
    assert is_shown(report, printed) and len(report["rows"]) == 2
    for row in report["rows"]:
        assert (row["samples"], row["tokens"]) == (6, 6 * (5 + 7))
        phases = [row[f"{name}_seconds"] for name in ("generate", "reward", "reference", "train", "other")]
        assert min(phases) > 0 and sum(phases) == pytest.approx(row["seconds"])
        assert 0 <= row["largest_difference"] < 1e-4 and row["peak_gb"] > 0


def test_grpo_rewards_differ_in_every_group():
    rewards = by_place(["x"] * 64)
    assert all(len(set(rewards[start : start + 8])) > 1 for start in range(0, 64, 8))


def test_grpo_tokens_keep_their_value_on_the_way_through_text():
    tokenizer, ids = number_tokenizer(300), [299, 0, 17, 17, 256]
    assert tokenizer.encode(" ".join(map(str, ids))) == ids and tokenizer.vocab_size == 300


def test_a_folder_brings_its_weights(capsys, tmp_path):
    printed, report = run(capsys, tmp_path, "train", "--model", "data/tiny-qwen3", "--rows", "1", "--repeats", "1")
    assert report["weights"] == report["model"] and "RANDOM" not in printed


def test_training_that_does_not_fit_is_said(capsys, tmp_path, monkeypatch):
    def fails(*_):
        raise MemoryError

    monkeypatch.setattr("cukit.bench.train._train", fails)
    printed, report = run(capsys, tmp_path, "train", "--rows", "1", "--repeats", "1")
    assert (
        is_shown(report, printed)
        and "out of memory: lower --max_tokens_per_batch" in printed
        and report["rows"][0]["seconds"] > 0
    )


@pytest.mark.parametrize(
    "argv, message",
    [
        ([], "bench must be followed by kernels, generate, train"),
        (["kernel"], "got 'kernel'"),
        (["kernels", "--only", "attention"], "only: 'attention' is not measured (did you mean attention_"),
        (["kernels", "--tokens", "0"], "tokens must be at least 1, got 0"),
        (["kernels", "--tokens", "4", "--sequences", "5"], "sequences=5 must not exceed tokens=4"),
        (["kernels", "--batch_milliseconds", "0"], "batch_milliseconds must be above 0"),
        (["kernels", "--model", "qwen"], "model 'qwen' is neither a shape"),
        (["kernels", "--output", "nowhere/report.json"], "output 'nowhere/report.json' cannot be written"),
        (["kernels", "--workload", "N"], "unknown option --workload"),
        (["generate", "--workload", "L"], "workload must be one of N, G, decode, got 'L'"),
        (["generate", "--scale", "0"], "scale must be above 0 and at most 1"),
        (["generate", "--scale", "1"], "exceed the 256 positions of tiny: lower --scale"),
        (["generate", "--scale", "0.05", "--max_model_len", "12"], "max_model_len"),
        (
            ["generate", "--scale", "0.05", "--workload", "decode", "--max_num_seqs", "3"],
            "8 requests did not decode together",
        ),
        (["train", "--tokens_per_row", "512", "--completion", "2"], "512 tokens a sequence exceed the 256 positions"),
        (["train", "--tokens_per_row", "10", "--completion", "10"], "completion=10 must be below tokens_per_row=10"),
    ],
)
def test_wrong_options(capsys, argv, message):
    argv = ["bench", *argv] + (["--device", "cpu"] if argv[1:] else [])
    assert cukit_cli.main(argv) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and message in lines[0]


def test_options_of_a_benchmark():
    with pytest.raises(ValueError, match="repeats must be at least 1, got 0"):
        GenerateBench(repeats=0)
    with pytest.raises(ValueError, match="seed must be at least 0"):
        TrainBench(seed=-1)
