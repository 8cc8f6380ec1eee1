"""The curvature of a model in the formats of other packages.

    F = A ⊗ G      A = Σ x xᵀ / R over the R rows of a layer's inputs, x with a 1 for the bias
                   G = Σ d dᵀ / N over the N terms of the loss, d of their sum
                   Λ = Σ_b (Q_Gᵀ ∇_b Q_A)² / N over the entries b of the batches (EK-FAC)

Each of the others divides by another number. Nothing is transposed where a weight is ``(in, out)``,
as in ``transformers.Conv1D``: A belongs to inputs and G to outputs. Of a convolution R counts
images, A sums over their T locations and G is a mean over these (Grosse & Martens 2016); for
packages that count locations A ⊗ G is then T times what they would have found, and Λ the same.
Modules that share a weight get the same factors.

Layers that a format has no place for (embeddings, normalisations, biases alone, and where nothing
else is said grouped convolutions and fused experts) are left out; what a function returns names
them and says why.

Where processes have shared the layers out, each calls the function alike, and the one that keeps
the first layer writes; what goes into one file is in its host's memory at once. Of a curvature that
every process has, one alone is to call.
"""

from __future__ import annotations

import importlib
import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn.utils import parameters_to_vector

from second_order.files import replacing
from second_order.kronecker.layer_curvature import LayerCurvature
from second_order.kronecker.layers import CONVOLUTIONS
from second_order.kronecker.model_curvature import KroneckerCurvature
from second_order.safetensors import save_tensors

__all__ = ["to_bergson", "to_gptq", "to_kronfluence", "to_laplace", "to_quip", "to_yaqa"]

_Files: TypeAlias = defaultdict[str, dict[str, Tensor]]  # by file, tensors by module
Naming: TypeAlias = Callable[[str], str | None]


# ---------------------------------------------------------------------------- influence functions


def to_kronfluence(
    curvature: KroneckerCurvature, folder: str | Path, *, documents: int | None = None
) -> dict[str, str]:
    """Write factors that kronfluence's ``Analyzer`` takes for its own.

        to_kronfluence(curvature, "influence_results/digits/factors_ours")
        analyzer = Analyzer("digits", model, task)  # output_dir="influence_results"
        analyzer.compute_pairwise_scores("scores", factors_name="ours", ...)

    As it fits them to a loss that is a sum over a batch: Σ x xᵀ and Σ d dᵀ with R as the number of
    both, their eigenvectors, the eigenvalues of both divided by R, and where there are corrected
    eigenvalues Σ_b (Q_Gᵀ ∇_b Q_A)² with the number of entries. By the modules' names, of which
    kronfluence tracks ``nn.Linear`` and ``nn.Conv2d``; a bias is A's last column there, too.
    ``factor_arguments.json`` says "ekfac", or "kfac", from which
    ``analyzer.fit_lambda_matrices(..., load_from_factors_name=)`` goes on.

    Args:
        curvature: With G.
        folder: ``factors_NAME`` in the folder of the analysis; files that are there are replaced.
        documents: The number of entries of the batches, such as sequences. None: N, each entry
            being a term of the loss. It scales the corrected eigenvalues.

    Returns:
        Why a layer has been left out, by name; such a module must not be tracked.

    Raises:
        ValueError: If there is no G, or no layer to write.
    """
    left_out, files = dict[str, str](), _Files(dict)
    writes = _writes(curvature)
    for layer in _pairs(curvature, "AG", "kronfluence", left_out):
        if not writes:
            continue
        terms, rows = _counts(layer)
        (a, q_a), (g, q_g) = _eigen(layer, "A"), _eigen(layer, "G")
        found = {
            "activation_covariance": layer.A * rows,
            "gradient_covariance": layer.G * terms,
            "num_activation_covariance_processed": torch.tensor([[rows]], device="cpu"),
            "num_gradient_covariance_processed": torch.tensor([[rows]], device="cpu"),
            "activation_eigenvectors": q_a,
            "activation_eigenvalues": a,
            "gradient_eigenvectors": q_g,
            "gradient_eigenvalues": g * (terms / rows),
        }
        if layer.corrected is not None:
            found["lambda_matrix"] = layer.corrected * terms
            found["num_lambda_processed"] = torch.tensor([[documents or terms]], device="cpu")
        _add(files, layer.modules, found)
    if files:
        if len(files["lambda_matrix"]) < len(files["activation_covariance"]):  # of some, or none
            files = _Files(dict, {k: v for k, v in files.items() if "lambda" not in k})
        strategy = {"strategy": "ekfac" if "lambda_matrix" in files else "kfac"}
        for name, tensors in files.items():
            save_tensors(tensors, _made(folder) / f"{name}.safetensors")
        with replacing(Path(folder) / "factor_arguments.json") as file:
            file.write(json.dumps(strategy).encode())
    return left_out


