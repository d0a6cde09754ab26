"""Which options make a run fit: what is tried, what is found, where it is said."""

import logging
from dataclasses import replace

import pytest

import cukit_cli
from cukit.engine import fitting
from cukit.engine.config import EngineConfig
from cukit.engine.fitting import TRAINING, TRAINING_TOGETHER, search
from cukit.engine.memory import GAPS, DoesNotFit, Plan, gigabytes, plan_memory
from cukit.engine.shapes import Item, ModelUse
from cukit.options import Options, check_choices, option
from cukit.trainers import trainer as loop
from cukit.trainers.grpo_config import GRPOConfig
from cukit.trainers.sft import SFTTrainer

from .shapes import GB, SHAPE, card


class Knobs(Options):
    tokens: int = option(16, "")
    recompute: bool = option(False, "")
    state: str = option("wide", "", ("wide", "half", "byte"))
    way: str | None = option(None, "")

    def __post_init__(self):
        check_choices(self)


ROWS = [{"tokens": 8}, {"tokens": 4}, {"recompute": True}, {"state": "half"}, {"state": "byte"}, {"missing": 1}]


def plan_of(limit, seen=None):
    """16 tokens take 16 GB, 8 with recomputation; states 8, 4 or 2."""

    def plan(knobs):
        if seen is not None:
            seen.append((knobs.tokens, knobs.recompute, knobs.state))
        nbytes = knobs.tokens * (1 if knobs.recompute else 2) + {"wide": 8, "half": 4, "byte": 2}[knobs.state]
        plan = Plan((Item("all", nbytes * GB, "training"),), limit * GB)
        if nbytes > limit:
            raise DoesNotFit("too much", plan)
        return plan

    return plan


