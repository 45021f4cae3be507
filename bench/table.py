"""The records of ``bench.corpus`` as text: one word for how a network fared, and the page of the docs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

Record = dict[str, Any]

LIMIT = 1e-4
"""Relative error up to which a network counts as verified."""
FACTOR = 4.0
"""A network amplifies rounding if stock TVM's own distance from float64 is at least a quarter of ours."""


def outcome(record: Record) -> tuple[str, str]:
    """``verified``, ``rounding``, ``refused`` (by TVM's importers) or ``failed``, and what to say of it."""
    failed = record.get("failed")
    if failed and failed["stage"] == "import":
        return "refused", f"by TVM's importer: {failed['reason']}"
    if failed and not ("worst" in record and failed["kind"] == "stopped"):
        return "failed", f"at {failed['stage']}: {failed['reason']}"
    if "worst" not in record:
        return "failed", f"at {record.get('stage')}"
    if not record["finite"] or not record["varies"]:
        return "failed", "its results are not finite" if not record["finite"] else "its results don't vary"
    if record["worst"] <= LIMIT:
        return "verified", f"error {record['worst']:.1e}"
    exact = record.get("stock_to_float64")
    if exact is not None and record["ours_to_float64"] <= FACTOR * exact:
        ours = record["ours_to_float64"]
        return "rounding", f"error {record['worst']:.1e}; to float64 ours {ours:.1e}, stock {exact:.1e}"
    return "failed", f"error {record['worst']:.1e}, first at {record.get('first_wrong')}"


def stock(record: Record) -> int | None:
    """Launches of stock's FuseOps: of the module in inference form, or as it came where that is fewer."""
    counts = [record[key] for key in ("stock_raw", "stock_normal") if key in record]
    return min(counts, default=None)


