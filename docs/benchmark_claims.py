"""What docs/benchmarks.md says: each claim as a sentence, with the stored result that its figures are read from.

A sentence has no figure of its own that was measured: `{name}` stands for a value that the claim's function finds in the result.
A changed result changes the page, and a result without that value is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple

Values = Mapping[str, object]


class Claim(NamedTuple):
    """One sentence. `values` maps the stored result to what the braces of `text` stand for."""

    text: str
    values: Callable[[Any], Values] = lambda _: {}


class Table(NamedTuple):
    """Rows that come from the result as they are."""

    head: Sequence[str]
    rows: Callable[[Any], Iterator[Sequence[str]]]


class Run(NamedTuple):
    """What one run of a script showed. `result` is a path below bench/results; with a `*`, results by the files' names."""

    result: str
    says: Sequence[Claim | Table]
    command: str = ""
    """The command of this run, where it is not the script's usual one."""


class Section(NamedTuple):
    """A heading and what was measured for it."""

    title: str
    intro: str
    runs: Sequence[Run]


def times(triple: Sequence[float], digits: int = 2) -> str:
    """A ratio with its 95 % interval."""
    value, low, high = triple
    return f"{value:.{digits}f}x ({low:.{digits}f} - {high:.{digits}f})"


def share(triple: Sequence[float], digits: int = 1) -> str:
    """A fraction with its 95 % interval, in percent."""
    value, low, high = (100 * one for one in triple)
    return f"{value:.{digits}f} % ({low:.{digits}f} to {high:.{digits}f})"


def micro(seconds: float) -> str:
    """Microseconds with three digits."""
    return f"{1e6 * seconds:.3g}"


def row_of(rows: Sequence[Mapping[str, Any]], **wanted: object) -> Mapping[str, Any]:
    """The one row that has all of these values."""
    found = [row for row in rows if all(row.get(name) == value for name, value in wanted.items())]
    if len(found) != 1:
        raise KeyError(f"{len(found)} rows with {wanted}")
    return found[0]


# -- finding ---------------------------------------------------------------------------------------------------------------------


def _checked(result: Any) -> Values:
    summary, num = result["summary"], result["summary"]["num_examples"]
    return {
        "num": num,
        "first": round(num * summary["cause_first"]),
        "line": round(num * summary["line_exact"]),
        "gain": round(num * summary["gain_within_25_percent"]),
        "controls": summary["controls"],
        "wrong": summary["controls_with_wrong_claims"],
    }


def _peers(result: Any) -> Iterator[Sequence[str]]:
    for name, tool in (("traceml", "TraceML"), ("profiler", "torch.profiler + HTA")):
        one = result["summary"][name]
        yield (
            tool,
            f"{one['cause']} of {one['num_examples']}",
            f"{one['line_exact']} of {one['num_examples']}",
            f"{one['controls_with_advice']} of {one['num_controls']}",
        )


def _light(result: Any, names: Mapping[str, str]) -> Values:
    listed = [
        f"{words} {result[name]['value']:.3f} ({result[name]['low']:.3f} - {result[name]['high']:.3f})"
        for name, words in names.items()
    ]
    return {"listed": ", ".join(listed)}


def _host_read(result: Any) -> Values:
    case = result["sizes"]["gpt2-small"]
    finding = row_of(case["findings"], rule="overhead.host-read")
    low, high = finding["gain"]
    step_ms, device_ms = 1e3 * case["steps"]["step_s"], 1e3 * case["steps"]["device_s"]
    return {
        "line": finding["line"],
        "step": f"{step_ms:.1f}",
        "idle": f"{step_ms - device_ms:.1f}",
        "low": f"{low:.2f}",
        "high": f"{high:.2f}",
        "gained": f"{case['measured_gain']:.2f}",
    }


def _memory(result: Any) -> Values:
    return {"worst": f"{100 * result['worst']:.0f}", "num": len(result["rows"])}


_TRAINERS = (("transformers", "transformers' Trainer"), ("lightning", "Lightning"), ("accelerate", "Accelerate"))


def _callback_seconds(result: Any) -> Iterator[Sequence[str]]:
    for name, words in _TRAINERS:
        one = result[name]
        yield (
            words,
            f"{one['more_s']:.2f} s ({one['low_s']:.2f} - {one['high_s']:.2f})",
            f"{one['own_s']:.2f} s",
            f"{one['first_own_s']:.2f} s",
        )


