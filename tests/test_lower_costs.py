"""The tile of a convolution that costs least on a known machine."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from fusion_patterns.lower.schedule.costs import cheapest_tile
from fusion_patterns.lower.schedule.tiles import Tile, Work
from fusion_patterns.lower.schedule.tuned import Space
from fusion_patterns.place.profiles import load_profile

TILES = load_profile("nvidia-opencl").tiles
SIZES = st.sampled_from([1, 2, 5, 7, 13, 14, 20, 28, 40, 56, 112])


@example(1, 16, 1, 1, 64, 1, 1, True, 16)
@given(
    st.integers(1, 3),
    st.sampled_from([1, 2, 3, 6, 8, 16, 30, 64, 250]),
    SIZES,
    SIZES,
    st.sampled_from([1, 2, 3, 8, 24, 31, 64, 512]),
    st.sampled_from([1, 9, 49]),
    st.integers(1, 3),
    st.booleans(),
    st.sampled_from([16, 64, 256, 1024]),
)
def test_every_choice_is_legal(
    batch: int,
    blocks: int,
    rows: int,
    columns: int,
    shares: int,
    taps: int,
    sums: int,
    even: bool,
    max_threads: int,
) -> None:
    work = Work((batch, blocks, rows, columns, 4), sums=sums, even=even)
    tile = cheapest_tile(work, sums * shares * taps, shares, max_threads, TILES)
    assert Space(work, tile, max_threads, TILES.local_bytes, shares).why_not(tile) is None
    assert tile.blocks * tile.columns <= 16
    assert tile == cheapest_tile.__wrapped__(work, sums * shares * taps, shares, max_threads, TILES)


@pytest.mark.parametrize(
    ("shape", "shares", "taps", "threads"),
    [
        ((1, 128, 7, 7, 4), 128, 9, 14_336),
        ((1, 64, 14, 14, 4), 64, 9, 14_336),
        ((1, 32, 28, 28, 4), 32, 9, 14_336),
        ((1, 32, 7, 7, 4), 248, 1, 8_000),
    ],
)
def test_small_images_keep_all_units_busy_with_large_tiles(
    shape: tuple[int, ...], shares: int, taps: int, threads: int
) -> None:
    work = Work(shape)
    tile = cheapest_tile(work, shares * taps, shares, 256, TILES)
    assert tile.blocks * tile.columns >= 7, tile
    assert work.texels // (tile.blocks * tile.columns) * tile.split >= threads, tile
    assert 64 <= tile.threads <= 256


def test_sums_are_not_split_where_pixels_are_many() -> None:
    tile = cheapest_tile(Work((1, 16, 112, 112, 4)), 2, 2, 256, TILES)
    assert tile.split == 1


def test_a_smaller_machine_needs_fewer_threads() -> None:
    work = Work((1, 64, 14, 14, 4))
    assert TILES.machine is not None
    phone = TILES.model_copy(update={"machine": TILES.machine.model_copy(update={"units": 4})})

    def threads(tile: Tile) -> int:
        return work.texels // (tile.blocks * tile.columns) * tile.split

    assert threads(cheapest_tile(work, 576, 64, 256, phone)) < threads(
        cheapest_tile(work, 576, 64, 256, TILES)
    )


def test_one_pixel_of_four_channels() -> None:
    assert cheapest_tile(Work((1, 1, 1, 1, 4)), 1, 1, 256, TILES) == Tile(1, 1, 1, (1, 1, 1), 1)
