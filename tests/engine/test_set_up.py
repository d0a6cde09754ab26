"""How an engine is made, and what it says of itself."""

from cukit.engine.config import EngineConfig
from cukit.engine.llm import LLM

from .helpers import tiny_llm, tiny_model


def test_repr_names_shape_device_cache_and_limits():
    llm = tiny_llm(num_kv_blocks=20, max_num_seqs=7)
    shape = tiny_model().config
    for text in (
        f"{shape.num_hidden_layers} layers",
        f"hidden_size={shape.hidden_size}",
        "float64 on cpu",
        "20 blocks of 4 tokens",
        "max_model_len=64",
        "max_num_seqs=7",
        "0.00 GB",
    ):
        assert text in repr(llm), repr(llm)
    llm.sleep()
    assert "asleep" in repr(llm) and "\n" not in repr(llm)


def test_from_model_takes_a_config_and_changes_of_it():
    config = EngineConfig(max_model_len=64, block_size=4, num_kv_blocks=20)
    llm = LLM.from_model(tiny_model(), None, config)
    assert (llm.config.max_model_len, llm.config.num_kv_blocks) == (64, 20)
    llm = LLM.from_model(tiny_model(), config=config, num_kv_blocks=30, seed=3)
    assert (llm.config.num_kv_blocks, llm.config.block_size, llm.config.seed) == (30, 4, 3)
    assert config.num_kv_blocks == 20
