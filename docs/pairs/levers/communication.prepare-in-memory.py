# Before
pictures = Pictures(paths)  # decodes a file for each item
loader = DataLoader(pictures, batch_size=64, shuffle=True)
for epoch in range(num_epochs):
    for x, y in loader:
        train_step(x, y)
# After
pictures = Pictures(paths)  # decodes a file for each item
items = [pictures[i] for i in range(len(pictures))]
loader = DataLoader(items, batch_size=64, shuffle=True)
for epoch in range(num_epochs):
    for x, y in loader:
        train_step(x, y)