def _callbacks(result: Any) -> Iterator[Sequence[str]]:
    for name, words in _TRAINERS:
        one = result[name]
        own = [float(says.rpartition(", ")[2].split()[0]) for says in one["says"]]
        yield (
            words,
            times((one["ratio"], one["low"], one["high"]), 3),
            times((one["cpu_ratio"], one["cpu_low"], one["cpu_high"]), 3),
            f"{min(own):g} - {max(own):g} %",
        )


def _look(result: Any) -> Values:
    value, low, high = result["look_adds_s"]
    return {
        "adds": f"{value:.2f} s ({low:.2f} - {high:.2f})",
        "own": f"{result['look_says_s']:.2f} s",
        "step": f"{1e3 * result['step_s']:.0f} ms",
        "hook": f"{1e6 * result['hook_s']:.1f} us",
    }


def _store(result: Any) -> Iterator[Sequence[str]]:
    names = (("sqlite", "an SQLite file"), ("files", "a file for each row"), ("parquet", "Parquet, after tidying"))
    for name, words in names:
        value, low, high = result[f"{name}_open_s"]
        write_s = result.get(f"{name}_write_s")
        written = f"{1e3 * write_s:.2f} ms" if write_s is not None else "-"
        yield words, f"{value:.2f} s ({low:.2f} - {high:.2f})", written


FIND = Section(
    "Finding causes",
    "The project's own examples: slow scripts with one planted cause each, their repaired twins, and clean controls. How\n"
    "`check` does on scripts of other people is on [a page of its own](world/index.md).",
    (
        Run(
            "2026-11-25-epyc-family25-2-cores/check_examples.json",
            (
                Claim(
                    "The right cause comes first for {first} of {num} scripts, on the exact line for {line}.", _checked
                ),
                Claim(
                    "The predicted gain is within 25 % of what the repaired twin gains for {gain} of {num} scripts.",
                    _checked,
                ),
                Claim("Of {controls} clean scripts, {wrong} have a wrong finding.", _checked),
            ),
        ),
        Run(
            "2026-11-21-epyc-2-cores/peers.json",
            (
                Claim("Other tools on the same scripts. Where an answer was unclear, it was counted for the tool."),
                Table(("tool", "right cause first", "exact line", "clean scripts with advice"), _peers),
            ),
        ),
        Run(
            "2026-11-21-h200/summary.json",
            (
                Claim(
                    "A script of GPT-2's size that logs gradient norms in every step: `check` names the host read on line "
                    "{line}, and a device that idles for {idle} of {step} ms. It predicts a gain of {low} - {high}; the "
                    "repaired twin gained {gained}.",
                    _host_read,
                ),
            ),
        ),
        Run(
            "2026-11-21-epyc-2-cores/light_cost.json",
            (
                Claim(
                    "Light observation, ratio of step times with and without it: {listed}.",
                    lambda r: _light(r, {"gpt": "a GPT", "mlp": "an MLP of 0.8 ms a step"}),
                ),
            ),
        ),
        Run(
            "2026-11-21-h200/light_cost.json",
            (
                Claim(
                    "The same where a GPU's host limits the step: {listed}.",
                    lambda r: _light(r, {"mlp": "an MLP of 0.8 ms a step", "layers": "24 layers", "gpt": "a GPT"}),
                ),
            ),
        ),
        Run(
            "2026-11-21-epyc-2-cores/memory_accounting.json",
            (
                Claim(
                    "The named parts of the peak are within {worst} % of the process's own figure on {num} models.",
                    _memory,
                ),
            ),
        ),
        Run(
            "2026-11-21-h200/memory_accounting.json",
            (Claim("On a GPU they are within {worst} % of an unobserved process on {num} models.", _memory),),
        ),
        Run(
            "2026-11-28-epyc-family25-2-cores/callback_seconds.json",
            (
                Claim(
                    "What a callback adds to a training of any length, trainings of ten seconds with and without it in turn:"
                ),
                Table(("library", "longer by", "by its own count", "of the first in a process"), _callback_seconds),
            ),
            "python bench/callback_cost.py",
        ),
        Run(
            "2026-11-28-epyc-family25-2-cores/callback_cost.json",
            (
                Claim(
                    "The same for whole trainings of two minutes, three pairs: times on this shared machine vary by more than "
                    "that."
                ),
                Table(("library", "time over without it", "processor time", "its own count"), _callbacks),
            ),
            "python bench/callback_cost.py --whole",
        ),
        Run(
            "2026-11-28-epyc-family26-2-cores/watch_look.json",
            (
                Claim(
                    "What `flatout fleet`'s watching takes of a job, steps of {step} with and without a look in turn: the look "
                    "adds {adds}, {own} by its own count. The hook takes {hook} of each step.",
                    _look,
                ),
            ),
            "python bench/watch_cost.py --look",
        ),
        Run(
            "2026-11-29-h200/watch_look.json",
            (
                Claim(
                    "The same on a GPU, steps of {step}: the look adds {adds}, {own} by its own count. "
                    "The hook takes {hook} of each step.",
                    _look,
                ),
            ),
            "python bench/watch_cost.py --look --device cuda",
        ),
        Run(
            "2026-11-28-epyc-family26-2-cores/fleet_store.json",
            (
                Claim("The whole command `flatout fleet` on 10,000 jobs, and writing one record:"),
                Table(("store", "opened in", "a record written in"), _store),
            ),
            "python bench/fleet_store.py",
        ),
    ),
)

