"""The life of a workflow: what is decided of requests about it, and the fold of its events. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec.structs import replace

from scheduler.core import graph
from scheduler.core.decisions import REASON_MAX, TEXT_MAX, Decision, problem_of
from schemas.ids import NAME_RULE, is_name
from schemas.limits import DURATION_MS_MAX, METADATA_MAX
from schemas.messages import (
    CancelWorkflow,
    Event,
    JoinRule,
    OnFailure,
    Outcome,
    SubmitTask,
    SubmitWorkflow,
    TaskSpec,
    Workflow,
    WorkflowEnded,
    WorkflowNode,
    WorkflowSpec,
    WorkflowStatus,
    WorkflowStopped,
    WorkflowSubmitted,
)

BODIES = (WorkflowSubmitted, WorkflowStopped, WorkflowEnded)
WORKFLOW_ID_RULE = f"{NAME_RULE}, without dots"


def node_id(workflow_id: str, name: str) -> str:
    """The id of the task of a node: it has its workflow's routing key."""
    return f"{workflow_id}.{name}"


def workflow_of(task_id: str) -> str | None:
    """The workflow that a task would be a node of; None: of none, by its id."""
    workflow_id, dot, _ = task_id.partition(".")
    return workflow_id if dot else None


def graph_of(spec: WorkflowSpec) -> list[graph.Node]:
    """The nodes without their tasks."""
    return [graph.Node(node.name, node.needs, node.join, node.at_least) for node in spec.nodes]


def task_spec(workflow: Workflow, node: WorkflowNode) -> TaskSpec:
    """What is asked for of a node."""
    return replace(workflow.spec.specs[node.template], payload=node.payload)


def decide_submit(known: Workflow | None, request: SubmitWorkflow, now: int) -> Decision:
    """Accept a workflow; the first one under an id wins."""
    if known is not None:
        theirs, ours = request.fingerprint, known.fingerprint
        if theirs is not None and ours is not None and theirs != ours:
            return Decision(None, Outcome.CONFLICT, "another workflow with other content has this id")
        return Decision(None, Outcome.DUPLICATE, "this workflow was submitted before")
    if problem := submission_problem(request, now):
        return Decision(None, Outcome.INVALID, problem)
    timeout_ms = request.spec.timeout_ms
    deadline_at = None if timeout_ms is None else now + timeout_ms * 1_000
    body = WorkflowSubmitted(spec=request.spec, deadline_at=deadline_at, fingerprint=request.fingerprint)
    return Decision(body)


def decide_cancel(known: Workflow | None, request: CancelWorkflow) -> Decision:
    """End a workflow that runs."""
    if known is None:
        return Decision(None, Outcome.NOT_FOUND, "no workflow that runs has this id")
    if known.status is not WorkflowStatus.RUNNING:
        if known.status is WorkflowStatus.CANCELLED:
            return Decision(None, Outcome.DUPLICATE, "cancelled before")
        return Decision(None, Outcome.WRONG_STATUS, f"the workflow is {known.status}")
    if known.stopped_as is not None:
        return Decision(None, Outcome.CANCEL_REQUESTED, f"it is ending already: {known.reason}")
    if request.reason is not None and len(request.reason) > REASON_MAX:
        return Decision(None, Outcome.INVALID, f"reason must have at most {REASON_MAX} characters")
    body = WorkflowStopped(status=WorkflowStatus.CANCELLED, reason=request.reason or "its workflow was cancelled")
    return Decision(body, Outcome.CANCEL_REQUESTED)


