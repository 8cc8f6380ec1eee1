"""What the tests of `measure` share: models, data with padding, and their sums written by hand."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import transformers
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from second_order.measuring.batches import call_model

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

transformers.logging.set_verbosity_error()

F64 = torch.float64
VOCABULARY = 23
LENGTH = 7
ENTRIES = 10
CUTS = ((0, 4), (4, 8), (8, 10))  # batches of 4, 4 and 2
SIZES: dict[str, Any] = {"hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2}
HEADS: dict[str, Any] = {"num_attention_heads": 2, "num_key_value_heads": 1}
MOE: dict[str, Any] = {"num_experts_per_tok": 2, "num_local_experts": 3}
MOE |= {"experts_implementation": "eager"}  # in float64


def _of(name: str, kind: str, **config: Any) -> nn.Module:
    made = getattr(transformers, f"{name}Config")(**config)
    model: nn.Module = getattr(transformers, f"{name}{kind}")(made)
    return model


LLM: dict[str, Any] = {**SIZES, **HEADS, "vocab_size": VOCABULARY, "tie_word_embeddings": False}
GPT2: dict[str, Any] = {"n_embd": 8, "n_layer": 2, "n_head": 2, "vocab_size": VOCABULARY}
BERT: dict[str, Any] = {**SIZES, "num_attention_heads": 2, "vocab_size": VOCABULARY}
VIT: dict[str, Any] = {**SIZES, "num_attention_heads": 2, "image_size": 6, "patch_size": 3}
WHISPER: dict[str, Any] = {
    **dict.fromkeys(("encoder_layers", "decoder_layers"), 1),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 2),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 12),
    **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), 0),
    "vocab_size": VOCABULARY,
    "d_model": 8,
    "num_mel_bins": 4,
    "max_source_positions": 6,
    "decoder_start_token_id": 1,
}
MODELS: dict[str, Callable[[], nn.Module]] = {
    "Llama": partial(_of, "Llama", "ForCausalLM", **LLM),
    "Qwen3": partial(_of, "Qwen3", "ForCausalLM", **LLM, head_dim=4),
    "GPT-2": partial(_of, "GPT2", "LMHeadModel", **GPT2),
    "BERT": partial(_of, "Bert", "ForSequenceClassification", **BERT),
    "ViT": partial(_of, "ViT", "ForImageClassification", **VIT),
    "Whisper": partial(_of, "Whisper", "ForConditionalGeneration", **WHISPER),
    "Mixtral": partial(_of, "Mixtral", "ForCausalLM", **LLM, **MOE),
}


def model_of(name: str, dtype: torch.dtype = F64, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return MODELS[name]().to(dtype).eval()


def data_of(name: str, dtype: torch.dtype = F64, entries: int = ENTRIES) -> dict[str, Tensor]:
    """All entries, padded on the right."""
    drawn = torch.Generator().manual_seed(1)
    if name == "ViT":
        images = torch.randn(entries, 3, 6, 6, generator=drawn, dtype=F64)
        return {"pixel_values": images.to(dtype)}
    tokens = torch.randint(1, VOCABULARY, (entries, LENGTH), generator=drawn)
    lengths = torch.randint(2, LENGTH + 1, (entries,), generator=drawn)
    mask = (torch.arange(LENGTH) < lengths.unsqueeze(1)).long()
    if name == "Whisper":
        sounds = torch.randn(entries, 4, 12, generator=drawn, dtype=F64).to(dtype)
        return {"input_features": sounds, "labels": tokens.where(mask.bool(), -100)}
    return {"input_ids": tokens * mask, "attention_mask": mask}


def batches_of(
    data: dict[str, Tensor], cuts: Sequence[tuple[int, int]] = CUTS
) -> list[dict[str, Tensor]]:
    return [{key: value[start:stop] for key, value in data.items()} for start, stop in cuts]


def alone(data: dict[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """Each entry as a batch of its own, without padding."""
    for i in range(len(next(iter(data.values())))):
        entry = {key: value[i : i + 1] for key, value in data.items()}
        for key in ("attention_mask", "labels"):
            if key in entry:
                length = int(((entry[key] != 0) & (entry[key] != -100)).sum())
                cut = ("input_ids", "attention_mask", "labels")
                entry = {k: v[:, :length] if k in cut else v for k, v in entry.items()}
        yield entry


def terms(output: Any, batch: dict[str, Tensor]) -> Tensor:
    """A term for each token that is not padding, or for each entry; made of logits alone."""
    logits: Tensor = output.logits
    found = (logits.logsumexp(-1) - logits[..., 0]).square() + logits[..., 1].sin()
    mask = batch.get("attention_mask", batch.get("labels"))
    if mask is None or found.dim() == 1:
        return found
    return found[(mask != 0) & (mask != -100)]


class _Products(TorchFunctionMode):
    """Hears of products with a slice of a parameter, as loops over experts make them."""

    def __init__(self, model: nn.Module, see: Callable[[str, Any, Tensor], None]) -> None:
        super().__init__()
        self.params = {p: name for name, p in model.named_parameters() if p.dim() == 3}
        self.see = see

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if func is nn.functional.linear:
            weight = args[1]
            for p, name in self.params.items():
                if weight._base is p or weight.untyped_storage() is p.untyped_storage():
                    expert = weight.storage_offset() // p[0].numel()
                    self.see(f"{name} {expert}", args[:1], output)
        return output


class ByHand:
    """Sums of linear layers over entries alone: inputs, gradients of outputs, and of weights."""

    def __init__(self, model: nn.Module, data: dict[str, Tensor], gradients: bool) -> None:
        self.x: dict[str, Tensor] = {}
        self.d: dict[str, Tensor] = {}
        self.weights: dict[str, list[Tensor]] = {}
        self.rows: dict[str, int] = {}
        self.terms = 0
        linear = [*_linear(model)]
        for entry in alone(data):
            pairs: dict[str, list[tuple[Tensor, Tensor]]] = {}
            hooks = [
                module.register_forward_hook(partial(_see, pairs.setdefault(name, [])))
                for name, module in linear
            ]
            with _Products(
                model, lambda name, x, y, pairs=pairs: _see(pairs.setdefault(name, []), None, x, y)
            ):
                output = call_model(model, entry)
            [hook.remove() for hook in hooks]
            if gradients:
                found = terms(output, entry)
                self.terms += found.numel()
                model.zero_grad()
                found.sum().backward()
            for name, calls in pairs.items():
                for x, y in calls:
                    rows = x.detach().reshape(-1, x.shape[-1])
                    self.x[name] = self.x.get(name, 0) + rows.T @ rows
                    self.rows[name] = self.rows.get(name, 0) + len(rows)
                    if gradients:
                        d = y.grad.reshape(-1, y.shape[-1])  # type: ignore[union-attr]
                        self.d[name] = self.d.get(name, 0) + d.T @ d
            if gradients:
                for name, module in linear:
                    self.weights.setdefault(name, []).append(_gradient(module))
                for name, p in model.named_parameters():
                    for i, each in enumerate(p.grad if p.dim() == 3 and p.grad is not None else ()):
                        self.weights.setdefault(f"{name} {i}", []).append(each.clone())
        model.zero_grad()

    def a(self, name: str) -> Tensor:
        return self.x[name] / self.rows[name]

    def g(self, name: str) -> Tensor:
        return self.d[name] / self.terms


def _linear(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    kinds = (nn.Linear, transformers.pytorch_utils.Conv1D)
    return ((name, m) for name, m in model.named_modules() if isinstance(m, kinds))


def _see(calls: list[Any], module: nn.Module | None, args: Any, output: Tensor) -> None:
    if output.requires_grad:
        output.retain_grad()
    calls.append((args[0], output))


def _gradient(module: nn.Module) -> Tensor:
    """(out, in), or with the bias as a last column."""
    weight = module.weight.grad
    bias = module.bias
    if weight is None:
        weight = torch.zeros_like(module.weight)
    weight = weight if isinstance(module, nn.Linear) else weight.T
    if bias is None:
        return weight.clone()
    column = torch.zeros_like(bias) if bias.grad is None else bias.grad
    return torch.cat([weight, column.unsqueeze(1)], 1)


def close(found: Tensor, expected: Tensor, within: float = 1e-10) -> None:
    difference = (found.to(F64) - expected.to(F64)).norm() / expected.norm().clamp_min(1e-30)
    assert float(difference.detach()) < within, float(difference.detach())
