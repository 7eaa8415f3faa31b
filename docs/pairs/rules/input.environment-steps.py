# Before
environments = [gymnasium.make("Humanoid-v5") for _ in range(8)]
for t in range(num_steps):
    actions = policy(torch.stack(observations))
    for i, environment in enumerate(environments):
        observation, reward, *_ = environment.step(actions[i].numpy())
        observations[i] = torch.from_numpy(observation).float()
# After
make = partial(gymnasium.make, "Humanoid-v5")
environments = gymnasium.vector.AsyncVectorEnv([make] * 8)
for t in range(num_steps):
    actions = policy(observations)
    observation, rewards, *_ = environments.step(actions.numpy())
    observations = torch.from_numpy(observation).float()