# -- tuning ----------------------------------------------------------------------------------------------------------------------


def _tuned(result: Any) -> Values:
    summary = result["summary"]
    return {
        "plans": summary["num_plans"],
        "num": summary["num_examples"],
        "untouched": f"{summary['geomean_over_untouched']:.2f}",
        "best": f"{summary['geomean_over_best_of_eager_and_compile']:.2f}",
        "slower": summary["num_slower"],
        "wrong": summary["num_wrong"],
        "trials": summary["num_levers_tried"],
        "within": f"{100 * summary['within_prediction']:.0f}",
    }


def _edited(result: Any) -> Values:
    summary = result["summary"]
    return {
        "proved": summary["num_proved"],
        "num": summary["num_edited"],
        "alone": summary["num_proved_as_text_alone"],
        "over": f"{summary['geomean_over_plan']:.2f}",
    }


def _tuned_on_gpu(result: Any) -> Iterator[Sequence[str]]:
    names = {
        "gpt2_naive": "GPT-2 small, written naively",
        "bert_ragged": "BERT-like, ragged input",
        "resnet_images": "ResNet-34, images",
        "mlp_small": "MLP bound by overhead",
        "ragged_attention": "language model on ragged sentences, bf16",
    }
    for name, words in names.items():
        one = result[name]
        best = one["best_line"]
        yield (
            words,
            f"{1e3 * one['step_s']['untouched']:.3g} ms",
            times(one["ratios"]["flatout"]),
            f"{best} {one['ratios'][best][0]:.2f}x",
            times(one["over_best_line"]),
        )


def _generated(result: Any) -> Values:
    summary = result["summary"]
    return {
        "num": summary["scripts"],
        "plans": summary["plans"],
        "bad": len(summary["plans that change what is learnt"]) + len(summary["texts that change what is learnt"]),
    }


TUNE = Section(
    "Tuning",
    "The same examples. Plans for scripts of other people, raced in whole runs against the best change by hand, are on\n"
    "[a page of their own](world/tune.md).",
    (
        Run(
            "2026-11-27-xeon-family6-2-cores/tune_examples.json",
            (
                Claim("`flatout tune` finds a plan for {plans} of {num} scripts.", _tuned),
                Claim(
                    "The geometric mean of their speed-ups is **{untouched}x** over the untouched scripts and **{best}x** over "
                    "the better of eager and `torch.compile(model)`.",
                    _tuned,
                ),
                Claim("Proved again from the start, {slower} of the plans were slower and {wrong} were wrong.", _tuned),
                Claim("Of {trials} trials of levers, {within} % are within the prediction.", _tuned),
            ),
        ),
        Run(
            "2026-11-22-epyc-2-cores/edit_examples.json",
            (
                Claim(
                    "As text, written by `flatout edit`, {proved} of {num} plans were proved, {alone} of them with nothing "
                    "left in a plan, at {over}x the plan's speed.",
                    _edited,
                ),
            ),
        ),
        Run(
            "2026-11-27-xeon-family6-2-cores/generated.json",
            (
                Claim(
                    "Generated training scripts with dropout, random crops, scheduled losses, accumulation and custom "
                    "optimizers: {plans} plans for {num} scripts; {bad} of the plans and their texts change what is learnt.",
                    _generated,
                ),
            ),
        ),
        Run(
            "2026-11-27-h200/tune/*.json",
            (
                Table(
                    ("script", "untouched", "tuned", "best well-known line alone", "tuned over that"),
                    _tuned_on_gpu,
                ),
            ),
        ),
    ),
)

