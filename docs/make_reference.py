"""Write the pages of docs/reference that are generated: api.md and options.md.

    python docs/make_reference.py [FOLDER]

api.md has the signature and the docstring of every public name. options.md has
every keyword of the optimizers: its type, its default, and the first sentence of
its description. It creates small optimizers over SGD, AdamW and Muon, and reads
the values that replaced "auto". A test fails if a page in the repository differs
from the generated one.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import re
import sys
import types
import typing
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from second_order import DHO2, DPKFAC, KAISA, MRDHO2, DistKFAC
from second_order.optimizers.keywords import keywords_of

FOLDER = Path(__file__).parent / "reference"
LINE_LENGTH = 88

# ------------------------------------------------------------------------------- api.md


class Section(NamedTuple):
    """A heading of api.md, an introduction, and the full names of what it contains."""

    heading: str
    introduction: str
    names: Sequence[str]


def names_in(module: str, *names: str) -> list[str]:
    """The full names of a module's members: those that are given, or all public ones."""
    public = names or importlib.import_module(module).__all__
    return [f"{module}.{name}" for name in public]


SECTIONS = [
    Section(
        "Optimizers",
        "Each optimizer wraps a base optimizer, such as SGD or AdamW, and preconditions its\n"
        "gradients. All have the methods of `SecondOrderOptimizer`. "
        "[Options](options.md) lists the keywords.",
        names_in(
            "second_order",
            *("KAISA", "DPKFAC", "DistKFAC", "DHO2", "MRDHO2", "SecondOrderOptimizer"),
        ),
    ),
    Section(
        "Values of keywords",
        "You pass these objects to `factor_decay`, `kl_clip`, `inv_update_steps` and `aux_base`.\n"
        "`paper_settings` returns the keywords that reproduce a paper.",
        [
            *names_in(
                "second_order", "PerStep", "DecayingClip", "TraceRule", "AuxBase"
            ),
            "second_order.papers.paper_settings",
        ],
    ),
    Section(
        "Layers",
        "`register_layer` describes a class of modules that the package does not know.\n"
        "[Layers](layers.md) shows examples.",
        names_in("second_order", "register_layer"),
    ),
    Section(
        "Checkpoints",
        "`state_dict` and `load_state_dict` work as in torch. These functions add files and\n"
        "the state of the base optimizer alone.",
        names_in(
            "second_order", "save_checkpoint", "load_checkpoint", "export_base_state"
        ),
    ),
    Section(
        "Reports",
        "`summary()` returns a `Summary`. DHO2 and MRDHO2 report their eigenpairs and epochs.\n"
        "[Monitoring](../how-to/monitor.md) shows how to log them.",
        names_in(
            "second_order", "Summary", "LayerRow", "CurvatureReport", "EpochReport"
        ),
    ),
    Section(
        "Planning",
        "`plan` predicts the time and the memory of every optimizer before you train.\n"
        "[Planning](../evidence/planning.md) compares predictions with measurements.",
        [
            *names_in("second_order", "plan", "Plan"),
            "second_order.planning.plan.Choice",
            *names_in("second_order.planning.cost", "Setting", "Costs"),
            *names_in("second_order", "calibrate", "Machine", "Interconnect"),
        ],
    ),
    Section(
        "Curvature of a trained model",
        "`measure` computes the Kronecker factors of a model that you do not train.\n"
        "[Curvature](../how-to/curvature.md) shows what you can do with them.",
        [
            *names_in(
                "second_order", "measure", "KroneckerCurvature", "LayerCurvature"
            ),
            "second_order.measuring.report.Report",
        ],
    ),
    Section(
        "Export to other libraries",
        "These functions write a `KroneckerCurvature` in the formats of other packages.\n"
        "You need those packages only to read the result.",
        names_in("second_order.export"),
    ),
    Section(
        "Curvature of a loss",
        "These functions need only a loss, and no optimizer. They compute eigenpairs, the\n"
        "density of the spectrum, the trace and the diagonal of the Hessian.",
        names_in(
            "second_order.lanczos",
            *(
                "eigenpairs",
                "Eigenpairs",
                "spectral_density",
                "SpectralDensity",
                "trace",
                "Trace",
            ),
            *("diagonal", "Diagonal", "Outputs", "losses_over", "Hessian"),
        ),
    ),
    Section(
        "Errors and warnings",
        "All errors of the package derive from `SecondOrderError`. Wrong arguments raise\n"
        "`TypeError` or `ValueError`, as in torch.",
        names_in(
            "second_order",
            *(
                "SecondOrderError",
                "DecompositionError",
                "CheckpointError",
                "CurvatureError",
            ),
            *("RankMismatchError", "SecondOrderWarning"),
        ),
    ),
    Section(
        "Assignment of layers to ranks",
        "These functions depend only on the sizes of the layers and the number of ranks. They\n"
        "need no process group, so you can inspect an assignment before you train.",
        names_in(
            "second_order.distributed.assignment",
            *(
                "assign_layers",
                "assign_owners",
                "gradient_worker_count",
                "balance_costs",
            ),
            *("factor_cost", "Grid", "LayerDims", "LayerAssignment"),
        ),
    ),
    Section(
        "Integrations",
        "The module imports transformers. [Frameworks](../how-to/frameworks.md) shows how to use\n"
        "it, and the plugin for axolotl, `second_order.integrations.axolotl.SecondOrderPlugin`.",
        ["second_order.integrations.transformers.MetricsCallback"],
    ),
]
PUBLIC = {name for section in SECTIONS for name in section.names}


