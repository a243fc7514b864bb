"""What schemathesis makes of /openapi.json, good and bad, for every operation: no answer is an error of ours."""

import contextlib
from collections.abc import Callable

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode

from tests.attack.conftest import SCALE

NUM_EXAMPLES = 30 * SCALE  # of each operation, good and bad ones each
LIMIT_S = 10.0  # for one answer
CHECKS = ("status_code_conformance", "content_type_conformance", "response_schema_conformance")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_what_fits_the_description_and_what_does_not_is_answered_as_it_says(target) -> None:
    schema = schemathesis.openapi.from_dict(target.server.client.get("/openapi.json").json())
    checks = [check for check in schemathesis.checks.CHECKS.get_all() if check.__name__ in CHECKS]
    assert len(checks) == len(CHECKS)
    before = target.footprint()
    with target.watch(), requests.Session() as session:

        def send(kind: str, case: schemathesis.Case) -> None:
            response = case.call(base_url=target.server.url, session=session, timeout=LIMIT_S)
            target.statuses[kind, response.status_code] += 1
            assert response.status_code < 500, response.content
            case.validate_response(response, checks=checks)

        for result in schema.get_all_operations():
            for mode in GenerationMode:
                attack(result.ok(), mode, send)
    target.check_unchanged(before)


def attack(
    operation: schemathesis.APIOperation, mode: GenerationMode, send: Callable[[str, schemathesis.Case], None]
) -> None:
    """Send what is drawn for one operation; one without parameters has nothing that could be wrong."""

    @seed(7)
    @settings(
        max_examples=NUM_EXAMPLES, deadline=None, database=None, suppress_health_check=[*HealthCheck],
        phases=[Phase.explicit, Phase.generate],
    )  # fmt: skip
    @given(case=operation.as_strategy(mode))
    def run(case: schemathesis.Case) -> None:
        if isinstance(case.body, dict) and mode is GenerationMode.POSITIVE:
            case.body.pop("model", None)  # no other than the one that is served goes further than a 404
        send(f"{operation.method.upper()} {operation.path} {mode.value}", case)

    with contextlib.suppress(Unsatisfiable):
        run()
