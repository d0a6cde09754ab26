"""Models that ranks share, on threads as ranks: the numbers are those of one rank, and so are the files."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from parallel import in_order
from parallel.threads import together

from cukit.autograd import Tensor, no_grad
from cukit.backend import backend_for
from cukit.models import weights
from cukit.models.adapter_config import AdapterConfig
from cukit.models.adapter_files import save_adapter
from cukit.models.adapters import Adapter
from cukit.models.config import ModelConfig
from cukit.models.decoder import Decoder
from cukit.models.logprobs import pack, target_logprobs
from cukit.models.scores import sequence_scores
from cukit.models.tensor_parallel import TensorParallel
from cukit.models.weights import load_model, save_model, whole_model, whole_parts
from cukit.ops import lm_head_logprobs
from cukit.optim import AdamW
from cukit.parallel.group import Group

from .fp8_folders import make_folder

CPU = backend_for("cpu")
BASE = {"hidden_size": 12, "intermediate_size": 18, "num_hidden_layers": 2, "num_attention_heads": 6,
        "num_key_value_heads": 6, "head_dim": 4, "max_position_embeddings": 32, "vocab_size": 23,
        "rms_norm_eps": 1e-6, "rope_theta": 1e4, "hidden_act": "silu"}  # fmt: skip
KINDS = {
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"},
    "qwen3 tied": {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "tie_word_embeddings": True},
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"},  # with biases
}
SEQUENCES = [[1, 5, 7, 9, 3, 8], [4, 4, 2, 1, 22, 13, 9]]
WANTED = [np.arange(len(ids)) > 0 for ids in SEQUENCES]


def config_of(kind="qwen3", **more):
    return ModelConfig.from_json(BASE | {"tie_word_embeddings": False} | KINDS[kind] | more)


def model_of(tensor=None, kind="qwen3", dtype="float64", head="lm_head", **more):
    model = Decoder(config_of(kind, **more), CPU, dtype, head, tensor)
    model.init_weights(3)
    for name, view in model.parts().items():
        if view.ndim == 1:  # ones and zeros hide which part is whose
            whole = np.random.default_rng(len(name)).uniform(0.5, 1.5, model.whole_shape(name))
            view[...] = whole if tensor is None else whole[tensor.own(name, whole.shape)]
    return model


def passes(model):
    """(log-probs, entropies, gradients of all whole parts on the first rank) of one loss."""
    logprobs, entropy = target_logprobs(model, SEQUENCES, WANTED, 0.7)
    ((logprobs * np.arange(1, 12)).sum() + entropy.sum()).backward()
    gradients = model.store.part_views(lambda bucket: bucket.grad)
    if model.tensor is None:
        return logprobs.data, entropy.data, gradients
    model.tensor.complete_gradients(model.store)
    return logprobs.data, entropy.data, whole_parts(model, gradients)


@pytest.mark.parametrize("level", ["none", "selective", "full"])
@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [2, 3])
def test_logprobs_and_gradients_are_those_of_one_rank(size, kind, invariant, level):
    """The vocabulary of 23 divides by neither size."""
    truth = passes(model_of(kind=kind))

    def work(group):
        model = model_of(TensorParallel(group, invariant), kind)
        model.gradient_checkpointing = level
        return passes(model)

    found = together(size, work)
    for logprobs, entropy, _ in found:
        np.testing.assert_allclose(logprobs, truth[0], rtol=1e-12)
        np.testing.assert_allclose(entropy, truth[1], rtol=1e-12)
        np.testing.assert_array_equal(logprobs, found[0][0])
    norm = np.sqrt(sum(np.square(x).sum() for x in truth[2].values()))
    assert found[0][2].keys() == truth[2].keys()
    for name, right in truth[2].items():
        assert np.abs(found[0][2][name] - right).max() <= 1e-12 * norm, name


def test_exchanges_of_a_model_are_prepared_for_steps_that_the_device_repeats():
    calls = Counter()

    class Prepared(Group):
        def prepare_steps(self):
            calls["prepare_steps"] += 1

    TensorParallel(Prepared()).on(backend_for("cpu"))
    assert calls["prepare_steps"] == 1


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
@pytest.mark.parametrize("size", [2, 3])
def test_a_pass_that_records_nothing_has_the_bits_of_one_that_does(size, dtype):
    """Its layers exchange parts: the only sum is the embedding's."""

    def work(group):
        model, calls = model_of(TensorParallel(group), dtype=dtype), Counter()
        for name in ("all_reduce", "all_parts"):
            setattr(group, name, counted(calls, name, getattr(group, name)))
        with no_grad():
            found = model.forward(*pack(model, SEQUENCES)).data
        return found, model.forward(*pack(model, SEQUENCES)).data, calls

    for plain, recorded, calls in together(size, work):
        assert plain.tobytes() == recorded.tobytes()
        # a small sum is an exchange of parts too: all of the pass that records, and an embedding's
        assert calls == {"all_reduce": 1 + 1 + 4, "all_parts": (1 + 4) + (1 + 4)}


