"""The results of ``bench.device measure`` as Markdown: beside the peers, by kernel class, beside the limits."""

from __future__ import annotations

import re
from math import exp, log
from typing import Any

__all__ = ["CLASSES", "LAYER", "VARIANTS", "class_of", "fractions", "row", "table"]

VARIANTS = ("ours", "ours-textures", "ours-buffers", "stock-buffers", "stock-texture")
PEERS = ("stock-buffers", "stock-texture")
HEAD = (
    "network",
    "ours, ms",
    "ours in textures / ours",
    "ours in buffers / ours",
    "stock buffers / ours",
    "stock texture / ours",
)
WORDS = {
    "convolution": "conv depthwise",
    "dense": "dense matmul",
    "norm": "norm lrn",
    "pooling": "pool mean",
    "concat": "concat concatenate",
    "resize": "resize",
    "conversion": "layout >",
    "shuffle": "shuffle slice strided split transpose reshape take gather move",
    "elementwise": "elementwise add subtract multiply divide relu leakyrelu clip sigmoid tanh exp power maximum "
    "minimum cast",
}
CLASSES = (*WORDS, "other")
LAYER = "layer_"
"""The name of a module that is one layer (see :mod:`bench.layers`) begins with this; the rest is its row's name."""
MEMORY_BOUND = ("pooling", "concat", "resize", "conversion", "elementwise")
ABOVE_FLOOR = 3.0
AT_FLOOR = 2.0


def class_of(label: str) -> str:
    """The kernel class of a launch by its label: a row of ours, the ops in the name of a stock kernel, or a copy.

    A fused kernel has the class of the heaviest op in it; the classes come in that order.
    """
    words = set(re.split(r"[^a-z>]+", label))
    return next((name for name, some in WORDS.items() if words & set(some.split())), "other")


def fractions(kernels: list[dict[str, Any]], limits: dict[str, float]) -> dict[str, Any]:
    """How near to the device's limits the kernels of one network come.

    ``kernels``: ``label``, ``count``, ``ms`` (in one run) and, where they are known, ``bytes``, ``flops`` and
    ``conv3x3`` of one launch. ``limits``: as :class:`bench.limits.Limits`. Returns shares of one, ``None`` where no
    kernel counts; what stays in a cache may be moved faster than a copy:

    ``conv_best``, ``conv_median``: 3x3 convolutions, of the peak; the median is weighted by time.
    ``memory_best``, ``memory_mean``: memory-bound kernels that take three times as long as an empty one or more, of the
    copy bandwidth; the mean is weighted by time.
    ``memory_time``: those kernels' share of the time.
    ``floor_time``, ``floor_launches``: share of the time, and number of the launches, that take less than twice as long
    as an empty kernel.
    """
    convs, memory = [], []
    floor_ms, floor_launches = 0.0, 0
    for kernel in kernels:
        each = kernel["ms"] / 1e3 / kernel["count"]
        if each < AT_FLOOR * limits["floor"]:
            floor_ms += kernel["ms"]
            floor_launches += kernel["count"]
        if each <= 0:  # an event too short for the device's clock
            continue
        if kernel.get("conv3x3"):
            convs.append((kernel["flops"] / each / limits["peak"], kernel["ms"]))
        is_long = each >= ABOVE_FLOOR * limits["floor"]
        if class_of(kernel["label"]) in MEMORY_BOUND and is_long and kernel.get("bytes"):
            memory.append((kernel["bytes"] / each / limits["copy"], kernel["ms"]))
    total = sum(kernel["ms"] for kernel in kernels)
    spent = sum(ms for _, ms in memory)
    return {
        "conv_best": max(convs)[0] if convs else None,
        "conv_median": weighted_median(convs) if convs else None,
        "memory_best": max(memory)[0] if memory else None,
        "memory_mean": sum(part * ms for part, ms in memory) / spent if memory else None,
        "memory_time": spent / total if total else 0.0,
        "floor_time": floor_ms / total if total else 0.0,
        "floor_launches": floor_launches,
    }


def weighted_median(pairs: list[tuple[float, float]]) -> float:
    """The value at which half of the weight is reached; pairs of value and weight, at least one."""
    half, seen = sum(weight for _, weight in pairs) / 2, 0.0
    for value, weight in sorted(pairs):
        seen += weight
        if seen >= half:
            return value
    return max(pairs)[0]


def row(network: str, variants: dict[str, Any]) -> str:
    """A line of the table: our milliseconds, and how many times longer each other variant takes."""
    if "ours" not in variants:
        return line(network, *["-"] * len(VARIANTS))
    ours = variants["ours"]["ms"]
    return line(
        network,
        f"{ours:.3f}",
        *(f"{variants[name]['ms'] / ours:.2f}" if name in variants else "-" for name in VARIANTS[1:]),
    )


def line(*cells: str) -> str:
    """A line of a Markdown table."""
    return f"| {' | '.join(cells)} |"


def head(*cells: str, numbers: int = 1) -> list[str]:
    """The first two lines of a table; the columns from ``numbers`` on are figures."""
    return [
        line(*cells),
        line(*("---" if place < numbers else "---:" for place in range(len(cells)))),
    ]


