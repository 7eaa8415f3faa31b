"""The values that pass between the rooms: frozen, typed, and at home in JSON."""
