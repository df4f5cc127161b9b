"""boto3, unmodified, against a real server: every operation, and the exceptions that it raises by their types."""

from __future__ import annotations

import json
import threading
from datetime import UTC, timedelta
from typing import Any

import pytest
from botocore.exceptions import ClientError

from perdure.core.errors import Busy
from perdure.runs.protocol import ErrorObject, InvocationStatus
from tests.integration.aws.conftest import World, aws
from tests.unit.runs.driving import callback, step

DEADLINE_S = 60
NOBODY = "arn:aws:lambda:us-east-1:000000000000:function:main:$LATEST/durable-execution/none/exn_none"
FUNCTION_ARN = "arn:aws:lambda:eu-central-1:123456789012:function:main"


def in_background(call: Any) -> tuple[threading.Thread, list[Any]]:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(call()))
    thread.start()
    return thread, found


def waiting(world: World) -> str:
    """The id of a callback that an execution waits for."""
    world.serve()
    world.begin(name="waits")
    taken = world.take()
    (operation,) = world.send(taken, callback("c", 10_000, 1000)).new_execution_state.operations
    world.answer(taken, InvocationStatus.PENDING)
    assert operation.callback_details is not None and operation.callback_details.callback_id is not None
    return operation.callback_details.callback_id


# ------------------------------------------------------------------------------------------------------------------------ invoke


def test_invoke_begins_an_execution(world: World, client: Any) -> None:
    world.serve()
    made = client.invoke(FunctionName="main", InvocationType="Event", Payload=b'{"n": 1}', DurableExecutionName="order-7")
    arn = made["DurableExecutionArn"]
    assert (made["StatusCode"], made["ExecutedVersion"], made["Payload"].read()) == (202, "$LATEST", b"")
    assert arn.startswith("arn:aws:lambda:") and ":function:main:$LATEST/durable-execution/order-7/" in arn
    assert world.state(arn).started.input == '{"n": 1}'


def test_invoke_waits_for_the_result(world: World, client: Any) -> None:
    world.serve()
    thread, found = in_background(lambda: client.invoke(FunctionName="main", Payload=b"[1]"))
    world.answer(world.take(DEADLINE_S), result='{"sum": 3}')
    thread.join(DEADLINE_S)
    (told,) = found
    assert (told["StatusCode"], json.load(told["Payload"]), told.get("FunctionError")) == (200, {"sum": 3}, None)
    assert "DurableExecutionArn" in told


def test_invoke_tells_a_failure_as_the_functions_own(world: World, client: Any) -> None:
    world.serve()
    thread, found = in_background(lambda: client.invoke(FunctionName="main"))
    error = ErrorObject(error_type="Broken", error_message="it broke", stack_trace=("a", "b"))
    world.answer(world.take(DEADLINE_S), InvocationStatus.FAILED, error=error)
    thread.join(DEADLINE_S)
    (told,) = found
    assert (told["StatusCode"], told["FunctionError"]) == (200, "Unhandled")
    assert json.load(told["Payload"]) == {"errorType": "Broken", "errorMessage": "it broke", "stackTrace": ["a", "b"]}


def test_invoke_tells_that_it_was_stopped(world: World, client: Any) -> None:
    world.serve()
    thread, found = in_background(lambda: client.invoke(FunctionName="main"))
    taken = world.take(DEADLINE_S)
    client.stop_durable_execution(DurableExecutionArn=taken.arn)
    thread.join(DEADLINE_S)
    assert json.load(found[0]["Payload"]) == {"errorType": "Execution.STOPPED"}


def test_invoke_dry_run_begins_nothing(world: World, client: Any) -> None:
    world.serve()
    assert client.invoke(FunctionName="main", InvocationType="DryRun")["StatusCode"] == 204
    assert client.list_durable_executions_by_function(FunctionName="main")["DurableExecutions"] == []
    with pytest.raises(client.exceptions.ResourceNotFoundException):
        client.invoke(FunctionName="nobody", InvocationType="DryRun")


