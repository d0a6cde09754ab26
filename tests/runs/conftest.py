"""Run folders for the tests of the report."""

import pytest

from cukit.runs.folder import write_run_config
from cukit.runs.metrics import MetricsLogger
from cukit.runs.record import RunRecord

STEPS = 12


@pytest.fixture
def make_run(tmp_path):
    """make_run(name="run", text="fine", steps=…, metric=, column=): a run folder in which `text` stands everywhere."""

    def make(name="run", text="fine", steps=STEPS, metric="other", tokens=("2", "+", "3"), scale=1.0):
        folder = tmp_path / name
        logger = MetricsLogger(folder)
        for step in range(1, steps + 1):
            times = {"time/generate": 0.5, "time/train": 0.25, "step_time": 1.0}
            row = {"loss": -step, "reward": scale * step / steps, "kl": 0.1, "num_tokens": 100 * step, metric: step}
            logger.log(step, row | times)
            messages = [{"role": text, "content": text}]
            entry = {"prompt": messages, "completion": text, f"rewards/{text}": step % 2, "advantage": 0.5}
            entry |= {"finish_reason": text, "length": 3, "tokens": list(tokens), "logprobs": [-0.1, -1.5, -4.0]}
            logger.log_completions(step, [entry, entry | {"completion": f"{text} again"}])
        logger.log(steps, {"eval/accuracy": 0.75})
        logger.close()
        write_run_config(folder, {"run_name": text, text: text, "stop": [text], "learning_rate": 1e-4})
        record = RunRecord(folder, goes_on=False)
        record.begin(0, {"method": text, "model": text, "device": text, "versions": {text: text}, "total_steps": steps})
        record.end(f"error: {text}", steps)
        return folder

    return make
