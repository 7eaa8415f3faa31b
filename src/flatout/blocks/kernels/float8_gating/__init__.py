"""The gated MLP of Llama-like models with products in float8, its gate rounded where it is computed."""
