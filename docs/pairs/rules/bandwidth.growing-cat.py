# Before
states = torch.empty(batch_size, 0, hidden_size)
for t in range(num_steps):
    h = cell(x[:, t], h)
    states = torch.cat([states, h[:, None]], dim=1)
logits = head(states)
# After
states = []
for t in range(num_steps):
    h = cell(x[:, t], h)
    states.append(h)
logits = head(torch.stack(states, dim=1))
