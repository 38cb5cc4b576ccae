"""What a technique is: its protocol, the step that it looks at, regions, options and offers."""
