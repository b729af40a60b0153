"""Where the operators meet real models: one folder per model family."""
