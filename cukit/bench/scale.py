"""bench scale: the time of a GRPO step on many GPUs, SIMULATED from the times of one. Nothing here is measured; two
GPUs were held against it, more were not. docs/SCALING.md has both, and what is left out.

A rank is `tensor_parallel_size` GPUs. Prompts are dealt in runs; a group leaves its rank with `balance` alone. All
completions then go to all ranks, and each trains on a run of rows with about as many tokens as the others'. The ranks
wait for each other after the rollout and after training.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace

import numpy as np

from ..options import changed, require
from . import ScaleBench
from .links import Links, Moved, Ring
from .report import COLUMNS, origin
from .simulated_rollout import Setting, balanced_seconds, draw_lengths, rollout_seconds
from .single_gpu import BACKWARD, Rollout, Shape, Times, read_report, with_report
from .subject import config_of

MEMORY_SHARE = 0.9  # of a GPU's memory for weights, states and cache
COMPLETION_BYTES = 8  # a token that every rank gets: id and log-probability
PROMPTS = 64  # for each GPU


@dataclass(frozen=True)
class Job:
    """Options, shape, times of one GPU and links, for any number of GPUs."""

    options: ScaleBench
    shape: Shape
    times: Times
    links: Links

    @property
    def sharing(self) -> int:
        """GPUs of a rank."""
        return self.options.tensor_parallel_size

    def ring(self, gpus: int, sharing: int) -> Ring:
        """Of those among so many GPUs that have the same place in their ranks."""
        size = gpus // sharing
        return Ring(size, max(1, min(size, self.options.gpus_per_host // sharing)), self.links)

    def fits(self, nbytes: float) -> bool:
        return nbytes <= MEMORY_SHARE * self.options.gpu_memory_gb * 1e9

    def cache_tokens(self, held: float) -> int:
        """Tokens whose keys and values a rank has room for where each of its GPUs holds so many bytes besides."""
        given = self.options.kv_cache_gb
        free = MEMORY_SHARE * self.options.gpu_memory_gb * 1e9 - held if given is None else given * 1e9
        return int(free * self.sharing / self.shape.key_bytes)


def run(options: ScaleBench) -> dict:
    """The report: a row for each number of GPUs."""
    job = make_job(options)
    each = options.prompts_per_gpu or PROMPTS
    # one GPU with its share of the prompts, as if its states always fitted
    alone = replace(job, options=changed(options, tensor_parallel_size=1, zero_stage=0, rollout_share=None))
    one = simulate(alone, 1, options.prompts or each, must_fit=False)
    require(
        one["seconds"] is not None,
        f"{job.shape.name} and a sequence do not fit {options.gpu_memory_gb:g} GB even without states: raise "
        "gpu_memory_gb or lower max_completion_length",
    )
    report = origin("scale") | {
        "about": f"SIMULATED steps of GRPO for {job.shape.name}'s shape, computed from the times of one GPU; "
        "checked against two GPUs of one host, not against more",
        "simulated": True,
        "model": job.shape.name,
        "options": asdict(options),
        "shape": asdict(job.shape),
        "single_gpu": asdict(job.times),
        "rows": [],
    }
    for gpus in options.gpus:
        row = simulate(job, gpus, options.prompts or each * gpus)
        if row["seconds"] is not None:
            row["efficiency"] = row["tokens_per_s"] / (gpus * one["tokens_per_s"])
        report["rows"].append(row)
    return report


def make_job(options: ScaleBench) -> Job:
    shape = Shape.of(options.model, config_of(options.model))
    links = Links(
        options.nvlink_gb_per_s * 1e9,
        options.network_gb_per_s * 1e9,
        options.nvlink_latency / 1e6,
        options.network_latency / 1e6,
    )
    job, rollout = Job(options, shape, Times.fitted(shape), links), None
    reports = [(path, read_report(path, shape.name)) for path in options.measured or []]
    for path, report in sorted(reports, key=lambda one: one[1]["benchmark"] == "grpo"):  # what grpo says counts
        times, measured = with_report(job.times, shape, report)
        job, rollout = replace(job, times=times), (path, measured) if measured else rollout
    return job if rollout is None else _with_rollout(job, *rollout)


def _with_rollout(job: Job, path: str, measured: Rollout) -> Job:
    """Decoding's times, all multiplied by what makes one GPU take the measured seconds."""
    lengths, capacity = np.full((measured.prompts, measured.samples), measured.completion), job.cache_tokens(0.0)

    def seconds(times: Times) -> float:
        return rollout_seconds(lengths, measured.prompt, job.shape, times, capacity, job.options.max_num_seqs)

    length = measured.prompt + measured.completion
    require(length <= capacity, f"measured {path!r}: {length} tokens a sequence need a larger kv_cache_gb")
    prompts, whole = seconds(job.times.decoding(0.0)), seconds(job.times)
    require(
        measured.seconds > prompts,
        f"measured {path!r}: {measured.seconds:.3g} s of generation are less than the {prompts:.3g} s of its prompts: "
        "give a report of bench train of the same machine too",
    )
    factor = 1.0
    for _ in range(50):  # a pass of prompts takes a decode step at least, so that the sum is not quite linear
        factor *= (measured.seconds - prompts) / (whole - prompts)
        whole = seconds(job.times.decoding(factor))
    return replace(job, times=job.times.decoding(factor))


