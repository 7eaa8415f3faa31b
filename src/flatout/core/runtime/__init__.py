"""How scripts are run, watched and patched: each mechanism exists once, here."""
