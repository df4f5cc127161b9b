"""The wire: what is accepted, what is refused and in which words, and how names and errors are written."""

from __future__ import annotations

import json
import re
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

import pytest
from botocore.loaders import Loader
from hypothesis import given
from hypothesis import strategies as st

from perdure.core.errors import (
    AlreadyExists,
    Busy,
    CallbackClosed,
    Conflict,
    ExecutionEnded,
    Forbidden,
    InvalidRequest,
    NotFound,
    PayloadTooLarge,
    PerdureError,
    QuotaExceeded,
    RateLimited,
    StaleCheckpoint,
    error_classes,
)
from perdure.runs import protocol
from perdure.runs.protocol import (
    Action,
    CallbackName,
    CheckpointRequest,
    CheckpointToken,
    Details,
    ErrorObject,
    EventType,
    ExecutionArn,
    ExecutionStatus,
    FunctionRef,
    InvocationOutput,
    Operation,
    OperationStatus,
    OperationType,
    PauseRequest,
    Unit,
    fault_body,
    fault_of,
    parse,
    parse_arn,
    parse_callback_id,
    parse_function,
    parse_marker,
    parse_token,
    stale_token,
)

MODEL: dict[str, Any] = Loader().load_service_model("lambda", "service-2")
SHAPES: dict[str, Any] = MODEL["shapes"]


# --------------------------------------------------------------------------------------------------------------- against botocore


@pytest.mark.parametrize(
    ("shape", "enum"),
    [
        ("OperationType", OperationType),
        ("OperationAction", Action),
        ("OperationStatus", OperationStatus),
        ("ExecutionStatus", ExecutionStatus),
        ("EventType", EventType),
    ],
)
def test_enums_are_those_of_the_model(shape: str, enum: Any) -> None:
    assert {member.value for member in enum} == set(SHAPES[shape]["enum"])


def test_what_is_written_has_only_members_that_the_model_has() -> None:
    bodies = {
        "Operation": protocol.Operation,
        "OperationUpdate": protocol.OperationUpdate,
        "CheckpointDurableExecutionResponse": protocol.CheckpointAnswer,
        "GetDurableExecutionStateResponse": protocol.OperationPage,
        "GetDurableExecutionResponse": protocol.ExecutionInfo,
        "Execution": protocol.ExecutionSummary,
        "ListDurableExecutionsByFunctionResponse": protocol.ExecutionPage,
        "StopDurableExecutionResponse": protocol.StopAnswer,
        "DeleteDurableExecutionResponse": protocol.DeleteAnswer,
        "ErrorObject": protocol.ErrorObject,
        "PauseDetails": protocol.PauseDetails,
        "DurableConfig": protocol.DurableConfig,
    }
    details = ["Execution", "Context", "Step", "Wait", "Callback", "ChainedInvoke"]
    bodies |= {f"{name}Details": getattr(protocol, f"{name}Details") for name in details}
    options = ["Context", "Step", "Wait", "Callback", "ChainedInvoke"]
    bodies |= {f"{name}Options": getattr(protocol, f"{name}Options") for name in options}
    for shape, body in bodies.items():
        known = set(SHAPES[shape]["members"])
        required = set(SHAPES[shape].get("required", ()))
        ours = {field.alias for field in body.model_fields.values()}
        assert ours <= known and required <= ours, shape


def test_event_details_have_only_members_that_some_event_has() -> None:
    known = {member for event in EventType for member in SHAPES[f"{event.value}Details"]["members"]}
    assert {field.alias for field in Details.model_fields.values()} == known


# ----------------------------------------------------------------------------------------------------------------------- requests


def body(**update: Any) -> bytes:
    base = {"Id": "a", "Type": "STEP", "Action": "START"}
    return json.dumps({"CheckpointToken": "YQ==", "Updates": [{**base, **update}]}).encode()


