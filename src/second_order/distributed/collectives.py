"""The former name of :mod:`second_order.distributed.world`."""

from second_order.distributed.world import BUCKET_BYTES, Delivery, PendingReduction, World

__all__ = ["BUCKET_BYTES", "Delivery", "PendingReduction", "World"]
