"""Equal machines that start together: one program in many processes, by torchrun, srun, mpirun or alone."""