# -- training --------------------------------------------------------------------------------------------------------------------


def _feeding(result: Any) -> Values:
    found = result["distributions"]["log-normal"]["256 sequences a step"]
    grouped, balanced = found["transformers group_by_length, padded"], found["transformers batch_rebalance, padded"]
    return {
        "ours": f"{100 * found['flatout, max_vif 1']['idle']:.1f}",
        "grouped": f"{100 * grouped['idle']:.0f}",
        "balanced": f"{100 * balanced['idle']:.0f}",
        "padding": f"{100 * balanced['padding']:.0f}",
    }


def _saved(result: Any) -> Values:
    small, large = result["checkpoints"], result["checkpoints_of_larger_steps"]
    return {
        "waits": result["full_loop"]["steps_without_a_wait"],
        "late": max(result["nan_watch"]["steps_late"]),
        "nan": share(result["nan_watch"]["cost"]),
        "hidden": share(result["prefetch"]["hidden"]),
        "bytes": f"{small['bytes'] / 1e9:.1f}",
        "large": share(large["stall_of_a_step"]),
        "large_s": f"{1e3 * large['step_s']:.0f}",
        "small": share(small["stall_of_a_step"]),
        "small_s": f"{1e3 * small['step_s']:.0f}",
    }


TRAIN = Section(
    "Feeding, looping and saving",
    "",
    (
        Run(
            "2026-11-22-epyc-2-cores/feeding.json",
            (
                Claim(
                    "With batches that are packed and shuffled uniformly, 8 ranks idle {ours} % of the time on log-normal "
                    "lengths. With transformers' `group_by_length` they idle {grouped} %, with `batch_rebalance` {balanced} % "
                    "at {padding} % padding.",
                    _feeding,
                ),
            ),
        ),
        Run(
            "2026-11-22-epyc-2-cores/loop_overhead.json",
            (
                Claim(
                    "All blocks together cost {flatout} Python calls a step, Fabric {fabric}, Accelerate {accelerate}.",
                    lambda r: r["extra"],
                ),
            ),
        ),
        Run(
            "2026-11-22-h200/loop_device.json",
            (
                Claim("The full loop takes {waits} steps without a wait of its host.", _saved),
                Claim("NaN is reported at most {late} steps late, at a cost of {nan}.", _saved),
                Claim("Of a copy to the device, {hidden} is hidden.", _saved),
                Claim(
                    "Saving {bytes} GB of weights and optimizer state costs {large} of a step of {large_s} ms, and {small} of "
                    "one of {small_s} ms.",
                    _saved,
                ),
            ),
        ),
        Run(
            "2026-11-22-h200/feeding_device.json",
            (
                Claim(
                    "On two of them, a transformer over ragged data learns {ratio} as many tokens a second as with padded "
                    "`group_by_length`.",
                    lambda r: {"ratio": times(r["packed_over_padded"], 1)},
                ),
            ),
            "torchrun --nproc-per-node 2 bench/feeding_device.py",
        ),
    ),
)

# -- operators -------------------------------------------------------------------------------------------------------------------


def _masks(result: Any) -> Values:
    masks = result["masks"]
    documents = row_of(result["attention"], what="16 documents", dtype="float32")
    window = row_of(result["attention"], what="window 512, causal", dtype="float32")
    prefix = row_of(result["attention"], what="prefix 512", dtype="float32")
    return {
        "documents": times(documents["faster"], 1),
        "window": times(window["faster"], 1),
        "prefix": times(prefix["faster"], 1),
        "tokens": f"{masks['tokens'] // 1024} k",
        "faster": f"{masks['faster']:.0f}",
        "smaller": f"{masks['smaller']:.0f}",
        "many": f"{masks['many_tokens']:,}",
        "many_s": f"{masks['many_s'][0]:.2f}",
        "many_mb": f"{masks['many_bytes'] / 1e6:.0f}",
    }


