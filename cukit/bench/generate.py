"""bench generate: whole requests through the engine, as explicit random token lists; every sample has log-probs and
runs to its full length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..engine.config import EngineConfig, SamplingParams
from ..engine.llm import LLM
from ..engine.tensor_parallel import take_tensor
from ..options import given_values
from . import GenerateBench
from .measure import memory_in_use, seconds_of
from .report import new_report
from .subject import Subject, build_model, check_length, choose_subject, scale_of, scaled

MOST_ROWS = (
    512  # sequences at once unless --max_num_seqs says otherwise; the engine's own number where a workload has fewer
)
DECODE_BATCHES = (1, 8)  # unless --batches says otherwise


@dataclass(frozen=True)
class Workload:
    """Prompts and how each is sampled."""

    name: str
    prompts: list[list[int]]
    params: list[SamplingParams]

    @property
    def samples(self) -> int:
        return sum(params.n for params in self.params)

    @property
    def output_tokens(self) -> int:
        return sum(params.n * params.max_tokens for params in self.params)

    @property
    def prompt_tokens(self) -> int:
        return sum(map(len, self.prompts))

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence, prompt and completion together."""
        return max(len(prompt) + params.max_tokens for prompt, params in zip(self.prompts, self.params, strict=True))


def workloads(
    name: str, scale: float, seed: int, vocab_size: int, batches: Sequence[int] = DECODE_BATCHES
) -> list[Workload]:
    """N and G are one workload; decode is one for each batch size."""
    generator = np.random.default_rng(seed)

    def prompt(length):
        return generator.integers(0, vocab_size, length).tolist()

    def params(index, tokens, temperature=1.0, n=1):
        return SamplingParams(
            n=n,
            temperature=temperature,
            max_tokens=int(tokens),
            ignore_eos=True,
            logprobs=True,
            seed=seed + 1000 * index,
        )

    if name == "N":
        count = scaled(256, scale)
        lengths = generator.integers(scaled(100, scale), scaled(1024, scale) + 1, (2, count))
        return [Workload(name, [prompt(n) for n in lengths[0]], [params(i, n, 0.6) for i, n in enumerate(lengths[1])])]
    if name == "G":
        count = scaled(64, scale)
        return [
            Workload(
                name,
                [prompt(scaled(200, scale)) for _ in range(count)],
                [params(i, scaled(512, scale), n=8) for i in range(count)],
            )
        ]
    tokens = max(2, scaled(256, scale))  # the first one comes from the prompt's pass
    return [
        Workload(
            f"decode {batch}",
            [prompt(scaled(128, scale)) for _ in range(batch)],
            [params(i, tokens) for i in range(batch)],
        )
        for batch in batches
    ]


def run(options: GenerateBench, engine_options: dict) -> dict:
    """The report: a row for each measured run."""
    tensor = take_tensor(given_values(options.tensor))  # before anything of CUDA
    subject = choose_subject(options)
    before = memory_in_use(subject.backend)
    scale = scale_of(options, subject)
    given = options.seed, subject.config.vocab_size, options.batches or DECODE_BATCHES
    loads = workloads(options.workload, scale, *given)
    longest = max(load.longest for load in loads)
    check_length(subject, longest, "lower --scale")
    rows = max(EngineConfig.max_num_seqs, min(MOST_ROWS, max(load.samples for load in loads)))
    settings = {"max_model_len": longest, "max_num_seqs": rows} | engine_options
    model = build_model(subject, options.seed, options.lora, tensor)
    report = new_report("generate", subject, options)
    report |= {"scale": scale, "engine": settings, "processes": 1 if tensor is None else tensor.size}
    with LLM.from_model(model, None, **settings) as llm:
        report["memory_gb"] = (memory_in_use(subject.backend) - before) / 1e9
        for load in loads:
            measure = _decode_row if options.workload == "decode" else _row
            for _ in range(2):  # kernels are compiled, products compared; then steps are captured as graphs
                measure(llm, load, subject)
            report["rows"] += [measure(llm, load, subject) for _ in range(options.repeats)]
    return report


def _row(llm: LLM, load: Workload, subject: Subject) -> dict:
    """All requests at once, from their queueing to the last token."""
    llm.reset_prefix_cache()  # the runs before had the same prompts
    steps, preemptions, outputs = llm.stats.num_steps, llm.stats.num_preemptions, []
    seconds = seconds_of(subject.backend, lambda: outputs.extend(llm.generate(load.prompts, load.params)))
    counted = sum(len(sample.token_ids) for output in outputs for sample in output.outputs)
    if counted != load.output_tokens:
        raise ValueError(
            f"{counted} tokens came instead of {load.output_tokens}: raise --max_model_len to at least "
            f"{load.longest}, or leave it out"
        )
    return _as_row(llm, load, seconds, counted, steps, preemptions) | {"ms_per_token": None}


def _decode_row(llm: LLM, load: Workload, subject: Subject) -> dict:
    """Only the steps after the one that gave each request its first token."""
    llm.reset_prefix_cache()
    requests = [llm.add_request(prompt, params) for prompt, params in zip(load.prompts, load.params, strict=True)]
    while not all(request.sequences[0].num_generated for request in requests):
        llm.step()
    steps, preemptions, generated = llm.stats.num_steps, llm.stats.num_preemptions, llm.stats.num_generated_tokens

    def finish():
        while not all(request.finished for request in requests):
            llm.step()

    seconds = seconds_of(subject.backend, finish)
    counted = llm.stats.num_generated_tokens - generated
    if counted != load.output_tokens - load.samples:
        raise ValueError(
            f"the {load.samples} requests did not decode together all the time: give them room by "
            f"--num_kv_blocks, --max_num_seqs, "
            f"--max_num_batched_tokens and --max_model_len (at least {load.longest})"
        )
    row = _as_row(llm, load, seconds, counted, steps, preemptions)
    return row | {"ms_per_token": 1000 * seconds * load.samples / counted}


def _as_row(llm: LLM, load: Workload, seconds: float, output_tokens: int, steps: int, preemptions: int) -> dict:
    return {
        "workload": load.name,
        "requests": len(load.prompts),
        "samples": load.samples,
        "prompt_tokens": load.prompt_tokens,
        "output_tokens": output_tokens,
        "seconds": seconds,
        "output_tokens_per_s": output_tokens / seconds,
        "steps": llm.stats.num_steps - steps,
        "preemptions": llm.stats.num_preemptions - preemptions,
    }
