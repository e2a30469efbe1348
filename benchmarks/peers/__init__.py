"""What a user would run instead of Batchmill, each as its documentation shows it; run by `benchmarks.vs_peers`."""
