"""Models from their directories: files, configuration, geometry, vocabulary, weights; what is checked and what is loaded."""
