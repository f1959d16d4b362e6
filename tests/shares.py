"""A share of a train batch from its columns, for tests that need no payloads."""

from areal.api.batch import BatchShare
from areal.api.table import TokenTable


def make_share(*, step=0, version=0, group_index, stats=None, **columns):
    return BatchShare(
        step=step, version=version, group_index=group_index, stats=stats or {}, table=TokenTable(**columns)
    )