def to_bergson(
    curvature: KroneckerCurvature,
    folder: str | Path,
    *,
    prefix: str = "",
    include_bias: bool = False,
    documents: int | None = None,
) -> dict[str, str]:
    """Write a Hessian that Bergson applies: ``--hessian_path folder``, ``load_preconditioner``.

    In folders of one ``shard_0.safetensors`` each, by names below ``model.base_model``, of a loss
    that is a sum over a document's tokens: ``activation_sharded`` Σ x xᵀ and ``gradient_sharded``
    Σ d dᵀ, ``total_processed.pt`` with R; ``eigen_*`` the eigenvectors; ``eigenvalue_sharded``
    those of A ⊗ G N / D, a mean over the D documents, as ``factor_eig_a`` and ``factor_eig_g``
    multiplied with each other are; ``eigenvalue_correction_sharded`` Λ N / D. Bergson leaves the
    last token of each sequence out of A; :func:`second_order.measure` does by ``mask=``.

    Args:
        curvature: With G.
        folder: The Hessian's; files that are there are replaced.
        prefix: Of the layers to write, removed from their names: "model." for a causal Llama.
        include_bias: As Bergson's own. False: a bias's column of A is dropped.
        documents: D, the number of entries of the batches. None: N, each being a term of the loss.

    Returns:
        Why a layer has been left out, by name.

    Raises:
        ValueError: If there is no G, or no layer to write; for corrected eigenvalues, which are of
            an eigenbasis with the bias, of a layer whose bias is to be dropped.
    """
    left_out, files = dict[str, str](), _Files(dict)
    writes = _writes(curvature)
    for layer in _pairs(curvature, "AG", "Bergson", left_out, prefix):
        part = layer if include_bias else _of_weight(layer)
        if layer.corrected is not None and part.corrected is None:
            raise ValueError(
                f"layer {layer.name!r} has a bias, and its corrected eigenvalues are of the "
                f"eigenbasis with it; give include_bias=True here and to Bergson"
            )
        if not writes:
            continue
        terms, rows = _counts(layer)
        entries = documents or terms
        (a, q_a), (g, q_g) = _eigen(part, "A"), _eigen(part, "G")
        scale = (rows / entries) ** 0.5
        found = {
            "activation_sharded": part.A * rows,
            "gradient_sharded": part.G * terms,
            "eigen_activation_sharded": q_a,
            "eigen_gradient_sharded": q_g,
            "eigenvalue_sharded": g.unsqueeze(-1) * a.unsqueeze(-2) * (terms / entries),
            "factor_eig_a": a * scale,
            "factor_eig_g": g * (terms / rows * scale),
        }
        if part.corrected is not None:
            found["eigenvalue_correction_sharded"] = part.corrected * (terms / entries)
        _add(files, [name.removeprefix(prefix) for name in layer.modules], found)
    if files:
        for name, tensors in files.items():
            save_tensors(tensors, _made(Path(folder) / name) / "shard_0.safetensors")
        with replacing(Path(folder) / "total_processed.pt") as file:
            torch.save(torch.tensor(rows, device="cpu"), file)
    return left_out


# ---------------------------------------------------------------------- Laplace's approximation


