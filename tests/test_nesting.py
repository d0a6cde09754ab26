"""The options module: types, nesting, what was given, and errors in one line."""

import copy
import inspect
import pickle
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from cukit import EngineConfig, GRPOConfig, SamplingParams, SFTConfig
from cukit.bench import GenerateBench, KernelsBench, TrainBench
from cukit.commands.evaluate import EvalOptions
from cukit.commands.generate import GenerateOptions
from cukit.options import Options, changed, check_range, flat_values, given_values, nested, option

CLASSES = [EngineConfig, SamplingParams, SFTConfig, GRPOConfig, GenerateOptions, EvalOptions]
CLASSES += [KernelsBench, GenerateBench, TrainBench]

# ---- c4: types -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: SFTConfig(bf16="false"), "bf16 must be true or false, got 'false'"),
        (lambda: SFTConfig(packing=1), "packing must be true or false, got 1"),
        (lambda: SamplingParams(ignore_eos="false"), "ignore_eos must be true or false, got 'false'"),
        (lambda: SamplingParams(temperature=None), "temperature must be a number, got None"),
        (lambda: SamplingParams(temperature="1"), "temperature must be a number, got '1'"),
        (lambda: SamplingParams(temperature=True), "temperature must be a number, got True"),
        (lambda: SamplingParams(n=2.0), "n must be a whole number, got 2.0"),
        (lambda: SamplingParams(logprobs=1), "logprobs must be true or false, got 1"),
        (lambda: SamplingParams(stop=[5]), "stop must be a list of texts, got [5]"),
        (lambda: SamplingParams(stop_token_ids=["a"]), "stop_token_ids must be a list of whole numbers, got ['a']"),
        (lambda: EngineConfig(max_num_seqs=True), "max_num_seqs must be a whole number, got True"),
        (lambda: EngineConfig(exact="maybe"), "exact must be one of auto, true, false, got 'maybe'"),
        (lambda: EngineConfig(max_num_seqs=None), "max_num_seqs must be a whole number, got None"),
        (lambda: GRPOConfig(reward_weights=["1"]), "reward_weights must be a list of numbers, got ['1']"),
        (lambda: GRPOConfig(chat_template_kwargs="{}"), "chat_template_kwargs must be a JSON object, got '{}'"),
        (lambda: GRPOConfig(output_dir=3), "output_dir must be text, got 3"),
        (lambda: GRPOConfig(learning_rate=10**400), "learning_rate must be a number, got 1000"),
        (lambda: GRPOConfig(temperature=float("inf")), "temperature must be above 0, got inf"),
        (lambda: SamplingParams(tempratur=1), "SamplingParams has no option 'tempratur'; did you mean temperature?"),
        (lambda: GRPOConfig(max_num_seq=1), "GRPOConfig has no option 'max_num_seq'; did you mean max_num_seqs?"),
        (lambda: GRPOConfig(n=4), "GRPOConfig has no option 'n'; docs/MIGRATION.md says"),
        (lambda: KernelsBench(tokens=1.5), "tokens must be a whole number, got 1.5"),
    ],
)
def test_c4_types_are_checked_by_the_classes(make, message):
    with pytest.raises(ValueError) as error:
        make()
    assert message in str(error.value) and "\n" not in str(error.value) and len(str(error.value)) < 200


def test_c4_what_means_the_same_is_taken():
    params = SamplingParams(temperature=0, n=np.int64(2), top_p=np.float32(0.5), ignore_eos=np.bool_(True), stop=("a",))
    assert (params.temperature, params.n, params.top_p, params.ignore_eos, params.stop) == (0.0, 2, 0.5, True, ["a"])
    assert type(params.temperature) is float and type(params.n) is int and type(params.ignore_eos) is bool
    assert SamplingParams(stop_token_ids=np.arange(3)).stop_token_ids == [0, 1, 2]
    assert EngineConfig(exact=True).exact == "true" and SFTConfig(eval_strategy=False).eval_strategy == "no"
    assert SFTConfig(output_dir=Path("a") / "b").output_dir == str(Path("a/b"))
    assert SFTConfig(resume_from_checkpoint=True).resume_from_checkpoint == "latest"


