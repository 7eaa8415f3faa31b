# Before
returns = torch.zeros_like(rewards)
running = 0.0
for t in reversed(range(args.num_steps)):
    returns[t] = running = rewards[t] + args.gamma * alive[t] * running
# After
from flatout import as_arrays

returns = torch.zeros_like(rewards)
running = 0.0
with as_arrays(rewards, alive, running, into=(returns,)) as (
    rewards_np,
    alive_np,
    running_np,
    returns_np,
):
    for t in reversed(range(args.num_steps)):
        returns_np[t] = running_np = rewards_np[t] + args.gamma * alive_np[t] * running_np