def _attention(result: Any) -> Values:
    causal = [result[f"causal {length}"]["cudnn"]["ours_is_faster_both"] for length in (4096, 16384)]
    documents = result["documents, new every step"]
    windows = [result[f"window 1024 of {length}"]["flex"]["ours_is_faster_both"][0] for length in (4096, 16384)]
    tree = result["tree 65536"]
    return {
        "short": times(causal[0]),
        "long": times(causal[1]),
        "flex": times(documents["flex"]["ours_is_faster_both"]),
        "flash": times(documents["flash"]["ours_is_faster_both"]),
        "windows": f"{min(windows):.1f} - {max(windows):.1f}",
        "tree": f"{tree['peak_bytes'] / 1e9:.2f}",
        "theirs": f"{tree['create_block_mask_peak_bytes'] / 1e9:.0f}",
    }


def _losses(result: Any) -> Iterator[Sequence[str]]:
    for name, case in result["parts"]["loss"].items():
        unfused, ours = case["variants"]["unfused"], case["variants"]["flatout"]
        compiled = case["variants"]["unfused, compiled"]["time"]["over_first"]
        memory = "above_start_and_gradients_bytes"
        yield (
            name,
            times(ours["time"]["over_first"]),
            times(compiled),
            times(case["variants"]["flatout, float8"]["time"]["over_first"]),
            f"1/{unfused['memory'][memory] / ours['memory'][memory]:.0f}",
        )


def _products(result: Any) -> Iterator[Sequence[str]]:
    wanted = (
        ("chosen 3620", "3620 x 3620 x 3620, bf16", "is_captured=False"),
        ("chosen vocabulary", "4096 x 50257 x 768, bf16", "is_captured=False"),
        ("chosen 17-rows", "17 x 5000 x 3001, bf16, in a captured graph", "is_captured=True"),
        ("chosen deep-64", "64 x 64 x 65536, bf16", "is_captured=False"),
        ("chosen 1000", "1000 x 1000 x 1000, bf16", "is_captured=False"),
    )
    for part, words, when in wanted:
        row = row_of(result, part=part)
        ours, vendor = row["ways"]["flatout.matmul"], row["ways"]["vendor"]
        yield words, f"{vendor['device_s'] / ours['device_s']:.1f}x", row["chosen"][when].partition("(")[0]


def _zeros(result: Any) -> Values:
    per_s = {kind: median(one["tflop_per_s"] for one in rounds) for kind, rounds in result["rounds"].items()}
    return {"shape": result["shape"], **{kind: f"{value:.0f}" for kind, value in per_s.items()}}


OPERATORS = Section(
    "Attention, losses and products",
    "",
    (
        Run(
            "2026-11-22-xeon-2-cores/attention_cpu.json",
            (
                Claim(
                    "Forward and backward of `flatout.attention` in float32 over SDPA with a dense mask: {documents} with 16 "
                    "documents in 4096 tokens, {window} with a window of 512 in 8192, {prefix} with a prefix of 512.",
                    _masks,
                ),
                Claim(
                    "Block lists of {tokens} tokens are built {faster} times faster than with `create_block_mask` and take "
                    "1/{smaller} of its memory. Those of {many} tokens take {many_s} s and {many_mb} MB.",
                    _masks,
                ),
            ),
        ),
        Run(
            "2026-11-22-h200/attention_device.json",
            (
                Claim(
                    "Causal masks, bf16, forward and backward, over cuDNN: {short} at 4096 tokens, {long} at 16384.",
                    _attention,
                ),
                Claim(
                    "Documents of new lengths in every step: {flex} over FlexAttention with `create_block_mask`, {flash} over "
                    "the bare variable-length kernel.",
                    _attention,
                ),
                Claim("A window of 1024: {windows} times as fast as FlexAttention.", _attention),
                Claim("A tree over 64 k tokens: {tree} GB, where `create_block_mask` takes {theirs} GB.", _attention),
            ),
        ),
        Run(
            "2026-11-27-h200/losses_device.json",
            (
                Claim(
                    "`flatout.linear_cross_entropy` in bf16 never has all logits in memory. Time over the unfused loss's (less "
                    "is better), and memory above inputs and gradients. float8 costs 3 - 7 % of error in the gradients."
                ),
                Table(("classes and tokens", "fused", "unfused, compiled", "fused, float8", "memory, fused"), _losses),
            ),
        ),
        Run(
            "2026-11-27-h200/zeros_device.json",
            (
                Claim(
                    "A product of two matrices of zeros ({shape}) is said to reach {zeros} TFLOP/s, of random numbers "
                    "{random}: measure on random numbers.",
                    _zeros,
                ),
            ),
        ),
        Run(
            "2026-11-22-h200/products_device.json",
            (
                Claim(
                    "`flatout.matmul` takes the implementation that `flatout matmul` measured to be fastest. Over the vendor's "
                    "library:"
                ),
                Table(("product", "times as fast", "what was taken"), _products),
            ),
        ),
    ),
)