# ---- a step ----------------------------------------------------------------------------------------------------------


def simulate(job: Job, gpus: int, prompts: int, must_fit: bool = True) -> dict:
    """The row of a step of `prompts` prompts on so many GPUs; without times where it does not fit and must."""
    options, drawing, training = job.options, *_places(job.options, gpus)
    row = dict.fromkeys(key for key, _, _ in COLUMNS["scale"]) | {"gpus": gpus, "prompts": prompts, "note": ""}
    ring, all_gpus = job.ring(training, job.sharing), job.ring(gpus, 1)
    weights, lasting, most = state_bytes(job, ring.size)
    row["state_gb"] = most / 1e9
    capacity = job.cache_tokens(lasting if drawing == gpus and must_fit else weights)
    if (must_fit and not job.fits(most)) or capacity < options.prompt_length + options.max_completion_length:
        return row | {"note": f"does not fit {options.gpu_memory_gb:g} GB"}
    lengths = draw_lengths(options, prompts)
    rollouts, row["moved_groups"] = _rollouts(job, lengths, drawing // job.sharing, capacity)
    slowest = max(rollouts)
    other = job.times.other * lengths.size / (drawing // job.sharing)
    train, last_pass, passes = training_seconds(job, lengths, ring.size)
    reduced, exposed = reduction(job, ring, last_pass, passes)
    gathered = all_gpus.broadcast(int(lengths.sum()) * COMPLETION_BYTES)
    sent = all_gpus.broadcast(2 * job.shape.parameters / job.sharing) if drawing < gpus else Moved()
    update = job.times.update / job.sharing / (ring.size if options.zero_stage else 1)
    drawn, trained = slowest + other + gathered.seconds, train + exposed + update
    overlapped = drawing < gpus and options.off_policy_steps
    seconds = (max(drawn, trained) if overlapped else drawn + trained) + sent.seconds
    moved, tokens = reduced + gathered + sent, int(lengths.sum()) + lengths.size * options.prompt_length
    return row | {
        "rollout_mean_seconds": sum(rollouts) / len(rollouts),
        "rollout_seconds": slowest,
        "train_seconds": train,
        "exposed_seconds": exposed + gathered.seconds + sent.seconds,
        "update_seconds": update,
        "seconds": seconds,
        "tokens_per_s": tokens / seconds,
        "nvlink_gb": moved.nvlink_bytes / 1e9,
        "network_gb": moved.network_bytes / 1e9,
    }


def _places(options: ScaleBench, gpus: int) -> tuple[int, int]:
    """(GPUs that draw, GPUs that train): all do both, or each its own."""
    if options.rollout_share is None:
        return gpus, gpus
    share = options.tensor_parallel_size
    ranks = gpus // share
    require(ranks > 1, f"rollout_share={options.rollout_share} needs two ranks at least, and gpus={gpus} make one")
    drawing = min(max(round(options.rollout_share * ranks), 1), ranks - 1) * share
    return drawing, gpus - drawing


def state_bytes(job: Job, ranks: int) -> tuple[float, float, float]:
    """Bytes of a GPU: bfloat16 weights; what a rollout finds (with 10 of remainder and moments); the most at any time
    (with 4 of gradients). Stages: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter
    Models", 2020. A rollout needs its weights whole at every stage.
    """
    numbers, stage = job.shape.parameters / job.sharing, job.options.zero_stage
    states = 10 * numbers / (ranks if stage else 1)
    rest = 2 * numbers / (ranks if stage == 3 else 1) + 4 * numbers / (ranks if stage >= 2 else 1)
    return 2 * numbers, 2 * numbers + states, max(rest, 2 * numbers) + states


def _rollouts(job: Job, lengths: np.ndarray, ranks: int, capacity: int) -> tuple[list[float], int]:
    """(seconds of each rank, groups that moved). Equal shares are played once."""
    options, times = job.options, with_sharing(job)
    borders, known = [len(lengths) * rank // ranks for rank in range(ranks + 1)], {}
    given = (options.prompt_length, job.shape, times, capacity, options.max_num_seqs)
    if options.balance != "none" and ranks > 1:
        running = options.balance == "running"
        return balanced_seconds(
            lengths, borders, Setting(*given, lengths.shape[1]), running, options.max_completion_length
        )
    seconds = []
    for first, last in zip(borders, borders[1:]):
        part = lengths[first:last]
        share = part.tobytes()
        if share not in known:
            known[share] = rollout_seconds(part, *given)
        seconds.append(known[share])
    return seconds, 0


def with_sharing(job: Job) -> Times:
    """The times of a rank whose GPUs share each layer, with the all-reduces of the residual stream, which nothing
    hides: Shoeybi et al., "Megatron-LM", 2019; two a layer forward, in training two more with full recompute and two
    for gradients. Those of a decode step are short: recursive doubling (Thakur et al.).
    """
    times, size, layers = job.times, job.sharing, job.shape.layers
    if size == 1:
        return times
    links, token, rounds = job.links, 2 * job.shape.hidden, math.log2(size)
    ring = Ring(size, size, replace(links, nvlink_latency=0.0))
    return replace(
        times,
        launch=times.launch + 2 * layers * rounds * links.nvlink_latency,
        weights=times.weights / size,
        product=times.product / size,
        row=times.row + 2 * layers * rounds * token / links.nvlink,
        key=times.key / size,
        prefill_flops=times.prefill_flops * size,
        train_flops=times.train_flops * size,
        token_waits=2 * layers * ring.all_reduce(token, True).seconds,
        pass_waits=6 * layers * 2 * (size - 1) * links.nvlink_latency,
    )


# ---- training --------------------------------------------------------------------------------------------------------


def training_seconds(job: Job, lengths: np.ndarray, ranks: int) -> tuple[float, float, int]:
    """(seconds, seconds of the last pass, passes) of the slowest rank, without what it waits for others."""
    times, most = with_sharing(job), job.options.max_tokens_per_batch
    rows = lengths.reshape(-1) + job.options.prompt_length
    ends, work = np.cumsum(rows), np.cumsum(rows * job.shape.work(rows))
    inner = np.searchsorted(ends - rows / 2, ends[-1] * np.arange(1, ranks) / ranks)  # runs of about as many tokens
    borders = [0, *inner.tolist(), len(rows)]

    def of(sums: np.ndarray, border: int) -> float:
        return float(sums[border - 1]) if border else 0.0

    slowest = (0.0, 0.0, 0)
    for first, last in zip(borders, borders[1:]):
        tokens = of(ends, last) - of(ends, first)
        if not tokens:
            continue
        each = (of(work, last) - of(work, first)) / times.train_flops / tokens + 3 * times.token_waits
        passes = math.ceil(tokens / most)
        last_pass, full = (
            max(count * each, times.pass_floor) + times.pass_waits for count in (tokens - (passes - 1) * most, most)
        )
        slowest = max(slowest, ((passes - 1) * full + last_pass, last_pass, passes))
    return slowest


def reduction(job: Job, ring: Ring, last_pass: float, passes: int) -> tuple[Moved, float]:
    """(what a GPU sends for gradients and sharded weights, the seconds that no computation hides).

    A bucket's sum begins when the last backward pass has completed the bucket and the sum before is done.
    """
    options, shape = job.options, job.shape
    if ring.size == 1:
        return Moved(), 0.0
    fast, buckets = options.fast_reduction, [bucket / job.sharing for bucket in shape.buckets]
    sums = [(ring.scatter if options.zero_stage else ring.all_reduce)(4 * bucket, fast) for bucket in buckets]
    weights = total(ring.one_way(2 * bucket) for bucket in buckets)
    if options.zero_stage == 3:  # weights come for each forward and backward pass, gradients go in each
        a_pass = weights * 2 + total(sums)
        beside = last_pass if options.overlap else 0.0
        first = ring.one_way(2 * buckets[0]).seconds
        exposed = passes * (max(a_pass.seconds - beside, 0.0) + first) + weights.seconds  # the last: for the rollout
        return a_pass * passes + weights, exposed
    window = BACKWARD * last_pass if options.overlap else 0.0
    heads, done = shape.vocabularies - 1, 0.0
    for place, one in enumerate(sums):
        ready = window * min(max(place + 1 - heads, 0) / shape.layers, 1.0)
        done = max(done, ready) + one.seconds
    moved, exposed = total(sums), done - window
    if options.zero_stage == 2:  # those of a pass before the last hide behind the pass after it
        beside = last_pass if options.overlap else 0.0
        exposed += (passes - 1) * max(moved.seconds - beside, 0.0)
        moved = moved * passes
    return (moved + weights, exposed + weights.seconds) if options.zero_stage else (moved, exposed)


def total(parts) -> Moved:
    return sum(parts, Moved())
