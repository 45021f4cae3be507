"""What the tuner found: as a profile, and as text."""

from __future__ import annotations

from io import StringIO
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap

from .. import __version__
from ..place.profiles import Profile, TunedTile
from .store import tile_text
from .tuner import KernelResult, TuneReport

__all__ = ["profile_text", "render", "tuned_profile"]

SUFFIX = "-tuned"


def tuned_profile(report: TuneReport) -> Profile:
    """The base profile with the fastest tile of every kernel for which another one is faster than the default.

    Measured tiles that the base has for other kernels stay. No target chooses the profile: it is named.
    """
    measured = {one.key for one in report.kernels if not one.fault}
    kept = [one for one in report.base.tuned if one.key not in measured]
    found = [_entry(one) for one in report.kernels if not one.fault and one.best != one.default]
    source = (
        f"tuned: {len(found)} of {len(measured)} kernels of {report.model}, measured on {report.device} "
        f"(driver {report.driver}) by fusion-patterns {__version__}"
    )
    name = report.base.name.removesuffix(SUFFIX) + SUFFIX
    changes = {"name": name, "keys": (), "tuned": (*kept, *found), "sources": (*report.base.sources, source)}
    return report.base.model_copy(update=changes)


def _entry(one: KernelResult) -> TunedTile:
    tile = one.best
    return TunedTile(
        key=one.key,
        label=f"{one.label} {'x'.join(map(str, one.shape))}",
        blocks=tile.blocks,
        rows=tile.rows,
        columns=tile.columns,
        group=tile.group,
        split=tile.split,
        default_us=round(one.default_us, 2),
        best_us=round(one.best_us, 2),
    )


def profile_text(profile: Profile) -> str:
    """A profile as the YAML that :func:`place.profiles.load_profile` reads."""
    data: dict[str, Any] = profile.model_dump(mode="json", exclude_defaults=True)
    for field in ("texture", "buffer", "tiles"):
        if field in data:
            data[field] = _on_one_line(data[field])
    if "tuned" in data:
        data["tuned"] = [_on_one_line(entry) for entry in data["tuned"]]
    yaml, text = YAML(), StringIO()
    yaml.width = 1000
    yaml.dump(data, text)
    return text.getvalue()


def _on_one_line(data: dict[str, Any]) -> CommentedMap:
    line = CommentedMap(data)
    line.fa.set_flow_style()
    return line


def render(report: TuneReport) -> str:
    """What came of it, for people: a line for each kernel, the dearest first, and the sums."""
    lines = [f"{report.model} on {report.device}, driver {report.driver}, beside profile {report.base.name}"]
    width = max([len(_name(one)) for one in report.kernels], default=6)
    lines.append(f"{'kernel':{width}}  calls  default us     best us  ratio  tried  invalid  tile")
    for one in sorted(report.kernels, key=lambda one: -one.default_us * one.calls):
        if one.fault:
            lines.append(f"{_name(one):{width}}  {one.calls:5}  not measured: {one.fault}")
            continue
        ratio = one.best_us / one.default_us
        tile = "default" if one.best == one.default else f"{tile_text(one.default)} -> {tile_text(one.best)}"
        lines.append(
            f"{_name(one):{width}}  {one.calls:5}  {one.default_us:10.1f}  {one.best_us:10.1f}  {ratio:5.2f}"
            f"  {one.tried:5}  {sum(one.invalid.values()):7}  {tile}"
        )
    lines += [f"no tile to choose: {name}: {reason}" for name, reason in report.left_out.items()]
    if not report.kernels and not report.waiting:
        lines.append("no kernel of it has a tile to choose")
    if report.default_us:
        lines.append(
            f"one run: {report.default_us:.1f} us in these kernels with the default tiles, {report.best_us:.1f} us "
            f"with the best (ratio {report.best_us / report.default_us:.2f})"
        )
    if report.waiting:
        lines.append(f"stopped early: {report.waiting} kernels left; the same command goes on from here")
    return "\n".join(lines)


def _name(one: KernelResult) -> str:
    return f"{one.label} {'x'.join(map(str, one.shape))} {one.key[:6]}"
