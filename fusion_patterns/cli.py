"""The command line: ``fusion-patterns apply | build | run | verify | explain | tune | tables | check | demo``.

Results go to standard output (``--json``: one document, nothing else), progress and errors to standard
error. The exit code is 0 only if all went well: 1 after an error or when the numbers differ, 2 when the
command was wrong. TVM is imported by the commands that need a model, and by nothing else.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import fusion_patterns as fp
from fusion_patterns.cli_check import check
from fusion_patterns.cli_options import (
    DeviceName,
    DeviceProfile,
    Json,
    Model,
    Seed,
    Shapes,
    Symbols,
    TableName,
    Target,
    dimension,
    read_model,
)
from fusion_patterns.cli_terminal import TRACEBACK, explain_error, progress, show, write_whole
from fusion_patterns.cli_tune import tune
from fusion_patterns.errors import FusionPatternsError

if TYPE_CHECKING:
    import tvm

__all__ = ["app", "main"]

PROGRAM = "fusion-patterns"

app = typer.Typer(
    name=PROGRAM,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback(invoke_without_command=True)
def face(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print versions.")] = False,
) -> None:
    """Fusion patterns as data for Apache TVM Relax: composites, texture kernels, memory scope per input."""
    if version:
        from importlib import metadata

        packages = ("apache-tvm", "apache-tvm-ffi")
        print(f"{PROGRAM} {fp.__version__} ({', '.join(f'{p} {metadata.version(p)}' for p in packages)})")
    elif context.invoked_subcommand is None:
        print(context.get_help(), file=sys.stderr)
        raise typer.Exit(2)


@app.command()
def apply(
    model: Model,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="Write the fused module: .py or .json."),
    ] = None,
    shape: Shapes = None,
    bind: Symbols = None,
    table: TableName = None,
    target: Target = None,
    as_json: Json = False,
) -> None:
    """Fuse a model by a table, and print the composites by row."""
    if output is not None:
        _check_output(output, model)
    with progress(silent=as_json) as say:
        job = read_model(model, shape, bind, table, target, say)
        say("applying patterns")
        fused = fp.apply_patterns(job.mod, job.table, target=job.target)
        if output is not None:
            say(f"writing {output}")
            write_whole(output, _module_text(fused, output.suffix))
    named = (
        func.attrs["Composite"] for func in fused.functions.values() if "Composite" in (func.attrs or {})
    )
    rows = dict(sorted(Counter(map(str, named)).items()))
    lines = [f"{count:>5}  {row}" for row, count in rows.items()] or ["    0"]
    written = [f"written to {output}"] if output else []
    data = {"composites": rows, "output": str(output) if output else None}
    show("\n".join(["composites by row", *lines, *written]), data, as_json=as_json)


@app.command()
def build(
    model: Model,
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FOLDER", help="Where the module goes.")],
    shape: Shapes = None,
    bind: Symbols = None,
    table: TableName = None,
    target: Target = None,
    profile: DeviceProfile = None,
    as_json: Json = False,
) -> None:
    """Compile a model to a folder that runs on any OpenCL device with images, without TVM."""
    from fusion_patterns.place.profiles import load_profile
    from fusion_patterns.run import check_folder

    check_folder(output)
    chosen = load_profile(profile) if profile else None
    with progress(silent=as_json) as say:
        job = read_model(model, shape, bind, table, target, say)
        compiled = fp.compile_module(
            job.mod, job.target, job.table, profile=chosen, name=job.name, progress=say
        )
        say(f"writing {output}")
        compiled.save(output)
    from fusion_patterns.report import render_report

    text = f"{render_report(compiled.report)}\nwritten to {output}"
    show(text, {**compiled.report.to_dict(), "output": str(output)}, as_json=as_json)


@app.command()
def run(
    what: Annotated[
        str, typer.Argument(metavar="FOLDER|MODEL", help="What build wrote, or a model to compile first.")
    ],
    inputs: Annotated[
        str | None, typer.Option("--inputs", metavar="X.npz", help="Input arrays by name; else drawn ones.")
    ] = None,
    save: Annotated[
        str | None,
        typer.Option("--save", metavar="OUT.npz", help="Write the outputs as output_0, output_1, ..."),
    ] = None,
    seed: Seed = 0,
    function: Annotated[str, typer.Option("--function", metavar="NAME", help="Which function.")] = "main",
    profile: Annotated[bool, typer.Option("--profile", help="Time every kernel on the device.")] = False,
    repeats: Annotated[int, typer.Option("--repeats", metavar="N", min=1, help="Of the profile.")] = 10,
    device: DeviceName = None,
    shape: Shapes = None,
    bind: Symbols = None,
    table: TableName = None,
    target: Target = None,
    as_json: Json = False,
) -> None:
    """Run a saved module, or a model, on an OpenCL device."""
    from fusion_patterns.run import pick_device, replay

    is_folder = Path(what).is_dir()
    if is_folder and (shape or table or target):
        option = "--shape" if shape else "--table" if table else "--target"
        raise typer.BadParameter(f"{option} is for a model; {what} is compiled already")
    with progress(silent=as_json) as say, tempfile.TemporaryDirectory(prefix="fusion-patterns-") as scratch:
        folder = what
        if not is_folder:
            pick_device(device)  # better to hear of it before the work
            job = read_model(what, shape, bind, table, target, say)
            compiled = fp.compile_module(job.mod, job.target, job.table, name=job.name, progress=say)
            folder = os.path.join(scratch, "module")
            compiled.save(folder)
        say("building kernels and running")
        asked = argparse.Namespace(
            folder=folder, inputs=inputs, save=save, seed=seed, dim=bind or [], function=function,
            profile=profile, repeats=repeats, device=device,
        )  # fmt: skip
        report = replay.replay(asked)
    show(replay.render(report), report, as_json=as_json)


@app.command()
def verify(
    model: Model,
    device: DeviceName = None,
    seed: Seed = 0,
    shape: Shapes = None,
    bind: Symbols = None,
    stays_open: Annotated[
        list[str] | None,
        typer.Option(
            "--open",
            metavar="NAME=N",
            help="A dimension that is compiled open, and its size in this comparison; may be repeated.",
        ),
    ] = None,
    table: TableName = None,
    target: Target = None,
    as_json: Json = False,
) -> None:
    """Compare a compiled model on an OpenCL device with the untouched one on the CPU."""
    from fusion_patterns.frontends import check_open
    from fusion_patterns.run import pick_device

    with progress(silent=as_json) as say:
        pick_device(device)  # better to hear of it before the work
        sizes = dict(dimension(text, "--open") for text in stays_open or ())
        job = read_model(model, shape, bind, table, target, say)
        check_open(job.mod, sizes, where=model)
        report = fp.verify(job.mod, job.target, job.table, device, seed, symbols=sizes, progress=say)
        say("counting the kernels of stock FuseOps")
        stock = _stock_launches(job.mod)
    from fusion_patterns.report import render_report

    lines = [render_report(report.compiled.report, stock_launches=stock)] if report.compiled else []
    lines.append(f"device           {report.device}")
    for output in report.outputs:
        odd = [
            word for word, bad in (("NOT FINITE", not output.finite), ("constant", not output.varies)) if bad
        ]
        said = [f"relative error {output.error:.1e}", f"allowed {output.tolerance:.0e}", *odd]
        lines.append(f"{output.name:<16} {', '.join(said)}")
    if report.first_wrong:
        lines.append(f"first wrong      {report.first_wrong}")
    lines.append(f"{'verified' if report.ok else 'NOT VERIFIED'}: worst relative error {report.worst:.1e}")
    show("\n".join(lines), {**report.to_dict(), "stock_launches": stock}, as_json=as_json)
    raise typer.Exit(0 if report.ok else 1)


@app.command()
def explain(
    model: Model,
    tensor: Annotated[
        str | None, typer.Option("--tensor", metavar="NAME", help="Only this tensor; left out, all of them.")
    ] = None,
    shape: Shapes = None,
    bind: Symbols = None,
    table: TableName = None,
    target: Target = None,
    as_json: Json = False,
) -> None:
    """Say of every tensor where it lives, what else was possible at which cost, and who asked for what."""
    with progress(silent=as_json) as say:
        job = read_model(model, shape, bind, table, target, say)
        say("placing tensors")
        explanation = fp.explain(job.mod, job.table, job.target)
        text, data = explanation.tell(tensor)
    show(text, data, as_json=as_json)


app.command()(tune)


@app.command()
def tables(
    name: Annotated[
        str | None, typer.Argument(metavar="[PATH|NAME]", help="One table, with conditions and scopes.")
    ] = None,
    as_json: Json = False,
) -> None:
    """List the built-in tables and their rows, or check and show one table."""
    from fusion_patterns.cli_tables import describe, render
    from fusion_patterns.table import builtin_names, load_table

    described = [describe(load_table(each)) for each in ([name] if name else builtin_names())]
    text = "\n\n".join(render(each, whole=name is not None) for each in described)
    show(text, described, as_json=as_json)


app.command()(check)


@app.command()
def demo(device: DeviceName = None, as_json: Json = False) -> None:
    """Take a trained text detector the whole way, and compare with the CPU."""
    from fusion_patterns import demo as way

    with progress(silent=as_json) as say:
        result = way.run(device, say)
    show(way.render(result), result.to_dict(), as_json=as_json)
    raise typer.Exit(0 if result.ok else 1)


def _stock_launches(mod: tvm.IRModule) -> int | None:
    """Launches of stock FuseOps, for comparison; there are modules that stock TVM can't fuse."""
    from fusion_patterns.reference import stock_launches

    try:
        return stock_launches(mod)
    except Exception:  # TVM raises many kinds
        return None