def api_page() -> str:
    """The text of api.md."""
    parts = [
        "# API",
        "<!-- Written by `make reference`. -->",
        "This page has the import, the signature and the docstring of every public name.",
    ]
    for section in SECTIONS:
        parts += [f"## {section.heading}", section.introduction]
        for full_name in section.names:
            module, _, name = full_name.rpartition(".")
            parts += [
                f"### {name}",
                f"```python\nfrom {module} import {name}\n\n{stub(member(full_name))}\n```",
            ]
    return "\n\n".join(parts) + "\n"


def member(full_name: str) -> Any:
    """Import a class or function by its full name."""
    module, _, name = full_name.rpartition(".")
    return getattr(importlib.import_module(module), name)


def public_bases(cls: type) -> list[type]:
    """The bases of a class that this page describes too."""
    public = {id(member(name)) for name in PUBLIC}
    return [base for base in cls.__mro__[1:] if id(base) in public]


def stub(thing: Any) -> str:
    """A class or function as in a stub file: its signature and its docstring."""
    body = (
        class_stub(thing)
        if isinstance(thing, type)
        else function_stub(thing, thing.__name__)
    )
    aliases = type_aliases(sys.modules[thing.__module__], words_of(code_of(body)))
    if not aliases:
        return body
    definitions = "\n".join(f"{name} = {text}" for name, text in aliases.items())
    return f"{definitions}\n\n{body}"


def class_stub(cls: type) -> str:
    """A class with its docstring, its fields or constructor, and its public methods."""
    is_dataclass = dataclasses.is_dataclass(cls)
    lines = ["@dataclass"] if is_dataclass else []
    bases = [public_name(base) for base in cls.__bases__ if base is not object]
    if any(is_private(base) for base in cls.__bases__):
        bases = [public_name(base) for base in public_bases(cls)[:1]]
    listed = f"({', '.join(bases)})" if bases else ""
    lines += [f"class {cls.__name__}{listed}:", docstring(cls)]

    if is_dataclass:
        lines.append("")
        for field in dataclasses.fields(cls):
            if not field.name.startswith("_"):
                lines.append(
                    f"    {field.name}: {annotation(field.type)}{default_of(field)}"
                )
    elif inspect.isfunction(cls.__init__) and not issubclass(cls, (Exception, Warning)):
        lines += ["", indented(function_stub(cls.__init__, "__init__"))]

    for name, value in members_of(cls):
        lines += ["", indented(member_stub(name, value))]
    return "\n".join(lines)


