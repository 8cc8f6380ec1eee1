"""Exporters: write a curvature in the formats of other packages."""

from second_order.export.bergson import to_bergson
from second_order.export.gptq import to_gptq
from second_order.export.kronfluence import to_kronfluence
from second_order.export.laplace import to_laplace

__all__ = ["to_bergson", "to_gptq", "to_kronfluence", "to_laplace"]
