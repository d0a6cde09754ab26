"""bench scale: sums by hand, the one-GPU figures it was fitted to, and what must never be slower."""

import json
from dataclasses import replace

import numpy as np
import pytest

from cukit.bench import ScaleBench
from cukit.bench.generate import workloads
from cukit.bench.links import Links, Moved, Ring
from cukit.bench.scale import make_job, reduction, run, simulate, state_bytes, training_seconds, with_sharing
from cukit.bench.simulated_rollout import draw_lengths, rollout_seconds
from cukit.bench.single_gpu import Shape, Times
from cukit.bench.subject import config_of

# launch + weights = 1, products nothing, a row 0.1, a key 0.01; a FLOP of a prompt 1/1000 s, of training 1/100 s
ROUND = Times(0.75, 0.25, 0.0, 0.1, 0.01, 1000.0, 100.0, 0.0, 0.5, 0.25)
# 30 parameters: two layers of 10 and a vocabulary of 10; no work of attention
SMALL = Shape("small", 30, 2, 4, 0, 10, 1, 1)


def job(**options):
    return make_job(ScaleBench(**options))


def rows(**options):
    return run(ScaleBench(**options))["rows"]


# ---- links -----------------------------------------------------------------------------------------------------------


def test_a_ring_by_hand():
    links = Links(nvlink=10.0, network=1.0, nvlink_latency=0.5, network_latency=2.0)
    assert Ring(4, 4, links).one_way(80) == Moved(60, 0, 6 + 3 * 0.5)
    two_hosts = Ring(8, 4, links)  # 3/4 within a host; of a quarter, a half over the network
    assert two_hosts.one_way(80) == Moved(60, 10, 6 + 10 + 3 * 0.5 + 1 * 2)
    assert two_hosts.all_reduce(80, fast=True) == two_hosts.one_way(80) * 2
    # in order of ranks: an eighth to each of 3 neighbours and of 4 others
    assert two_hosts.ordered_scatter(80) == Moved(30, 40, 40 + 3 * 0.5 + 4 * 2)
    assert two_hosts.all_reduce(80, fast=False) == two_hosts.ordered_scatter(80) + two_hosts.one_way(80)
    assert two_hosts.broadcast(80) == Moved(80, 80, 80 + 3 * 0.5 + 2)
    assert Ring(4, 4, links).broadcast(80) == Moved(80, 0, 8 + 3 * 0.5)
    one = Ring(1, 1, links)
    assert one.all_reduce(80, True) == one.all_reduce(80, False) == one.broadcast(80) == Moved()


@pytest.mark.parametrize("size, local", [(2, 2), (8, 8), (64, 8), (1024, 8), (12, 4)])
@pytest.mark.parametrize("fast", [False, True])
def test_every_way_sends_as_many_bytes_in_all(size, local, fast):
    """2(n - 1)/n of the array a rank: the least that an all-reduce can."""
    moved = Ring(size, local, Links(1.0, 1.0)).all_reduce(size * 100.0, fast)
    assert moved.nvlink_bytes + moved.network_bytes == pytest.approx(2 * (size - 1) * 100)


# ---- rollout ---------------------------------------------------------------------------------------------------------


def test_a_rollout_by_hand():
    """Two prompts of 10 tokens, completions of 3 and 1, and of 2 and 2."""
    lengths = np.array([[3, 1], [2, 2]])
    prompts = 2 * 10 * 2 * 30 / 1000  # 1.2 s, more than a step; this also gives all four their first tokens
    first = 1 + 3 * 0.1 + 0.01 * (10 + 1 + 10 + 1 + 1)  # one of the four has ended
    second = 1 + 0.1 + 0.01 * (10 + 2)
    assert rollout_seconds(lengths, 10, SMALL, ROUND, 1000, 8) == pytest.approx(prompts + first + second)


