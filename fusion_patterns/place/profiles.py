"""What moving bytes costs on a device: weights in YAML files, one for each kind of device.

A cost is a number of bytes: those that the device's memory could have moved in the same time. Shipped
profiles lie in ``place/profiles``; each says in ``sources`` where its numbers come from.
"""

from __future__ import annotations

import os
from collections import Counter
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import Any

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
    ValidationError,
    field_validator,
)
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from ..errors import BuildError

__all__ = [
    "GENERIC",
    "Machine",
    "Memory",
    "Profile",
    "ProfileLike",
    "Tiles",
    "TunedTile",
    "as_profile",
    "load_profile",
    "profile_for",
    "shipped_profiles",
]

GENERIC = "generic"


class _Data(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Memory(_Data):
    """Cost of one byte: read for the first time by a kernel, read again by the same kernel, written."""

    read: NonNegativeFloat
    again: NonNegativeFloat
    write: NonNegativeFloat


class Machine(_Data):
    """A device as the cost of a convolution's tile sees it (`lower.schedule.costs`).

    ``units``: compute units. What one of them has: ``schedulers``, each of which starts an instruction of a
    ``subgroup`` of work items in a cycle; 32-bit ``registers``, of which a work item takes ``own_registers`` beside its
    sums; room for so many ``items``; a cache that serves a ``line`` of bytes in a cycle. ``texels``: a work item keeps
    at most.

    A step of a sum takes ``latency`` cycles, and ``read`` more for each vector in it, however little there is to do. A
    vector takes ``access`` instructions beside its products, a texel of the result ``finish`` cycles, and a kernel of
    its own ``launch``.
    """

    units: PositiveInt
    subgroup: PositiveInt
    schedulers: PositiveInt
    registers: PositiveInt
    own_registers: PositiveInt
    items: PositiveInt
    line: PositiveInt
    texels: PositiveInt
    latency: NonNegativeFloat
    read: NonNegativeFloat
    access: NonNegativeFloat
    finish: NonNegativeFloat
    launch: NonNegativeFloat


class Tiles(_Data):
    """How a kernel's work is cut for a device.

    ``threads``: so many work items keep the device busy. ``group``: work items of a work group.
    ``accumulators``: texels that a work item keeps in registers while it sums. ``split``: over how many
    work items of a group one sum may be split, through local memory; 1 where work items are few and
    barriers dear. ``sum_group``: work items of a group at most where few results are summed, each by all of a group;
    without it ``group``, and where sums are long as many as the target allows. ``aligned``: whether aligned vectors
    of a buffer go through a vector's pointer, not ``vload4``. ``machine``: where it is known, convolutions get the tile
    that costs least on it, not the one that ``threads`` and ``accumulators`` lead to.
    """

    threads: PositiveInt = 8192
    group: PositiveInt = 64
    accumulators: PositiveInt = 8
    split: PositiveInt = 1
    sum_group: PositiveInt | None = None
    local_bytes: PositiveInt = 16384
    aligned: bool = True
    machine: Machine | None = None


class TunedTile(_Data):
    """The tile that was fastest for one kernel, as ``fusion-patterns tune`` found it.

    ``key``: of the kernel (`lower.tuned.kernel_key`). ``label``: the row it was made by. ``blocks``,
    ``rows``, ``columns``: texels of one work item. ``group``: work items of a group along z, y, x.
    ``split``: over how many work items a sum is split. ``default_us``, ``best_us``: microseconds of one
    launch with the tile that `tiles` lead to, and with this one.
    """

    key: str = Field(pattern=r"^[0-9a-f]{16}$")
    label: str = ""
    blocks: PositiveInt
    rows: PositiveInt
    columns: PositiveInt
    group: tuple[PositiveInt, PositiveInt, PositiveInt]
    split: PositiveInt = 1
    default_us: NonNegativeFloat
    best_us: NonNegativeFloat


class Profile(_Data):
    """A device's weights.

    ``keys``: the target keys that choose it; with none it is chosen by name only. ``textures``: whether images
    bring anything there; where not, who asks for texture gets a buffer. ``tiles``: how work is
    cut; ``tuned``: tiles of single kernels, which were measured and go before it. ``launch``: cost of
    starting one kernel, in bytes. ``sources``: where the numbers come from.
    """

    name: str
    keys: tuple[str, ...]
    textures: bool = True
    texture: Memory
    buffer: Memory
    launch: NonNegativeInt
    tiles: Tiles = Tiles()
    tuned: tuple[TunedTile, ...] = ()
    sources: tuple[str, ...] = Field(min_length=1)

    @field_validator("tuned")
    @classmethod
    def _one_tile_for_a_kernel(cls, tuned: tuple[TunedTile, ...]) -> tuple[TunedTile, ...]:
        twice = [key for key, count in Counter(one.key for one in tuned).items() if count > 1]
        if twice:
            raise ValueError(f"kernel {twice[0]} has more than one tile")
        return tuned

    def memory(self, scope: str) -> Memory:
        """The weights of a memory scope: every ``global.texture*`` is texture."""
        return self.texture if "texture" in scope else self.buffer

    def read(self, scope: str, size: int, times: float = 1.0) -> int:
        """Cost of a kernel that reads ``size`` bytes and asks for each of them ``times`` times."""
        memory = self.memory(scope)
        return round(size * (memory.read + max(times - 1.0, 0.0) * memory.again))

    def write(self, scope: str, size: int) -> int:
        """Cost of writing ``size`` bytes once."""
        return round(size * self.memory(scope).write)

    def convert(self, size: int, source: str, result: str) -> int:
        """Cost of a kernel that reads a tensor of ``size`` bytes in one scope and writes it in another."""
        return self.read(source, size) + self.write(result, size) + self.launch


ProfileLike = Profile | str | os.PathLike[str] | None
"""How a profile may be named: itself, a shipped one's name, a YAML file; ``None`` is the one of the
target."""


def load_profile(name: str | os.PathLike[str]) -> Profile:
    """A shipped profile by name, or one from a ``.yaml`` file. Raises :class:`BuildError`."""
    text = os.fspath(name)
    path = Path(text)
    if path.suffix in (".yaml", ".yml"):
        if not path.is_file():
            raise BuildError(f"{text}: no such file")
        return _read(text, path.read_text(encoding="utf-8"))
    known = {profile.name: profile for profile in shipped_profiles()}
    if text not in known:
        raise BuildError(
            f"no device profile is called {text!r}; shipped: {', '.join(known)}; or name a .yaml file"
        )
    return known[text]


@lru_cache(maxsize=1)
def shipped_profiles() -> tuple[Profile, ...]:
    """The profiles that come with the package, by name."""
    files = resources.files(__package__).joinpath("profiles").iterdir()
    found = [
        _read(file.name, file.read_text(encoding="utf-8")) for file in files if file.name.endswith(".yaml")
    ]
    return tuple(sorted(found, key=lambda profile: profile.name))


def profile_for(target: Any) -> Profile:
    """The shipped profile with the most keys among those of a ``tvm.target.Target``; else ``generic``."""
    keys = {str(key) for key in target.keys}
    fitting = [profile for profile in shipped_profiles() if profile.keys and keys.issuperset(profile.keys)]
    return max(fitting, key=lambda profile: len(profile.keys), default=load_profile(GENERIC))


def as_profile(profile: ProfileLike, target: Any) -> Profile:
    """A profile given as such, by name or file; ``None`` is the target's. Raises :class:`BuildError`."""
    if profile is None:
        return profile_for(target)
    return profile if isinstance(profile, Profile) else load_profile(profile)


def _read(where: str, text: str) -> Profile:
    try:
        return Profile.model_validate(YAML(typ="safe").load(text))
    except YAMLError as error:
        raise BuildError(f"{where}: not YAML: {str(error).splitlines()[0]}") from None
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"])) or "the file"
        raise BuildError(f"{where}: {field}: {first['msg']}") from None