def is_private(cls: type) -> bool:
    """Whether a base class belongs to the package, but not to this page."""
    return cls.__module__.startswith("second_order") and cls not in public_classes()


def public_classes() -> list[type]:
    """The classes of this page."""
    return [cls for cls in map(member, PUBLIC) if isinstance(cls, type)]


def members_of(cls: type) -> Iterator[tuple[str, Any]]:
    """The documented methods and properties of a class and of its private bases."""
    seen: set[str] = set()
    for each in cls.__mro__:
        if each is not cls and not is_private(each):
            continue
        for name, value in vars(each).items():
            function = inspect.unwrap(underlying(value)) if underlying(value) else None
            if name.startswith("_") or name in seen or not inspect.isfunction(function):
                continue
            if function.__name__ == name and function.__doc__:
                seen.add(name)
                yield name, value


def underlying(value: Any) -> Any:
    """The function of a method or a property; None for anything else."""
    if isinstance(value, property):
        return value.fget
    if isinstance(value, (classmethod, staticmethod)):
        return value.__func__
    return value if inspect.isfunction(value) else None


def member_stub(name: str, value: Any) -> str:
    """A method or a property as in a stub file."""
    decorator = ""
    if isinstance(value, (property, classmethod, staticmethod)):
        decorator = f"@{type(value).__name__}\n"
    return decorator + function_stub(underlying(value), name)


def function_stub(function: Any, name: str) -> str:
    """A function with its signature and docstring, and ``...`` as its body."""
    signature = inspect.signature(function)
    result = annotation(signature.return_annotation)
    result = f" -> {result}" if result else ""
    parameters = list(parameters_of(signature))
    line = f"def {name}({', '.join(parameters)}){result}:"
    if len(line) > LINE_LENGTH:
        listed = "".join(f"    {parameter},\n" for parameter in parameters)
        line = f"def {name}(\n{listed}){result}:"
    if not function.__doc__:
        return f"{line} ..."
    return f"{line}\n{docstring(function)}\n    ..."


def parameters_of(signature: inspect.Signature) -> Iterator[str]:
    """The parameters of a signature as code, with ``*`` and ``/`` where they belong."""
    had_star = False
    parameters = list(signature.parameters.values())
    for i, parameter in enumerate(parameters):
        if parameter.kind is parameter.KEYWORD_ONLY and not had_star:
            had_star = True
            yield "*"
        prefix = ""
        if parameter.kind is parameter.VAR_POSITIONAL:
            had_star = True
            prefix = "*"
        elif parameter.kind is parameter.VAR_KEYWORD:
            prefix = "**"
        hint = annotation(parameter.annotation)
        text = prefix + parameter.name + (f": {hint}" if hint else "")
        if parameter.default is not parameter.empty:
            equals = " = " if hint else "="
            text += equals + code_for(parameter.default)
        yield text
        is_last = (
            i + 1 == len(parameters) or parameters[i + 1].kind is not parameter.kind
        )
        if parameter.kind is parameter.POSITIONAL_ONLY and is_last:
            yield "/"


def annotation(value: Any) -> str:
    """An annotation as in the source; "" for none."""
    if value is inspect.Parameter.empty:
        return ""
    if isinstance(value, str):
        return value.replace("'", '"')
    return public_name(value) if isinstance(value, type) else str(value)


def default_of(field: dataclasses.Field[Any]) -> str:
    """The default of a dataclass's field, as code with an equals sign."""
    if field.default is not dataclasses.MISSING:
        return f" = {code_for(field.default)}"
    if field.default_factory is not dataclasses.MISSING:
        return " = ..."
    return ""


def code_for(value: Any) -> str:
    """A value as code; ``...`` if its repr is not an expression."""
    if isinstance(value, type):
        return public_name(value)
    if isinstance(value, float) and abs(value) == float("inf"):
        return "math.inf" if value > 0 else "-math.inf"
    if isinstance(value, str):
        return f'"{value}"'
    if dataclasses.is_dataclass(value):
        arguments = []
        for i, field in enumerate(dataclasses.fields(value)):
            number = getattr(value, field.name)
            if number != field.default:
                fraction = Fraction(number).limit_denominator(10)
                text = str(fraction) if float(fraction) == number else f"{number:g}"
                arguments.append(text if i == 0 else f"{field.name}={text}")
        return f"{type(value).__name__}({', '.join(arguments)})"
    try:
        ast.parse(repr(value), mode="eval")
    except SyntaxError:
        return "..."
    return repr(value)


