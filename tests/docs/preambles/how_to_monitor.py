from types import SimpleNamespace

import torch
from torch import nn

from second_order import KAISA

model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
optimizer = KAISA(model, lr=0.1, momentum=0.9)
loss = model(torch.randn(16, 8)).square().mean()
step = 0
writer = SimpleNamespace(add_scalar=lambda name, value, step: None)
trainer = SimpleNamespace(callback_handler=SimpleNamespace(callbacks=[]))