def counted(calls, name, function):
    def call(*given, **more):
        calls[name] += 1
        return function(*given, **more)

    return call


def test_logits_have_a_gradient():
    """Not used in training, where the head never holds them all."""
    hidden, dy = np.random.default_rng(0).standard_normal((5, 12)), np.random.default_rng(1).standard_normal((5, 23))

    def work(group=None):
        x = Tensor(hidden, requires_grad=True)
        logits = model_of(group and TensorParallel(group)).logits(x)
        logits.backward(dy)
        return logits.data, x.grad

    truth = work()
    for found in together(2, work):
        for one, right in zip(found, truth):
            np.testing.assert_allclose(one, right, rtol=1e-12, atol=1e-12)


def test_log_probs_of_the_head_alone():
    hidden, targets = np.random.default_rng(0).standard_normal((5, 12)), np.array([0, 22, 3, 11, 12], np.int32)

    def work(group=None):
        head = model_of(group and TensorParallel(group)).lm_head
        plain = lm_head_logprobs(Tensor(hidden), head.weight, targets, columns=head.columns)  # of all ids
        return [one.data for one in (*head.logprobs(Tensor(hidden), targets, 0.7), *plain)]

    truth = work()
    for found in together(2, work):
        for one, right in zip(found, truth, strict=True):
            np.testing.assert_allclose(one, right, rtol=1e-12)


def test_scores_are_those_of_one_rank():
    truth = sequence_scores(model_of(head="score"), SEQUENCES)
    for found in together(2, lambda group: sequence_scores(model_of(TensorParallel(group), head="score"), SEQUENCES)):
        np.testing.assert_allclose(found, truth, rtol=1e-12)


# ---- invariant mode ----


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_in_invariant_mode_no_bit_depends_on_the_number_of_ranks(dtype, monkeypatch):
    """With a product whose bits do not depend on the weight's rows; the other mode has other bits."""
    in_order.use_it(monkeypatch)

    def logprobs(model):
        found = target_logprobs(model, SEQUENCES, WANTED)
        return np.concatenate([one.data for one in found])

    truth = logprobs(model_of(dtype=dtype))
    for size in (2, 3):
        for found in together(size, lambda group: logprobs(model_of(TensorParallel(group, True), dtype=dtype))):
            np.testing.assert_array_equal(found, truth)
    plain = together(2, lambda group: logprobs(model_of(TensorParallel(group), dtype=dtype)))
    assert (plain[0] != truth).any()


# ---- weights and files ----


@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_files_do_not_depend_on_the_number_of_ranks(kind, invariant, tmp_path):
    """Written by one and read by two, written by those and read by three: the same bytes."""
    save_model(model_of(kind=kind, dtype="bfloat16"), tmp_path / "1")

    def again(group):
        tensor = TensorParallel(group, invariant)
        model = load_model(tmp_path / str(group.size - 1), dtype="bfloat16", tensor=tensor)
        whole = whole_model(model)
        if group.rank == 0:
            save_model(whole, tmp_path / str(group.size))
        return sum(bucket.size for bucket in model.store.buckets)

    for size in (2, 3):
        together(size, again)
        for name in ("model.safetensors", "config.json"):
            assert (tmp_path / str(size) / name).read_bytes() == (tmp_path / "1" / name).read_bytes()


def test_a_rank_reads_and_holds_its_share_alone(tmp_path, monkeypatch):
    save_model(model_of(dtype="float32"), tmp_path)
    read = weights.safe_open

    class Slices:
        """A file of which tensors are read in slices alone."""

        def __init__(self, *given, **more):
            self._file = read(*given, **more)
            self.keys, self.get_slice = self._file.keys, self._file.get_slice

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

    monkeypatch.setattr(weights, "safe_open", Slices)

    def held(group):
        model = load_model(tmp_path, dtype="float64", tensor=TensorParallel(group))
        parts = model.parts()
        return {name: view.shape for name, view in parts.items()}, model.own_config, model.num_parameters

    whole = model_of()
    (first, config, count), (second, *_) = together(2, held)
    assert count == whole.num_parameters == sum(view.size for view in whole.parts().values())
    assert (config.num_attention_heads, config.num_key_value_heads, config.intermediate_size) == (3, 3, 9)
    assert (first["model.embed_tokens.weight"], second["lm_head.weight"]) == ((11, 12), (12, 12))
    assert first["model.layers.1.self_attn.o_proj.weight"] == (12, 12)
    assert first["model.layers.1.mlp.gate_proj.weight"] == (9, 12)
    assert first["model.norm.weight"] == (12,)