def test_invoke_by_one_name_is_one_execution(world: World, client: Any) -> None:
    """A retry does nothing twice (peers: row 30)."""
    world.serve()
    named = {"FunctionName": "main", "InvocationType": "Event", "DurableExecutionName": "order-7"}
    arns = {client.invoke(**named, Payload=b"1")["DurableExecutionArn"] for _ in range(3)}
    assert len(arns) == 1
    with pytest.raises(client.exceptions.DurableExecutionAlreadyStartedException):
        client.invoke(**named, Payload=b"2")


def test_invoke_whose_answer_is_lost_is_repeated_by_boto3_and_begins_once(world: World) -> None:
    """The SDK names its call, so that no name of an author's is needed (peers: row 30)."""
    world.serve()
    begin, lost = world.runs.begin, []

    async def begin_and_lose(new: Any) -> Any:
        begun = await begin(new)
        if not lost:
            lost.append(begun)
            raise Busy("The answer is lost.")
        return begun

    world.runs.begin = begin_and_lose  # type: ignore[method-assign]
    try:
        client = aws(world.server.url, secret=world.secret, attempts=3)
        made = client.invoke(FunctionName="main", InvocationType="Event", Payload=b"1")
    finally:
        del world.runs.begin  # type: ignore[method-assign]
    assert made["ResponseMetadata"]["RetryAttempts"] == 1
    assert made["DurableExecutionArn"] == lost[0].arn
    assert len(client.list_durable_executions_by_function(FunctionName="main")["DurableExecutions"]) == 1


@pytest.mark.parametrize(
    "function",
    ["main", "main:$LATEST", "123456789012:function:main", FUNCTION_ARN, FUNCTION_ARN + ":$LATEST", "main:$LATEST.PUBLISHED"],
)
def test_invoke_by_whatever_names_the_function(world: World, client: Any, function: str) -> None:
    world.serve()
    made = client.invoke(FunctionName=function, InvocationType="Event")
    assert ":function:main:$LATEST/" in made["DurableExecutionArn"]
    if not function.endswith("PUBLISHED"):
        client.invoke(FunctionName=function, Qualifier="$LATEST", InvocationType="Event")


@pytest.mark.parametrize(
    ("given", "exception"),
    [
        ({"FunctionName": "nobody"}, "ResourceNotFoundException"),
        ({"FunctionName": "main:7"}, "ResourceNotFoundException"),
        ({"FunctionName": "main", "Qualifier": "live"}, "ResourceNotFoundException"),
        ({"FunctionName": "main:$LATEST", "Qualifier": "7"}, "InvalidParameterValueException"),
        ({"FunctionName": "not a function"}, "InvalidParameterValueException"),
        ({"FunctionName": "a/b"}, "InvalidParameterValueException"),
        ({"FunctionName": "main", "InvocationType": "Perhaps"}, "InvalidParameterValueException"),
        ({"FunctionName": "main", "Payload": b"{"}, "InvalidParameterValueException"),
        ({"FunctionName": "main", "Payload": b"\xff"}, "InvalidParameterValueException"),
        ({"FunctionName": "main", "DurableExecutionName": "with space"}, "InvalidParameterValueException"),
        ({"FunctionName": "main", "TenantId": "somebody"}, "InvalidParameterValueException"),
    ],
)
def test_invoke_refuses_nonsense(world: World, client: Any, given: dict[str, Any], exception: str) -> None:
    world.serve()
    with pytest.raises(getattr(client.exceptions, exception)) as caught:
        client.invoke(**{"InvocationType": "Event", **given})
    message = caught.value.response.get("message") or caught.value.response["Error"]["Message"]
    assert message.strip(), "an error says what is wrong"
    assert client.list_durable_executions_by_function(FunctionName="main")["DurableExecutions"] == []


# ------------------------------------------------------------------------------------------------------------- from the function


def test_checkpoint_records_and_answers(world: World, client: Any) -> None:
    world.serve()
    arn, taken = world.begin(), world.take()
    update = {"Id": "a", "Type": "STEP", "Action": "START", "Name": "first"}
    made = client.checkpoint_durable_execution(DurableExecutionArn=arn, CheckpointToken=world.token(taken), Updates=[update])
    assert made["CheckpointToken"] != world.token(taken)
    (operation,) = made["NewExecutionState"]["Operations"]
    assert (operation["Id"], operation["Status"], operation["Name"]) == ("a", "STARTED", "first")
    begun = client.get_durable_execution(DurableExecutionArn=arn)["StartTimestamp"]
    assert timedelta(0) <= operation["StartTimestamp"] - begun < timedelta(minutes=5)


