"""Starting and ending the observed script."""
