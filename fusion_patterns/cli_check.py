"""``fusion-patterns check``: every property of a table, without pytest."""

from __future__ import annotations

from typing import Annotated

import typer

from fusion_patterns.cli_options import Json, Seed, Target
from fusion_patterns.cli_terminal import progress, show

__all__ = ["check"]


def check(
    table: Annotated[str, typer.Argument(metavar="PATH|NAME", help="The table.")] = "adreno",
    examples: Annotated[
        int, typer.Option("--examples", metavar="N", min=1, help="Graphs for each row and property.")
    ] = 100,
    seed: Seed = 0,
    target: Target = None,
    device: Annotated[
        str | None,
        typer.Option(
            "--device", metavar="DEVICE", help='Run modules on this OpenCL device; "" is the best one.'
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Test a table on generated graphs: what each row takes and declines, and all other properties."""
    from fusion_patterns.table import load_table

    loaded = load_table(table)
    with progress(silent=as_json) as say:
        say("loading TVM")
        from fusion_patterns.testing.check import check_table, render

        report = check_table(loaded, target=target, examples=examples, seed=seed, device=device, progress=say)
    show(render(report), report.to_dict(), as_json=as_json)
    raise typer.Exit(0 if report.ok else 1)
