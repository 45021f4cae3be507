"""The tiles that the tuner tries: all of them legal, in an order that is always the same, the profile's own first."""

from __future__ import annotations

from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusion_patterns.lower.schedule.tiles import Tile, Work, choose_plain, choose_tile
from fusion_patterns.lower.schedule.tuned import Space
from fusion_patterns.place.profiles import Tiles
from fusion_patterns.tune.space import MOST_TEXELS, Limits, cuts, groups

LIMITS = Limits(256, (256, 256, 64))
TILES = Tiles(group=64, split=4)


def space(
    shape: tuple[int, ...] = (1, 16, 28, 28, 4),
    shares: int = 16,
    *,
    even: bool = False,
    max_threads: int = 256,
    tiles: Tiles = TILES,
    joins_blocks: bool = True,
    joins_pixels: bool = True,
) -> Space:
    work = Work(shape, even=even)
    most = {"most_blocks": 4 if joins_blocks else 1, "most_columns": 14 if joins_pixels else 1}
    chosen = choose_tile(work, max_threads, tiles, shares=shares, **most)
    return Space(work, chosen, max_threads, tiles.local_bytes, shares, joins_blocks, joins_pixels)


SPACES = st.builds(
    space,
    st.tuples(st.integers(1, 2), st.integers(1, 24), st.integers(1, 30), st.integers(1, 30), st.just(4)),
    st.sampled_from([1, 2, 3, 8, 12, 16]),
    even=st.booleans(),
    max_threads=st.sampled_from([1, 16, 64, 256]),
    joins_blocks=st.booleans(),
    joins_pixels=st.booleans(),
)


@given(SPACES, st.integers(1, 40))
def test_every_tile_is_one_that_kernel_and_device_take(of: Space, count: int) -> None:
    tried = cuts(of, LIMITS, TILES, count)
    tried += groups(of, LIMITS, TILES, tried[-1], count)
    assert tried[0] == of.chosen
    for tile in tried:
        assert of.why_not(tile) is None
        assert LIMITS.takes(tile)
        _, blocks, rows, columns, _ = of.work.shape
        assert (blocks % tile.blocks, rows % tile.rows, columns % tile.columns) == (0, 0, 0)
        assert tile.blocks * tile.rows * tile.columns <= max(MOST_TEXELS, TILES.accumulators)
        assert of.shares % tile.split == 0
        assert tile.split == 1 or (tile.rows == 1 and (not of.work.even or tile.is_even))
        assert tile.blocks == 1 or of.joins_blocks
        assert tile.rows * tile.columns == 1 or of.joins_pixels


@given(SPACES, st.integers(1, 40))
def test_so_many_as_asked_for_and_none_twice(of: Space, count: int) -> None:
    first = cuts(of, LIMITS, TILES, count)
    more = groups(of, LIMITS, TILES, first[0], count)
    assert len(first) <= count
    assert len(more) <= count
    assert len({*first}) == len(first)
    assert len({first[0], *more}) == len(more) + 1
    assert first == cuts(of, LIMITS, TILES, count)


def test_cuts_differ_in_what_a_thread_does_and_groups_in_the_group_alone() -> None:
    first = cuts(space(), LIMITS, TILES, 20)
    assert len({(t.blocks, t.rows, t.columns, t.split) for t in first}) == 20
    assert {t.split for t in first} > {1, 2}
    assert max(t.rows for t in first) > 1
    more = groups(space(), LIMITS, TILES, first[0], 12)
    assert len({t.group for t in more} - {first[0].group}) == 12
    assert {(t.blocks, t.rows, t.columns, t.split) for t in more} == {
        (first[0].blocks, first[0].rows, first[0].columns, first[0].split)
    }


def test_half_of_the_tiles_are_near_and_the_others_far() -> None:
    all_cuts, few = cuts(space(), LIMITS, TILES, 10_000), cuts(space(), LIMITS, TILES, 13)
    assert len(all_cuts) > 50
    assert few[:7] == all_cuts[:7]
    places = [all_cuts.index(tile) for tile in few[7:]]
    assert places == sorted(places)
    assert places[-1] > len(all_cuts) * 0.8


def test_a_group_has_about_as_many_threads_as_the_profile_wants() -> None:
    plain = Space(Work((1, 16, 32, 32, 4)), choose_plain(Work((1, 16, 32, 32, 4)), 256), 256, 16384)
    assert prod(cuts(plain, LIMITS, Tiles(group=128), 2)[1].group) == 128
    assert prod(cuts(plain, LIMITS, Tiles(group=16), 2)[1].group) == 16


def test_a_device_that_takes_less_than_the_target_bounds_the_groups() -> None:
    small = Limits(32, (8, 8, 4))
    for tile in [
        *cuts(space(), small, TILES, 30)[1:],
        *groups(space(), small, TILES, Tile(1, 1, 1, (1, 1, 1)), 30),
    ]:
        z, y, x = tile.group
        assert tile.threads <= 32
        assert (x <= 8 and y <= 8 and z <= 4) if tile.split == 1 else tile.threads <= 8


@pytest.mark.parametrize(
    ("tile", "reason"),
    [
        (Tile(3, 1, 1, (1, 1, 1)), "3 blocks of a thread don't divide 16"),
        (Tile(16, 1, 1, (1, 1, 1)), "16 blocks of a thread are more than 8"),
        (Tile(1, 3, 1, (1, 1, 1)), "3 rows of a thread don't divide 28"),
        (Tile(1, 1, 28, (1, 1, 1)), "28 columns of a thread are more than 16"),
        (Tile(1, 1, 4, (1, 1, 4)), "4 threads of a group along x don't divide 7"),
        (Tile(1, 1, 1, (16, 28, 1)), "a group of 448 threads, the target takes 256"),
        (Tile(1, 1, 1, (1, 1, 1), 5), "a sum of 16 shares can't be split over 5 threads"),
        (Tile(1, 2, 1, (1, 1, 1), 2), "a thread that shares a sum computes one row"),
        (
            Tile(8, 1, 2, (2, 2, 14), 4),
            "its shares take 57344 bytes of local memory, the profile allows 16384",
        ),
    ],
)
def test_a_tile_that_a_kernel_does_not_allow_is_told_with_the_reason(tile: Tile, reason: str) -> None:
    assert space().why_not(tile) == reason


def test_more_than_64_threads_along_z_are_not_allowed() -> None:
    deep = space((1, 128, 4, 4, 4))
    assert deep.why_not(Tile(1, 1, 1, (128, 1, 1))) == "128 threads of a group along z, devices take 64"


def test_an_even_kernel_refuses_threads_that_wrap_round() -> None:
    even = space((1, 16, 7, 28, 4), even=True)
    assert even.why_not(Tile(2, 1, 4, (1, 7, 7), 2)) == "its threads would not write equally many texels"
    assert even.why_not(Tile(2, 1, 4, (2, 1, 7), 4)) is None