def test_folders_with_fp8_weights_are_shared_out(tmp_path):
    make_folder(tmp_path / "model", "block", block=(16, 16))
    whole = load_model(tmp_path / "model", dtype="float32").parts()

    def work(group):
        tensor = TensorParallel(group)
        return {
            name: (view, whole[name][tensor.own(name, whole[name].shape)])
            for name, view in load_model(tmp_path / "model", dtype="float32", tensor=tensor).parts().items()
        }

    for parts in together(2, work):
        for view, right in parts.values():
            np.testing.assert_array_equal(view, right)


def test_weights_that_are_not_finite_are_named_on_every_rank(tmp_path):
    model = model_of(dtype="float32")
    model.parts()["lm_head.weight"][22, 3] = np.nan  # the last rank's
    save_model(model, tmp_path)

    def refused(group):
        with pytest.raises(ValueError, match="lm_head.weight has 1 of"):
            load_model(tmp_path, dtype="float64", tensor=TensorParallel(group))

    together(2, refused)


def test_a_whole_model_is_shared_out():
    whole = model_of()
    whole.limit_vocabulary(20)

    def work(group):
        part = whole.share_out(TensorParallel(group))
        return whole_parts(part, part.parts()), part.vocab_size

    (parts, count), _ = together(2, work)
    assert count == 20
    for name, right in whole.parts().items():
        np.testing.assert_array_equal(parts[name], right)


def test_a_frozen_copy_is_shared_by_the_same_ranks():
    def work(group):
        model = model_of(TensorParallel(group))
        copy = model.frozen_copy()
        return target_logprobs(model, SEQUENCES, WANTED)[0].data, target_logprobs(copy, SEQUENCES, WANTED)[0].data

    for own, copied in together(2, work):
        np.testing.assert_array_equal(own, copied)


# ---- the optimizer ----


def test_updates_and_the_gradients_norm_are_those_of_one_rank():
    """Clipped; a bias and a norm weight of one layer lie in one bucket of float64, unless ranks share the model."""

    def updated(model):
        optimizer, norms = AdamW(model.store, 1e-2, max_grad_norm=0.5, weight_decay=0.1, eps=1e-4), []
        for _ in range(2):
            passes(model)
            norms.append(optimizer.step()[0])
        parts = model.parts()
        return parts if model.tensor is None else whole_parts(model, parts), norms

    truth, norms = updated(model_of(kind="qwen2"))
    found = together(2, lambda group: updated(model_of(TensorParallel(group), "qwen2")))
    np.testing.assert_allclose(found[0][1], norms, rtol=1e-12)
    assert found[0][1] == found[1][1]
    for name, right in truth.items():
        np.testing.assert_allclose(found[0][0][name], right, rtol=1e-9, atol=1e-11, err_msg=name)


# ---- what is refused ----


@pytest.mark.parametrize(
    ("more", "invariant", "message"),
    [
        ({"num_key_value_heads": 3}, False, "tensor_parallel_size=2 does not divide .* num_key_value_heads=3"),
        ({"intermediate_size": 17}, False, "tensor_parallel_size=2 does not divide .* intermediate_size=17"),
        ({"hidden_size": 13}, True, "hidden_size=13"),
    ],
)
def test_a_model_that_does_not_divide_is_refused(more, invariant, message):
    def refused(group):
        with pytest.raises(ValueError, match=message):
            Decoder(config_of(**more), CPU, "float32", tensor=TensorParallel(group, invariant))

    together(2, refused)


def test_an_adapters_folder_is_refused(tmp_path):
    base = tmp_path / "base"
    save_model(model_of(dtype="float32"), base)
    model = load_model(base)
    save_adapter(Adapter(model, AdapterConfig(2, 4, ("q_proj",), base=str(base))), tmp_path / "adapter")

    def refused(group):
        with pytest.raises(ValueError, match="merge the adapter first"):
            load_model(tmp_path / "adapter", tensor=TensorParallel(group))
        with pytest.raises(ValueError, match="an adapter is of a whole model"):
            Adapter(model_of(TensorParallel(group)), AdapterConfig(2, 4, ("q_proj",)))

    together(2, refused)


def test_the_shape_of_a_part():
    config = config_of()
    assert config.part_of(1) == config
    part = replace(config, vocab_size=24).part_of(2).part_of(3)
    assert (part.num_attention_heads, part.num_key_value_heads, part.intermediate_size) == (1, 1, 3)
    assert (part.vocab_size, part.vocab_rows, part.hidden_size, part.head_dim) == (24, 4, 12, 4)
    assert part.raw == config.raw