def test_unknown_members_are_ignored_and_empty_ones_are_absent() -> None:
    request = parse(CheckpointRequest, body(ParentId="", SubType=None, NewThing={"x": 1}))
    assert request.updates is not None
    update = request.updates[0]
    assert (update.parent_id, update.sub_type, update.payload) == (None, None, None)
    assert parse(CheckpointRequest, b'{"CheckpointToken": "YQ=="}').updates is None


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        (b"", "CheckpointToken: Field required"),
        (b"[]", "the body"),
        (b"{", "the body: Invalid JSON"),
        (b"\xff\xfe", "the body"),
        (body(Type="SAGA"), "Updates.0.Type"),
        (body(Action="UNDO"), "Updates.0.Action"),
        (body(Id=""), "Updates.0.Id"),
        (body(Id="x" * 65), "Updates.0.Id"),
        (body(Id="a b"), "Updates.0.Id"),
        (body(Id="a\n"), "Updates.0.Id"),
        (body(Name="n" * 257), "Updates.0.Name"),
        (body(Name="näme"), "Updates.0.Name"),
        (body(SubType="s" * 33), "Updates.0.SubType"),
        (body(Payload=7), "Updates.0.Payload"),
        (body(WaitOptions={"WaitSeconds": 0}), "Updates.0.WaitOptions.WaitSeconds"),
        (body(WaitOptions={"WaitSeconds": 31_622_401}), "Updates.0.WaitOptions.WaitSeconds"),
        (body(StepOptions={"NextAttemptDelaySeconds": 0}), "Updates.0.StepOptions.NextAttemptDelaySeconds"),
        (body(CallbackOptions={"TimeoutSeconds": -1}), "Updates.0.CallbackOptions.TimeoutSeconds"),
        (body(CallbackOptions={"HeartbeatTimeoutSeconds": 10**8}), "Updates.0.CallbackOptions.HeartbeatTimeoutSeconds"),
        (body(ChainedInvokeOptions={}), "Updates.0.ChainedInvokeOptions.FunctionName"),
        (body(ChainedInvokeOptions={"FunctionName": "a/b"}), "Updates.0.ChainedInvokeOptions.FunctionName"),
        (body(ChainedInvokeOptions={"FunctionName": "f", "TenantId": ""}), "Updates.0.ChainedInvokeOptions.TenantId"),
    ],
)
def test_a_bad_request_names_its_first_wrong_member(raw: bytes, says: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse(CheckpointRequest, raw)
    assert caught.value.message.startswith(says) and caught.value.message.endswith(".")


@given(st.binary(max_size=200))
def test_no_bytes_do_anything_but_parse_or_be_refused(raw: bytes) -> None:
    for model in (CheckpointRequest, InvocationOutput, ErrorObject, PauseRequest):
        with suppress(InvalidRequest):
            parse(model, raw)


@pytest.mark.parametrize(
    "output",
    [
        {},
        {"Status": "DONE"},
        {"Status": "RETRY"},
        {"Status": "FAILED", "Result": "1"},
        {"Status": "SUCCEEDED", "Error": {"ErrorType": "x"}},
        {"Status": "SUCCEEDED", "Result": {"not": "text"}},
    ],
)
def test_what_is_not_an_answer_is_refused(output: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest):
        parse(InvocationOutput, json.dumps(output).encode())


def test_an_error_object_may_be_empty_and_is_written_without_what_is_not_there() -> None:
    assert parse(ErrorObject, b"") == ErrorObject() == parse(ErrorObject, b'{"ErrorType": null}')
    assert ErrorObject().wire() == {}
    assert ErrorObject(error_type="x", stack_trace=("a", "b")).wire() == {"ErrorType": "x", "StackTrace": ["a", "b"]}


def test_instants_are_milliseconds_for_functions_and_seconds_for_clients() -> None:
    at = datetime(2026, 3, 1, 12, 0, 0, 123_456, tzinfo=UTC)
    operation = Operation(id="a", type=OperationType.WAIT, status=OperationStatus.STARTED, start_timestamp=at)
    assert operation.wire(Unit.MILLISECONDS)["StartTimestamp"] == 1_772_366_400_123
    assert operation.wire(Unit.SECONDS)["StartTimestamp"] == pytest.approx(1_772_366_400.123456)


# -------------------------------------------------------------------------------------------------------------------------- names


def test_arns_are_of_the_form_that_clients_check() -> None:
    arn = ExecutionArn("eu-west-1", "000000000001", "my-function", "order-17", "exe_01abc")
    text = str(arn)
    assert re.fullmatch(SHAPES["DurableExecutionArn"]["pattern"], text)
    assert re.fullmatch(SHAPES["NameSpacedFunctionArn"]["pattern"], arn.function_arn)
    assert parse_arn(text) == arn


@pytest.mark.parametrize(
    "text", ["", "arn:aws:lambda", "arn:aws:lambda:r:1:function:f:$LATEST/durable-execution/n/i", "x" * 2000]
)
def test_other_texts_are_no_arns(text: str) -> None:
    with pytest.raises(InvalidRequest):
        parse_arn(text)


@pytest.mark.parametrize(
    ("text", "qualifier"),
    [
        ("pay", None),
        ("pay:7", "7"),
        ("pay:$LATEST", "$LATEST"),
        ("pay:$LATEST.PUBLISHED", "$LATEST.PUBLISHED"),
        ("000000000000:function:pay", None),
        ("000000000000:function:pay:live", "live"),
        ("arn:aws:lambda:eu-west-1:000000000000:function:pay", None),
        ("arn:aws:lambda:eu-west-1:000000000000:function:pay:live", "live"),
    ],
)
def test_functions_are_read_from_names_and_arns(text: str, qualifier: str | None) -> None:
    assert re.fullmatch(SHAPES["NamespacedFunctionName"]["pattern"], text), "what AWS's clients let through"
    assert parse_function(text) == FunctionRef("pay", qualifier)


@pytest.mark.parametrize(
    "text", ["", "pay:", "a/b", "pay\n", "with.dot", "x" * 65, "arn:aws:s3:::pay", "arn:aws:lambda:eu-west-1:1:function:pay"]
)
def test_other_texts_are_no_functions(text: str) -> None:
    with pytest.raises(InvalidRequest):
        parse_function(text)


@given(st.from_regex(r"\A[a-zA-Z0-9_-]{1,64}\Z"), st.integers(0, 10**9), st.integers(0, 10**9))
def test_tokens_and_callback_ids_come_back_as_they_were(name: str, invocation: int, number: int) -> None:
    token, callback = CheckpointToken(name, invocation, number), CallbackName(name, name, "f00")
    assert parse_token(str(token)) == token and parse_callback_id(str(callback)) == callback
    for text, shape in ((str(token), "CheckpointToken"), (str(callback), "CallbackId")):
        assert re.fullmatch(SHAPES[shape]["pattern"], text) and len(text) <= SHAPES[shape]["max"]


@given(st.text(max_size=50))
def test_no_text_is_taken_for_a_name_that_it_is_not(text: str) -> None:
    with pytest.raises(StaleCheckpoint, match=r"^Invalid checkpoint token"):
        parse_token(text)
    with pytest.raises(NotFound):
        parse_callback_id(text)


@pytest.mark.parametrize("marker", ["-1", "x", "１", "1.0", "9" * 20])
def test_other_markers_are_refused(marker: str) -> None:
    with pytest.raises(InvalidRequest):
        parse_marker(marker)


def test_markers_may_be_absent() -> None:
    assert (parse_marker(None), parse_marker(""), parse_marker("17")) == (0, 0, 17)


# ------------------------------------------------------------------------------------------------------------------------- faults

SAMPLES: dict[str, PerdureError] = {
    "InvalidParameterValueException": InvalidRequest("no"),
    "ResourceNotFoundException": NotFound("no"),
    "ResourceConflictException": ExecutionEnded("no"),
    "TooManyRequestsException": RateLimited("no"),
    "ServiceException": Busy("no"),
    "CallbackTimeoutException": CallbackClosed("no"),
    "DurableExecutionAlreadyStartedException": AlreadyExists("no"),
}


@pytest.mark.parametrize(("name", "error"), SAMPLES.items(), ids=list(SAMPLES))
def test_faults_are_the_exceptions_that_boto3_knows(name: str, error: PerdureError) -> None:
    fault = fault_of(error)
    shape = SHAPES[name]
    assert (fault.name, fault.status) == (name, shape["error"]["httpStatusCode"])
    assert set(fault_body(error)) <= set(shape["members"]) and fault_body(error)[fault.message_key].startswith("no")


@pytest.mark.parametrize("kind", error_classes().values(), ids=lambda kind: kind.__name__)
def test_whatever_may_pass_by_itself_never_ends_an_execution(kind: type[PerdureError]) -> None:
    """The SDKs fail the whole execution for any 4xx but 429 and an invalid token (durable: rule 9, fault 5)."""
    error = kind("no")
    fault = fault_of(error)
    if error.retryable or fault.name == "ServiceException":
        assert fault.status == 429 or fault.status >= 500
    if fault.status == 409 or isinstance(error, InvalidRequest | Conflict | Forbidden | PayloadTooLarge):
        assert not error.retryable
    assert (fault.name == "InvalidParameterValueException" and fault.status == 400) == isinstance(
        error, InvalidRequest | StaleCheckpoint
    )
    assert isinstance(error, QuotaExceeded | RateLimited) == (fault.status == 429)


def test_stale_tokens_have_the_words_that_sdks_look_for() -> None:
    error = stale_token("its invocation is over")
    assert fault_body(error)["message"].startswith("Invalid checkpoint token")
