"""How a kernel's work is cut."""

from __future__ import annotations

from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusion_patterns.lower.schedule.tiles import (
    Tile,
    Work,
    choose_group,
    choose_plain,
    choose_tile,
    choose_vectors,
    divisor,
)
from fusion_patterns.place.profiles import Tiles


def choose(shape: tuple[int, ...], reduces: bool, max_threads: int) -> Tile:
    work = Work(shape)
    return choose_tile(work, max_threads) if reduces else choose_plain(work, max_threads)


SHAPES = st.tuples(
    st.integers(1, 3), st.integers(1, 64), st.integers(1, 230), st.integers(1, 230), st.just(4)
)


@pytest.mark.parametrize(
    ("number", "limit", "wanted"),
    [(12, 8, 6), (12, 100, 12), (13, 12, 1), (7, 0, 1), (1, 1, 1), (230, 16, 10)],
)
def test_the_largest_divisor_within_a_limit(number: int, limit: int, wanted: int) -> None:
    assert divisor(number, limit) == wanted


@given(st.integers(1, 2000), st.integers(0, 2000))
def test_a_divisor_divides_and_no_larger_one_would_do(number: int, limit: int) -> None:
    found = divisor(number, limit)
    assert number % found == 0
    assert found <= max(limit, 1)
    assert all(number % larger for larger in range(found + 1, min(number, max(limit, 1)) + 1))


