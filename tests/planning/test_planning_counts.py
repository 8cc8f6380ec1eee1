"""What is counted beforehand is what a step does, rank by rank, in worlds that are pretended."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from scaling import one_of
from second_order import DPKFAC, KAISA, DistKFAC
from second_order.distributed import shares
from second_order.planning.counts import Case
from second_order.planning.messages import Bucket, summed
from second_order.planning.network import base_state_bytes
from second_order.planning.systems import PLANNED, dpkfac, kaisa
from second_order.planning.work import Among

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from second_order.planning.work import RankWork

pytestmark = pytest.mark.filterwarnings("ignore::second_order.SecondOrderWarning")

OPTIMIZERS: dict[str, Any] = {"KAISA": KAISA, "DPKFAC": DPKFAC, "DistKFAC": DistKFAC}
ONE = 2  # examples
# Its name since torch 2.13, and before.
GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"


class Images(nn.Module):
    """Convolutions, one with groups; norms; a Linear fed by maps; a weight of no layer."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 4, 3, padding=1, bias=False),
            nn.BatchNorm2d(4),
            nn.Conv2d(4, 6, 2, stride=2, groups=2),
            nn.Flatten(),
            nn.Linear(24, 7),
            nn.Tanh(),
            nn.Linear(7, 3, bias=False),
        )
        self.scale = nn.Parameter(torch.ones(3, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x) @ self.scale


class Tokens(nn.Module):
    """An embedding, whose A is diagonal; attention; a recurrent layer; a shared Linear."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.norm = nn.LayerNorm(6)
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)
        self.recurrent = nn.RNN(6, 6, batch_first=True)
        self.shared = nn.Linear(6, 6)
        self.head = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.embedding(x))
        h = h + self.attention(h, h, h, need_weights=False)[0]
        h = self.recurrent(h)[0]
        return self.head(self.shared(torch.tanh(self.shared(h))))


def images() -> tuple[Tensor, ...]:
    return (torch.randn(ONE, 3, 4, 4),)


def tokens() -> tuple[Tensor, ...]:
    return (torch.randint(0, 11, (ONE, 3)),)


MODELS: dict[str, tuple[type[nn.Module], Callable[[], tuple[Tensor, ...]]]] = {
    "images": (Images, images),
    "tokens": (Tokens, tokens),
}


@dataclass
class Seen:
    """What one rank was seen to do at a step.

    Attributes:
        sent: By collective and ranks, calls, bytes handed over, and bytes of all buffers.
        solved: By kind and size, matrices decomposed.
        accounts: Bytes by account, as the optimizer tells them.
        held: Bytes by what they are.
        products: Floating point operations of products, but those of solves.
    """

    sent: dict[tuple[str, tuple[int, ...]], list[int]] = field(
        default_factory=lambda: defaultdict(lambda: [0, 0, 0])
    )
    solved: Counter[tuple[str, int]] = field(default_factory=Counter)
    accounts: dict[str, int] = field(default_factory=dict)
    held: dict[str, int] = field(default_factory=dict)
    products: float = 0.0


@contextmanager
def watched(seen: Seen) -> Iterator[None]:
    reduce, exchange = dist.all_reduce, dist.all_to_all_single
    gather = getattr(dist, GATHER)
    eigh, cholesky = torch.linalg.eigh, torch.linalg.cholesky_ex

    def note(name: str, group: Any, sent: Tensor, more: int) -> None:
        entry = seen.sent[name, tuple(dist.get_process_group_ranks(group))]
        for i, n in enumerate((1, sent.nbytes, sent.nbytes + more)):
            entry[i] += n

    def all_reduce(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        note("all_reduce", kwargs["group"], tensor, 0)
        return reduce(tensor, *args, **kwargs)

    def all_to_all(output: Tensor, message: Tensor, *args: Any, **kwargs: Any) -> Any:
        note("all_to_all", kwargs["group"], message, output.nbytes)
        return exchange(output, message, *args, **kwargs)

    def all_gather(output: Tensor, message: Tensor, *args: Any, **kwargs: Any) -> Any:
        note("all_gather", kwargs["group"], message, output.nbytes)
        return gather(output.zero_(), message, *args, **kwargs)

    def counted(kind: str, function: Any) -> Any:
        def call(matrix: Tensor, *args: Any, **kwargs: Any) -> Any:
            seen.solved[kind, matrix.shape[-1]] += len(matrix)
            return function(matrix, *args, **kwargs)

        return call

    with (
        patch.object(dist, "all_reduce", all_reduce),
        patch.object(dist, "all_to_all_single", all_to_all),
        patch.object(dist, GATHER, all_gather),
        patch.object(torch.linalg, "eigh", counted("eigh", eigh)),
        patch.object(torch.linalg, "cholesky_ex", counted("cholesky_inverse", cholesky)),
    ):
        yield


def nbytes(tensors: Any) -> int:
    return sum(t.nbytes for t in tensors if isinstance(t, Tensor))


def real_steps(
    name: str, model: str, ranks: int, rank: int, dtype: torch.dtype, chosen: dict[str, Any]
) -> list[Seen]:
    """A step with statistics and a refresh, and a plain one, as one rank takes them."""
    make, batch = MODELS[model]
    torch.manual_seed(0)
    net = make().to(dtype)
    with one_of(ranks, rank):
        optimizer = OPTIMIZERS[name](
            net, lr=0.01, **{**chosen, "base": torch.optim.SGD, "momentum": 0.9}
        )
        steps = []
        for _ in range(2):
            net.zero_grad()
            inputs = [x.to(dtype) if x.is_floating_point() else x for x in batch()]
            net(*inputs).square().mean().backward()
            seen = Seen()
            layers = optimizer._curvature.layers.blocks
            staged = [b.staged.sums(1).factors for b in layers if not b.staged.empty]
            seen.held["statistics"] = sum(nbytes(factors.values()) for factors in staged)
            with watched(seen), FlopCounterMode(display=False) as flops:
                optimizer.step()
            seen.products = flops.get_total_flops()
            told = optimizer.statistics()
            names = {k.removeprefix("bytes/") for k in told if k.startswith("bytes/")}
            names -= {"elsewhere"}  # the first rank's parameters, sent to all at construction
            seen.accounts = {k: int(told[f"bytes/{k}"]) for k in names if told[f"bytes/{k}"]}
            summary = optimizer.summary()
            averages = [b.ensure_factors() for b in layers]
            seen.held |= {
                "factors": summary.factor_bytes,
                "inverses": summary.inverse_bytes,
                "heads": sum(
                    f.weight.nbytes + f.means.nbytes + f.examples.nbytes for f in averages
                ),
                "base": sum(nbytes(s.get("base", {}).values()) for s in optimizer.state.values()),
                "gradients": nbytes(p.grad for p in net.parameters()),
                "parameters": nbytes(net.parameters()),
            }
            steps.append(seen)
        optimizer.close()
    return steps


def compare(work: RankWork, seen: Seen, ranks: int) -> None:
    """What was counted is what was seen."""
    # The word of greeting goes in a gloo group, which there is not in a pretended world.
    transfers = [t for t in work.transfers if t.stage != "compare"]
    sent: dict[tuple[str, tuple[int, ...]], list[int]] = defaultdict(lambda: [0, 0, 0])
    accounts: Counter[str] = Counter()
    for t in transfers:
        width = t.among.stride
        start = {"world": 0, "row": work.rank - work.rank % t.among.size}
        first = start.get(t.among.name, work.rank % width)
        members = tuple(range(first, first + t.among.size * width, width))
        for i, n in enumerate((t.messages, t.handed, t.buffers)):
            sent[t.collective, members][i] += n
        accounts[t.stage] += t.handed
    assert dict(sent) == dict(seen.sent)
    by_account = {k: n for k, n in accounts.items() if n}
    assert by_account == seen.accounts
    held = {h.what: h.nbytes for h in work.held}
    assert {"statistics": 0, **held} == seen.held


def compare_work(work: RankWork, seen: Seen) -> None:
    solved: Counter[tuple[str, int]] = Counter()
    for c in work.computes:
        if c.kind in ("eigh", "cholesky_inverse"):
            solved[c.kind, c.sizes[-1]] += c.count
    assert solved == seen.solved


SHARED = {
    "solver": st.sampled_from(["eigen", "inverse"]),
    "symmetry_aware": st.booleans(),
    "factor_dtype": st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
    "inv_dtype": st.sampled_from([torch.float32, torch.float64]),
    "exact_blocks": st.booleans(),
    "max_exact_dim": st.sampled_from([4, 256]),
    "other_matrices": st.sampled_from(["base", "gradient"]),
    "max_factor_dim": st.sampled_from([20, 8192]),
    "kl_clip": st.sampled_from([None, "auto", 0.1]),
    "preconditioner_scale": st.sampled_from(["newton", "gradient"]),
    "gradient_averaging": st.booleans(),
    "kfac_approx": st.sampled_from(["expand", "reduce"]),
}
OWN: dict[str, dict[str, st.SearchStrategy[Any]]] = {
    "KAISA": {
        "factor_exchange": st.sampled_from(["all_reduce", "reduce"]),
        "assignment": st.sampled_from(["compute", "memory"]),
        "colocate_factors": st.booleans(),
    },
    "DPKFAC": {
        "assignment": st.sampled_from(["balanced", "round_robin"]),
        "gradient_exchange": st.sampled_from(["owner", "all_reduce"]),
    },
    "DistKFAC": {
        "conv_factors": st.sampled_from(["kfc", "cheap"]),
        "doubly_factored": st.sampled_from(["auto", None]),
    },
}
BELOW: dict[str, dict[str, Any]] = {"DistKFAC": {"async_inverse": False}}
INTERVALS = {"factor_update_steps": 5, "inv_update_steps": 5}


@st.composite
def settings_of(draw: Any) -> tuple[str, str, int, int, torch.dtype, dict[str, Any]]:
    name = draw(st.sampled_from(list(OPTIMIZERS)))
    ranks = draw(st.integers(1, 8))
    chosen = draw(st.fixed_dictionaries({**SHARED, **OWN[name]}))
    if name == "KAISA":
        workers = draw(st.sampled_from([n for n in range(1, ranks + 1) if ranks % n == 0]))
        chosen["grad_worker_fraction"] = workers / ranks
    model, rank = draw(st.sampled_from(list(MODELS))), draw(st.integers(0, ranks - 1))
    dtype = draw(st.sampled_from([torch.float32, torch.float64]))
    return name, model, ranks, rank, dtype, {**chosen, **INTERVALS}


def case_of(name: str, model: str, ranks: int, dtype: torch.dtype, chosen: dict[str, Any]) -> Case:
    with torch.device("meta"):
        make, batch = MODELS[model]
        net, inputs = make().to(dtype), batch()
    planned = PLANNED[name](**chosen)
    example = [x.to(dtype) if x.is_floating_point() else x for x in inputs]
    network = planned.network(net, example, momentum=0.9)
    return Case(network, planned, ranks, examples=ONE)


# As found: smaller settings are looked for for minutes, and are no easier to read.
@settings(phases=[Phase.explicit, Phase.generate])
@given(settings_of(), st.sampled_from([0, 2000, shares.SMALL_BYTES]))
def test_a_rank_sends_keeps_and_computes_what_is_counted(
    setting: tuple[str, str, int, int, torch.dtype, dict[str, Any]], small: int
) -> None:
    """Also where the parts of few ranks go by shares, as in large worlds."""
    with patch.object(shares, "SMALL_BYTES", small):
        compare_all(*setting)


def compare_all(
    name: str, model: str, ranks: int, rank: int, dtype: torch.dtype, chosen: dict[str, Any]
) -> None:
    case = case_of(name, model, ranks, dtype, chosen)
    refresh, plain = real_steps(name, model, ranks, rank, dtype, {**chosen, **BELOW.get(name, {})})
    work = case.work(rank, statistics=True, refresh=True)
    compare(work, refresh, ranks)
    compare_work(work, refresh)
    work = case.work(rank)
    compare(work, plain, ranks)
    compare_work(work, plain)
    assert work.operations("precondition") == plain.products


# ------------------------------------------------------------------------- statistics and shares


def products_of_backward(model: str, chosen: dict[str, Any], *, captured: bool) -> float:
    """Operations of a backward pass, with the statistics taken in it or without."""
    make, batch = MODELS[model]
    torch.manual_seed(0)
    net = make()
    optimizer = KAISA(net, lr=0.01, **chosen) if captured else None
    for block in [] if optimizer is None else optimizer._curvature.layers.blocks:
        block.state.unlooked = 1  # the first passes' look at the gradients is not counted
    loss = net(*batch()).square().mean()
    with FlopCounterMode(display=False) as flops:
        loss.backward()
    if optimizer is not None:
        optimizer.close()
    return float(flops.get_total_flops())


# Queries, keys and values have one input, and two of the three products are spared.
SPARED = {("tokens", "expand"): 2 * 2 * (ONE * 3) * 6**2}


@pytest.mark.parametrize(
    ("model", "approximation"), [("images", "expand"), ("tokens", "expand"), ("tokens", "reduce")]
)
def test_statistics_take_the_operations_that_are_counted(model: str, approximation: str) -> None:
    chosen = {"kfac_approx": approximation, "exact_blocks": True}
    with_statistics = products_of_backward(model, chosen, captured=True)
    without = products_of_backward(model, chosen, captured=False)
    work = case_of("KAISA", model, 1, torch.float32, chosen).work(0, statistics=True)
    spared = SPARED.get((model, approximation), 0)
    assert work.operations("statistics") - spared == with_statistics - without > 0


@pytest.mark.parametrize("name", list(OPTIMIZERS))
@pytest.mark.parametrize("ranks", [1, 6, 12])
@pytest.mark.parametrize("small", [0, shares.SMALL_BYTES])
def test_equal_ranks_are_counted_once_and_none_is_left_out(
    name: str, ranks: int, small: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shares, "SMALL_BYTES", small)
    chosen = {"grad_worker_fraction": 1 / 3, "colocate_factors": False} if name == "KAISA" else {}
    chosen = {} if ranks == 1 else chosen
    case = case_of(name, "images", ranks, torch.float32, chosen)
    found = {s.work.rank: s for s in case.everybody(statistics=True, refresh=True)}
    assert sum(s.ranks for s in found.values()) == ranks
    for rank in range(ranks):
        mine = case.work(rank, statistics=True, refresh=True)
        assert replace(mine, rank=case.alike(rank)) == found[case.alike(rank)].work
    alike = Counter(map(case.alike, range(ranks)))
    assert alike == {rank: share.ranks for rank, share in found.items()}


@pytest.mark.parametrize("small", [0, shares.SMALL_BYTES])
def test_what_leaves_the_ranks_arrives(small: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """No byte is counted twice, and none is lost: over all ranks, moved is received."""
    monkeypatch.setattr(shares, "SMALL_BYTES", small)
    for name in OPTIMIZERS:
        case = case_of(name, "tokens", 4, torch.float32, {"other_matrices": "gradient"})
        moved: Counter[str] = Counter()
        for share in case.everybody(statistics=True, refresh=True):
            for t in share.work.transfers:
                moved[t.stage] += share.ranks * t.moved - share.ranks * t.received  # type: ignore[assignment]
        assert all(math.isclose(n, 0.0, abs_tol=1e-6) for n in moved.values())


def test_sums_for_one_and_for_all_arrive_by_shares_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shares, "SMALL_BYTES", 0)
    bucket = Bucket(sizes={1: 10}, common=3, itemsize=4, ranks=4)
    assert bucket.by_shares
    found = [t for r in range(4) for t in summed("solve", Among("world", 4), r, [bucket])]
    assert sum(t.moved for t in found) == sum(t.received for t in found) > 0
    # 13 sums of four shares; 10 of them to one rank, 3 to all, but for what is there already.
    assert sum(t.moved for t in found) == 4 * (13 * 3 + 10 - 4 + 3 * 3)


def test_four_thousand_ranks_are_counted_by_their_kinds() -> None:
    """A rank of thousands is like most others, whatever there is to do."""
    for planned in (
        kaisa(grad_worker_fraction=1.0),
        kaisa(grad_worker_fraction=1 / 64, factor_exchange="reduce"),
        dpkfac(),
    ):
        with torch.device("meta"):
            network = planned.network(Images())
        found = Case(network, planned, 4096).everybody(statistics=True, refresh=True)
        assert sum(s.ranks for s in found) == 4096
        assert len(found) < 4 * len(network.params)


def test_a_plan_of_other_solvers_is_not_what_a_step_does() -> None:
    """The comparison is one that fails: with rank 0's work for rank 1, and with another solver."""
    chosen = {"solver": "eigen", "grad_worker_fraction": 1.0, **INTERVALS}
    seen = real_steps("KAISA", "images", 4, 1, torch.float32, chosen)[0]
    case = case_of("KAISA", "images", 4, torch.float32, chosen)
    compare(case.work(1, statistics=True, refresh=True), seen, 4)
    other = case.work(3, statistics=True, refresh=True)
    with pytest.raises(AssertionError):
        compare(other, seen, 4)
    inverse = case_of("KAISA", "images", 4, torch.float32, {**chosen, "solver": "inverse"})
    with pytest.raises(AssertionError):
        compare(inverse.work(1, statistics=True, refresh=True), seen, 4)


# ------------------------------------------------------------------------------------ what is said


def test_what_cannot_be_counted_is_said() -> None:
    with torch.device("meta"):
        model = Images()
    planned = kaisa()
    network = planned.network(model)
    with pytest.raises(ValueError, match=r"examples=4, and nobody knows .* layer 'body.0'; make"):
        Case(network, kaisa(), 2, examples=4)
    with pytest.raises(ValueError, match="ranks=0 is less than 1"):
        Case(network, kaisa(), 0)
    with pytest.raises(ValueError, match=r"examples=-1 is less than 0"):
        Case(network, kaisa(), 1, examples=-1)
    with pytest.raises(ValueError, match=r"rank=2 is not one of 0 to 1"):
        Case(network, kaisa(), 2).work(2)
    with pytest.raises(ValueError, match=r"gives 1.5 gradient workers"):
        Case(network, kaisa(grad_worker_fraction=0.5), 3)
    with pytest.raises(ValueError, match=r"has no tensor with a batch dimension"):
        planned.network(model, [3])
    with pytest.raises(TypeError, match=r"unknown options \['stats_workers'\]"):
        PLANNED["DistKFAC"](stats_workers=1)
    with pytest.raises(ValueError, match="factor_exchange='gather'"):
        kaisa(factor_exchange="gather")


def test_the_state_of_a_base_is_that_of_a_step() -> None:
    params = [nn.Parameter(torch.ones(3, 5)), nn.Parameter(torch.ones(7))]
    assert base_state_bytes(torch.optim.SGD, params) == 0
    assert base_state_bytes(torch.optim.SGD, params, momentum=0.9) == 4 * 22
    # Two moments, and a step for each parameter.
    assert base_state_bytes(torch.optim.AdamW, params) == 4 * (2 * 22 + 2)
    assert [p.grad for p in params] == [None, None]
