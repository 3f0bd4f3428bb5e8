"""What is let in of new tasks: rates of tenants, and bounds of what waits."""

from __future__ import annotations

from typing import Any

import pytest

from scheduler.core import admission
from scheduler.core.admission import BURST_S, Admission, AdmissionSettings, SubmitRates
from scheduler.core.policies import Policies
from schemas.messages import Outcome, QueuePolicy, Status, Task, TaskSpec, TenantPolicy

SECOND = 1_000_000
TENANT = TenantPolicy(tenant_id="t", set_at=0)


def spec(**fields: Any) -> TaskSpec:
    given: dict[str, Any] = {"task_type": "a", "tenant_id": "t", **fields}
    return TaskSpec(**given)


def waiting(**fields: Any) -> Task:
    return Task(task_id="x", spec=spec(**fields), status=Status.PENDING, version=1, created_at=0, updated_at=0)


def admitted(rates: SubmitRates, tenant: TenantPolicy, now: int, tries: int) -> int:
    return sum(rates.refusal(tenant, now) is None for _ in range(tries))


def test_without_a_word_nothing_is_bounded() -> None:
    assert admitted(SubmitRates(AdmissionSettings()), TENANT, 0, 1_000) == 1_000


@pytest.mark.parametrize(("parts", "burst"), [(1, 800), (8, 133)])
def test_a_tenant_may_submit_at_its_rate_and_ten_seconds_worth_at_once(parts: int, burst: int) -> None:
    """A part may take more at once than its share of the burst, by what chance may give it."""
    rates = SubmitRates(AdmissionSettings(tenant_submits_per_s=80), parts)
    assert admitted(rates, TENANT, 0, 10_000) == burst
    taken = sum(admitted(rates, TENANT, tenth * SECOND // 10, 100) for tenth in range(1, 101))
    assert taken == 10 * 80 // parts, "in ten seconds what comes in ten seconds"


def test_what_is_refused_costs_nothing_and_others_do_not_pay() -> None:
    rates = SubmitRates(AdmissionSettings(tenant_submits_per_s=10))
    admitted(rates, TENANT, 0, 100_000)
    assert rates.refusal(TENANT, SECOND) is None
    assert rates.refusal(TenantPolicy(tenant_id="other", set_at=0), 0) is None


def test_what_an_operator_says_of_a_tenant_goes_before_the_settings() -> None:
    rates = SubmitRates(AdmissionSettings(tenant_submits_per_s=10))
    generous = TenantPolicy(tenant_id="t", set_at=0, submits_per_s=20)
    assert admitted(rates, generous, 0, 10_000) == 20 * BURST_S
    refused = rates.refusal(generous, 0)
    assert refused is not None
    assert refused == (Outcome.TOO_MANY, "tenant t submits more than 20 tasks/s, and 200 at once")


def test_a_rate_below_its_parts_still_lets_something_in() -> None:
    rates = SubmitRates(AdmissionSettings(tenant_submits_per_s=1), parts=64)
    assert admitted(rates, TENANT, 0, 10) == 3
    taken = sum(admitted(rates, TENANT, second * SECOND, 1) for second in range(1, 641))
    assert taken == 10


def test_what_waited_for_a_scheduler_was_not_submitted_in_a_burst() -> None:
    """A minute of a tenant's records is decided at once: they count by when they were submitted."""
    rates = SubmitRates(AdmissionSettings(tenant_submits_per_s=100), parts=1)
    assert all(rates.refusal(TENANT, number * SECOND // 50) is None for number in range(3_000))


def test_who_names_no_tenant_is_not_held_to_what_a_tenant_may() -> None:
    rates = SubmitRates(AdmissionSettings(tenant_submits_per_s=1))
    assert admitted(rates, TenantPolicy(tenant_id="default", set_at=0), 0, 1_000) == 1_000
    assert admitted(rates, TenantPolicy(tenant_id="default", set_at=0, submits_per_s=2), 0, 1_000) == 20


def test_a_clock_that_goes_back_gives_and_takes_nothing() -> None:
    rates = SubmitRates(AdmissionSettings(tenant_submits_per_s=1))
    assert admitted(rates, TENANT, 100 * SECOND, 20) == 10
    assert admitted(rates, TENANT, 0, 20) == 0
    assert admitted(rates, TENANT, SECOND, 20) == 1


def test_of_tenants_that_come_and_go_nothing_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "TENANTS_MAX", 50)
    rates = SubmitRates(AdmissionSettings(tenant_submits_per_s=1))
    for number in range(1_000):
        rates.refusal(TenantPolicy(tenant_id=f"t{number}", set_at=0), number * SECOND)
    assert len(rates._buckets) <= 50


def test_a_queue_takes_no_more_than_its_bound_until_some_have_started() -> None:
    admits = Admission(AdmissionSettings(queue_pending_max=400), Policies(), shards=4)
    for _ in range(100 + 3 * 10 + 3):  # its part, and what chance may give it
        assert admits.refusal(spec(), 0) is None
        admits.enters(waiting())
    refused = admits.refusal(spec(), 0)
    assert refused == (Outcome.OVERLOADED, "queue default has its bound of 400 waiting tasks")
    assert admits.refusal(spec(queue="other"), 0) is None
    admits.leaves(waiting())
    assert admits.refusal(spec(), 0) is None


def test_a_tenant_may_have_its_bound_waiting_in_all_queues_together() -> None:
    policies = Policies()
    policies.put(TenantPolicy(tenant_id="t", set_at=0, pending_max=2))
    admits = Admission(AdmissionSettings(), policies, shards=1)
    for queue in "ab":
        admits.enters(waiting(queue=queue))
    refused = admits.refusal(spec(queue="c"), 0)
    assert refused == (Outcome.TOO_MANY, "tenant t has its bound of 2 waiting tasks")
    assert admits.refusal(spec(queue="a", tenant_id="other"), 0) is None


def test_a_bound_that_is_changed_holds_at_once() -> None:
    policies = Policies()
    admits = Admission(AdmissionSettings(queue_pending_max=1), policies, shards=1)
    admits.enters(waiting())
    assert admits.refusal(spec(), 0) is not None
    policies.put(QueuePolicy(queue="default", set_at=0, pending_max=5))
    assert admits.refusal(spec(), 0) is None


def test_nothing_is_left_of_what_has_started() -> None:
    admits = Admission(AdmissionSettings(), Policies(), shards=1)
    admits.enters(waiting())
    assert admits.pending() == 1
    admits.leaves(waiting())
    assert admits.pending() == 0
    assert not admits._of_queue
    assert not admits._of_tenant


def test_where_queues_must_be_known_a_word_makes_one_so() -> None:
    policies = Policies()
    admits = Admission(AdmissionSettings(takes_any_queue=False), policies, shards=1)
    refused = admits.refusal(spec(queue="mial"), 0)
    assert refused == (Outcome.INVALID, "queue mial is not known: tidewheel queues set makes it so")
    policies.put(QueuePolicy(queue="mail", set_at=1))
    assert admits.refusal(spec(queue="mail"), 0) is None


def test_a_drained_queue_takes_nothing() -> None:
    policies = Policies()
    policies.put(QueuePolicy(queue="default", set_at=1, is_drained=True))
    refused = Admission(AdmissionSettings(), policies, shards=1).refusal(spec(), 0)
    assert refused is not None
    assert refused.outcome is Outcome.OVERLOADED
