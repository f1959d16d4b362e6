"""Placeholders of images: expanded inside, collapsed on the wire."""

import pytest

from areal.api.images import ImageRef, VisionLayout, collapsed, expanded
from tests.expect import raises_code

IMG = 9
LAYOUT = VisionLayout(
    family="qwen3_vl",
    image_token_id=IMG,
    vision_start_id=7,
    vision_end_id=8,
    banned_ids=(7, 8, IMG),
    patch_size=14,
    merge_size=2,
    temporal_patch_size=2,
    min_pixels=1,
    max_pixels=10**6,
    mean=(0.5, 0.5, 0.5),
    std=(0.5, 0.5, 0.5),
    has_3d_positions=True,
)
ONE, TWO, SIX = (ImageRef(str(index) * 64, grid) for index, grid in enumerate([(1, 2, 2), (1, 2, 4), (1, 4, 6)]))


@pytest.mark.parametrize(
    ("images", "short", "long"),
    [
        ([], [1, 2], [1, 2]),
        ([SIX], [1, 7, IMG, 8, 2], [1, 7, *[IMG] * 6, 8, 2]),
        ([TWO, ONE], [IMG, IMG], [IMG] * 3),  # a family without tokens around the placeholders
        ([ONE, TWO, SIX], [IMG, 1, IMG, IMG, 2], [IMG, 1, *[IMG] * 8, 2]),
    ],
)
def test_collapsing_inverts_expanding(images, short, long):
    assert expanded(short, images, LAYOUT) == long
    assert collapsed(long, images, LAYOUT) == short


@pytest.mark.parametrize(
    ("images", "ids"),
    [
        ([], [1, IMG]),
        ([ONE], [1, 2]),
        ([TWO], [1, IMG]),
        ([TWO], [IMG, 1, IMG]),
        ([TWO], [IMG, IMG, IMG]),
        ([TWO, ONE], [IMG, IMG, 1]),
    ],
)
def test_other_placeholders_than_those_of_the_images_are_refused(images, ids):
    with raises_code("data.image_tokens"):
        collapsed(ids, images, LAYOUT)


@pytest.mark.parametrize(("images", "ids"), [([], [IMG]), ([ONE], [1]), ([ONE], [IMG, IMG])])
def test_another_number_of_placeholders_is_not_expanded(images, ids):
    with raises_code("data.image_tokens"):
        expanded(ids, images, LAYOUT)
