"""bench scale as a command: reports in place of the fitted times, what it writes, errors."""

import json

import pytest

import cukit_cli
from cukit.bench import ScaleBench
from cukit.bench.scale import make_job, run


def job(**options):
    return make_job(ScaleBench(**options))


def rows(**options):
    return run(ScaleBench(**options))["rows"]


def report(kind, model="qwen3-0.6b", scale=1.0, options=None, **row):
    names = dict.fromkeys(("tokens_per_row", "prompt_length")) | {"num_generations": 8}
    return {"benchmark": kind, "model": model, "scale": scale, "options": names | (options or {}), "rows": [row]}


def test_measured_times_take_the_place_of_the_fitted_ones(tmp_path):
    step = report(
        "grpo", samples=128, tokens=128 * 712, seconds=4.0, generate_seconds=2.5, train_seconds=1.4, prompts=16
    )
    train = report("train", seconds=0.1, tokens=22_784, gradient_checkpointing=None)
    train["rows"].append({"seconds": 0.3, "tokens": 22_784, "gradient_checkpointing": "full"})
    whole = report(
        "generate", workload="G", requests=64, samples=512, prompt_tokens=12_800, output_tokens=262_144, seconds=6.0
    )
    paths = [str(tmp_path / f"{one['benchmark']}.json") for one in (step, train, whole)]
    for path, one in zip(paths, (step, train, whole)):
        (tmp_path / path).write_text(json.dumps(one))
    for files in (paths[:1], paths[:2], paths[1::-1]):
        (row,) = rows(gpus=[1], prompts=16, measured=files)
        assert row["rollout_seconds"] == pytest.approx(2.5, rel=1e-6)
        assert row["train_seconds"] + row["update_seconds"] == pytest.approx(1.4, rel=1e-6)
        assert row["seconds"] == pytest.approx(4.0, rel=1e-6)
    (row,) = rows(gpus=[1], measured=paths[1:])
    assert row["rollout_seconds"] == pytest.approx(6.0, rel=1e-6)
    assert row["train_seconds"] == pytest.approx(512 * 712 / 22_784 * (0.3 - row["update_seconds"]), rel=1e-6)
    assert job(measured=paths[1:2]).times.prefill_flops == pytest.approx(22_784 * job().shape.work(712) / 0.1)


def test_reports_of_bench_are_taken(tmp_path, capsys):
    """Written by the commands themselves; the step comes back from its parts."""
    paths = {kind: str(tmp_path / f"{kind}.json") for kind in ("grpo", "train", "generate")}
    sizes = {
        "grpo": "--prompts 2 --num_generations 2 --prompt_length 5 --max_completion_length 6 --steps 3",
        "train": "--rows 2 --tokens_per_row 8 --completion 4 --repeats 1",
        "generate": "--workload G --scale 0.02 --repeats 1",
    }
    for kind, path in paths.items():
        assert cukit_cli.main(["bench", kind, *sizes[kind].split(), "--device", "cpu", "--output", path]) == 0
    measured = json.loads((tmp_path / "grpo.json").read_text())["rows"][0]
    same = dict(num_generations=2, prompt_length=5, max_completion_length=6, prompts=2)
    found = run(ScaleBench(model="tiny", gpus=[1, 8], measured=list(paths.values()), **same))
    row = found["rows"][0]
    assert row["rollout_seconds"] == pytest.approx(measured["generate_seconds"], rel=1e-3)
    assert row["seconds"] == pytest.approx(measured["seconds"], rel=0.05)


def test_the_command_writes_what_it_shows(capsys, tmp_path):
    path = tmp_path / "scale.json"
    assert cukit_cli.main(["bench", "scale", "--gpus", "8", "64", "--output", str(path)]) == 0
    printed, written = capsys.readouterr().out, json.loads(path.read_text())
    assert "SIMULATED" in printed and "checked against two GPUs" in printed and written["simulated"] is True
    assert [row["gpus"] for row in written["rows"]] == [8, 64]
    assert written["shape"]["parameters"] == 596_049_920 and written["single_gpu"]["launch"] > 0
    assert all(f"{row['seconds']:,.2f}" in printed for row in written["rows"])


@pytest.mark.parametrize(
    "argv, message",
    [
        ("--gpus 0", "gpus must be 1 to gpus_per_host=8 or a multiple of that, got 0"),
        ("--gpus 12", "gpus must be 1 to gpus_per_host=8 or a multiple of that, got 12"),
        ("--gpus 8 --tensor_parallel_size 3", "tensor_parallel_size=3 must divide gpus_per_host=8"),
        ("--gpus 2 --tensor_parallel_size 4", "tensor_parallel_size=4 must divide gpus, got 2"),
        ("--zero_stage 4", "zero_stage must be at least 0 and at most 3, got 4"),
        ("--prompts 8 --prompts_per_gpu 2", "prompts=8 and prompts_per_gpu=2 say two things"),
        ("--completions long", "completions must be one of fixed, uniform, lognormal, got 'long'"),
        ("--network_gb_per_s 0", "network_gb_per_s must be above 0"),
        ("--rollout_share 1", "rollout_share must be above 0 and at most 0.99"),
        ("--gpus 1 --rollout_share 0.5", "rollout_share=0.5 needs two ranks at least, and gpus=1 make one"),
        ("--model qwen", "model 'qwen' is neither a shape"),
        ("--gpu_memory_gb 1", "qwen3-0.6b and a sequence do not fit 1 GB even without states"),
        ("--measured nowhere.json", "measured 'nowhere.json' cannot be read: No such file or directory"),
        ("--output nowhere/x.json", "output 'nowhere/x.json' cannot be written"),
    ],
)
def test_errors_are_one_line(capsys, argv, message):
    assert cukit_cli.main(["bench", "scale", *argv.split()]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and message in lines[0]


@pytest.mark.parametrize(
    "written, message",
    [
        ("[]", "has no rows of bench grpo, generate, train"),
        ("{", "cannot be read"),
        (json.dumps(report("ppo", seconds=1)), "has no rows of bench grpo"),
        (json.dumps(report("train", model="tiny", seconds=1)), "is about tiny, not qwen3-0.6b: give --model tiny"),
        (json.dumps(report("train", seconds=1) | {"processes": 2}), "is of 2 processes: give a report of one"),
        (json.dumps(report("generate", workload="N")), "is of workload N, which is no rollout of groups: measure G"),
        (
            json.dumps(report("grpo", samples=16, tokens=16 * 712, seconds=1, generate_seconds=1e-6, train_seconds=1)),
            "1e-06 s of generation are less than",
        ),
    ],
)
def test_reports_that_cannot_be_taken(tmp_path, written, message):
    path = tmp_path / "report.json"
    path.write_text(written)
    with pytest.raises(ValueError, match=message):
        run(ScaleBench(measured=[str(path)], gpus=[8]))
