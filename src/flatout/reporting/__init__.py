"""What people and programs read: records in, a drawing, a table or JSON out. Nothing is computed here."""
