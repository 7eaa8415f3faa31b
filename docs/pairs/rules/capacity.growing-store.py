# Before
features = []
for x, y in loader:
    h = encoder(x)
    features.append(h.detach())
    loss = F.cross_entropy(head(h), y)
    loss.backward()
# After
features = collections.deque(maxlen=100)
for x, y in loader:
    h = encoder(x)
    features.append(h.detach())
    loss = F.cross_entropy(head(h), y)
    loss.backward()
