"""Reductions composed until a model is as cheap as its metric allows; every composition is built and measured."""