def test_what_has_no_room_waits():
    """13 tokens hold one sample; its group's prompt is computed again for the next."""
    lengths = np.array([[3, 3]])
    alone = 1 + 2 * (1 + 0.1) + 0.01 * (11 + 12)  # a prompt's pass takes a step at least
    assert rollout_seconds(lengths, 10, SMALL, ROUND, 13, 8) == pytest.approx(2 * alone)
    assert rollout_seconds(lengths, 10, SMALL, ROUND, 1000, 1) == pytest.approx(2 * alone)
    together = 1 + 2 * (1 + 2 * 0.1) + 0.01 * (12 + 14)
    assert rollout_seconds(lengths, 10, SMALL, ROUND, 16, 8) == pytest.approx(together)


@pytest.mark.parametrize("seed", range(4))
def test_a_rollout_is_the_sum_of_its_steps(seed):
    """The events against a loop over all steps, where everything has room. From 12 rows on products take longer than
    the weights.
    """
    times, generator = replace(ROUND, product=0.021), np.random.default_rng(seed)
    lengths, step = generator.integers(1, 30, (5, 3)), 0
    seconds = max(1.0, 5 * 7 * 2 * 30 / 1000)
    for step in range(1, lengths.max()):
        alive = lengths > step
        keys = step * alive.sum() + 7 * alive.any(axis=1).sum()
        seconds += 0.75 + (0.25**4 + (0.021 * alive.sum()) ** 4) ** 0.25 + 0.1 * alive.sum() + 0.01 * keys
    assert rollout_seconds(lengths, 7, SMALL, times, 10**6, 99) == pytest.approx(seconds)


def test_lengths():
    options = dict(max_completion_length=100, seed=5)
    assert (draw_lengths(ScaleBench(**options), 3) == np.full((3, 8), 100)).all()
    uniform = draw_lengths(ScaleBench(completions="uniform", **options), 2000)
    assert uniform.min() == 1 and uniform.max() == 100 and uniform.mean() == pytest.approx(50.5, rel=0.02)
    lognormal = ScaleBench(completions="lognormal", mean_completion_length=10, completion_spread=0.5, **options)
    drawn = draw_lengths(lognormal, 2000)
    assert drawn.mean() == pytest.approx(10.5, rel=0.02) and 1 <= drawn.min() < 5 and 30 < drawn.max() <= 100
    capped = draw_lengths(ScaleBench(completions="lognormal", completion_spread=3, **options), 2000)
    assert capped.max() == 100 and (capped == 100).sum() > 100
    assert (drawn == draw_lengths(lognormal, 2000)).all()
    assert (uniform != draw_lengths(ScaleBench(completions="uniform", max_completion_length=100), 2000)).any()


# ---- the figures of one GPU ------------------------------------------------------------------------------------------


def test_one_gpu_gives_the_measured_step_back():
    """docs/BENCHMARKS.md, eighth section: 8.56 s = 5.13 + 3.39 under a limit of 32 GB, whose cache has no room for
    all rows at once (its size is not recorded; from 16 to 29 GB it makes two waves).
    """
    for cache in (18, 24, 28):
        (row,) = rows(gpus=[1], kv_cache_gb=cache)
        assert row["rollout_seconds"] == pytest.approx(5.13, rel=0.03)
        assert row["train_seconds"] + row["update_seconds"] == pytest.approx(3.39, rel=0.01)
        assert row["seconds"] == pytest.approx(8.56, rel=0.02) and row["efficiency"] == 1


def test_one_gpu_gives_the_measured_rates_back():
    """G, N and T1."""
    model = job(model="qwen3-0.6b")
    shape, times = model.shape, model.times
    measured = 262_144 / 61_907
    assert rollout_seconds(np.full((64, 8), 512), 200, shape, times, 10**7, 512) == pytest.approx(measured, rel=0.01)
    (load,) = workloads("N", 1.0, 0, 151_936)
    prompts = np.array([len(prompt) for prompt in load.prompts])
    lengths = np.array([params.max_tokens for params in load.params])
    seconds = sum(prompts * shape.work(prompts)) / times.prefill_flops
    for step in range(1, lengths.max()):
        alive = lengths > step
        seconds += times.step(alive.sum()) + times.key * (prompts[alive] + step).sum()
    assert lengths.sum() / seconds == pytest.approx(22_674, rel=0.01)
    train, last_pass, passes = training_seconds(job(max_tokens_per_batch=10**6), np.full((32, 1), 512), 1)
    assert passes == 1 and 22_784 / (train + times.update) == pytest.approx(105_932, rel=0.01) and train == last_pass


