# Before
def discounted(x):
    length = x.shape[0]
    out = torch.zeros(length, dtype=x.dtype)
    running = 0.0
    for t in reversed(range(length)):
        running = x[t].item() + GAMMA * running
        out[t] = running
    return out


# After
import numba


@numba.njit
def discounted_loop(length, running, x, out):
    for t in range(length - 1, -1, -1):
        running = x[t] + GAMMA * running
        out[t] = running


def discounted(x):
    length = x.shape[0]
    out = torch.zeros(length, dtype=x.dtype)
    running = 0.0
    discounted_loop(length, running, x.numpy(), out.numpy())
    return out