def test_each_row_is_tried_alone():
    found = search(Knobs(), plan_of(15), ROWS)
    assert [(one.words(), one.needs // GB, one.fits) for one in found.alone] == [
        ("as given", 40, False),
        ("--tokens 8", 24, False),
        ("--tokens 4", 16, False),
        ("--recompute true", 24, False),
        ("--state half", 36, False),
        ("--state byte", 34, False),
    ]


@pytest.mark.parametrize(
    ("limit", "options"),
    [
        (40, {}),
        (24, {"tokens": 8}),
        (16, {"tokens": 4}),
        (12, {"tokens": 4, "recompute": True}),
        (8, {"tokens": 4, "recompute": True, "state": "half"}),
        (6, {"tokens": 4, "recompute": True, "state": "byte"}),
        (5, None),
    ],
)
def test_the_first_combination_that_fits(limit, options):
    found = search(Knobs(), plan_of(limit), ROWS)
    assert (found.found and found.found.options) == options
    if options:
        assert found.line() == "it fits with " + " ".join(
            f"--{name} {str(value).lower()}" for name, value in options.items()
        )
    elif options is None:
        assert found.line() == "neither these options nor all of them together make it fit"
    else:
        assert found.line() == "it fits as it is"


@pytest.mark.parametrize(
    ("limit", "line", "given"),
    [
        (50, "it fits as it is", "as given"),
        (40, "it fits with --tokens 8", "as given: only with smaller gaps"),
        (
            10,
            "it fits with --tokens 4 --recompute true --state half, but only with smaller gaps in the pool",
            "as given: does not fit",
        ),
    ],
)
def test_what_surely_fits_goes_before_what_needs_smaller_gaps(limit, line, given):
    def plan(knobs):
        try:
            found = plan_of(limit)(knobs)
        except DoesNotFit as error:
            raise DoesNotFit("too much", with_gaps(error.plan)) from None
        return with_gaps(found)

    def with_gaps(plan):
        return replace(plan, items=(*plan.items, Item(GAPS, 5 * GB, "training")))

    found = search(Knobs(), plan, ROWS)
    assert found.line() == line and found.table().splitlines()[1].endswith(given)


def test_a_run_that_fits_only_with_smaller_gaps_is_warned_of(caplog):
    policy = [ModelUse("policy", SHAPE, "bfloat16", trained=True)]
    plans = {limit: plan_memory(policy, None, card(40 * GB), max_tokens_per_batch=16_384, memory_limit=limit * GB)
             for limit in (40, 13)}  # fmt: skip
    assert not plans[40].is_tight and plans[13].is_tight
    (message,) = caplog.messages
    assert message == (
        f"this run may end in out-of-memory: with the usual gaps in the pool it takes "
        f"{gigabytes(plans[13].peak_bytes)}, and it may take 13.00 GB; lower max_tokens_per_batch, or take a smaller "
        "dtype, a leaner optimizer_state or offload_optimizer, or raise memory_limit"
    )


def test_what_is_not_needed_is_left_out_again():
    rows = [{"state": "half"}, {"recompute": True}, {"tokens": 4}]
    assert search(Knobs(), plan_of(16), rows).found.options == {"tokens": 4}
    assert search(Knobs(), plan_of(12), rows).found.options == {"state": "half", "tokens": 4}, "the dearest goes first"


def test_a_row_is_not_needed_once_another_has_gone():
    def plan(knobs):  # 4 tokens without recomputation take more
        nbytes = (4 if knobs.state == "byte" else 10) + 3 * (knobs.tokens == 4 and not knobs.recompute)
        plan = Plan((Item("all", nbytes * GB, "training"),), 6 * GB)
        if nbytes > 6:
            raise DoesNotFit("too much", plan)
        return plan

    assert search(Knobs(), plan, ROWS).found.options == {"state": "byte"}


def test_rows_that_take_no_less_are_left_out():
    given = Knobs(tokens=8, recompute=True, state="half")
    assert [one.options for one in search(given, plan_of(1), ROWS).alone] == [{}, {"tokens": 4}, {"state": "byte"}]
    assert [one.options for one in search(Knobs(state="byte", tokens=4), plan_of(1), ROWS).alone] == [
        {},
        {"recompute": True},
    ]


def test_levels_that_auto_has_tried_and_exactness_that_was_demanded_are_left_out():
    def tried(args, rows):
        return {name for one in search(args, plan_of(99), rows).alone for name in one.options}

    plan_of = lambda limit: lambda args: Plan((), limit)  # noqa: E731
    assert "gradient_checkpointing" not in tried(GRPOConfig(gradient_checkpointing="auto"), TRAINING)
    assert "gradient_checkpointing" in tried(GRPOConfig(gradient_checkpointing="none"), TRAINING)
    assert "exact" not in tried(EngineConfig(exact="true"), fitting.GENERATION)
    assert "exact" in tried(EngineConfig(), fitting.GENERATION)


def test_the_table_tells_a_cache_that_has_no_room_from_the_rest():
    def plan(engine):
        return plan_memory([ModelUse("m", SHAPE, "bfloat16")], engine, card(4 * GB), memory_limit=4 * GB, quiet=True)

    table = search(EngineConfig(max_model_len=40_000), plan, [{"max_num_seqs": 16}]).table()
    assert table.splitlines()[1].endswith("  as given: does not fit with its KV cache")
    few = search(EngineConfig(), plan_of_bytes(5 * GB, 4 * GB), [{"max_num_seqs": 16}]).table()
    assert few.splitlines()[1].endswith("  as given: does not fit")


def plan_of_bytes(nbytes, limit):
    def plan(_):
        raise DoesNotFit("too much", Plan((Item("all", nbytes),), limit))

    return plan


def test_generation_without_exactness_is_the_last_way_to_fit(large, capsys):
    options = ["--max_num_seqs", "16", "--max_model_len", "2048", "--max_num_batched_tokens", "2048"]
    argv = ["chat", "--memory_limit", "2.8GB", "--dry_run", *options]
    assert cukit_cli.main(argv) == 2 and capsys.readouterr().err.strip().endswith("; it fits with --exact false")
    assert cukit_cli.main([*argv, "--exact", "false"]) == 0
    assert "comparisons" not in capsys.readouterr().out


def test_copies_in_eight_bits_are_given_up_to_fit():
    def plan(options, limit=80 * GB):
        engine = EngineConfig(max_num_seqs=16, max_model_len=2048, quantization=options.quantization, exact="false")
        return plan_memory([ModelUse("m", SHAPE, "bfloat16")], engine, card(), memory_limit=limit)

    with_room = plan(EngineConfig())
    most = with_room.peak_bytes - with_room.kv_bytes + 300 * 10**6  # a sequence's cache takes 235 MB
    for options, rows in ((GRPOConfig, TRAINING), (EngineConfig, fitting.GENERATION)):
        found = search(options(quantization="int8"), lambda one: plan(one, most), rows)
        assert found.line() == "it fits with --quantization none"
        assert all("quantization" not in one.options for one in search(options(), plan, rows).alone)


def test_what_the_options_refuse_is_left_out():
    rows = [{"state": "word"}, {"tokens": 8}]
    found = search(Knobs(), plan_of(24), [{"way": "far", "state": "none of these"}, *rows])
    assert [one.options for one in found.alone] == [{}, {"tokens": 8}] and found.found.options == {"tokens": 8}


def test_options_go_together_in_a_row():
    found = search(Knobs(), plan_of(24), [{"recompute": True, "way": "far"}])
    assert found.found.options == {"recompute": True, "way": "far"}


def test_the_table():
    lines = search(Knobs(), plan_of(8), ROWS).table().splitlines()
    assert lines[1].split() == ["40.00", "GB", "–", "as", "given:", "does", "not", "fit"]
    assert lines[-2].split()[:2] == ["8.00", "GB"] and lines[-2].endswith("–  --tokens 4 --recompute true --state half")
    assert lines[-1] == "it fits with --tokens 4 --recompute true --state half"
    with_cache = fitting.Tried({}, True, GB, 2 * GB)
    assert "2.00 GB  as given" in fitting.Search([with_cache], with_cache).table()


def test_a_refusal_carries_its_plan():
    policy = [ModelUse("policy", SHAPE, "bfloat16", trained=True)]
    with pytest.raises(DoesNotFit) as caught:
        plan_memory(policy, None, card(8 * GB), max_tokens_per_batch=16_384)
    assert caught.value.plan.least_bytes > 8 * GB and isinstance(caught.value, ValueError)
    with pytest.raises(DoesNotFit, match="the KV cache has room"):
        plan_memory(policy[:0] or [ModelUse("m", SHAPE, "bfloat16")], EngineConfig(max_model_len=40_000), card(4 * GB))


def test_a_quiet_plan_says_nothing(caplog):
    with caplog.at_level(logging.WARNING):
        plan_memory([ModelUse("m", SHAPE, "bfloat16")], EngineConfig(), card(4 * GB), quiet=True)
    assert not caplog.records


def test_every_row_of_training_is_an_option():
    known = GRPOConfig.options()
    assert all(set(row) <= set(known) for row in TRAINING_TOGETHER) and all(
        row in TRAINING_TOGETHER for row in TRAINING
    )
    for row in TRAINING_TOGETHER:
        GRPOConfig(**{"use_peft": True, "lora_way": "merged"} | row)
    assert all(set(row) <= set(EngineConfig.options()) for row in fitting.GENERATION)


# ---- where it is said ----


@pytest.fixture
def large(monkeypatch):
    """The bundled model with the shape of Qwen3-0.6B, for plans alone."""
    from cukit.commands import dry_run

    shape_of = dry_run.model_shape

    def made(*given):
        shape = shape_of(*given)
        shape.config = SHAPE
        return shape

    monkeypatch.setattr(dry_run, "model_shape", made)


def test_a_dry_run_that_does_not_fit_says_what_would(large, capsys):
    assert cukit_cli.main(["grpo", "--memory_limit", "9GB", "--dry_run"]) == 2
    printed = capsys.readouterr()
    assert "as given: does not fit" in printed.out and "AdamW's moments" in printed.out
    line = printed.err.splitlines()[-1]
    assert line.startswith("error: this run needs")
    words = line.partition("; it fits with ")[2]
    assert words.startswith("--") and f"# it fits with {words}" in printed.out
    assert cukit_cli.main(["grpo", "--memory_limit", "9GB", "--dry_run", *words.split()]) == 0, "and it does"
    assert "# it fits as it is" in capsys.readouterr().out


def test_a_larger_batch_of_tokens_that_makes_one_pass_is_named(large, capsys):
    """Several passes hold gradients of the whole model beside activations, which a single pass does not."""
    argv = ["sft", "--memory_limit", "13.5GB", "--gradient_checkpointing", "none", "--dry_run"]
    argv += ["--per_device_train_batch_size", "64", "--gradient_accumulation_steps", "1", "--max_tokens_per_batch"]
    assert cukit_cli.main([*argv, "2048"]) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    tokens = line.partition("; with --max_tokens_per_batch ")[2].partition(" an update is one pass")[0]
    assert int(tokens) > 2048
    assert cukit_cli.main([*argv, tokens]) == 0
    assert cukit_cli.main([*argv, "2048", "--memory_limit", "9GB"]) == 2
    assert "one pass" not in capsys.readouterr().err


def test_several_processes_are_told_to_share_out(large, capsys, monkeypatch):
    """A larger stage takes less; one process alone has nothing to share."""
    argv = ["grpo", "--memory_limit", "9.7GB", "--dry_run"]
    assert cukit_cli.main(argv) == 2
    assert "--zero_stage" not in capsys.readouterr().out
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "8")
    assert cukit_cli.main(argv) == 2
    printed = capsys.readouterr()
    assert printed.err.splitlines()[-1].endswith("; it fits with --zero_stage 1")
    for stage in (1, 2, 3):
        assert f"--zero_stage {stage}" in printed.out
    assert cukit_cli.main([*argv, "--zero_stage", "1"]) == 0
    printed = capsys.readouterr().out
    assert "--zero_stage 1\n" not in printed and "--zero_stage 2\n" in printed and "--zero_stage 3\n" in printed