def public_name(cls: type) -> str:
    """The name by which users import a class."""
    module = cls.__module__
    name = cls.__qualname__
    if module == "builtins" or module.startswith("second_order"):
        return name
    if module.startswith("torch.optim"):
        return f"torch.optim.{name}"
    package = module.split(".")[0]
    if getattr(sys.modules[package], name, None) is cls:
        return f"{package}.{name}"
    return f"{module}.{name}"


def docstring(thing: Any) -> str:
    """A docstring, indented for a body."""
    text = inspect.getdoc(thing) or ""
    text = re.sub(r":\w+:`~?(?:\w+\.)*(\w+)`", r"``\1``", text)
    prefix = "r" if "\\" in text else ""
    end = '\n"""' if "\n" in text else '"""'
    return indented(f'{prefix}"""{text.rstrip()}{end}')


def indented(text: str) -> str:
    """A text with four more spaces in front of each line."""
    return "\n".join(
        f"    {line}" if line.strip() else "" for line in text.splitlines()
    )


def code_of(body: str) -> str:
    """A stub without its docstrings."""
    return re.sub(r'r?"""(?s:.*?)"""', "", body)


def words_of(code: str) -> list[str]:
    """The names in a piece of code, each once, in order."""
    return list(dict.fromkeys(re.findall(r"\b[A-Za-z_]\w*", code)))


def type_aliases(module: types.ModuleType, names: Sequence[str]) -> dict[str, str]:
    """The type aliases of the package among some names of a module, and those that they use."""
    found: dict[str, str] = {}
    for name in names:
        if name in found:
            continue
        text, home = find_alias(module, name)
        if text is None:
            continue
        found |= type_aliases(home, words_of(text))
        found[name] = text
    return found


def find_alias(
    module: types.ModuleType, name: str
) -> tuple[str | None, types.ModuleType]:
    """The definition of a type alias in a module, or in the one that it imports the alias from."""
    for node in assignments_and_imports(module):
        is_alias = (
            isinstance(node, ast.AnnAssign)
            and ast.unparse(node.annotation) == "TypeAlias"
        )
        if is_alias and ast.unparse(node.target) == name:
            return ast.unparse(node.value).replace("'", '"'), module
        if not isinstance(node, ast.ImportFrom) or not str(node.module).startswith(
            "second_order."
        ):
            continue
        if name in {alias.name for alias in node.names}:
            return find_alias(importlib.import_module(node.module), name)
    return None, module


@cache
def assignments_and_imports(
    module: types.ModuleType,
) -> list[ast.AnnAssign | ast.ImportFrom]:
    """The nodes of a module's source in which it defines or imports type aliases."""
    nodes = ast.walk(ast.parse(inspect.getsource(module)))
    return [node for node in nodes if isinstance(node, ast.AnnAssign | ast.ImportFrom)]


# --------------------------------------------------------------------------- options.md

ADAPTIVE_BASES = (torch.optim.AdamW, torch.optim.Muon)
KFAC_OPTIMIZERS = (KAISA, DPKFAC, DistKFAC)
FOSI_OPTIMIZERS = (DHO2, MRDHO2)


class Group(NamedTuple):
    """A table of options.md: its heading, the optimizers that it describes, and their keywords."""

    heading: str
    introduction: str
    optimizers: Sequence[type]
    names: str


