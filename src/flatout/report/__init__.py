"""What people and programs read: records in; text, a page or JSON out. Nothing is computed here."""
