# Before
for observations, actions, advantages in loader:
    distribution = torch.distributions.Normal(actor(observations), log_std.exp())
    log_prob = distribution.log_prob(actions).sum(-1)
    loss = -(log_prob * advantages).mean()
# After
torch.distributions.Distribution.set_default_validate_args(False)
for observations, actions, advantages in loader:
    distribution = torch.distributions.Normal(actor(observations), log_std.exp())
    log_prob = distribution.log_prob(actions).sum(-1)
    loss = -(log_prob * advantages).mean()
