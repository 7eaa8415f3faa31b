# Before
x = torch.from_numpy(np.random.randn(1000, 20))
model = nn.Linear(20, 1).double()
loss = model(x).square().mean()
# After
x = torch.from_numpy(np.random.randn(1000, 20)).float()
model = nn.Linear(20, 1)
loss = model(x).square().mean()
