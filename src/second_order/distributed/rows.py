"""The former name of :mod:`second_order.distributed.shard_layout`."""

from second_order.distributed.shard_layout import ShardLayout as Rows
from second_order.distributed.shard_layout import layout_of as rows_of

__all__ = ["Rows", "rows_of"]
