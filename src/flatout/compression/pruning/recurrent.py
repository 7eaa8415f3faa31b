"""Rules of recurrent layers and cells: a unit goes out of all gates, the state and the next step's input together."""

from __future__ import annotations

from collections.abc import Sequence

from flatout.compression.pruning.calls import Call, Shape, Value, broadcast, rule
from flatout.compression.pruning.terms import Dim, Terms

GATES = {"gru": 3, "lstm": 4, "rnn_tanh": 1, "rnn_relu": 1}


def _tie_gates(terms: Terms, weights: Sequence[Shape], inputs: Dim, num_gates: int) -> Dim:
    """Weights [G*H, in], [G*H, H], then biases [G*H] if any; the hidden dimension."""
    hidden = weights[1].dims[1]
    terms.tie(weights[0].dims[1], inputs)
    for weight in weights:
        terms.tie(terms.tie_inside(weight.dims[0], num_gates), hidden)
    return hidden


@rule("gru_cell", "rnn_tanh_cell", "rnn_relu_cell", "lstm_cell")
def _cell(call: Call) -> Value:
    x = call.shape("input")
    weights = [call.args[name] for name in ("w_ih", "w_hh", "b_ih", "b_hh") if isinstance(call.args[name], Shape)]
    hidden = _tie_gates(call.terms, weights, x.dims[-1], GATES[call.name.removesuffix("_cell")])
    states = call.args["hx"] if isinstance(call.args["hx"], list) else [call.args["hx"]]
    rest = [list(x.dims[:-1]), *(list(state.dims[:-1]) for state in states)]
    batch = broadcast(call.terms, [Shape(tuple(dims)) for dims in rest])
    for state in states:
        call.terms.tie(state.dims[-1], hidden)
    out = Shape((*batch, hidden))
    return [out, out] if call.name == "lstm_cell" else out


@rule("gru", "lstm", "rnn_tanh", "rnn_relu")
def _layers(call: Call) -> Value:
    """Hidden units of all layers are tied by position: their states are one tensor [layers * directions, B, H]."""
    if "input" not in call.args or "batch_sizes" in call.args:
        return call.pin_all()  # packed sequences
    terms, x, weights = call.terms, call.shape("input"), call.args["params"]
    states = call.args["hx"] if isinstance(call.args["hx"], list) else [call.args["hx"]]
    num_directions = 2 if call.args["bidirectional"] else 1
    num_layers = int(call.args["num_layers"])
    per_cell = len(weights) // (num_layers * num_directions)
    if per_cell != (4 if call.args["has_biases"] else 2):
        return call.pin_all()  # projections
    common, features = states[0].dims[-1], x.dims[-1]
    for state in states:
        terms.tie(state.dims[-1], common)
        terms.pin(state.dims[0], "one state a layer and direction")
    for layer in range(num_layers):
        for direction in range(num_directions):
            first = (layer * num_directions + direction) * per_cell
            hidden = _tie_gates(terms, weights[first : first + per_cell], features, GATES[call.name])
            terms.tie(hidden, common)
        features = common * num_directions
    return _outputs(call, x, states, common * num_directions)


def _outputs(call: Call, x: Shape, states: list[Shape], features: Dim) -> Value:
    is_batched = len(x.dims) == 3
    if is_batched:
        batch = x.dims[0 if call.args.get("batch_first") else 1]
        for state in states:
            call.terms.tie(state.dims[1], batch)
    time = x.dims[1 if is_batched and call.args.get("batch_first") else 0]
    call.terms.pin(time, "time goes on step by step")
    return [Shape((*x.dims[:-1], features)), *states]
