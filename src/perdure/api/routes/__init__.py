"""One router per resource: parse, call the service, render."""
