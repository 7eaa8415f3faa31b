"""The loss of a linear layer with its three products in float8: on GPUs whose units multiply it twice as fast as bfloat16."""