def test_c4_setting_an_option_is_checked_too():
    params, args = SamplingParams(), GRPOConfig()
    with pytest.raises(ValueError, match="temperature must be a number, got None"):
        params.temperature = None
    with pytest.raises(AttributeError, match="no option 'temprature'; did you mean temperature"):
        params.temprature = 1
    args.max_num_seqs = 7
    assert args.engine.max_num_seqs == args.max_num_seqs == 7 and "max_num_seqs" in args.given
    with pytest.raises(ValueError, match="max_num_seqs must be a whole number"):
        args.max_num_seqs = "7"


# ---- nesting ---------------------------------------------------------------------------------------------------------


class Engine(Options):
    group = "engine"
    rows: int = option(8, "rows at once")
    share: float = option(0.5, "share of memory")
    seed: int = option(0, "its own seed")

    def __post_init__(self):
        check_range(self, "rows", 1)


class Outer(Options):
    group = "outer"
    seed: int = option(1, "another seed")
    names: list[str] = option(["a"], "a list")
    engine: Engine = nested(Engine, without=("seed",), share=0.25)


def test_nested_options_are_flat_for_the_user():
    outer = Outer(rows=2, seed=3)
    assert (outer.rows, outer.engine.rows, outer.share, outer.engine.share) == (2, 2, 0.25, 0.25)
    assert (outer.seed, outer.engine.seed) == (3, 0)
    assert list(Outer.options()) == ["seed", "names", "rows", "share"]
    assert {name: item.group for name, item in Outer.options().items()}["rows"] == "engine"
    assert outer.given == {"rows", "seed"} and outer.engine.given == {"rows"}
    assert flat_values(outer) == {"seed": 3, "names": ["a"], "rows": 2, "share": 0.25}
    assert given_values(outer) == {"seed": 3, "rows": 2}
    assert list(inspect.signature(Outer).parameters) == ["seed", "names", "rows", "share"]
    with pytest.raises(ValueError, match="rows must be at least 1"):
        Outer(rows=0)
    with pytest.raises(AttributeError, match="no option 'row'; did you mean rows"):
        _ = outer.row


def test_a_list_is_no_ones_default():
    first, second = Outer(), Outer()
    first.names.append("b")
    assert second.names == ["a"] and Outer.options()["names"].default == ["a"]


def test_copies_keep_what_was_given():
    outer = Outer(rows=2)
    assert changed(outer, share=1).given == {"rows", "share"} and changed(outer).given == {"rows"}
    for other in (
        copy.deepcopy(outer),
        pickle.loads(pickle.dumps(outer)),
        replace(outer),
        Outer(**given_values(outer)),
    ):
        assert other == outer and other.engine == outer.engine
    assert replace(outer, rows=5).engine.rows == 5 and Outer(engine=Engine(rows=6), seed=2).rows == 6
    assert Outer(engine=Engine(rows=6)).given == {"rows"}


def test_mistakes_of_a_declaration_are_found_at_import():
    with pytest.raises(TypeError, match="two things are named 'seed'"):
        type("Clash", (Options,), {"__annotations__": {"seed": int, "engine": Engine}, "seed": option(1, "x"),
                                   "engine": nested(Engine)})  # fmt: skip
    with pytest.raises(TypeError, match="it has no option 'row'"):
        nested(Engine, row=3)
    with pytest.raises(TypeError, match="declare it by option"):
        type("Plain", (Options,), {"__annotations__": {"rows": int}, "rows": 3})
    with pytest.raises(TypeError, match="two things are named 'given'"):
        type("Taken", (Options,), {"__annotations__": {"given": int}, "given": option(1, "x")})


def test_an_option_without_a_default_must_be_given():
    needs = type("Needs", (Options,), {"__annotations__": {"model": str}, "model": option(help="a folder")})
    with pytest.raises(ValueError, match="Needs needs model: a folder"):
        needs()
    assert needs(model="m").model == "m"


