"""``fusion-patterns tune``: the fastest tile of every kernel of a model, found on the device."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fusion_patterns.cli_options import (
    DeviceName,
    Json,
    Model,
    Shapes,
    Symbols,
    TableName,
    Target,
    read_model,
)
from fusion_patterns.cli_terminal import progress, show, write_whole

__all__ = ["tune"]


def tune(
    model: Model,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            metavar="FILE.yaml",
            help="Write the profile; else MODEL-tuned.yaml is written here.",
        ),
    ] = None,
    profile: Annotated[
        str | None,
        typer.Option(
            "--profile",
            metavar="NAME|FILE.yaml",
            help="Profile whose tiles the others are compared with; left out, the target's.",
        ),
    ] = None,
    results: Annotated[
        Path, typer.Option("--results", metavar="FILE", help="What was measured; is made, or gone on with.")
    ] = Path("tune.sqlite"),
    trials: Annotated[
        int, typer.Option("--trials", metavar="N", min=1, help="Tiles tried for each distinct kernel.")
    ] = 32,
    repeats: Annotated[
        int, typer.Option("--repeats", metavar="N", min=1, help="Launches whose median is a tile's time.")
    ] = 10,
    device: DeviceName = None,
    rpc_tracker: Annotated[
        str | None,
        typer.Option(
            "--rpc-tracker",
            metavar="HOST:PORT",
            help="Measure on devices of TVM's RPC tracker instead, several at a time.",
        ),
    ] = None,
    rpc_key: Annotated[
        str | None, typer.Option("--rpc-key", metavar="KEY", help="The devices' key at the tracker.")
    ] = None,
    rpc_timeout: Annotated[
        int,
        typer.Option("--rpc-timeout", metavar="SECONDS", min=1, help="Most for one tile on such a device."),
    ] = 60,
    shape: Shapes = None,
    bind: Symbols = None,
    table: TableName = None,
    target: Target = None,
    as_json: Json = False,
) -> None:
    """Time the legal tiles of every kernel of a model on a device, and write the fastest as a profile.

    Ctrl-C stops after the tile in work; the same command goes on from there.
    """
    from fusion_patterns.place.profiles import load_profile

    out = out or Path(f"{Path(model).stem}-tuned.yaml")
    _check(out, rpc_tracker, rpc_key, device)
    base = load_profile(profile) if profile else None
    with progress(silent=as_json) as say:
        job = read_model(model, shape, bind, table, target, say)
        from fusion_patterns import tune as tuner
        from fusion_patterns.tune.remote import RpcMeasurer

        say("opening the device")
        measurer: tuner.Measurer
        if rpc_tracker and rpc_key:
            measurer = RpcMeasurer(rpc_tracker, rpc_key, job.target, seconds=rpc_timeout)
        else:
            measurer = tuner.LocalMeasurer(device)
        report = tuner.tune(
            job.mod, measurer, job.target, job.table, profile=base, results=results, trials=trials,
            repeats=repeats, name=job.name, progress=say,
        )  # fmt: skip
        write_whole(out, tuner.profile_text(tuner.tuned_profile(report)))
    text = f"{tuner.render(report)}\nprofile written to {out}, results kept in {results}"
    show(text, {**report.to_dict(), "output": str(out), "results": str(results)}, as_json=as_json)
    raise typer.Exit(1 if report.waiting or any(one.fault for one in report.kernels) else 0)


def _check(out: Path, tracker: str | None, key: str | None, device: str | None) -> None:
    """Refuse before the work what could not be done after it."""
    if out.suffix not in (".yaml", ".yml"):
        raise typer.BadParameter(f"--out {out}: the suffix must be .yaml, or it can't be named as a profile")
    if not out.parent.is_dir():
        raise typer.BadParameter(f"--out {out}: there is no folder {out.parent}; make it first")
    if bool(tracker) != bool(key):
        raise typer.BadParameter("--rpc-tracker and --rpc-key go together: the tracker lends devices by key")
    if tracker and device:
        raise typer.BadParameter(
            "--device is for a device of this machine, --rpc-tracker for others: give one"
        )