@pytest.mark.parametrize(
    "model, count, milliseconds, within",
    [
        ("qwen3-0.6b", 1, 1.791, 0.07),  # more than eight take, which no sum of parts gives back
        ("qwen3-0.6b", 8, 1.672, 0.07),
        ("qwen3-4b", 1, 4.23, 0.01),
        ("qwen3-4b", 8, 4.25, 0.01),
        ("qwen3-8b", 1, 6.27, 0.015),
        ("qwen3-8b", 64, 6.70, 0.08),
    ],
)
def test_decode_steps_take_what_was_measured(model, count, milliseconds, within):
    """docs/LOG.md, docs/BENCHMARKS.md (eighth, ninth): 128 tokens of a prompt, 255 more."""
    times = job(model=model).times
    assert times.step(count) + 256 * count * times.key == pytest.approx(milliseconds / 1e3, rel=within)


def test_few_rows_hide_behind_the_weights():
    times = job(model="qwen3-8b").times
    equal = times.weights / times.product
    for count, more in ((1, 1.0), (equal / 4, 1.001), (equal, 2**0.25), (4 * equal, 1.001)):
        longer = max(times.weights, count * times.product)
        found = times.step(count) - times.launch - count * times.row
        assert found == pytest.approx(more * longer, rel=1e-4)
    slower = times.decoding(3.0)
    assert all(slower.step(count) == pytest.approx(3 * times.step(count)) for count in (0, 1, 512))


# ---- the figures of two GPUs, docs/BENCHMARKS.md, ninth --------------------------------------------------------------

# bench grpo on one of them
ONE = {"samples": 512, "tokens": 512 * 712, "seconds": 8.0371, "generate_seconds": 4.5041, "train_seconds": 3.4477}


@pytest.mark.parametrize("prompts, step, rollout, train", [(128, 8.095, 4.495, 3.468), (64, 4.338, 2.537, 1.723)])
def test_two_gpus_take_what_was_measured(tmp_path, prompts, step, rollout, train):
    report = {"benchmark": "grpo", "model": "qwen3-0.6b", "scale": 1.0, "rows": [ONE]}
    report["options"] = {"prompt_length": None, "num_generations": 8}
    path = tmp_path / "grpo.json"
    path.write_text(json.dumps(report))
    (row,) = rows(gpus=[2], prompts=prompts, measured=[str(path)])
    assert row["rollout_seconds"] == pytest.approx(rollout, rel=0.035)
    assert row["train_seconds"] + row["update_seconds"] == pytest.approx(train, rel=0.015)
    assert row["seconds"] == pytest.approx(step, rel=0.02)


def test_one_gpu_draws_while_the_other_trains():
    """Measured after the times were fitted, and no part of the fit."""
    (row,) = rows(gpus=[2], prompts=64, rollout_share=0.5, off_policy_steps=1)
    assert row["seconds"] == pytest.approx(4.51, rel=0.05)
    assert row["rollout_seconds"] == pytest.approx(4.42, rel=0.04) and row["train_seconds"] == pytest.approx(
        3.49, rel=0.04
    )


@pytest.mark.parametrize("stage, step, rollout, train", [(2, 19.46, 8.64, 10.73), (3, 19.76, 8.46, 11.20)])
def test_two_gpus_share_qwen3_8b(stage, step, rollout, train):
    sizes = dict(prompts=16, prompt_length=512, max_completion_length=1024, max_tokens_per_batch=8192)
    (row,) = rows(model="qwen3-8b", gpus=[2], zero_stage=stage, **sizes)
    assert row["rollout_seconds"] == pytest.approx(rollout, rel=0.05)
    assert row["train_seconds"] + row["update_seconds"] == pytest.approx(train, rel=0.045)
    assert row["seconds"] == pytest.approx(step, rel=0.02)


