"""GPT-2, BERT and Llama of `transformers`, small and with weights made on the spot."""

from __future__ import annotations

import copy
import os
from typing import TYPE_CHECKING, Any

import pytest
import torch
from combinations import fractional_product
from optimizer_cases import KRONECKER
from torch import Tensor, nn

if TYPE_CHECKING:
    from collections.abc import Callable

os.environ.setdefault("HF_HUB_OFFLINE", "1")
transformers: Any = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore::second_order.SecondOrderWarning")
WORDS = 256
WIDTH = 64


def gpt2() -> Any:
    config = transformers.GPT2Config(
        vocab_size=WORDS, n_positions=16, n_embd=WIDTH, n_layer=2, n_head=4,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def bert() -> Any:
    config = transformers.BertConfig(
        vocab_size=WORDS, hidden_size=WIDTH, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=4 * WIDTH, max_position_embeddings=16,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return transformers.BertForMaskedLM(config)


def llama(tied: bool = False) -> Any:
    config = transformers.LlamaConfig(
        vocab_size=WORDS, hidden_size=WIDTH, intermediate_size=3 * WIDTH, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=16,
        tie_word_embeddings=tied, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


CONFIGURATIONS: dict[str, Callable[[], Any]] = {
    "GPT-2": gpt2,
    "BERT": bert,
    "Llama": llama,
    "Llama, tied": lambda: llama(tied=True),
}


def made(name: str) -> Any:
    torch.manual_seed(0)
    return CONFIGURATIONS[name]()


def words() -> Tensor:
    return torch.randint(WORDS, (8, 12), generator=torch.Generator().manual_seed(0))


def trained(model: nn.Module, optimizer: Any, steps: int = 3) -> list[float]:
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(input_ids=words(), labels=words()).loss
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    return losses


@pytest.mark.parametrize(
    ("System", "name"), fractional_product(KRONECKER, [*CONFIGURATIONS], part=2, first=1)
)
def test_nearly_all_parameters_are_preconditioned(System: Any, name: str) -> None:
    model = made(name)
    plain = copy.deepcopy(model)
    optimizer = System(model, lr=0.1, inv_update_steps=1)
    losses = trained(model, optimizer)
    assert losses[-1] < losses[0]
    summary = optimizer.summary()
    assert summary.preconditioned_share >= 0.99, str(summary)
    total = sum(p.numel() for p in model.parameters())
    assert sum(row.parameters for row in summary.rows) == total
    # Every matrix has got another gradient than its own.
    trained(plain, torch.optim.SGD(plain.parameters(), 0.0), 1)
    own = {key: p.grad for key, p in plain.named_parameters()}
    fresh = made(name)
    trained(fresh, System(fresh, lr=0.1, kl_clip=None), 1)
    for key, p in fresh.named_parameters():
        if p.dim() > 1 and bool(own[key].any()):
            assert not torch.allclose(p.grad, own[key], rtol=0.05), key
