"""Several learners of one run, the processes of torchrun."""
