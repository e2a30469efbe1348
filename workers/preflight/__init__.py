"""What can be known to fail before a model is loaded, said in one line each."""
