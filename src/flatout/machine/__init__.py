"""What devices can do: data sheets, cost formulas, and what is measured on this machine."""