def table(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A Markdown table; columns of numbers are set to the right."""
    cells = [["" if cell is None else str(cell) for cell in row] for row in rows]
    numbers = [
        all(cell == "" or cell[0] in "-0123456789" for cell in column) for column in zip(*cells, strict=True)
    ]
    rule = "|".join(" ---: " if number else " --- " for number in numbers or [False] * len(header))
    lines = [f"| {' | '.join(header)} |", f"|{rule}|", *(f"| {' | '.join(row)} |" for row in cells)]
    return "\n".join(lines) + "\n"


def share(part: float, whole: float) -> str:
    """``part`` of ``whole`` in percent."""
    return f"{100 * part / whole:.0f} %" if whole else ""


def document(records: Sequence[Record], listed: int) -> str:
    """The page ``docs/networks.md``."""
    kinds = [outcome(record)[0] for record in records]
    ran = [r for r, kind in zip(records, kinds, strict=True) if kind in ("verified", "rounding")]
    fewer = sum(1 for r in ran if (stock(r) or 0) > r["report"]["launches"])
    with_stock = [r for r in ran if stock(r) is not None]
    text = [
        "# Networks\n",
        "Written by `make corpus`; not by hand.\n",
        f"{listed} networks are listed, {len(records)} of them have been run: {kinds.count('verified')} "
        f"verified, {kinds.count('rounding')} right but amplifying rounding, {kinds.count('refused')} "
        f"refused by "
        f"TVM's importers, {kinds.count('failed')} failed. Fewer launches than stock on {fewer} of "
        f"{len(with_stock)}.\n",
        _meaning(ran),
        _main_table(ran),
    ]
    if any("stock_seconds" in record for record in records):
        text += ["## Compile time\n", _compile_table(records)]
    amplified = [r for r in ran if outcome(r)[0] == "rounding"]
    if amplified:
        text += ["## Rounding\n", _rounding_table(amplified)]
    others = [r for r in records if outcome(r)[0] in ("refused", "failed")]
    if others:
        rows = [(f"`{r['name']}`", *outcome(r)) for r in others]
        text += ["## Not verified\n", table(("network", "outcome", "reason"), _escaped(rows))]
    return "\n".join(text)


def _meaning(ran: Sequence[Record]) -> str:
    devices = sorted({r["device"] for r in ran if "device" in r})
    return (
        f"Device: {', '.join(devices)}. *ops*: calls in the module as imported. *convs*: covered by rows, of "
        "all. *launches*: kernels that one run starts, conversions included, beside stock's LegalizeOps, "
        "FuseOps "
        "and FuseTIR on the module in this package's inference form, which spares stock launches. "
        "*conversions*: "
        "layout transforms at run time. *texture*: activations that convolutions read from textures, by "
        "number "
        "and by bytes, and bytes of all tensors that kernels write. *error*: largest difference from stock "
        "TVM "
        "on the CPU, relative to the output's largest magnitude. Inputs are drawn with seed 0.\n"
    )


def _main_table(records: Sequence[Record]) -> str:
    header = (
        "network",
        "ops",
        "convs",
        "launches",
        "stock",
        "conversions",
        "texture inputs",
        "of bytes",
        "of all written",
        "compile s",
        "error",
    )
    rows = []
    for r in records:
        report = r["report"]
        written = report["texture_bytes"] + report["global_bytes"]
        rows.append(
            (
                f"`{r['name']}`",
                r["ops"],
                f"{report['convs']['covered']}/{report['convs']['total']}",
                report["launches"],
                stock(r),
                report["conversions"],
                share(r["conv_inputs_texture"], r["conv_inputs"]),
                share(r["conv_bytes_texture"], r["conv_bytes"]),
                share(report["texture_bytes"], written),
                f"{r['compile_seconds']:.1f}",
                f"{r['worst']:.0e}",
            )
        )
    return table(header, rows)


def _compile_table(records: Sequence[Record]) -> str:
    rows = []
    for r in records:
        if "stock_seconds" not in r:
            continue
        ours = r.get("stock_beside_seconds")
        theirs = r.get("stock_compile_seconds")
        ratio = f"{theirs / ours:.1f}" if ours and theirs else ""
        said = "" if theirs else str(r.get("stock_compile_error", ""))
        rows.append(
            (f"`{r['name']}`", f"{ours:.1f}" if ours else "", f"{theirs:.1f}" if theirs else "", ratio, said)
        )
    return (
        "Seconds from a Relax module to OpenCL C, ours beside stock TVM's texture pipeline with its registration "
        "repaired, in one process, one after the other.\n\n"
        + table(("network", "ours", "stock", "stock/ours", "what stops stock"), _escaped(rows))
    )


def _rounding_table(records: Sequence[Record]) -> str:
    rows = [
        (f"`{r['name']}`", *(f"{r[k]:.1e}" for k in ("worst", "ours_to_float64", "stock_to_float64")))
        for r in records
    ]
    return (
        "Weights here are random, and these networks make small differences larger: computed in float64, "
        "stock TVM's "
        "own float32 result is as far off as ours.\n\n"
        + table(("network", "ours to stock", "ours to float64", "stock to float64"), rows)
    )


def write_block(file: Path, key: str, title: str, text: str) -> None:
    """Put *text* under the heading *title* between two comments of this *key*; what is outside stays."""
    begin, end = f"<!-- {key}: begin, generated -->", f"<!-- {key}: end -->"
    block = f"{begin}\n## {title}\n\n{text.strip()}\n{end}"
    page = file.read_text(encoding="utf-8") if file.exists() else "# Performance\n"
    before, found, rest = page.partition(begin)
    if found:
        _, closed, after = rest.partition(end)
        if not closed:
            raise ValueError(f"{file}: `{begin}` is not followed by `{end}`")
        page = before + block + after
    else:
        page = f"{page.rstrip()}\n\n{block}\n"
    file.write_text(page, encoding="utf-8")


def _escaped(rows: Iterable[Sequence[Any]]) -> list[list[str]]:
    return [["" if c is None else str(c).replace("|", "\\|").replace("\n", " ") for c in row] for row in rows]
