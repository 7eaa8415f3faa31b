"""What else a step tells: reads, feeding, compiling, settings, uses, modules, values, escapes."""
