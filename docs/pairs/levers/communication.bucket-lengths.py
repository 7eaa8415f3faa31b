# Before
for tokens, labels in loader:
    loss = F.cross_entropy(model(tokens), labels)
    loss.backward()
    optimizer.step()


# After
for tokens, labels in loader:
    loss = F.cross_entropy(flatout.call_by_length(model, tokens, pad=0, groups=4, multiple=32), labels)
    loss.backward()
    optimizer.step()