def submission_problem(request: SubmitWorkflow, now: int) -> str | None:
    """Why a workflow cannot be accepted, naming the field and what is allowed; None: it can.

    The API says the same earlier; this guards against producers that write to the topic.
    """
    spec, workflow_id = request.spec, request.workflow_id
    if not is_name(workflow_id) or "." in workflow_id:
        return f"workflow_id must be {WORKFLOW_ID_RULE}"
    if not 1 <= len(spec.name) <= TEXT_MAX:
        return f"name must have 1 to {TEXT_MAX} characters"
    if spec.timeout_ms is not None and not 1 <= spec.timeout_ms <= DURATION_MS_MAX:
        return f"timeout_ms must be from 1 to {DURATION_MS_MAX}"
    if spec.on_failure is OnFailure.UNKNOWN:
        return "on_failure is not known here"
    if sum(len(key.encode()) + len(value.encode()) for key, value in spec.metadata.items()) > METADATA_MAX:
        return f"metadata must have at most {METADATA_MAX} bytes"
    return _template_problem(request, now) or _node_problem(request) or _graph_problem(spec)


def _template_problem(request: SubmitWorkflow, now: int) -> str | None:
    for number, spec in enumerate(request.spec.specs):
        if spec.tenant_id != request.spec.tenant_id:
            return f"specs[{number}].tenant_id must be that of the workflow"
        if spec.unique is not None or spec.idempotency_key is not None or spec.scheduled_at is not None:
            return f"specs[{number}] must have no unique, idempotency_key and scheduled_at: its workflow has"
        submission = SubmitTask(request_id="", spec=spec, submitted_at=now, task_id=request.workflow_id)
        if problem := problem_of(submission, now):
            return f"specs[{number}].{problem}"
    return None


def _node_problem(request: SubmitWorkflow) -> str | None:
    names: set[str] = set()
    for number, node in enumerate(request.spec.nodes):
        if not is_name(node_id(request.workflow_id, node.name)):
            return f"nodes[{number}].name must be {NAME_RULE}, with the workflow's id and a dot before it"
        if node.name in names:
            return f"nodes[{number}].name {node.name} is there twice"
        names.add(node.name)
        if not 0 <= node.template < len(request.spec.specs):
            return f"nodes[{number}].template must be the number of one of the {len(request.spec.specs)} specs"
        if node.join is JoinRule.UNKNOWN:
            return f"nodes[{number}].join is not known here"
        wrong = [parent for parent in node.needs if not 0 <= parent < len(request.spec.nodes)]
        if wrong or len(set(node.needs)) != len(node.needs):
            return f"nodes[{number}].needs must be numbers of nodes, each once"
    return None


def _graph_problem(spec: WorkflowSpec) -> str | None:
    try:
        graph.check(graph_of(spec))
    except graph.GraphProblem as problem:
        where = "nodes" if problem.node is None else f"nodes[{problem.node}].{problem.field}"
        return f"{where}: {problem}"
    return None


def evolve(workflow: Workflow | None, event: Event, kept_us: Mapping[bool, int]) -> Workflow:
    """The workflow after its next event. `kept_us`: how long an ended one is kept, without and with a fingerprint."""
    match event.body:
        case WorkflowSubmitted() as body:
            return Workflow(
                workflow_id=event.entity_id,
                spec=body.spec,
                status=WorkflowStatus.RUNNING,
                version=event.version,
                created_at=event.at,
                updated_at=event.at,
                deadline_at=body.deadline_at,
                fingerprint=body.fingerprint,
                traceparent=event.traceparent,
            )
        case WorkflowStopped() as body:
            return _changed(workflow, event, stopped_as=body.status, reason=body.reason)
        case WorkflowEnded() as body:
            ended = _changed(workflow, event, status=body.status)
            keep_until = event.at + kept_us[ended.fingerprint is not None]
            return replace(ended, spec=replace(ended.spec, specs=(), nodes=()), keep_until=keep_until)
    raise TypeError(f"{type(event.body).__name__} changes no workflow")


def _changed(workflow: Workflow | None, event: Event, **fields: object) -> Workflow:
    if workflow is None:
        raise TypeError(f"{type(event.body).__name__} for {event.entity_id}, which is not known")
    changed: Workflow = replace(workflow, version=event.version, updated_at=event.at, **fields)
    return changed
