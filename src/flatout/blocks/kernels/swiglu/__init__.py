"""SwiGLU: one half of a projection, through a sigmoid, gates the other."""
