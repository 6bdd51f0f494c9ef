"""What people look at: progress bars and the start-up timeline."""
