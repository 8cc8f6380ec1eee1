"""A network and its residuals, as on the page's first block."""

import torch
from torch import nn

network = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1))


def residuals(network):
    """The residuals of u' = -u."""
    t = torch.linspace(0, 1, 20)[:, None].requires_grad_()
    u = network(t)
    (slope,) = torch.autograd.grad(u.sum(), t, create_graph=True)
    return slope + u
