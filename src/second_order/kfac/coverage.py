"""What K-FAC covers, as a warning at construction and as the table of the summary.

A layer is preconditioned, frozen, or without statistics. All other parameters are in
the rows of ``Layers.left_to_base``, which say why only the base optimizer trains them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from second_order.distributed.fsdp import reshard
from second_order.kfac.layers import NO_STATISTICS, Layers
from second_order.kronecker.layers import FactorShape
from second_order.kronecker.model_blocks import LeftToBase
from second_order.optimizers.config import KFACOptions
from second_order.reporting.summary import LayerRow, Summary, describe_share
from second_order.training.context import Training
from second_order.utils.modules import plain_type, unmatched_patterns

__all__ = ["summarize_layers", "warn_of_uncovered"]

MAX_NAMES = 10  # in a warning

COVER_MORE = (
    "precondition_norms=True, a larger max_factor_dim, fewer skip_layers, or register_layer() for "
    "your own classes"
)


def warn_of_uncovered(training: Training, options: KFACOptions, layers: Layers) -> None:
    """Warn once of each unmatched pattern and each module that only the base trains.

    Modules left out by ``skip_layers`` or ``precondition=False`` are not named.
    """
    # Patterns without a match.
    for pattern in unmatched_patterns(training.model, options.skip_layers):
        if training.is_first_warning(f"pattern:{pattern}"):
            training.warn(
                f"skip_layers: the pattern {pattern!r} matches no module of the model"
            )

    # Modules that only the base trains.
    rows = _trained_by_base(training, layers)
    others = [row for row in rows if not row.by_option]
    new = [row for row in others if training.is_first_warning(f"left:{row}")]
    if not new:
        return
    names = _list_modules(new)
    if len(others) < len(rows):
        names += ", and the modules that you left out"

    # The share of the parameters that is preconditioned.
    covered = 0
    for block in layers.blocks:
        if block.trainable and not block.no_statistics:
            covered += block.size
    total = sum(p.numel() for p in training.trainable_params())
    share = covered / max(total, 1)
    message = (
        f"{describe_share(share)}; trained by {training.base_name} alone, without curvature: "
        f"{names}; summary() gives the reasons"
    )
    if share < 0.5:
        # With FSDP2 no rank has whole gradients, which 'gradient_factors' needs.
        option = "unsupported_layers='gradient_factors', "
        if layers.sharded:
            option = ""
        message += f"; to precondition more, use {option}{COVER_MORE}"
    training.warn(message)


def _trained_by_base(training: Training, layers: Layers) -> list[LeftToBase]:
    """Return the rows of modules and parameters that train now, by the base alone.

    The row of a module has the module's name; that of a parameter without a module,
    such as a position embedding, has the parameter's name. The row "(model)" stands for
    the parameters of the model itself, and "(no module)" for parameters that are not
    part of the model.
    """
    covered = {id(p) for block in layers.blocks for p in block.params}
    uncovered = {id(p) for p in training.trainable_params()} - covered
    names: set[str] = set()
    in_model: set[int] = set()
    reshard(training.model)
    for name, p in training.model.named_parameters(remove_duplicate=False):
        if id(p) in uncovered:
            module_name = name.rpartition(".")[0] or "(model)"
            names.update((name, module_name))
            in_model.add(id(p))
    if in_model != uncovered:
        names.add("(no module)")
    return [row for row in layers.left_to_base if row.name in names]


def _list_modules(rows: Sequence[LeftToBase]) -> str:
    """List the modules that only the base trains: the largest first, norms last."""
    num_norms = sum(row.norm and not row.unexpected for row in rows)
    others = [row for row in rows if not row.norm or row.unexpected]
    others.sort(key=lambda row: -row.parameters)
    names = [str(row) for row in others[:MAX_NAMES]]
    if len(others) > MAX_NAMES:
        names.append(f"{len(others) - MAX_NAMES} more")
    if num_norms:
        names.append(f"{num_norms} norm layer{'s' if num_norms > 1 else ''}")
    return ", ".join(names)


def summarize_layers(
    training: Training,
    options: KFACOptions,
    layers: Layers,
    assignment: Mapping[str, str],
) -> Summary:
    """Return a table of the layers, and of what only the base trains.

    Args:
        training: The training run.
        options: The options of K-FAC.
        layers: The layers.
        assignment: The ranks that work on each layer, as text, by the layer's name.
    """
    rows: list[LayerRow] = []
    for block in layers.blocks:
        # A layer without statistics is trained by the base; the row says why.
        status = "preconditioned"
        detail = _describe_factors(block.shape)
        if block.no_statistics:
            status = "base"
            detail = layers.missing_reason(block) or NO_STATISTICS
            if block.unverified:
                detail = f"{block.residual:.0%} of its gradient unexplained: {detail}"
        if not block.trainable:
            status = "frozen"
        row = LayerRow(
            name=block.name,
            kind=plain_type(block.modules[0]).__name__,
            parameters=block.size,
            status=status,
            detail=detail,
            computed_by=assignment.get(block.name, ""),
            factor_bytes=block.factor_bytes,
            inverse_bytes=block.inverse_bytes,
        )
        rows.append(row)

    # Add the parameters without a layer.
    trained_by_base = _trained_by_base(training, layers)
    for left in layers.left_to_base:
        status = "base" if left in trained_by_base else "frozen"
        rows.append(
            LayerRow(left.name, left.kind, left.parameters, status, left.reason)
        )
    return Summary(
        training.summary_title(options.solver),
        rows,
        dropped=sum(int(block.staged.dropped) for block in layers.blocks),
        failed=sum(block.failures > 0 for block in layers.blocks),
    )


def _describe_factors(shape: FactorShape) -> str:
    """Return the sizes of a layer's factors as text."""
    if shape.exact:
        size = shape.groups * shape.out_dim
        return f"exact, diagonal {size}" if shape.groups > 1 else f"exact {size}²"
    sizes: list[str] = []
    for factor in shape.factor_names:
        square = "" if factor in shape.diagonals else "²"
        sizes.append(f"{factor} {shape.dims[factor]}{square}")
    prefix = ""
    if shape.gradient_factored:
        prefix = "of gradients: "
    elif shape.groups > 1:
        prefix = f"{shape.groups} x "
    return prefix + ", ".join(sizes)