@pytest.mark.parametrize("cls", CLASSES)
def test_given_and_flat_values_make_the_same_again(cls):
    config = cls(**({"gpu_memory_utilization": 0.5} if "gpu_memory_utilization" in cls.options() else {}))
    assert cls(**given_values(config)) == config
    assert flat_values(cls(**flat_values(config))) == flat_values(config)


def test_defaults_of_an_outer_class_are_no_given_values():
    assert EvalOptions().temperature == 0.0 and EvalOptions().sampling.given == frozenset()
    assert GRPOConfig().gpu_memory_utilization == EngineConfig().gpu_memory_utilization == 0.9


# ---- c9, c11: what follows from several options ----------------------------------------------------------------------


@pytest.mark.parametrize("ratio, total, steps", [(0.1, 4, 1), (0.1, 25, 3), (0.0, 9, 0), (1.0, 9, 9), (0.5, 1, 1)])
def test_c9_warm_up_is_rounded_up(ratio, total, steps):
    assert SFTConfig(warmup_ratio=ratio).num_warmup_steps(total) == steps


def test_c9_warmup_steps_rule_the_ratio():
    assert SFTConfig(warmup_ratio=0.5, warmup_steps=2).num_warmup_steps(100) == 2


def test_e9_given_values_stay_as_given():
    args = GRPOConfig(per_device_train_batch_size=16, gradient_accumulation_steps=2, epsilon=0.3)
    assert (args.generation_batch_size, args.steps_per_generation, args.epsilon_high) == (None, None, None)
    assert (args.generation_size, args.num_slices) == (32, 1)
    assert changed(args, per_device_train_batch_size=8).generation_size == 16
    assert SFTConfig(eval_steps=3).eval_strategy == "no"


def test_c11_generation_kwargs_are_another_spelling():
    kwargs = {"stop_strings": ["END"], "top_k": 5, "min_p": 0.1, "temperature": 0.7, "max_new_tokens": 9}
    args = GRPOConfig(generation_kwargs=kwargs)
    assert args == GRPOConfig(stop="END", top_k=5, min_p=0.1, temperature=0.7, max_completion_length=9)
    assert args.sampling_params().stop == ["END"] and args.sampling_params().max_tokens == 9
    assert GRPOConfig(generation_kwargs={"eos_token_id": 7}).sampling_params().stop_token_ids == [7]
    for kwargs, message in (
        ({"num_beams": 4}, "generation_kwargs has 'num_beams', which is no sampling option"),
        ({"top_kk": 4}, "did you mean top_k?"),
        ({"n": 4}, "'n'"),
        ({"top_k": "many"}, "top_k must be a whole number"),
    ):
        with pytest.raises(ValueError) as error:
            GRPOConfig(generation_kwargs=kwargs)
        assert message in str(error.value) and "\n" not in str(error.value)
    with pytest.raises(ValueError, match="generation_kwargs has top_k=4 but top_k=5; give only one"):
        GRPOConfig(generation_kwargs={"top_k": 4}, top_k=5)
    with pytest.raises(ValueError, match="min_tokens=600 must not exceed max_completion_length=512"):
        GRPOConfig(min_tokens=600)


def test_bf16_and_fp16_are_spellings_of_dtype():
    assert [SFTConfig(bf16=True).dtype, SFTConfig(fp16=True).dtype, SFTConfig(fp16=False).dtype] == [
        "bfloat16",
        "float16",
        "auto",
    ]
    assert SFTConfig(bf16=False).dtype == "float32" and SFTConfig(bf16=False, fp16=True).dtype == "float16"
    for options in (
        {"bf16": True, "fp16": True},
        {"bf16": False, "dtype": "bfloat16"},
        {"fp16": True, "dtype": "float32"},
    ):
        with pytest.raises(ValueError, match="contradict; give only one"):
            SFTConfig(**options)