@pytest.mark.parametrize("count, milliseconds, times_measured", [(1, 4.14, 1.06), (64, 4.59, 1.11)])
def test_two_gpus_share_each_layer(count, milliseconds, times_measured):
    """So much above what was measured, as docs/SCALING.md says and explains."""
    times = with_sharing(job(model="qwen3-8b", tensor_parallel_size=2))
    found = (times.step(count) + 256 * count * times.key) * 1e3
    assert found / milliseconds == pytest.approx(times_measured, abs=0.005)


# ---- shapes ----------------------------------------------------------------------------------------------------------


def test_shapes_have_their_sizes():
    shape = Shape.of("qwen3-32b", config_of("qwen3-32b"))
    assert shape.parameters == pytest.approx(32.76e9, rel=0.001) and shape.key_bytes == 2 * 64 * 8 * 128 * 2
    assert shape.multiplied == shape.parameters - 151_936 * 5120
    assert len(shape.buckets) == 66 and sum(shape.buckets) == pytest.approx(shape.parameters, rel=1e-6)
    small = Shape.of("qwen3-0.6b", config_of("qwen3-0.6b"))
    assert small.multiplied == small.parameters == 596_049_920 and len(small.buckets) == 29
    assert small.work(712) == 2 * 596_049_920 + 2 * 28 * 2048 * 712


# ---- training and reduction ------------------------------------------------------------------------------------------


def test_a_ranks_training_by_hand():
    """tiny; rows of 3, 5 and 4 tokens; two ranks have 8 and 4; passes of 6 tokens."""
    model = job(model="tiny", prompt_length=1, max_tokens_per_batch=6)
    lengths, times, shape = np.array([[2, 4], [3, 3]])[:1], model.times, model.shape
    seconds, last_pass, passes = training_seconds(model, np.array([[2, 4, 3]]), 2)
    floor = 3 * 1.2e-3
    assert (seconds, last_pass, passes) == (pytest.approx(2 * floor), pytest.approx(floor), 2)
    assert training_seconds(model, lengths, 5)[2] == 1, "ranks without rows do nothing"
    large = job(model="tiny", prompt_length=1, max_tokens_per_batch=10**9)
    count = 10**6
    seconds, *_ = training_seconds(large, np.full((1, 1), count - 1), 1)
    assert seconds == pytest.approx(count * shape.work(count) / times.train_flops)


def test_ranks_train_on_about_as_many_tokens():
    model = job(model="tiny", prompt_length=1, max_tokens_per_batch=10**9)
    rows = np.array([3, 5, 4]) * 10**5  # the middle of the second lies before that of all
    seconds, *_ = training_seconds(model, rows[None] - 1, 2)
    work = rows[:2] * model.shape.work(rows[:2])
    assert seconds == pytest.approx(work.sum() / model.times.train_flops)


def test_sums_hide_behind_the_backward_pass():
    model = job(model="qwen3-0.6b", nvlink_latency=0, fast_reduction=True)
    ring, layer = model.ring(8, 1), model.shape.buckets[0]
    whole = 2 * 7 / 8 * 4 * sum(model.shape.buckets) / 360e9
    # the first layer's and the embedding's, which the head's weight is too, come at the end
    last = 2 * 7 / 8 * 4 * (layer + model.shape.vocabulary) / 360e9
    moved, exposed = reduction(model, ring, 10.0, 3)
    assert exposed == pytest.approx(last) and moved.nvlink_bytes == pytest.approx(whole * 360e9)
    later = job(model="qwen3-0.6b", nvlink_latency=0, fast_reduction=True, overlap=False)
    assert reduction(later, ring, 10.0, 3)[1] == pytest.approx(whole)
    # a pass that is too short to hide them
    assert reduction(model, ring, 1e-9, 3)[1] == pytest.approx(whole, rel=1e-6)
    assert reduction(model, model.ring(1, 1), 10.0, 3) == (Moved(), 0.0) and layer < model.shape.vocabulary


