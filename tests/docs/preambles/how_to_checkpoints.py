import torch
from torch import nn

from second_order import KAISA, load_checkpoint, save_checkpoint  # noqa: F401

rank = 0
step = 1
path = "checkpoint.pt"
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
optimizer = KAISA(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
model(torch.randn(32, 8)).logsumexp(dim=1).mean().backward()
optimizer.step()
