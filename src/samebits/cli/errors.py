"""What a command raises when the user asked for something that cannot be done."""


class UserError(Exception):
    """Printed as one line, exit code 2."""
