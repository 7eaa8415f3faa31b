# Before
class Policy(nn.Module):
    def act(self, x, action):
        distribution = torch.distributions.Normal(self.actor(x), 1.0, validate_args=False)
        return distribution.log_prob(action).sum(1), self.critic(x)


# After
class Policy(nn.Module):
    @torch.compile(dynamic=False)
    def act(self, x, action):
        distribution = torch.distributions.Normal(self.actor(x), 1.0, validate_args=False)
        return distribution.log_prob(action).sum(1), self.critic(x)
