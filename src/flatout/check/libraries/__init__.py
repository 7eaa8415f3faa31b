"""What a user can set where a library runs the code: one TOML a library."""
