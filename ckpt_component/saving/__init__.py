"""One save, from the call to the commit and its report."""
