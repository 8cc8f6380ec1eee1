import torch
from torch import nn


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(8, 16)
        self.head = nn.Linear(16, 4)

    def forward(self, inputs):
        return self.head(torch.tanh(self.body(inputs)))


x = torch.randn(64, 8)
y = torch.randint(4, (64,))
loader = [(x[:32], y[:32]), (x[32:], y[32:])]
model = Network()
params = list(model.parameters())
criterion = nn.CrossEntropyLoss()
