"""The former place of what is in :mod:`second_order.distributed.world` and ``buckets``."""

from second_order.distributed.buckets import pack_by_dtype, take_model
from second_order.distributed.world import Parts, Shapes, deliver_parts

__all__ = ["Parts", "Shapes", "deliver_parts", "pack_by_dtype", "take_model"]