def test_a_dry_run_of_an_engine_says_it_too(large, capsys):
    argv = ["chat", "--memory_limit", "3.4GB", "--dry_run", "--max_model_len", "40000"]
    assert cukit_cli.main(argv) == 2
    printed = capsys.readouterr()
    words = printed.err.partition("; it fits with ")[2].strip()
    assert "max_model_len" in words
    options = dict(zip(words.split()[::2], words.split()[1::2]))
    final = [word for name, value in options.items() for word in (name, value)]
    assert cukit_cli.main([*argv[:4], *final]) == 0


def test_without_a_limit_and_with_room_nothing_is_tried(capsys):
    assert cukit_cli.main(["grpo", "--dry_run", "--device", "cpu"]) == 0
    assert "cheapest" not in capsys.readouterr().out


def test_a_run_that_does_not_fit_says_what_would(monkeypatch, tmp_path):
    """As on a card."""
    from cukit import SFTConfig

    def planned(uses, engine, _, **more):
        uses = [ModelUse("policy", SHAPE, "bfloat16", True, moment_bytes=use.moment_bytes) for use in uses]
        return plan_memory(uses, engine, card(10 * GB), **more)

    monkeypatch.setattr(loop, "plan_memory", planned)
    args = SFTConfig(output_dir=str(tmp_path / "run"), max_steps=1, device="cpu")
    with pytest.raises(DoesNotFit, match=r"this run needs .*; it fits with --optimizer_state bfloat16$"):
        SFTTrainer(model="data/tiny-qwen3", args=args, train_dataset=[{"text": "1+2=3"}] * 8)
    assert args.optimizer_state == "float32"
