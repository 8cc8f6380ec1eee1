import torch
from torch import nn

from second_order import KAISA  # noqa: F401

inputs = torch.randn(64, 8)
targets = torch.randint(4, (64,))
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
loader = [(inputs[:32], targets[:32]), (inputs[32:], targets[32:])]
criterion = nn.CrossEntropyLoss()
