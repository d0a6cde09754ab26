"""The planner of memory: the cache gets what is left, and what cannot fit is refused.

What is counted: test_memory_counts.py. What the driver says: tests/gpu/test_memory.py and tests/oracle/memory_plan.py.
"""

import logging
from dataclasses import replace

import numpy as np
import pytest

from cukit.engine import memory
from cukit.engine.config import EngineConfig
from cukit.engine.memory import plan_memory
from cukit.engine.shapes import CONTEXT_BYTES, ModelUse, block_bytes, parameter_counts
from cukit.models.config import LEVELS
from engine.shapes import GB, SHAPE, bytes_of, card, cpu

LARGER = replace(SHAPE, hidden_size=2048, intermediate_size=6144)  # Qwen3-1.7B

# ---- training ----


def planned(**options):
    uses = options.pop("uses", [ModelUse("policy", SHAPE, "bfloat16", trained=True)])
    return plan_memory(uses, None, card(), **({"max_tokens_per_batch": 16_384} | options))


def test_states_follow_their_dtypes_and_ranks():
    numbers = sum(parameter_counts(SHAPE))
    plan = planned()
    assert bytes_of(plan, "master") == 2 * numbers and bytes_of(plan, "moments") == 8 * numbers
    assert bytes_of(plan, "weights' gradients") == 4 * numbers
    whole = planned(uses=[ModelUse("policy", SHAPE, "float32", trained=True)])
    assert bytes_of(whole, "master") == 0 and bytes_of(whole, "moments") == 8 * numbers
    half = planned(uses=[ModelUse("policy", SHAPE, "float16", trained=True)])
    assert bytes_of(half, "master") == 4 * numbers
    lean = planned(uses=[ModelUse("policy", SHAPE, "bfloat16", True, master_bytes=1, moment_bytes=4, gradient_bytes=2)])
    assert bytes_of(lean, "master") == 1 * numbers and bytes_of(lean, "moments") == 4 * numbers
    half = planned(ranks=2)
    assert abs(bytes_of(half, "moments") - 4 * numbers) <= 8
    assert bytes_of(half, "weights in") == bytes_of(plan, "weights in")


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_stages_of_zero_share_gradients_and_weights_out(micro_batches):
    weights, norms = parameter_counts(SHAPE)
    numbers, vocabulary = weights + norms, SHAPE.vocab_size * SHAPE.hidden_size
    layer = -(-(numbers - vocabulary) // SHAPE.num_hidden_layers)
    few = dict(max_tokens_per_batch=64, ranks=4, micro_batches=micro_batches)
    plans = [planned(zero_stage=stage, **few) for stage in (1, 2, 3)]
    assert [bytes_of(plan, "weights' gradients") for plan in plans] == [
        4 * numbers,
        *[4 * (-(-numbers // 4) + vocabulary + 3 * layer)] * 2,
    ]
    assert len({bytes_of(plan, "moments") for plan in plans}) == 1
    whole = bytes_of(plans[0], "policy: weights in")
    assert bytes_of(plans[1], "policy: weights in") == whole
    others = 2 * weights - 2 * weights // 4
    assert bytes_of(plans[2], "policy: weights in") == whole - others
    coming = 2 * (vocabulary + 2 * layer)
    assert whole - bytes_of(plans[2], "other processes hold") == bytes_of(plans[2], "policy: weights in")
    # a quarter of what comes and goes bounds the gap of a chunk of logits; whole weights leave no gaps in the pool
    waste = (memory.POOL_WASTE + 0.25) * coming
    assert plans[1].phase_bytes("training") - plans[2].phase_bytes("training") == pytest.approx(others - coming - waste)
    assert bytes_of(plans[2], "gaps in the pool") - bytes_of(plans[1], "gaps in the pool") == pytest.approx(waste)
    assert planned(zero_stage=3).items == planned().items  # of one process
    adapter = ModelUse("policy", SHAPE, "bfloat16", True, adapter_parameters=10**6)
    assert bytes_of(planned(uses=[adapter], zero_stage=3, **few), "other processes") == 0


def test_more_models_hold_more():
    policy, reference = (ModelUse(name, SHAPE, "bfloat16", name == "policy") for name in ("policy", "reference"))
    both = planned(uses=[policy, reference])
    assert both.peak_bytes - planned().peak_bytes == bytes_of(both, "reference: weights") > 1e9
    critic = planned(uses=[policy, ModelUse("critic", SHAPE, "bfloat16", True, head=False)])
    assert bytes_of(critic, "critic: AdamW") > 4e9 and bytes_of(critic, "weights' gradients") > 4e9


def test_an_adapter_is_trained_alone():
    adapter = planned(uses=[ModelUse("policy", SHAPE, "bfloat16", True, adapter_parameters=10**6)])
    assert bytes_of(adapter, "moments") == 8 * 10**6 and bytes_of(adapter, "weights' gradients") <= 4 * 10**6
    assert bytes_of(adapter, "weights in") - bytes_of(planned(), "weights in") == 2 * 10**6


def test_one_pass_an_update_holds_few_gradients_beside_the_activations():
    one, many = (planned(micro_batches=count, gradient_checkpointing="none") for count in (1, 2))
    vocabulary = SHAPE.vocab_size * SHAPE.hidden_size * 4
    assert bytes_of(one, "weights' gradients") == vocabulary < bytes_of(many, "weights' gradients")
    # few tokens: the peak is the end of the backward pass, with all gradients
    assert bytes_of(planned(micro_batches=1, max_tokens_per_batch=64), "weights' gradients") == 4 * sum(
        parameter_counts(SHAPE)
    )


def test_recomputation_and_fewer_tokens_hold_less():
    peaks = [
        planned(max_tokens_per_batch=tokens, gradient_checkpointing=level).peak_bytes
        for tokens, level in ((16_384, "none"), (16_384, "selective"), (8_192, "none"), (8_192, "selective"),
                              (16_384, "full"), (8_192, "full"), (1, "full"))
    ]  # fmt: skip
    assert peaks == sorted(peaks, reverse=True) and peaks[0] > 2 * peaks[4]
    assert planned(longest_sequence=20_000) == planned(max_tokens_per_batch=20_000)  # a longer row stands alone


def test_a_step_that_only_scores_holds_no_states():
    assert planned(uses=[ModelUse("policy", SHAPE, "bfloat16")]).peak_bytes < 2.1e9


# ---- the cache ----

ALONE = [ModelUse("model", SHAPE, "bfloat16")]
POLICY = [ModelUse("policy", SHAPE, "bfloat16", trained=True)]


def test_e16_the_share_is_of_the_whole_device_and_for_everything():
    for share in (0.3, 0.5, 0.9):
        plan = plan_memory(ALONE, EngineConfig(gpu_memory_utilization=share), card())
        assert plan.limit == int(share * 80 * GB)
        assert 0 <= plan.limit - plan.peak_bytes < block_bytes(SHAPE, np.dtype("float16"), 16)
        training = plan_memory(POLICY, EngineConfig(gpu_memory_utilization=share), card(), max_tokens_per_batch=16_384)
        assert training.peak_bytes <= training.limit == plan.limit
        states = bytes_of(training, "master weights") + bytes_of(training, "moments")
        block = block_bytes(SHAPE, np.dtype("float16"), 16)
        assert plan.kv_bytes - training.kv_bytes > states - block, "states come before the cache"


def test_e16_what_others_hold_is_not_ours():
    plan = plan_memory(ALONE, EngineConfig(), card(free=20 * GB))
    assert plan.limit == 20 * GB + CONTEXT_BYTES
    loaded = plan_memory([replace(ALONE[0], loaded=True)], EngineConfig(), card(free=20 * GB))
    assert loaded.limit - plan.limit == bytes_of(plan, "weights in"), "what is loaded is no longer in the free memory"


def test_e16_partial_results_of_long_rows_are_in_the_budget():
    plan = plan_memory(ALONE, EngineConfig(max_num_seqs=512, max_model_len=40_960), card())
    assert bytes_of(plan, "partial results") == 512 * 16 * 160 * (128 + 2) * 4
    short = plan_memory(ALONE, EngineConfig(max_num_seqs=512, max_model_len=1024), card())
    assert bytes_of(short, "partial results") == 512 * 16 * 4 * (128 + 2) * 4


def test_the_table_says_whether_prompts_or_comparisons_take_the_memory():
    def passing(**options):
        plan = plan_memory(ALONE, EngineConfig(**options), card())
        return bytes_of(plan, "comparisons"), bytes_of(plan, "engine: prompts")

    compared, prompts = passing()
    assert compared and not prompts and passing(max_num_batched_tokens=2048) == (compared, 0)
    without = [passing(exact="false", max_num_batched_tokens=tokens) for tokens in (8192, 2048)]
    assert without[0][0] == without[1][0] == 0 and 0 < without[1][1] < without[0][1] < compared
    assert passing(max_num_batched_tokens=1 << 16)[0] == 0


def test_the_cache_holds_all_sequences_at_most():
    plan = plan_memory(ALONE, EngineConfig(max_num_seqs=4, max_model_len=100, block_size=16), card())
    assert plan.num_kv_blocks == 4 * 7 and plan.max_model_len == 100
    shorter = plan_memory(ALONE, EngineConfig(max_num_seqs=4, max_model_len=100), card(), longest_sequence=33)
    assert shorter.num_kv_blocks == 4 * 3
    shortest = plan_memory(ALONE, EngineConfig(max_num_seqs=1, max_model_len=100), card(), longest_sequence=33)
    assert shortest.num_kv_blocks == 7, "one sequence of max_model_len at the least"
    assert plan_memory(ALONE, EngineConfig(num_kv_blocks=5, max_model_len=80), card()).num_kv_blocks == 5


def test_a_cache_that_fits_stays_awake_and_one_that_does_not_sleeps():
    engine = EngineConfig(max_num_seqs=64, max_model_len=2048)
    large = plan_memory(POLICY, engine, card(), max_tokens_per_batch=16_384)
    assert not large.sleeps_cache and large.num_kv_blocks == 64 * 128
    small = plan_memory(POLICY, engine, card(225 * GB // 10), max_tokens_per_batch=16_384)
    assert small.sleeps_cache and small.num_kv_blocks > 2 * (small.limit - small.phase_bytes("training")) // 1_835_008
    assert small.peak_bytes <= small.limit and small.phase_bytes("training") < small.phase_bytes("rollout")
    assert "sleeps in training" in small.table()
    middle = plan_memory(POLICY, engine, card(275 * GB // 10), max_tokens_per_batch=16_384)
    awake = (middle.limit - middle.phase_bytes("training")) // 1_835_008
    assert middle.sleeps_cache and 1.4 * awake < middle.num_kv_blocks < 2 * awake
    given = plan_memory(POLICY, replace(engine, num_kv_blocks=6000), card(225 * GB // 10), max_tokens_per_batch=16_384)
    assert given.sleeps_cache and given.num_kv_blocks == 6000


def test_e7_a_default_length_shrinks_with_a_warning_and_a_given_one_is_an_error(caplog):
    tight = card(4 * GB)
    with caplog.at_level(logging.WARNING, "cukit"):
        plan = plan_memory(ALONE, EngineConfig(), tight)
    assert plan.max_model_len == 16 * plan.num_kv_blocks < 40_960
    assert len(caplog.records) == 1 and "max_model_len is" in caplog.text and "40960" in caplog.text
    caplog.clear()
    with pytest.raises(ValueError, match=r"room for \d+ tokens .*max_model_len=40000.*gpu_memory_utilization"):
        plan_memory(ALONE, EngineConfig(max_model_len=40_000), tight)
    with pytest.raises(ValueError, match="max_model_len=50000 exceeds the model's max_position_embeddings=40960"):
        plan_memory(ALONE, EngineConfig(max_model_len=50_000), card())
    assert plan_memory(ALONE, EngineConfig(), card()).max_model_len == 40_960 and not caplog.records


def test_e7_the_cpu_takes_a_share_of_what_is_free_and_four_gigabytes_of_cache_at_most(caplog):
    def on_cpu(free, **options):
        return plan_memory(ALONE, EngineConfig(**options), cpu, total_bytes=64 * GB, free_bytes=free)

    assert on_cpu(60 * GB).kv_bytes <= memory.CPU_CACHE_BYTES < on_cpu(60 * GB).kv_bytes * 1.01
    less = on_cpu(6 * GB, gpu_memory_utilization=0.9)
    assert less.table().splitlines()[-1].endswith("of 5.40 GB (gpu_memory_utilization 0.9 of 6.00 GB free)")
    assert less.peak_bytes <= less.limit == int(5.4 * GB) and less.kv_bytes > 0.2 * GB
    assert on_cpu(60 * GB, num_kv_blocks=10_000).num_kv_blocks == 10_000, "asked for"
    caplog.clear()
    with caplog.at_level(logging.WARNING, "cukit"):
        plan = on_cpu(1 * GB)  # the system may swap: said, not refused
    assert plan.num_kv_blocks == 1 and "may take" in caplog.text and "max_model_len is" in caplog.text


# ---- what does not fit ----


@pytest.mark.parametrize(
    ("engine", "options", "words"),
    [
        (EngineConfig(), {"gradient_checkpointing": "none"}, ", or set gradient_checkpointing=full"),
        (EngineConfig(), {"max_tokens_per_batch": 131_072}, "lower max_tokens_per_batch"),
        (None, {"max_tokens_per_batch": 262_144}, "lower max_tokens_per_batch"),
        (EngineConfig(num_kv_blocks=20_000), {}, "num_kv_blocks"),
    ],
)
def test_a_run_that_cannot_fit_is_refused_with_a_way_out(engine, options, words):
    with pytest.raises(ValueError, match="this run needs .* GB .* largest: ") as caught:
        plan_memory(POLICY, engine, card(24 * GB), **({"max_tokens_per_batch": 16_384} | options))
    assert words in str(caught.value) and "\n" not in str(caught.value)
    assert ("gpu_memory_utilization" in str(caught.value)) == (engine is not None)


def test_the_error_names_what_is_enough():
    """A limit of the bytes that the error names is one with which the run fits, and the table says how tightly."""

    def plan(nbytes):
        return plan_memory(POLICY, None, card(80 * GB), max_tokens_per_batch=16_384, memory_limit=nbytes)

    with pytest.raises(memory.DoesNotFit, match="this run needs at least ") as caught:
        plan(8 * GB)
    least = caught.value.plan.least_bytes
    assert f"needs at least {memory.gigabytes(least)} of memory and may take 8.00 GB" in str(caught.value)
    assert plan(least).table().endswith("(memory_limit); it fits only with smaller gaps")
    assert plan(caught.value.plan.peak_bytes).table().endswith("(memory_limit)")


def test_the_error_names_the_fastest_level_that_fits():
    """None at all where another level would not help either."""
    sizes = {"max_tokens_per_batch": 16_384}

    def error(gigabytes, level, **more):
        with pytest.raises(memory.DoesNotFit) as caught:
            plan_memory(POLICY, None, card(gigabytes * GB), gradient_checkpointing=level, **sizes, **more)
        return str(caught.value)

    assert error(30, "none").endswith("set gradient_checkpointing=selective")
    assert error(20, "none").endswith("set gradient_checkpointing=full")
    assert error(20, "selective").endswith("set gradient_checkpointing=full")
    for level in LEVELS:
        assert "gradient_checkpointing" not in error(8, level)
    assert "gradient_checkpointing" not in error(8, "auto")
    assert "gradient_checkpointing" not in error(30, "none", quiet=True), "a search tries levels itself"


def test_auto_takes_the_fastest_level_that_fits():
    def plan(gigabytes, engine=None, level="auto"):
        return plan_memory(
            POLICY, engine, card(gigabytes * GB), gradient_checkpointing=level, max_tokens_per_batch=16_384
        )

    levels = {gigabytes: plan(gigabytes).level for gigabytes in (16, 20, 30, 40, 80)}
    assert levels == {16: "full", 20: "full", 30: "selective", 40: "none", 80: "none"}
    for gigabytes, level in levels.items():
        chosen, given = plan(gigabytes), plan(gigabytes, level=level)
        assert replace(chosen, why="") == given and given.why == "" and chosen.peak_bytes <= chosen.limit
    line = plan(30).table().splitlines()[-2]
    assert line.startswith("level      selective  of gradient_checkpointing, by auto: none needs 3")
    assert "none needs 3" in plan(30).why and plan(30).why.endswith("GB; the fastest that fits")
    assert plan(80).why == ", by auto: the fastest that fits"
    assert "none needs" in plan(16).why and "selective needs" in plan(16).why
    assert "level           full  of gradient_checkpointing" in plan(80, level="full").table().splitlines()


def test_auto_takes_nothing_from_the_cache():
    """Where a faster level fits only with a smaller cache, or one that sleeps, the leanest level keeps it as it is."""
    engine = EngineConfig(max_num_seqs=64, max_model_len=2048)
    found = {}
    for gigabytes in range(24, 100, 4):
        plan, full = (
            plan_memory(POLICY, engine, card(gigabytes * GB), gradient_checkpointing=level, max_tokens_per_batch=8192)
            for level in ("auto", "full")
        )
        assert (plan.num_kv_blocks, plan.sleeps_cache) == (full.num_kv_blocks, full.sleeps_cache)
        found[plan.level] = plan
    assert set(found) == set(LEVELS) and "takes memory from the KV cache" in found["full"].why


def test_auto_on_a_cpu_goes_by_the_free_memory():
    def level(free):
        sizes = {"max_tokens_per_batch": 16_384, "total_bytes": 64 * GB, "free_bytes": free * GB}
        return plan_memory(POLICY, None, cpu, gradient_checkpointing="auto", **sizes).level

    assert [level(free) for free in (4, 28, 60)] == ["full", "selective", "none"]


def test_auto_says_nothing_of_levels_that_it_does_not_take(caplog):
    with caplog.at_level(logging.WARNING, "cukit"):
        plan_memory(POLICY, EngineConfig(), card(60 * GB), gradient_checkpointing="auto", max_tokens_per_batch=8192)
    given = [record.getMessage() for record in caplog.records]
    caplog.clear()
    with caplog.at_level(logging.WARNING, "cukit"):
        plan_memory(POLICY, EngineConfig(), card(60 * GB), gradient_checkpointing="full", max_tokens_per_batch=8192)
    assert given == [record.getMessage() for record in caplog.records]


def test_where_nothing_is_trained_there_is_no_level():
    plan = plan_memory(ALONE, EngineConfig(), card(), gradient_checkpointing="auto")
    assert plan.level == plan.why == "" and "gradient_checkpointing" not in plan.table()


def test_weights_alone_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match=r"model: weights in float32 2\.\d\d GB"):
        plan_memory([ModelUse("model", SHAPE, "float32")], EngineConfig(max_model_len=256), card(2 * GB))


def test_gaps_alone_refuse_nothing():
    plan = planned()
    gaps = bytes_of(plan, memory.GAPS)
    exact = plan.peak_bytes - gaps - CONTEXT_BYTES
    fits = plan_memory(POLICY, None, card(80 * GB, exact), max_tokens_per_batch=16_384)
    assert fits.limit < fits.peak_bytes
    with pytest.raises(ValueError, match="this run needs"):
        plan_memory(POLICY, None, card(80 * GB, exact - 1000), max_tokens_per_batch=16_384)


# ---- the table ----


def test_the_table_names_every_item_and_adds_up():
    plan = plan_memory(POLICY, EngineConfig(max_model_len=2048), card(), max_tokens_per_batch=16_384)
    lines = plan.table().splitlines()
    for words in ("AdamW's moments", "master weights", "KV cache", "logits", "partial results", "CUDA context"):
        assert sum(words in line for line in lines) == 1, words
    assert any(line.startswith("peak") and "training" in line for line in lines)
    assert "gpu_memory_utilization 0.9 of 80.00 GB" in lines[-1] and lines[-1].startswith("left")
    total = sum(float(line.split()[1]) for line in lines if line.split()[0] in ("always", "training") and "GB" in line)
    assert abs(total - plan.phase_bytes("training") / 1e9) < 0.1
    assert all(len(line) < 120 for line in lines)


def test_every_shape_has_a_plan_at_random():
    """What is planned keeps to its limit, whatever the options; what cannot is refused."""
    generator, fitting = np.random.default_rng(0), 0
    for _ in range(300):
        config = generator.choice([SHAPE, LARGER])
        engine = EngineConfig(
            max_num_seqs=int(generator.integers(1, 600)),
            max_model_len=[None, 512, 4096][generator.integers(3)],
            gpu_memory_utilization=float(generator.uniform(0.2, 1.0)),
            block_size=int(generator.choice([1, 16, 64])),
        )
        uses = [ModelUse("policy", config, "bfloat16", bool(generator.integers(2)))]
        options = {"max_tokens_per_batch": int(generator.integers(1, 40_000))}
        options["gradient_checkpointing"] = generator.choice([*LEVELS, "auto"])
        try:
            plan = plan_memory(uses, engine, card(int(generator.uniform(2, 90) * GB)), **options)
        except ValueError as error:
            assert "this run needs" in str(error) or "the KV cache has room" in str(error)
            continue
        fitting += 1
        gaps = max(item.nbytes for item in plan.items if "gaps" in item.name)
        assert plan.peak_bytes - gaps <= plan.limit and plan.num_kv_blocks >= 1
        assert plan.max_model_len <= plan.num_kv_blocks * engine.block_size
    assert fitting > 100