# -- inference and size ----------------------------------------------------------------------------------------------------------


def _native(result: Any) -> Iterator[Sequence[str]]:
    for row in result:
        if row.get("part") != "models":
            continue
        peers = row["peers"]
        cells = [
            micro(peers[name]["s"]) if "s" in peers.get(name, {}) else "-"
            for name in ("eager", "aoti_tuned", "ort", "flatout", "flatout_loop")
        ]
        yield row["about"], *cells, micro(row["floor_s"])


def _int8(result: Any) -> Values:
    row = row_of(result, part="int8", model="lstm")
    return {
        "faster": f"{row['faster']:.1f}",
        "us": micro(row["peers"]["int8"]["s"]),
        "error": f"{100 * row['error']['int8']:.1f}",
    }


def _shrunk(result: Any) -> Iterator[Sequence[str]]:
    for row in result:
        if "chosen" in row:
            before, after = row["bytes"]
            yield (
                row["model"],
                row["chosen"],
                times(row["faster"]),
                f"{before / after:.1f}x" if after < before else f"{after / before:.1f}x as many",
                f"{100 * max(row['lost'], 0):.1f} %",
            )


SMALL = Section(
    "Small models, smaller models",
    "",
    (
        Run(
            "2026-11-22-xeon-2-cores/native.json",
            (
                Claim(
                    "Microseconds of one event, called from Python on one core with AVX-512, medians. AOTInductor has its C++ "
                    "products and is autotuned; ONNX Runtime has bound inputs and outputs."
                ),
                Table(
                    ("model", "eager", "AOTInductor", "ONNX Runtime", "flatout", "flatout, in a C loop", "floor"),
                    _native,
                ),
                Claim(
                    'The LSTM with `precision="int8"`: {us} us, {faster} times as fast as float32, {error} % off.',
                    _int8,
                ),
            ),
        ),
        Run(
            "2026-11-23-xeon-2-cores/shrinking.json",
            (
                Claim(
                    "`flatout shrink` on trained models, where 1 % of the metric may be lost, one thread. Which choice it "
                    "takes, a call's speed-up, fewer bytes and the loss:"
                ),
                Table(("model", "choice", "faster", "fewer bytes", "lost"), _shrunk),
            ),
        ),
    ),
)


def _streamed(result: Any) -> Values:
    def found(transit: str, key: str) -> Any:
        return next(
            row[key]
            for row in result
            if row.get("transit") == transit and row.get("input") == "one token" and key in row
        )

    layers = next(row for row in result if "layers" in row)
    whole, bits = found("as-is", "measured"), found("int4", "measured")
    return {
        "layers": layers["layers"],
        "gib": f"{layers['layers'] * layers['layer_bytes'] / 2**30:.0f}",
        "sent": f"{found('as-is', 'prediction')['sent_bytes'] / 2**30:.0f}",
        "pass_s": f"{whole['pass_s']:.3f}",
        "bound": f"{100 * whole['bound_fraction']:.1f}",
        "off": f"{100 * abs(whole['error_fraction']):.1f}",
        "bits_s": f"{bits['pass_s']:.3f}",
        "accelerate_s": f"{row_of(result, part='accelerate', input='one token')['pass_s']:.1f}",
    }


def _decoded(result: Any) -> Values:
    found = {kind: row_of(result, part="decode", kind=kind, how="graph, chain") for kind in ("bf16", "int4")}
    return {
        **{kind: f"{row['tokens_per_s']:.0f}" for kind, row in found.items()},
        **{f"{kind}_bound": f"{100 * row['bound_fraction']:.0f}" for kind, row in found.items()},
    }


