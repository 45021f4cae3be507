"""What several commands have in common: their options, and how the model that they work on is read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import fusion_patterns as fp
from fusion_patterns.cli_terminal import Say
from fusion_patterns.errors import ModelError

if TYPE_CHECKING:
    import tvm

    from fusion_patterns.table import Table

__all__ = [
    "DeviceName",
    "DeviceProfile",
    "Job",
    "Json",
    "Model",
    "Seed",
    "Shapes",
    "Symbols",
    "TableName",
    "Target",
    "dimension",
    "read_model",
]

FORMATS = ".onnx, .pt2 (torch.export), .py (TVMScript), .json (TVM)"

Model = Annotated[
    str,
    typer.Argument(metavar="MODEL", help=f"A model file: {FORMATS}; or a name of fusion_patterns.networks."),
]
Shapes = Annotated[
    list[str] | None,
    typer.Option("--shape", metavar="NAME=1,3,640,640", help="Dimensions of an input; may be repeated."),
]
Symbols = Annotated[
    list[str] | None,
    typer.Option("--bind", "--dim", metavar="NAME=N", help="Value of an open dimension; may be repeated."),
]
TableName = Annotated[
    str | None,
    typer.Option("--table", metavar="PATH|NAME", help="Pattern table; left out, the built-in one."),
]
DeviceProfile = Annotated[
    str | None,
    typer.Option(
        "--profile",
        metavar="NAME|FILE.yaml",
        help="Device profile, such as tune writes; left out, the target's.",
    ),
]
Target = Annotated[
    str | None,
    typer.Option("--target", metavar="TARGET", help="TVM target; left out, qcom/adreno-opencl-texture."),
]
DeviceName = Annotated[
    str | None,
    typer.Option(
        "--device",
        metavar="DEVICE",
        help="OpenCL device: platform:device, or a part of its name; else the best.",
    ),
]
Seed = Annotated[int, typer.Option("--seed", metavar="N", min=0, help="Of what is drawn.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document for machines.")]


@dataclass(frozen=True)
class Job:
    """What a command works on."""

    name: str
    mod: tvm.IRModule
    target: Any
    table: Table


def read_model(
    model: str,
    shapes: list[str] | None,
    bind: list[str] | None,
    table: str | None,
    target: str | None,
    say: Say,
) -> Job:
    """Read all that the user named; what is wrong with it shows before any work is done.

    ``shapes``: ``NAME=1,3,h,w``; ``bind``: ``NAME=N``; the others as on the command line. Raises ``typer.BadParameter``
    for words that can't be read, and the package's own errors for what they name.
    """
    given = dict(_dimensions(text) for text in shapes or ())
    sizes = dict(dimension(text, "--bind") for text in bind or ())
    path = Path(model)
    if path.suffix and not path.exists():
        raise ModelError(f"{model}: no such file")
    loaded = fp.load_table(table)
    say("loading TVM")
    load_model = fp.load_model
    from fusion_patterns.compiler import as_target
    from fusion_patterns.networks import NETWORKS, fetch_model

    checked = as_target(target)
    if not path.exists():
        if model not in NETWORKS:
            raise ModelError(
                f"{model}: no such file, and no network of this name; known: {', '.join(NETWORKS)}"
            )
        path = fetch_model(model, progress=say)
        given = {**NETWORKS[model].inputs, **given}
    say(f"reading {model}")
    return Job(Path(model).stem, load_model(path, given, sizes), checked, loaded)


def _dimensions(text: str) -> tuple[str, Sequence[int | str]]:
    """``NAME=1,3,h,w``: numbers, and names for what stays open. The name may hold anything, ``=`` too."""
    name, equals, dims = text.rpartition("=")
    parts = [part.strip() for part in dims.split(",") if part.strip()]
    sizes = [int(part) if part.isdecimal() else part for part in parts]
    if not (name and equals) or not all(isinstance(size, int) or size.isidentifier() for size in sizes):
        raise typer.BadParameter(f"--shape {text}: expected NAME=1,3,640,640")
    return name, sizes


def dimension(text: str, option: str) -> tuple[str, int]:
    """``NAME=N``, as ``option`` was given it."""
    name, _, size = text.rpartition("=")
    if not name or not size.isdecimal():
        raise typer.BadParameter(f"{option} {text}: expected NAME=N")
    return name, int(size)
