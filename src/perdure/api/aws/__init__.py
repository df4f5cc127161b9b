"""What AWS's clients speak, beside ``/v1`` on the same port: Lambda's durable executions, and Step Functions' task tokens.

Paths, members, headers, queries and statuses are those of botocore's models (lambda 2015-03-31, with the API version 2025-12-01
in it, and states 2016-11-23); docs/aws.md says which operations there are, and which test drives each.

paths    which requests these are
faults   errors as AWS's clients read them
signing  who has signed a request
calls    one request, its parts judged
routes   operations by their path, as it came: an ARN in it has slashes, which are encoded
invoke, executions, tasks    the operations
"""
