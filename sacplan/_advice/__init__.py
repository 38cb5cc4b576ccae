"""What makes the peak and what helps (`advise`), and whether a step fits a device (`fit`)."""
