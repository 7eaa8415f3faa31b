# Before
loader = DataLoader(dataset, batch_size=64, shuffle=True, num_workers=4)
for epoch in range(num_epochs):
    for x, y in loader:
        train_step(x, y)
# After
loader = DataLoader(dataset, batch_size=64, shuffle=True, num_workers=4, persistent_workers=True)
for epoch in range(num_epochs):
    for x, y in loader:
        train_step(x, y)