def _check_output(output: Path, model: str) -> None:
    """Refuse before the work what could not be written after it, and what would overwrite the model."""
    if output.suffix not in (".py", ".json"):
        raise typer.BadParameter(f"--output {output}: the suffix must be .py or .json")
    if not output.parent.is_dir():
        raise typer.BadParameter(f"--output {output}: there is no folder {output.parent}; make it first")
    if output.exists() and Path(model).exists() and output.samefile(model):
        raise typer.BadParameter(f"--output {output}: is the model itself; name another file")


def _module_text(mod: tvm.IRModule, suffix: str) -> str:
    import tvm

    if suffix == ".json":
        return str(tvm.ir.save_json(mod))
    # The script holds the constants as `metadata`, and the imports that it needs as comments.
    script = str(mod.script(show_meta=True))
    return "import tvm\n" + script.replace("\n# from tvm.script import ", "\nfrom tvm.script import ")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code. Never raises."""
    try:
        code = typer.main.get_command(app).main(
            list(sys.argv[1:] if arguments is None else arguments), PROGRAM, standalone_mode=False
        )
        return int(code or 0)
    except typer.TyperException as error:
        print(f"error: {error.format_message()} (see {PROGRAM} --help)", file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:  # whoever read our output has left: nothing more to say
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        if os.environ.get(TRACEBACK):
            traceback.print_exc()
        print(explain_error(error, expected=isinstance(error, FusionPatternsError)), file=sys.stderr)
        return 1