@given(SHAPES, st.booleans(), st.integers(1, 1024))
def test_a_tile_divides_its_tensor_and_a_group_its_threads(
    shape: tuple[int, ...], reduces: bool, max_threads: int
) -> None:
    tile = choose(shape, reduces, max_threads)
    batch, blocks, rows, columns, _ = shape
    assert blocks % tile.blocks == rows % tile.rows == columns % tile.columns == 0
    threads = (batch * blocks // tile.blocks, rows // tile.rows, columns // tile.columns)
    assert [extent % group for extent, group in zip(threads, tile.group, strict=True)] == [0, 0, 0]


@given(SHAPES, st.booleans(), st.integers(1, 1024))
def test_a_group_is_never_above_the_targets_limit(
    shape: tuple[int, ...], reduces: bool, max_threads: int
) -> None:
    assert prod(choose(shape, reduces, max_threads).group) <= max_threads


@given(SHAPES)
def test_a_thread_without_a_reduction_computes_one_texel(shape: tuple[int, ...]) -> None:
    tile = choose(shape, False, 256)
    assert (tile.blocks, tile.rows, tile.columns) == (1, 1, 1)


@given(SHAPES, st.sampled_from([1, 2, 4, 8]), st.sampled_from([1, 2, 4]))
def test_a_thread_computes_no_more_than_its_kernel_can(
    shape: tuple[int, ...], most_columns: int, most_blocks: int
) -> None:
    tile = choose_tile(Work(shape), 256, most_columns=most_columns, most_blocks=most_blocks)
    assert tile.columns <= most_columns
    assert tile.blocks <= most_blocks
    assert tile.blocks * tile.columns <= Tiles().accumulators


def test_a_large_image_gets_large_tiles_and_a_small_one_many_threads() -> None:
    large = choose((1, 64, 112, 112, 4), True, 256)
    small = choose((1, 16, 7, 7, 4), True, 256)
    assert large.blocks * large.columns == Tiles().accumulators
    assert small.blocks * small.columns == 1


SPLITTING = Tiles(threads=65536, group=128, split=16)


@given(SHAPES, st.sampled_from([1, 2, 8, 12, 16, 64]), st.integers(1, 1024), st.booleans(), st.integers(1, 2))
def test_a_sum_is_split_evenly_and_a_group_holds_all_shares(
    shape: tuple[int, ...], shares: int, max_threads: int, even: bool, sums: int
) -> None:
    tile = choose_tile(Work(shape, sums, even), max_threads, SPLITTING, shares=shares)
    threads = prod(tile.group) * tile.split
    assert shares % tile.split == 0
    assert tile.split == 1 or not even or tile.is_even
    assert threads <= max_threads
    if tile.split > 1:
        assert shape[1] // tile.blocks % tile.group[0] == 0
        texels = threads * tile.blocks * tile.columns
        assert texels * sums * 16 <= SPLITTING.local_bytes


@pytest.mark.parametrize(
    ("group", "split", "wanted"),
    [
        ((1, 2, 7), 4, True),
        ((1, 7, 7), 2, False),
        ((2, 2, 7), 4, True),
        ((1, 1, 7), 8, True),
        ((1, 1, 7), 16, False),
    ],
)
def test_threads_that_wrap_round_inside_a_row_are_not_even(
    group: tuple[int, int, int], split: int, wanted: bool
) -> None:
    assert Tile(2, 1, 4, group, split).is_even == wanted


def test_where_sums_are_not_split_a_small_image_gets_small_tiles() -> None:
    assert choose_tile(Work((1, 16, 7, 7, 4)), 256, Tiles(split=1), shares=64).split == 1


def test_a_sum_of_many_with_few_results_is_shared_by_a_group() -> None:
    assert choose_vectors(Work((1, 6, 1, 1, 4)), 160 * 160, 256, SPLITTING) == Tile(1, 1, 1, (1, 1, 1), 256)
    assert choose_vectors(Work((1, 250, 1, 1, 4)), 2048, 256, SPLITTING) == Tile(1, 1, 1, (1, 1, 1), 128)
    assert choose_vectors(Work((1, 512, 1, 1, 4)), 49, 256, SPLITTING) == Tile(1, 1, 1, (2, 1, 1), 49)


def test_a_profile_gives_few_results_larger_groups() -> None:
    large = SPLITTING.model_copy(update={"sum_group": 1024})
    assert choose_vectors(Work((1, 6, 1, 1, 4)), 160 * 160, 1024, large).split == 1024
    assert choose_vectors(Work((1, 6, 1, 1, 4)), 20 * 20, 1024, large).split == 100  # four each
    assert choose_vectors(Work((1, 4096, 1, 1, 4)), 20 * 20, 1024, large).split == 16  # busy without


def test_results_that_keep_a_device_busy_are_not_split() -> None:
    busy = Work((64, 512, 1, 1, 4))
    assert choose_vectors(busy, 49, 256, SPLITTING).split == 7
    assert choose_vectors(busy, 49, 256, Tiles(split=4, threads=8192)).split == 1


def test_where_sums_are_not_split_a_thread_sums_alone() -> None:
    assert choose_vectors(Work((1, 250, 1, 1, 4)), 512, 256, Tiles(split=1)) == Tile(1, 1, 1, (50, 1, 1))


def test_what_every_group_computes_again_is_computed_by_few() -> None:
    tile = choose_vectors(Work((1, 120, 1, 1, 4), sums=2), 30, 256, SPLITTING)
    assert tile == Tile(1, 1, 1, (8, 1, 1), 30)
    assert choose_vectors(Work((1, 24, 1, 1, 4), sums=2), 6, 256, SPLITTING) == Tile(1, 1, 1, (12, 1, 1), 6)


@given(st.integers(1, 4), st.integers(1, 600), st.integers(1, 3000), st.integers(1, 1024), st.integers(1, 3))
def test_a_group_of_few_results_divides_them_and_holds_all_shares(
    batch: int, blocks: int, shares: int, max_threads: int, sums: int
) -> None:
    tile = choose_vectors(Work((batch, blocks, 1, 1, 4), sums), shares, max_threads, SPLITTING)
    assert shares % tile.split == blocks % tile.group[0] == 0
    assert tile.threads <= max_threads
    assert tile.threads * sums * 16 <= SPLITTING.local_bytes


def test_a_group_is_wide_in_x_first() -> None:
    assert choose_group((64, 64, 64), 256) == (1, 4, 16)
    assert choose_group((64, 1, 1), 256) == (64, 1, 1)
    assert choose_group((128, 1, 1), 256, 128) == (64, 1, 1)
    assert choose_group((64, 64, 64), 8) == (1, 1, 8)