GROUPS = [
    Group(
        "Tuning",
        "You must pass `lr`. Start from that of your base optimizer, and then tune `damping`.",
        KFAC_OPTIMIZERS,
        "lr damping damping_floor relative_damping grafting kl_clip step_scale factor_decay base "
        "aux_base",
    ),
    Group(
        "Your training script",
        "Set these if they describe what your script does.",
        KFAC_OPTIMIZERS,
        "model loss_reduction fisher kfac_approx grad_scaler gradient_averaging process_group",
    ),
    Group(
        "Refreshes",
        "These trade wall-clock time for newer curvature.",
        KFAC_OPTIMIZERS,
        "inv_update_steps factor_update_steps overhead solver async_inverse max_staleness "
        "deterministic inverse_threads inverse_device",
    ),
    Group(
        "Communication",
        "These matter if you train on several processes.",
        KFAC_OPTIMIZERS,
        "grad_worker_fraction factor_exchange exchange_dtype colocate_factors assignment "
        "gradient_exchange stats_workers helper_timeout",
    ),
    Group(
        "Layers, memory and checks",
        "[Layers](layers.md) says which layers need them.",
        KFAC_OPTIMIZERS,
        "precondition_norms unsupported_layers skip_layers max_factor_dim factor_dtype "
        "conv_factors doubly_factored debug",
    ),
    Group(
        "DHO2 and MRDHO2",
        "DHO2 and MRDHO2 also have `lr`, `base`, `model`, `grad_scaler`, `gradient_averaging`,\n"
        "`process_group` and `debug`, with the same meaning and default.",
        FOSI_OPTIMIZERS,
        "curvature_closure num_largest num_smallest newton_scale curvature_interval overhead "
        "warmup_steps subspace_momentum lr_scale_clip lr_scale_guard trust_region curvature hvp "
        "lanczos_iterations lanczos_tol lanczos_dtype eigenvalue_floor warm_start layout seed "
        "helper_ranks epoch_steps final_update helper_timeout",
    ),
]
COMMON = {
    "lr",
    "base",
    "model",
    "grad_scaler",
    "gradient_averaging",
    "process_group",
    "debug",
}


def options_page() -> str:
    """The text of options.md.

    Raises:
        ValueError: If a keyword is in no group.
    """
    for optimizers in (KFAC_OPTIMIZERS, FOSI_OPTIMIZERS):
        listed = set(COMMON)
        for group in GROUPS:
            if group.optimizers == optimizers:
                listed.update(group.names.split())
        missing = {name for cls in optimizers for name in keywords_of(cls)} - listed
        if missing:
            raise ValueError(f"GROUPS in {Path(__file__).name} lacks {sorted(missing)}")

    parts = [
        "# Options",
        "<!-- Written by `make reference`. -->",
        "The tables show the default of every keyword after the optimizer has resolved\n"
        '`"auto"`: over SGD, and over an adaptive base (AdamW or Muon) if it differs. Where\n'
        '`"auto"` remains, your model or the training run decides. You can add the keywords of\n'
        "the base optimizer, such as `momentum`. The [API](api.md) describes each in full.",
    ]
    for group in GROUPS:
        parts += [f"## {group.heading}", group.introduction, table(group)]
    return "\n\n".join(parts) + "\n"


def table(group: Group) -> str:
    """The table of a group: a row for each keyword."""
    over_sgd = {cls: resolved(cls, torch.optim.SGD) for cls in group.optimizers}
    over_adaptive = {cls: resolved(cls, ADAPTIVE_BASES[0]) for cls in group.optimizers}
    for cls in group.optimizers:
        if resolved(cls, ADAPTIVE_BASES[1]) != over_adaptive[cls]:
            raise ValueError(
                f"the defaults of {cls.__name__} over AdamW and Muon differ"
            )

    lines = [
        "| option | type | over SGD | adaptive | meaning |",
        "|---|---|---|---|---|",
    ]
    for name in group.names.split():
        owners = [cls for cls in group.optimizers if name in keywords_of(cls)]
        label = f"`{name}`"
        if len(owners) == 1:
            label += f" ({owners[0].__name__})"
        over = cell({cls: over_sgd[cls][name] for cls in owners})
        adaptive = cell({cls: over_adaptive[cls][name] for cls in owners})
        if adaptive == over or name == "base":
            adaptive = ""
        meaning = first_sentence(description(owners[0], name))
        kind = type_of(owners[0], name)
        lines.append(f"| {label} | {kind} | {over} | {adaptive} | {meaning} |")
    return "\n".join(lines)


