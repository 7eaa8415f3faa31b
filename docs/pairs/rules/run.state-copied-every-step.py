# Before
for x, y in loader:
    train_step(x, y)
    state = copy.deepcopy(model.state_dict())
    score = evaluate(model)
    if score > best:
        best, best_state = score, state
# After
best_state = copy.deepcopy(model.state_dict())
for x, y in loader:
    train_step(x, y)
    score = evaluate(model)
    if score > best:
        best = score
        torch._foreach_copy_(list(best_state.values()), list(model.state_dict().values()))
