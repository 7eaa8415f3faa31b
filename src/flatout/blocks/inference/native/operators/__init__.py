"""Native code of ATen operators, a file for each family: its constant OPERATORS, and DECOMPOSITIONS into other operators."""
