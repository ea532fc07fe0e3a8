"""What arguments must satisfy: errors name the argument, the rule and the value."""