def to_laplace(
    curvature: KroneckerCurvature,
    laplace: Any,
    train_loader: Any,
    *,
    examples: float | None = None,
) -> None:
    """Give laplace-torch's posterior its Hessian, in the place of ``laplace.fit(train_loader)``.

        la = Laplace(model, "classification", subset_of_weights="last_layer",
                     hessian_structure="kron", last_layer_name="head")
        to_laplace(curvature, la, train_loader)

    H = Σ over the terms of the loss = N F, as a ``Kron`` of [N G, A] for a weight and [N G] for its
    bias: A loses the bias's column, and H what couples the two, as laplace-torch has it. For a
    weight ``(in, out)`` it is [A, N G]. Of normalisations and biases alone it has a block a
    parameter. The loss is to be a negative log-likelihood: of a regression ½ ‖f - y‖², whose σ is
    laplace's. A and G are used where there are corrected eigenvalues, as a ``Kron`` has none.

    The forward passes that the loss of ``log_marginal_likelihood`` needs are run.

    Args:
        curvature: With G; of the same model, all parameters of ``laplace`` in it.
        laplace: A ``KronLaplace``, or a ``KronLLLaplace`` that was given ``last_layer_name``.
        train_loader: As for ``laplace.fit``.
        examples: The number of terms to make H the sum over. None: N, as many as were measured.

    Raises:
        TypeError: For another ``laplace``.
        ValueError: If there is no G; for a parameter without curvature, or with one that is no
            Kronecker product, of a grouped convolution or a doubly factored layer.
    """
    package = importlib.import_module("laplace")
    if not isinstance(laplace, package.KronLaplace):
        raise TypeError(
            f"{type(laplace).__name__} has no Kronecker factors; give a Laplace of "
            f"hessian_structure='kron', of all weights or of the last layer"
        )
    model, params = laplace.model, laplace.params
    if isinstance(laplace, package.KronLLLaplace):
        if model.last_layer is None:
            raise ValueError("the last layer is not known; give last_layer_name= to Laplace")
        model, params = model.model, list(model.last_layer.parameters())
    names = {parameter: name for name, parameter in model.named_parameters()}
    wanted = [names[parameter] for parameter in params]
    blocks = dict[str, list[Tensor]]()
    for name in {each.rpartition(".")[0]: None for each in wanted}:
        if name in curvature:
            blocks |= _blocks(curvature[name], examples)
    missing = [name for name in wanted if name not in blocks]
    if missing:
        raise ValueError(
            f"{missing[0]!r} and {len(missing) - 1} more parameters have no curvature: "
            f"{curvature.uncovered.get(missing[0], 'their layers were not measured')}; freeze "
            f"them, or measure them"
        )
    kfacs = [[b.to(p) for b in blocks[name]] for name, p in zip(wanted, params, strict=True)]
    laplace.model.eval()
    laplace.mean = parameters_to_vector(params).detach()
    laplace.loss, laplace.n_data = 0.0, len(train_loader.dataset)
    device = params[0].device
    with torch.no_grad():
        for data in train_loader:
            x, y = (data, data[laplace.dict_key_y]) if isinstance(data, Mapping) else data
            out = laplace.model(x.to(device) if isinstance(x, Tensor) else x)
            loss = laplace.backend.lossfunc(out, y.to(device))
            laplace.loss += laplace.backend.factor * loss
    laplace.n_outputs = laplace.model.output_size = out.shape[-1]
    laplace.H_facs = importlib.import_module("laplace.utils.matrix").Kron(kfacs)
    laplace.H = laplace.H_facs.decompose(damping=laplace.damping)


def _blocks(layer: LayerCurvature, examples: float | None) -> dict[str, list[Tensor]]:
    """N F's diagonal blocks as Kronecker factors, by parameter."""
    shape = layer.shape
    _check(layer, "AG", "laplace-torch")
    if (shape.groups > 1 and not shape.exact) or shape.locations:
        raise ValueError(f"layer {layer.name!r} has no pair of factors; freeze it for Laplace")
    g = layer.G * (layer.examples * layer.updates if examples is None else examples)
    if shape.exact:
        sizes = [size.numel() for size in layer.shapes.values()]
        whole = g[0] if shape.groups == 1 else g.flatten()
        ends = list(accumulate(sizes))
        spans = [slice(end - size, end) for end, size in zip(ends, sizes, strict=True)]
        return {k: [whole[(s,) * whole.dim()]] for k, s in zip(layer.shapes, spans, strict=True)}
    weight, *bias = layer.shapes
    pair = [g[0], _of_weight(layer).A[0]]
    return {weight: pair[::-1] if shape.transposed else pair} | {
        name: [g[0] * layer.A[0, -1, -1]] for name in bias
    }


# ------------------------------------------------------------------------------------ quantisation


