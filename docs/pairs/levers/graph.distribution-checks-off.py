# Before
import torch

for observations, actions, advantages in loader:
    distribution = torch.distributions.Normal(actor(observations), log_std.exp())
    loss = -(distribution.log_prob(actions).sum(-1) * advantages).mean()
# After
import torch

torch.distributions.Distribution.set_default_validate_args(False)

for observations, actions, advantages in loader:
    distribution = torch.distributions.Normal(actor(observations), log_std.exp())
    loss = -(distribution.log_prob(actions).sum(-1) * advantages).mean()
