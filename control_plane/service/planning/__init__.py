"""What is asked of the scheduler, and what is made of its answers."""