def to_gptq(curvature: KroneckerCurvature, folder: str | Path | None = None) -> dict[str, Tensor]:
    """H = 2/R Σ x xᵀ = 2 A by module name, ``(in, in)`` on the CPU, as GPTQ keeps it.

    Of the weight alone: a bias's column is dropped. Of a grouped convolution the mean over its
    groups, as GPTQModel takes it; of fused experts ``(experts, in, in)``, each one's own. No
    damping is in it: GPTQ adds its percentage of the mean diagonal. GPTQModel counts rows; AutoGPTQ
    and llm-compressor count sequences, so that their H is larger by the mean length of one, and
    makes the same weights.

    Args:
        curvature: Of any factors.
        folder: Where to write ``MODULE.safetensors`` with "H" and, in "nsamples", R; None for no
            files.

    Returns:
        H of each layer with factors of inputs, on every process.

    Raises:
        ValueError: If there is no such layer.
    """
    found, writes = dict[str, Tensor](), _writes(curvature)
    for layer in _pairs(curvature, "A", "GPTQ", {}, groups=True):
        a = _of_weight(layer).A
        alike = layer.shape.groups == 1 or issubclass(layer.kind, CONVOLUTIONS)
        h = 2 * (a.mean(0) if alike else a).cpu()
        for module in layer.modules:
            found[module] = h
            if folder is not None and writes:
                tensors = {"H": h, "nsamples": torch.tensor([_counts(layer)[1]], device="cpu")}
                save_tensors(tensors, _made(folder) / f"{module}.safetensors")
    return found


def _numbered(module: str) -> str | None:
    """``12_q`` of ``model.layers.12.self_attn.q_proj``; None without a number."""
    parts = module.split(".")
    number = next(filter(str.isdigit, parts), None)
    return None if number is None else f"{number}_{parts[-1].removesuffix('_proj')}"


def _shared(module: str) -> str | None:
    """As :func:`_numbered`, one of those that read the same: q, k and v are ``qkv``."""
    number, _, name = (_numbered(module) or "").partition("_")
    name = {"q": "qkv", "k": "", "v": "", "gate": ""}.get(name, name)
    return f"{number}_{name}" if name else None


def to_yaqa(
    curvature: KroneckerCurvature, folder: str | Path, *, names: Naming = _numbered
) -> dict[str, str]:
    """Write the pair of Hessians that YAQA reads from ``--hess_path`` (Tseng et al. 2025).

    ``12_q_hin.pt`` and ``12_q_hout.pt`` for each Linear of a block, q k v o up gate down: A
    ``(in (in + 1) / 2,)`` and G ``(out (out + 1) / 2,)`` as ``torch.save`` writes the lower
    triangle, row after row, in the order of ``torch.tril_indices``. A bias's column is dropped.
    Their scales do not matter: YAQA divides each by its mean diagonal, and adds its own damping.
    Its labels are drawn from the model, so are they where ``measure`` has no ``loss=``.

    Args:
        curvature: With G.
        folder: Files that are there are replaced.
        names: Gives a module's name in files, ``12_q``, or None to leave it out. By default the
            first number in the name, and its last part without ``_proj``.

    Returns:
        Why a layer has been left out, by name.

    Raises:
        ValueError: If there is no G, no layer to write, or two modules are to have one file.
    """
    left_out = dict[str, str]()
    writes = _writes(curvature)
    for layer, name in _named(_pairs(curvature, "AG", "YAQA", left_out), names, left_out):
        if not writes:
            continue
        for matrix, end in ((_of_weight(layer).A, "hin"), (layer.G, "hout")):
            with replacing(_made(folder) / f"{name}_{end}.pt") as file:
                torch.save(_lower(matrix), file)
    return left_out


def to_quip(
    curvature: KroneckerCurvature, folder: str | Path, *, names: Naming = _shared
) -> dict[str, str]:
    """Write the Hessians of inputs that QuIP#, QTIP and VPTQ read (Tseng et al. 2024).

    ``12_qkv.pt``, ``12_o.pt``, ``12_up.pt`` and ``12_down.pt`` of a block: "flatH" A's lower
    triangle as for :func:`to_yaqa`, "mu" zeros, which they add as μ μᵀ to what elsewhere is a
    covariance, "n" the width and "ct" R. q, k and v read the same, as do up and gate: one file. A
    bias's column is dropped. G is not needed.

    Args:
        curvature: Of any factors.
        folder: Files that are there are replaced.
        names: As for :func:`to_yaqa`; by default q_proj's is ``12_qkv``, and None k's, v's and
            gate's.

    Returns:
        Why a layer has been left out, by name.

    Raises:
        ValueError: If there is no layer to write, or two modules are to have one file.
    """
    left_out = dict[str, str]()
    writes = _writes(curvature)
    for layer, name in _named(_pairs(curvature, "A", "QuIP#", left_out), names, left_out):
        if not writes:
            continue
        a = _of_weight(layer).A
        n = a.shape[-1]
        content = {
            "flatH": _lower(a),
            "mu": torch.zeros(n, device="cpu"),
            "n": n,
            "ct": _counts(layer)[1],
        }
        with replacing(_made(folder) / f"{name}.pt") as file:
            torch.save(content, file)
    return left_out