LARGE = Section(
    "Models larger than the GPU's memory",
    "Weights that do not fit [stream through the GPU](how-to/run-larger-than-memory.md).",
    (
        Run(
            "2026-11-22-h200/beyond.json",
            (
                Claim(
                    "{layers} layers of a 70 B model's shape ({gib} GiB), {sent} GiB of them streamed in each pass, take "
                    "{pass_s} s: {bound} % of the link's bound, predicted within {off} %. With 4 bits on the way they take "
                    "{bits_s} s, with Accelerate's `cpu_offload` {accelerate_s} s.",
                    _streamed,
                ),
            ),
        ),
        Run(
            "2026-11-23-h200/beyond_chain.json",
            (
                Claim(
                    "A 7 B model's shape, one token at a time with all layers in one launch: {bf16} tokens a second in "
                    "bfloat16 ({bf16_bound} % of a copy's bandwidth), {int4} in 4 bits ({int4_bound} %).",
                    _decoded,
                ),
            ),
        ),
    ),
)

# -- many devices ----------------------------------------------------------------------------------------------------------------


def _regret(result: Any) -> Values:
    return {
        "groups": result["groups"],
        "rows": result["rows"],
        "fitted": f"{100 * result['rows_fitted_on'] / result['rows']:.0f}",
        "mean": f"{100 * result['regret_mean']:.2f}",
        "p95": f"{100 * result['regret_p95']:.1f}",
    }


def _layouts(result: Any, model: str) -> Values:
    one = result[model]
    return {
        "num": one["layouts"],
        "calibrated": f"{result['calibration_s']:.0f}",
        "regret": f"{100 * one['regret']:.1f}",
        "error": f"{100 * one['error_mean']:.0f}",
        "at_host": f"{100 * one.get('error_mean_at_measured_host_speed', one['error_mean']):.0f}",
        "memory": f"{100 * one['memory_error_median']:.1f}" if one["memory_error_median"] is not None else "-",
        "low": one["too_low_bounds"],
    }


def _survived(result: Any) -> Values:
    one = result["survive"]
    equal = "equal, bit for bit" if one["is_bitwise_equal"] else "not equal"
    return {
        "kills": one["kills_done"],
        "ranks": result["ranks"],
        "median": f"{one['median_s']:.2f}",
        "longest": f"{one['longest_s']:.2f}",
        "lost": one["most_steps_lost"],
        "equal": equal,
        "torchrun": sum(again["recovery_s"] is not None for again in result.get("torchrun", ())),
        "tries": len(result.get("torchrun", ())),
    }


MANY = Section(
    "Many devices",
    "",
    (
        Run(
            "2026-11-28-a100-published/regret.json",
            (
                Claim(
                    "{groups} published sweeps of 1 to 8 A100 with {rows} measured steps, {fitted} % of them used to fit "
                    "constants: the first choice of `flatout scale` is {mean} % slower than the best in the mean, and {p95} % "
                    "at the 95th percentile.",
                    _regret,
                ),
            ),
        ),
        Run(
            "2026-11-22-h200-x2/layouts.json",
            (
                Claim(
                    "All {num} layouts of a Llama-like model of 2 billion parameters, after {calibrated} s of calibration: the "
                    "first choice is {regret} % slower than the best. Seconds are {error} % off in the mean, peaks of memory "
                    "{memory} % in the median; {low} layouts were said to fit and did not.",
                    lambda r: _layouts(r, "wide"),
                ),
            ),
        ),
        Run(
            "2026-11-29-h200-x2/layouts_held_out.json",
            (
                Claim(
                    "{num} layouts of a GPT of 24 thin layers, whose steps wait for the host: the first choice is {regret} % "
                    "slower than the best. Seconds are {error} % off in the mean, {at_host} % at the speed that the host had "
                    "then, peaks of memory {memory} % in the median; {low} layouts were said to fit and did not.",
                    lambda r: _layouts(r, "deep"),
                ),
            ),
        ),
        Run(
            "2026-11-22-xeon-2-cores/surviving.json",
            (
                Claim(
                    "`flatout survive`, {kills} random kills on {ranks} CPU ranks: recovery takes {median} s in the median and "
                    "{longest} s at most, with at most {lost} step lost and losses that are {equal}. torchrun's own restart "
                    "came back {torchrun} of {tries} times.",
                    _survived,
                ),
            ),
        ),
        Run(
            "2026-11-22-h200-x2/surviving.json",
            (
                Claim(
                    "{kills} kills in a row on {ranks} GPUs: {median} s in the median and {longest} s at most, with at most "
                    "{lost} step lost and losses that are {equal}.",
                    _survived,
                ),
            ),
        ),
    ),
)

SECTIONS: Sequence[Section] = (FIND, TUNE, TRAIN, OPERATORS, SMALL, LARGE, MANY)
