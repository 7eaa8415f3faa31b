# Before
cell = nn.GRUCell(64, 128)
h = torch.zeros(len(x), 128)
states = []
for t in range(x.size(1)):
    h = cell(x[:, t], h)
    states.append(h)
out = torch.stack(states, dim=1)
# After
gru = nn.GRU(64, 128, batch_first=True)
h = torch.zeros(1, len(x), 128)
out, _ = gru(x, h)