def test_checkpoint_with_a_stale_token_says_so_in_the_sdks_words(world: World, client: Any) -> None:
    world.serve()
    arn, taken = world.begin(), world.take()
    world.send(taken, step("a"))
    with pytest.raises(client.exceptions.InvalidParameterValueException) as caught:
        client.checkpoint_durable_execution(DurableExecutionArn=arn, CheckpointToken=world.token(taken), Updates=[])
    assert caught.value.response["message"].startswith("Invalid checkpoint token")
    assert caught.value.response["ResponseMetadata"]["HTTPStatusCode"] == 400


@pytest.mark.parametrize("text", ["a\0b", "\U0001f600", "\x1b[31m", "é" * 1000])
def test_checkpoint_keeps_any_text(world: World, client: Any, text: str) -> None:
    """It comes back as it was: a checkpoint that could not be stored would be sent again for ever."""
    world.serve()
    arn, taken = world.begin(), world.take()
    updates = [
        {"Id": "a", "Type": "STEP", "Action": "START"},
        {"Id": "a", "Type": "STEP", "Action": "SUCCEED", "Payload": text},
        {"Id": "b", "Type": "STEP", "Action": "START"},
        {"Id": "b", "Type": "STEP", "Action": "FAIL", "Error": {"ErrorMessage": text, "ErrorType": "E"}},
    ]
    made = client.checkpoint_durable_execution(DurableExecutionArn=arn, CheckpointToken=world.token(taken), Updates=updates)
    state = client.get_durable_execution_state(DurableExecutionArn=arn, CheckpointToken=made["CheckpointToken"])["Operations"]
    assert state[1]["StepDetails"]["Result"] == text
    assert state[2]["StepDetails"]["Error"]["ErrorMessage"] == text
    events = client.get_durable_execution_history(DurableExecutionArn=arn)["Events"]
    assert events[2]["StepSucceededDetails"]["Result"]["Payload"] == text


def test_checkpoint_of_what_is_no_text_is_refused_for_good(world: World, client: Any) -> None:
    """Half of a pair of surrogates is no character."""
    world.serve()
    arn, taken = world.begin(), world.take()
    update = {"Id": "a", "Type": "STEP", "Action": "FAIL", "Error": {"ErrorMessage": "\ud800"}}
    with pytest.raises(client.exceptions.InvalidParameterValueException, match="Nothing was recorded"):
        client.checkpoint_durable_execution(DurableExecutionArn=arn, CheckpointToken=world.token(taken), Updates=[update])


def test_checkpoint_of_large_payloads(world: World, client: Any) -> None:
    world.serve()
    arn, taken = world.begin(), world.take()
    world.answer(taken, InvocationStatus.FAILED)
    arn, taken = world.begin(), world.take()
    updates = [
        {"Id": "a", "Type": "STEP", "Action": "START"},
        {"Id": "a", "Type": "STEP", "Action": "SUCCEED", "Payload": "x" * (8 << 20)},
    ]
    client.checkpoint_durable_execution(DurableExecutionArn=arn, CheckpointToken=world.token(taken), Updates=updates)
    assert len(world.state(arn).operations["a"].payload or "") == 8 << 20
    with pytest.raises(client.exceptions.InvalidParameterValueException, match="larger than 32 MiB"):
        client.checkpoint_durable_execution(
            DurableExecutionArn=arn, CheckpointToken="x", Updates=[{**updates[1], "Payload": "x" * (33 << 20)}]
        )


def test_state_comes_in_pages(world: World, client: Any) -> None:
    world.serve()
    arn, taken = world.begin(), world.take()
    answer = world.send(taken, *(step(f"s{number}") for number in range(5)))
    read = {"DurableExecutionArn": arn, "CheckpointToken": answer.checkpoint_token}
    pages = client.get_paginator("get_durable_execution_state").paginate(**read, MaxItems=2)
    found = [[operation["Id"] for operation in page["Operations"]] for page in pages]
    assert [len(page) for page in found] == [2, 2, 2]
    assert [one for page in found for one in page][1:] == [f"s{number}" for number in range(5)]
    assert len(client.get_durable_execution_state(**read, MaxItems=0)["Operations"]) == 6
    with pytest.raises(client.exceptions.InvalidParameterValueException, match="Invalid checkpoint token"):
        client.get_durable_execution_state(**{**read, "CheckpointToken": world.token(taken)})
    with pytest.raises(client.exceptions.InvalidParameterValueException, match="marker"):
        client.get_durable_execution_state(**read, Marker="nonsense")