def test_stages_of_zero():
    """Bytes by hand: one way less for gradients, 2 bytes a parameter for weights; all in each pass for stage 3."""
    numbers = sum(job().shape.buckets)
    sent = {}
    for stage in (0, 1, 2, 3):
        model = job(zero_stage=stage, nvlink_latency=0)
        moved, _ = reduction(model, model.ring(8, 1), 10.0, 3)
        sent[stage] = moved.nvlink_bytes / numbers * 8 / 7
    assert sent == {stage: pytest.approx(x) for stage, x in {0: 8, 1: 6, 2: 3 * 4 + 2, 3: 3 * (4 + 4) + 2}.items()}
    second, layer = 8 / 7 * 360e9, job().shape.buckets[0]
    for overlap, hidden in ((True, 10.0), (False, 0.0)):
        model = job(zero_stage=3, nvlink_latency=0, overlap=overlap)
        exposed = 3 * (max(8 * numbers / second - hidden, 0) + 2 * layer / second) + 2 * numbers / second
        assert reduction(model, model.ring(8, 1), 10.0, 3)[1] == pytest.approx(exposed)
        one, each = (reduction(job(zero_stage=s, nvlink_latency=0, overlap=overlap), model.ring(8, 1), 1e-3, n)[1]
                     for s, n in ((1, 1), (2, 3)))  # fmt: skip
        assert each == pytest.approx(one + 2 * (4 * numbers / second - hidden * 1e-4))
    weights, lasting, most = state_bytes(job(zero_stage=0), 8)
    p = job().shape.parameters
    assert (weights, lasting, most) == (2 * p, 12 * p, 16 * p)
    assert state_bytes(job(zero_stage=1), 8) == (2 * p, 2 * p + 10 * p / 8, 6 * p + 10 * p / 8)
    assert state_bytes(job(zero_stage=2), 8) == (2 * p, 2 * p + 10 * p / 8, 2 * p + 14 * p / 8)
    assert state_bytes(job(zero_stage=3), 8) == (2 * p, 2 * p + 10 * p / 8, 2 * p + 10 * p / 8)
    assert state_bytes(job(zero_stage=3), 2) == (2 * p, 7 * p, 8 * p)
    row, sharded = (rows(gpus=[8], zero_stage=stage)[0] for stage in (0, 1))
    assert sharded["update_seconds"] == pytest.approx(row["update_seconds"] / 8)


def test_gpus_that_share_layers():
    model = job(model="qwen3-8b", tensor_parallel_size=4)
    one, four = model.times, with_sharing(model)
    assert four.weights == one.weights / 4 and four.key == one.key / 4 and four.train_flops == 4 * one.train_flops
    assert four.launch == pytest.approx(one.launch + 2 * 36 * 2 * 5e-6)
    assert four.token_waits == pytest.approx(2 * 36 * 2 * 3 / 4 * 2 * 4096 / 360e9)
    free = with_sharing(job(model="qwen3-8b", tensor_parallel_size=4, nvlink_latency=0, nvlink_gb_per_s=1e12))
    assert free.row == pytest.approx(one.row) and free.product == one.product / 4 and free.pass_waits == 0
    lengths = np.full((2, 8), 512)
    (whole, last, _), (shared, *_) = (training_seconds(each, lengths, 1) for each in (job(model="qwen3-8b"), model))
    waits = 3 * 16 * 712 * four.token_waits + 6 * 36 * 6 * 5e-6  # six all-reduces a layer, of six messages each
    assert whole == last and shared == pytest.approx(whole / 4 + waits)


def test_a_step_is_its_parts():
    (row,) = rows(gpus=[64])
    other = 0.04
    parts = ("rollout_seconds", "train_seconds", "exposed_seconds", "update_seconds")
    assert row["seconds"] == pytest.approx(sum(row[part] for part in parts) + other)
    assert row["tokens_per_s"] == pytest.approx(64 * 512 * 712 / row["seconds"])
    completions = 64 * 512 * 512 * 8 / 1e9  # every rank gets all of them
    assert row["network_gb"] == pytest.approx(completions + 4 * 0.59605 * (56 / 64 + 7 / 64), rel=1e-3)


