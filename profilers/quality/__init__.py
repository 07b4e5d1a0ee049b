"""What is checked about answers: one check a file."""