# -------------------------------------------------------------------------------------------------------------- from the outside


def test_an_execution_is_described(world: World, client: Any) -> None:
    world.serve()
    arn = world.begin(name="order-7", input='"in"', timeout_s=60)
    running = client.get_durable_execution(DurableExecutionArn=arn)
    assert (running["Status"], running["InputPayload"], running["DurableConfig"]) == ("RUNNING", '"in"', {"ExecutionTimeout": 60})
    assert running["ExpectedExecutionTimeoutTimestamp"] - running["StartTimestamp"] == timedelta(seconds=60)
    world.answer(world.take(), result='"out"')
    told = client.get_durable_execution(DurableExecutionArn=arn)
    assert (told["DurableExecutionArn"], told["DurableExecutionName"], told["Status"]) == (arn, "order-7", "SUCCEEDED")
    assert (told["Result"], told["ExecutionDataIncluded"]) == ('"out"', True)
    assert told["FunctionArn"] == arn.partition("/")[0] and told["EndTimestamp"] >= told["StartTimestamp"]
    bare = client.get_durable_execution(DurableExecutionArn=arn, IncludeExecutionData=False)
    assert bare["ExecutionDataIncluded"] is False and not {"InputPayload", "Result"} & set(bare)


def test_a_history_comes_in_pages_and_backwards(world: World, client: Any) -> None:
    world.serve()
    arn, taken = world.begin(input="1"), world.take()
    world.send(taken, step("a"), callback("c"))
    world.answer(taken, InvocationStatus.PENDING)
    whole = client.get_durable_execution_history(DurableExecutionArn=arn)["Events"]
    kinds = ["ExecutionStarted", "StepStarted", "CallbackStarted", "InvocationCompleted"]
    assert [event["EventType"] for event in whole] == kinds
    assert whole[0]["ExecutionStartedDetails"]["Input"] == {"Payload": "1"}
    pages = client.get_paginator("get_durable_execution_history").paginate(
        DurableExecutionArn=arn, ReverseOrder=True, PaginationConfig={"PageSize": 3}
    )
    assert [event["EventId"] for page in pages for event in page["Events"]] == [4, 3, 2, 1]
    bare = client.get_durable_execution_history(DurableExecutionArn=arn, IncludeExecutionData=False)["Events"]
    assert bare[0]["ExecutionStartedDetails"]["Input"] == {"Truncated": True}


def test_executions_of_a_function_are_listed(world: World, client: Any) -> None:
    world.serve("main", "other")
    for number in range(5):
        world.begin(name=f"n{number}")
        world.advance(10)
    client.stop_durable_execution(DurableExecutionArn=world.begin(name="stopped"))

    def names(**query: Any) -> list[str]:
        pages = client.get_paginator("list_durable_executions_by_function").paginate(
            FunctionName="main", PaginationConfig={"PageSize": 2}, **query
        )
        return [one["DurableExecutionName"] for page in pages for one in page["DurableExecutions"]]

    assert names() == ["stopped", "n4", "n3", "n2", "n1", "n0"]
    assert names(ReverseOrder=True, Statuses=["RUNNING", "PAUSED"]) == ["n0", "n1", "n2", "n3", "n4"]
    assert names(Statuses=["STOPPED"]) == ["stopped"]
    assert names(DurableExecutionName="n3") == ["n3"]
    at = client.list_durable_executions_by_function(FunctionName="main", DurableExecutionName="n3")
    started = at["DurableExecutions"][0]["StartTimestamp"].astimezone(UTC)
    assert names(StartedAfter=started - timedelta(seconds=5)) == ["stopped", "n4", "n3"]
    assert names(StartedBefore=started + timedelta(seconds=5)) == ["n3", "n2", "n1", "n0"]
    assert client.list_durable_executions_by_function(FunctionName="other")["DurableExecutions"] == []
    with pytest.raises(client.exceptions.ResourceNotFoundException):
        client.list_durable_executions_by_function(FunctionName="nobody")
    for wrong in ({"Statuses": ["SLEEPING"]}, {"MaxItems": 1001}, {"Marker": "nonsense"}):
        with pytest.raises(client.exceptions.InvalidParameterValueException):
            client.list_durable_executions_by_function(FunctionName="main", **wrong)