def _named(
    layers: Iterable[LayerCurvature], names: Naming, left_out: dict[str, str]
) -> Iterator[tuple[LayerCurvature, str]]:
    """Yield layers with the names of their files, one for each module; note those without."""
    taken: dict[str, str] = {}
    for layer in layers:
        for module in layer.modules:
            name = names(module)
            if name is None:
                left_out[layer.name] = f"names= has none for {module!r}"
            elif name in taken:
                raise ValueError(
                    f"{taken[name]!r} and {module!r} are both to be in {name!r}; give names= that "
                    f"tells them apart"
                )
            else:
                taken[name] = module
                yield layer, name


def _lower(matrix: Tensor) -> Tensor:
    """The lower triangle of ``(1, n, n)``, row after row, on the CPU."""
    n = matrix.shape[-1]
    rows, columns = torch.tril_indices(n, n, device=matrix.device)
    return matrix[0, rows, columns].cpu()


# ------------------------------------------------------------------------------------------ layers


def _pairs(
    curvature: KroneckerCurvature,
    letters: str,
    package: str,
    left_out: dict[str, str],
    prefix: str = "",
    *,
    groups: bool = False,
) -> Iterator[LayerCurvature]:
    """Yield layers with factors of a module's inputs and outputs, and note why others have none.

    What is found of such a layer is not kept. Raises ValueError if a letter is missing, or no layer
    is left.
    """
    for name in curvature:
        if not name.startswith(prefix):
            left_out[name] = f"its name does not begin with {prefix!r}"
            continue
        layer = curvature[name]
        why = _why_not(layer, groups)
        if why:
            left_out[name] = why
            continue
        _check(layer, letters, package)
        yield replace(layer)
    if len(left_out) == len(curvature):
        name, why = next(iter(left_out.items()), ("none", "there is none"))
        raise ValueError(f"no layer has anything for {package}; of {name!r}: {why}")


def _why_not(layer: LayerCurvature, groups: bool) -> str:
    shape = layer.shape
    if shape.exact:
        return "its curvature is one matrix, without a factor of inputs"
    if shape.diagonal_a:
        return "its inputs are indices"
    if shape.locations:
        return "it is doubly factored"
    if shape.groups > 1 and not groups:
        return f"it has {shape.groups} groups, with a pair of factors each"
    return ""


def _check(layer: LayerCurvature, letters: str, package: str) -> None:
    missing = [letter for letter in letters if letter not in layer.stored]
    if missing:
        raise ValueError(
            f"layer {layer.name!r} has no {missing[0]}, which {package} needs; measure with "
            f"factors='kfac'"
        )


def _writes(curvature: KroneckerCurvature) -> bool:
    """Whether this process keeps the first layer."""
    return next(iter(curvature), None) in curvature.here


def _counts(layer: LayerCurvature) -> tuple[int, int]:
    """N and R, whole numbers of at least 1; R is N where it is not known."""
    terms = layer.examples * layer.updates
    return max(1, round(terms)), max(1, round(layer.rows or terms))


def _eigen(layer: LayerCurvature, letter: str) -> tuple[Tensor, Tensor]:
    """Eigenvalues and eigenvectors of a factor that is no diagonal."""
    values, vectors = layer.eigen[letter]
    assert vectors is not None
    return values, vectors


def _of_weight(layer: LayerCurvature) -> LayerCurvature:
    """The curvature of a layer's weight alone; without corrected eigenvalues if it had a bias."""
    shape, (weight, size) = layer.shape, next(iter(layer.shapes.items()))
    columns = size.numel() // (shape.groups * shape.out_dim)
    if columns == shape.in_dim:
        return layer
    return replace(
        layer,
        shapes={weight: size},
        shape=replace(shape, in_dim=columns),
        stored={**layer.stored, "A": layer.A[..., :columns, :columns].contiguous()},
        corrected=None,
        basis=None,
    )


def _add(files: _Files, modules: Iterable[str], found: Mapping[str, Tensor]) -> None:
    """Add a layer's tensors ``(1, ...)`` to the files that they belong to."""
    for file, tensor in found.items():
        files[file] |= dict.fromkeys(modules, tensor[0].cpu().contiguous())


def _made(folder: str | Path) -> Path:
    Path(folder).mkdir(parents=True, exist_ok=True)
    return Path(folder)
