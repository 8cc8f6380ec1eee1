import torch
from torch import nn

inputs = torch.randn(64, 8)
targets = torch.randint(4, (64,))
loader = [(inputs[:32], targets[:32]), (inputs[32:], targets[32:])]
curvature_loader = loader
x_curv = inputs
y_curv = targets
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
criterion = nn.CrossEntropyLoss()