def test_an_execution_is_stopped(world: World, client: Any) -> None:
    world.serve()
    arn = world.begin()
    error = {"ErrorType": "Enough", "ErrorMessage": "we have", "StackTrace": ["a"]}
    at = client.stop_durable_execution(DurableExecutionArn=arn, Error=error)["StopTimestamp"]
    told = client.get_durable_execution(DurableExecutionArn=arn)
    assert (told["Status"], told["Error"], told["EndTimestamp"]) == ("STOPPED", error, at)
    assert client.stop_durable_execution(DurableExecutionArn=arn)["StopTimestamp"] == at, "its answer may have been lost"
    ended = world.begin()
    world.answer(world.take())
    with pytest.raises(client.exceptions.ResourceConflictException):
        client.stop_durable_execution(DurableExecutionArn=ended)


def test_an_execution_is_paused_and_resumed(world: World, client: Any) -> None:
    world.serve()
    arn = world.begin(timeout_s=60)
    answer = client.pause_durable_execution(DurableExecutionArn=arn, Reason="a look", ExecutionTimeoutPaused=False)
    assert answer["ResponseMetadata"]["HTTPStatusCode"] == 202
    told = client.get_durable_execution(DurableExecutionArn=arn)
    assert (told["Status"], told["PauseDetails"]["Reason"]) == ("PAUSED", "a look")
    assert told["PauseDetails"]["ExecutionTimeoutPaused"] is False
    assert client.resume_durable_execution(DurableExecutionArn=arn)["ResponseMetadata"]["HTTPStatusCode"] == 202
    assert client.get_durable_execution(DurableExecutionArn=arn)["Status"] == "RUNNING"
    client.pause_durable_execution(DurableExecutionArn=arn)
    assert client.get_durable_execution(DurableExecutionArn=arn)["PauseDetails"]["ExecutionTimeoutPaused"] is True
    client.stop_durable_execution(DurableExecutionArn=arn)
    for call in (client.pause_durable_execution, client.resume_durable_execution):
        with pytest.raises(client.exceptions.ResourceConflictException):
            call(DurableExecutionArn=arn)


def test_an_execution_is_deleted(world: World, client: Any) -> None:
    world.serve()
    arn = world.begin()
    with pytest.raises(client.exceptions.ResourceConflictException):
        client.delete_durable_execution(DurableExecutionArn=arn)
    world.answer(world.take())
    answer = client.delete_durable_execution(DurableExecutionArn=arn)
    assert answer["ResponseMetadata"]["HTTPStatusCode"] == 202 and answer["DeletionRequestTimestamp"]
    with pytest.raises(client.exceptions.ResourceNotFoundException):
        client.get_durable_execution(DurableExecutionArn=arn)


@pytest.mark.parametrize(("arn", "exception"), [(NOBODY, "ResourceNotFoundException"), ("x", "InvalidParameterValueException")])
def test_executions_that_are_none(client: Any, arn: str, exception: str) -> None:
    calls: list[tuple[str, dict[str, Any]]] = [
        ("get_durable_execution", {}),
        ("get_durable_execution_history", {}),
        ("stop_durable_execution", {}),
        ("pause_durable_execution", {}),
        ("resume_durable_execution", {}),
        ("delete_durable_execution", {}),
        ("checkpoint_durable_execution", {"CheckpointToken": "x"}),
        ("get_durable_execution_state", {"CheckpointToken": "x"}),
    ]
    for operation, given in calls:
        with pytest.raises(getattr(client.exceptions, exception)) as caught:
            getattr(client, operation)(DurableExecutionArn=arn, **given)
        metadata = caught.value.response["ResponseMetadata"]
        assert metadata["RequestId"] == metadata["HTTPHeaders"]["perdure-request-id"], operation


# --------------------------------------------------------------------------------------------------------------------- callbacks


