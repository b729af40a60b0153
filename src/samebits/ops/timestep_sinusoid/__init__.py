"""``timestep_sinusoid``: cosines and sines of a diffusion time at fixed frequencies."""