def table(result: dict[str, Any]) -> str:
    """All results of a run."""
    layers = {name: variants for name, variants in result["networks"].items() if name.startswith(LAYER)}
    result = {**result, "networks": {k: v for k, v in result["networks"].items() if k not in layers}}
    lines = [
        f"{result['device']}, {result['platform']}, driver {result['driver']}; medians of {result['repeats']} runs.",
        "",
    ]
    if result["networks"]:
        lines += [
            *head(*HEAD),
            *(row(network, variants) for network, variants in result["networks"].items()),
            line("geometric mean", "", *(mean_ratio(result, name) for name in VARIANTS[1:])),
            "",
            *whole_runs(result),
            "",
            *errors(result),
            *by_class(result),
            "",
        ]
    lines += beside_limits(result)
    if layers:
        lines += ["", *of_copy(layers, result["limits"])]
    if refused := [
        f"- {network}, {variant}: {reason}"
        for network, reasons in result["refused"].items()
        for variant, reason in reasons.items()
    ]:
        lines += ["", *refused]
    return "\n".join(lines)


def whole_runs(result: dict[str, Any]) -> list[str]:
    """One run of many that follow each other, on the host's clock: what is between kernels is in it."""
    lines = head("network, whole runs", "ours, ms", *(f"{name} / ours" for name in PEERS))
    for network, variants in result["networks"].items():
        if ours := variants.get("ours", {}).get("run_ms"):
            peers = (variants.get(name, {}).get("run_ms") for name in PEERS)
            lines.append(line(network, f"{ours:.3f}", *(f"{ms / ours:.2f}" if ms else "-" for ms in peers)))
    means = (mean_ratio(result, name, "run_ms") for name in PEERS)
    return [*lines, line("geometric mean", "", *means)]


def errors(result: dict[str, Any]) -> list[str]:
    """How far outputs are from those of the untouched module on the CPU, where that was compared."""
    lines = [
        line(
            network,
            *(
                f"{one['error']:.1e}" if (one := variants.get(name, {})).get("error") is not None else "-"
                for name in VARIANTS
            ),
        )
        for network, variants in result["networks"].items()
        if any("error" in one for one in variants.values())
    ]
    return [*head("network, worst error", *VARIANTS), *lines, ""] if lines else []


def by_class(result: dict[str, Any]) -> list[str]:
    """The time of each kernel class, stock's to ours, over the networks where both sides have kernels of it."""
    lines = head(
        "kernel class", "peer", "networks", "slowest for us, peer / ours", "geometric mean", numbers=2
    )
    for peer in PEERS:
        for name in CLASSES:
            ratios = {
                network: variants[peer]["classes"][name] / variants["ours"]["classes"][name]
                for network, variants in result["networks"].items()
                if {peer, "ours"} <= variants.keys()
                and variants[peer]["classes"].get(name)
                and variants["ours"]["classes"].get(name)
            }
            if ratios:
                worst = min(ratios, key=ratios.__getitem__)
                lines.append(
                    line(
                        name,
                        peer,
                        str(len(ratios)),
                        f"{ratios[worst]:.2f} ({worst})",
                        f"{geometric_mean(list(ratios.values())):.2f}",
                    )
                )
    return lines


def beside_limits(result: dict[str, Any]) -> list[str]:
    """How near our kernels come to what the device can do."""
    limits = result["limits"]
    lines = [
        f"Limits, measured in the same run: copy {limits['copy'] / 1e9:.0f} GB/s (read and written), float32 peak "
        f"{limits['peak'] / 1e12:.2f} TFLOP/s, an empty kernel {limits['floor'] * 1e6:.1f} us.",
    ]
    if result["networks"]:
        lines += [
            "",
            *head(
                "network",
                "3x3 convolutions, of peak: best",
                "median by time",
                "memory-bound kernels, of copy: best",
                "mean by time",
                "their share of the time",
                "launches at the floor",
                "their share of the time",
            ),
        ]
    for network, variants in result["networks"].items():
        if "ours" in variants:
            part = fractions(variants["ours"]["kernels"], limits)
            lines.append(
                line(
                    network,
                    *map(percent, (part[name] for name in ("conv_best", "conv_median"))),
                    *map(percent, (part[name] for name in ("memory_best", "memory_mean", "memory_time"))),
                    f"{part['floor_launches']} of {variants['ours']['launches']}",
                    percent(part["floor_time"]),
                )
            )
    return lines


def of_copy(layers: dict[str, dict[str, Any]], limits: dict[str, float]) -> list[str]:
    """The bandwidth that the kernel of each large layer reaches: bytes that it must move, each once, by its time."""
    lines = head("large layer", "variant", "MB", "us", "GB/s", "of copy", numbers=2)
    for name, variants in layers.items():
        label = name.removeprefix(LAYER)
        for variant, figures in variants.items():
            for kernel in figures["kernels"]:
                if kernel["label"] == label and kernel.get("bytes") and kernel["ms"] > 0:
                    each = kernel["ms"] / 1e3 / kernel["count"]
                    rate = kernel["bytes"] / each
                    lines.append(
                        line(
                            label,
                            variant,
                            f"{kernel['bytes'] / 1e6:.0f}",
                            f"{each * 1e6:.1f}",
                            f"{rate / 1e9:.0f}",
                            percent(rate / limits["copy"]),
                        )
                    )
    return lines


def percent(part: float | None) -> str:
    """A fraction for people; small ones with a digit more."""
    if part is None:
        return "-"
    return f"{100 * part:.1f}%" if part < 0.1 else f"{100 * part:.0f}%"


def mean_ratio(result: dict[str, Any], peer: str, figure: str = "ms") -> str:
    """The geometric mean over the networks that both can run, and their number."""
    both = [
        v for v in result["networks"].values() if all(v.get(one, {}).get(figure) for one in (peer, "ours"))
    ]
    ratios = [v[peer][figure] / v["ours"][figure] for v in both]
    return f"{geometric_mean(ratios):.2f} ({len(ratios)})" if ratios else "-"


def geometric_mean(values: list[float]) -> float:
    """The geometric mean of positive numbers, at least one."""
    return exp(sum(map(log, values)) / len(values))