def test_a_callback_succeeds(world: World, client: Any) -> None:
    callback_id = waiting(world)
    client.send_durable_execution_callback_success(CallbackId=callback_id, Result=b'{"approved": true}')
    taken = world.take()
    operation = world.state(taken.arn).operations["c"]
    assert (operation.status.value, operation.payload) == ("SUCCEEDED", '{"approved": true}')
    for call in ("success", "failure", "heartbeat"):
        with pytest.raises(client.exceptions.CallbackTimeoutException):
            getattr(client, f"send_durable_execution_callback_{call}")(CallbackId=callback_id)


def test_a_callback_succeeds_with_any_text(world: World, client: Any) -> None:
    client.send_durable_execution_callback_success(CallbackId=waiting(world), Result="a\0b\U0001f600".encode())
    assert world.state(world.take().arn).operations["c"].payload == "a\0b\U0001f600"


def test_a_callback_succeeds_with_nothing(world: World, client: Any) -> None:
    client.send_durable_execution_callback_success(CallbackId=waiting(world))
    assert world.state(world.take().arn).operations["c"].payload is None


def test_a_callback_fails(world: World, client: Any) -> None:
    error = {"ErrorType": "Denied", "ErrorMessage": "no", "ErrorData": "x"}
    client.send_durable_execution_callback_failure(CallbackId=waiting(world), Error=error)
    operation = world.state(world.take().arn).operations["c"]
    assert operation.status.value == "FAILED" and operation.error is not None
    assert operation.error.wire() == error


def test_a_callback_is_kept_by_heartbeats(world: World, client: Any) -> None:
    callback_id = waiting(world)
    for _ in range(3):
        world.advance(800)
        client.send_durable_execution_callback_heartbeat(CallbackId=callback_id)
    world.advance(1100)
    with pytest.raises(client.exceptions.CallbackTimeoutException):
        client.send_durable_execution_callback_heartbeat(CallbackId=callback_id)


def test_callbacks_that_are_none(world: World, client: Any) -> None:
    real = waiting(world)
    for callback_id in ("bm90aGluZw==", "not base64!", "a/b+c==", real[:-4] + "AAA="):
        with pytest.raises(client.exceptions.ResourceNotFoundException):
            client.send_durable_execution_callback_success(CallbackId=callback_id)
    with pytest.raises(client.exceptions.InvalidParameterValueException):
        client.send_durable_execution_callback_success(CallbackId=real, Result=b"\xff")


# ---------------------------------------------------------------------------------------------------------------- Step Functions


def test_a_task_token_completes_a_callback(world: World, tasks: Any) -> None:
    token = waiting(world)
    tasks.send_task_heartbeat(taskToken=token)
    tasks.send_task_success(taskToken=token, output='{"approved": true}')
    assert world.state(world.take().arn).operations["c"].payload == '{"approved": true}'
    for call in (
        lambda: tasks.send_task_success(taskToken=token, output="1"),
        lambda: tasks.send_task_failure(taskToken=token),
        lambda: tasks.send_task_heartbeat(taskToken=token),
    ):
        with pytest.raises(tasks.exceptions.TaskTimedOut):
            call()


def test_a_task_token_fails_a_callback(world: World, tasks: Any) -> None:
    tasks.send_task_failure(taskToken=waiting(world), error="Denied", cause="no")
    operation = world.state(world.take().arn).operations["c"]
    assert operation.error == ErrorObject(error_type="Denied", error_message="no")


def test_a_task_token_that_is_none(world: World, tasks: Any) -> None:
    token = waiting(world)
    with pytest.raises(tasks.exceptions.InvalidToken):
        tasks.send_task_success(taskToken="nonsense", output="1")
    with pytest.raises(tasks.exceptions.InvalidOutput):
        tasks.send_task_success(taskToken=token, output="{")
    world.forget()
    with pytest.raises(tasks.exceptions.TaskDoesNotExist):
        tasks.send_task_success(taskToken=token, output="1")
    with pytest.raises(ClientError, match="ValidationException"):
        tasks.send_task_failure(taskToken="x", error="x" * 300)


def test_operations_of_step_functions_that_are_not_served_say_so(tasks: Any) -> None:
    with pytest.raises(ClientError, match="UnknownOperationException"):
        tasks.list_state_machines()