def resolved(cls: type, base: type) -> dict[str, Any]:
    """The defaults of an optimizer's keywords, with the values that have replaced "auto"."""
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 2, bias=False))
    make: Callable[..., Any] = cls
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        optimizer = make(model, lr=0.1, base=base)
    signature = inspect.signature(cls).parameters
    defaults = {name: signature[name].default for name in keywords_of(cls)}

    curvature = optimizer._curvature
    if cls in KFAC_OPTIMIZERS:
        for name, value in vars(curvature._options).items():
            if name in defaults:
                defaults[name] = value
    else:
        defaults["lanczos_dtype"] = curvature.flat_params.dtype
        curvature._scale_bound = float("inf")  # no guard yet
        eigenvalues = torch.tensor([1e9, 1.0])
        defaults["lr_scale_clip"] = curvature._compute_base_scale(eigenvalues, 2)
    optimizer.close()
    return defaults


def cell(values: Mapping[type, Any]) -> str:
    """A default as code. If one optimizer has another default, its name is added."""
    codes = {
        cls: code_for(value).removeprefix("torch.optim.")
        for cls, value in values.items()
    }
    codes = {cls: code.removeprefix("torch.") for cls, code in codes.items()}
    texts = list(codes.values())
    usual = max(texts, key=texts.count)
    others = [
        f"{cls.__name__}: `{code}`" for cls, code in codes.items() if code != usual
    ]
    return f"`{usual}`" + (f" ({', '.join(others)})" if others else "")


def description(cls: type, name: str) -> str:
    """The description of a keyword in the docstring of an optimizer."""
    text = inspect.getdoc(cls) or ""
    match = re.search(rf"^    {name}: (.*(?:\n        .*)*)", text, re.M)
    if match is None:
        raise ValueError(f"{cls.__name__} has no description of {name}")
    return " ".join(match[1].split())


def first_sentence(text: str) -> str:
    """The first sentence of a description, as Markdown."""
    sentence = re.split(r"(?<=\.)\s", text)[0].removesuffix(".")
    sentence = re.sub(r":\w+:`~?(?:\w+\.)*(\w+)`", r"``\1``", sentence)
    return sentence.replace("``", "`").replace("|", "\\|")


def type_of(cls: type, name: str) -> str:
    """The types that a keyword accepts, as Markdown; without "auto" and None."""
    namespace = vars(sys.modules[cls.__module__])
    hint = typing.get_type_hints(cls.__init__, namespace)[name]  # type: ignore[misc]
    found = list(dict.fromkeys(types_in(hint)))
    if "str" in found:
        # The description quotes the choices.
        choices = dict.fromkeys(re.findall(r'"(\w+)"', description(cls, name)))
        position = found.index("str")
        found[position : position + 1] = [
            f'`"{choice}"`' for choice in choices if choice != "auto"
        ]
    return ", ".join(found)


def types_in(hint: Any) -> Iterator[str]:
    """The parts of a union, as Markdown."""
    origin = typing.get_origin(hint)
    arguments = typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        for argument in arguments:
            yield from types_in(argument)
    elif origin is typing.Literal:
        yield from (f'`"{choice}"`' for choice in arguments if choice != "auto")
    elif hint is Any:
        yield "object"
    elif hint is not type(None):
        plain = origin or hint
        names = {Callable: "callable", Sequence: "list", Mapping: "dict", type: "class"}
        yield names.get(plain, plain.__name__)


# -------------------------------------------------------------------------------- pages

PAGES: dict[str, Callable[[], str]] = {"api.md": api_page, "options.md": options_page}


def main() -> None:
    """Write the pages to the folder that the command line names, or to docs/reference."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER
    for name, make_page in PAGES.items():
        (folder / name).write_text(make_page(), "utf-8")


if __name__ == "__main__":
    main()
