"""The result cache: answers that are determined by their request, kept in a Redis of their own."""
