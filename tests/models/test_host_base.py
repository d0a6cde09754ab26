"""A merged adapter with its base in the host's memory: no bit differs from one with both in place."""

import numpy as np
import pytest

from cukit.autograd import no_grad
from cukit.models.adapter_config import TARGETS, AdapterConfig
from cukit.models.adapters import Adapter, WithoutAdapter, adapter_sizes, weights_in_use
from cukit.models.host_base import HostBase
from cukit.models.logprobs import target_logprobs, token_logprobs
from cukit.models.weights import load_model
from cukit.optim import AdamW

from .test_adapters import GOLDEN, logits_of

ROWS = [[5, 9, 100, 7, 3], [8, 2], list(range(3, 40))]
NAMES = ["qwen3_tiny", "qwen2_tiny", "llama_tiny"]  # q/k norm; biases; neither


def merged(name, dtype, on_host, targets=TARGETS):
    model = load_model(GOLDEN / name, dtype=dtype)
    adapter = Adapter(model, AdapterConfig(5, 10, targets), "merged", 3, on_host)
    for index, view in enumerate(adapter.parts().values()):
        view[...] = np.random.default_rng(index).standard_normal(view.shape) * 0.2
    adapter.refresh()
    return model


def train(model, steps=3):
    optimizer = AdamW(model.trained_store, 1e-2)
    for _ in range(steps):
        logprobs, _ = target_logprobs(model, ROWS, [np.arange(len(row)) > 0 for row in ROWS])
        (logprobs.sum() * -0.1).backward()
        optimizer.step()
        model.adapter.refresh()


@pytest.mark.parametrize("targets", [TARGETS, ("q_proj", "v_proj", "down_proj")])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", NAMES)
def test_no_bit_differs(name, dtype, targets):
    there, here = merged(name, dtype, True, targets), merged(name, dtype, False, targets)
    for model in (there, here):
        train(model)
    assert logits_of(there, ROWS).tobytes() == logits_of(here, ROWS).tobytes()
    for mine, other in zip(there.adapter.parts().values(), here.adapter.parts().values(), strict=True):
        assert mine.tobytes() == other.tobytes()
    for (_, mine), (_, other) in zip(there.adapter.linears, here.adapter.linears, strict=True):
        assert mine.merged.tobytes() == other.merged.tobytes()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", NAMES)
def test_a_pass_without_the_adapter_is_the_bases(name, dtype):
    plain, model = load_model(GOLDEN / name, dtype=dtype), merged(name, dtype, True)
    train(model, 2)
    wanted = token_logprobs(plain, ROWS)
    with_adapter = token_logprobs(model, ROWS)
    for _ in range(2):
        found = token_logprobs(WithoutAdapter(model), ROWS)
        assert all(map(np.array_equal, found, wanted))
    assert not all(map(np.array_equal, with_adapter, wanted))
    assert all(map(np.array_equal, token_logprobs(model, ROWS), with_adapter)), "and the adapter's is as before"


def test_the_device_holds_each_weight_once():
    model = merged("qwen3_tiny", "bfloat16", True)
    for linear, one in model.adapter.linears:
        assert one.merged is linear.weight.data
    found = weights_in_use(model)
    assert len({id(array) for array in found}) == len(found)
    sizes = {way: adapter_sizes(model, model.adapter.config, way) for way in ("merged", "beside")}
    assert adapter_sizes(model, model.adapter.config, "merged", True) == sizes["beside"]
    weights = sum(linear.weight.data.size for linear, _ in model.adapter.linears)
    assert sizes["merged"][1] - sizes["beside"][1] == weights and model.adapter.base.nbytes == 2 * weights


def test_only_a_merged_adapter_leaves_its_base_to_the_host():
    model = load_model(GOLDEN / "qwen3_tiny")
    with pytest.raises(ValueError, match="only a merged adapter"):
        Adapter(model, AdapterConfig(4, 8, TARGETS), "beside", base_on_host=True)
    assert model.adapter is None


# ---- copies that run beside ----


class Late:
    """A device on which a copy is there only once it is joined."""

    def __init__(self):
        self.log, self.most, self.alive = [], 0, 0

    def host_buffer(self, nbytes):
        return np.zeros(nbytes, np.uint8)

    def download(self, host, source):
        host[...] = source

    def synchronize(self):
        pass

    def empty(self, shape, dtype):
        self.log.append("empty")
        return np.full(shape, -1, dtype)

    def SideCopies(self):  # noqa: N802
        late = self

        class Copies:
            def upload(self, target, host):
                late.log.append("begin")
                return target, host

            def join(self, copy):
                copy[0][...] = copy[1]
                late.log.append("join")

        return Copies()


def weights():
    return [np.full((2, 3), number, np.float32) for number in range(4)]


def test_all_weights_are_on_their_way_before_the_first_is_merged():
    late, given = Late(), weights()
    base = HostBase(late, given)
    for weight in given:
        weight[...] = 99  # merged
    seen = []
    for place in base.bring_back():
        seen.append(given[place].copy())
        assert late.log.count("begin") == 4 and late.log.count("join") == place + 1
    assert [int(x[0, 0]) for x in seen] == [0, 1, 2, 3]


def test_the_next_weight_comes_while_one_is_multiplied_with():
    late = Late()
    base = HostBase(late, weights())
    for place in range(4):
        found = base.weight(place)
        assert (found == place).all()
        assert late.log.count("begin") == min(place + 2, 4), "one ahead, none beyond the last"
    late.log.clear()
    assert (base.weight(2) == 2).all() and (base.weight(0) == 0).all(), "in any order"
    assert late.log.count("begin") == late.log.count("join") + 1
    base.drop_ahead()
    assert late.log.count("begin") == late.log.count("join") == 4
    base.drop_ahead()
    assert late.log.count("join") == 4


def test_leaving_off_drops_what_came_ahead():
    model = merged("qwen3_tiny", "float32", True)
    with no_grad(), model.adapter.off():
        model.layers[0].self_attn.qkv_proj.adapter.base_weight(model.layers[0].self_attn.qkv_proj)
        assert model.adapter.base._ahead
    assert not model.adapter.base._ahead