def test_apart():
    model = dict(gpus=[8], rollout_share=0.5)
    (turns,), (overlapped,) = rows(**model, off_policy_steps=0), rows(**model)
    sent = 2 * 596_049_920 / 360e9
    assert turns["seconds"] > turns["rollout_seconds"] + turns["train_seconds"] + sent
    longest = max(turns["rollout_seconds"], turns["train_seconds"])
    assert overlapped["rollout_seconds"] == turns["rollout_seconds"]
    assert longest < overlapped["seconds"] < longest + 0.2
    (together,) = rows(gpus=[8])
    assert turns["rollout_seconds"] > 1.5 * together["rollout_seconds"] and turns["state_gb"] == together["state_gb"]
    sums = 2 * 3 / 4 * 4 * sum(job().shape.buckets) / 1e9  # four train
    assert turns["nvlink_gb"] == pytest.approx(sums + (2 * 596_049_920 + 512 * 8 * 512 * 8) / 1e9)
    assert together["nvlink_gb"] == pytest.approx(sums * 7 / 6 + 512 * 8 * 512 * 8 / 1e9)


def test_states_take_room_from_the_cache():
    """12 bytes a parameter lie beside a rollout that shares its GPU with training, 2 where it has one of its own."""
    options = dict(model="qwen3-8b", gpu_memory_gb=150.0, max_completion_length=1024)
    model, lengths = job(**options), np.full((64, 8), 1024)
    shape, times = model.shape, model.times
    for more, held, prompts in (({}, 12, 512), ({"rollout_share": 0.5}, 2, 256)):
        capacity = int((0.9 * 150e9 - held * shape.parameters) / shape.key_bytes)
        (row,) = rows(gpus=[8], prompts=prompts, **options, **more)
        assert row["rollout_seconds"] == rollout_seconds(lengths, 200, shape, times, capacity, 512)


# ---- what must hold --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [{}, {"zero_stage": 1}, {"zero_stage": 2}, {"zero_stage": 3}, {"fast_reduction": True}, {"overlap": False}],
)
@pytest.mark.parametrize("link", ["nvlink", "network"])
def test_faster_links_are_never_slower(options, link):
    gpus = [8, 64, 1024]
    for name, values in ((f"{link}_gb_per_s", (5.0, 50.0, 500.0)), (f"{link}_latency", (50.0, 5.0, 0.0))):
        found = [[row["seconds"] for row in rows(gpus=gpus, **options, **{name: value})] for value in values]
        assert found[0] >= found[1] >= found[2] and found[0] != found[2]
        assert all(slow >= fast for step in (0, 1) for slow, fast in zip(found[step], found[step + 1]))


def test_stragglers_come_with_lengths():
    for row in rows(gpus=[1, 8, 64]):
        assert row["rollout_seconds"] == pytest.approx(row["rollout_mean_seconds"], rel=1e-12)
    several = rows(gpus=[1, 8, 64], completions="lognormal", max_completion_length=1024)
    assert several[0]["rollout_seconds"] == several[0]["rollout_mean_seconds"]
    assert all(row["rollout_seconds"] > 1.02 * row["rollout_mean_seconds"] for row in several[1:])
    assert several[2]["efficiency"] < 1


def test_a_seed_repeats():
    first, again, other = (rows(gpus=[8], completions="uniform", seed=seed) for seed in (1, 1, 2))
    assert first == again and first != other


def test_a_step_that_is_shared_gets_less_efficient():
    found = rows(gpus=[1, 2, 8, 64], prompts=64)
    shares = [row["efficiency"] for row in found]
    assert shares[0] == 1 and shares == sorted(shares, reverse=True) and shares[-1] < 0.2
    assert [row["prompts"] for row in found] == [64] * 4
    assert [row["prompts"] for row in rows(gpus=[1, 8], prompts_per_gpu=16)] == [16, 128]


def test_what_does_not_fit_is_said():
    one, eight = rows(model="qwen3-8b", gpus=[1, 8], zero_stage=1)
    assert (
        one["note"] == "does not fit 141 GB" and one["seconds"] is None and one["state_gb"] == pytest.approx(131, abs=1)
    )
    assert eight["note"] == "" and 0.9 < eight["efficiency"] <= 1
    full = simulate(job(max_completion_length=40_000, kv_cache_gb=1), 8, 8)
    assert full["note"] == "does not fit 141 GB"
