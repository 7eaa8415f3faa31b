# Before
def path_of(x):
    path = x.unsqueeze(1)
    for _ in range(num_steps):
        state = path[:, -1]
        state = state + torch.tanh(state)
        path = torch.cat([path, state.unsqueeze(1)], dim=1)
    return path


# After
def path_of(x):
    states = [x]
    for _ in range(num_steps):
        state = states[-1]
        state = state + torch.tanh(state)
        states.append(state)
    path = torch.stack(states, dim=1)
    return path
