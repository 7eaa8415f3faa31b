# Before
for step in range(num_steps):
    frames = [environment.render() for environment in environments]  # NumPy arrays
    x = torch.tensor(frames)
    actions = policy(x)
# After
for step in range(num_steps):
    frames = [environment.render() for environment in environments]  # NumPy arrays
    x = torch.from_numpy(np.stack(frames))
    actions = policy(x)
