"""Each promise of docs/security.md is kept by a test."""
# ruff: noqa: E501 - a line per promise

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = "docs/security.md"

PROMISES = {
    "By default the service listens only on its own machine": "access/test_tls.py::test_by_default_the_service_listens_on_its_own_machine_alone",
    "To listen on other addresses it needs tokens and certificates": "access/test_tls.py::test_settings_that_would_leave_an_api_open_are_refused",
    # Tokens
    "The file contains only the token's SHA-256": "access/test_tokens.py::test_the_command_prints_a_token_and_keeps_only_its_digest",
    "a new token works without a restart": "access/test_tokens.py::test_a_file_that_changes_is_read_again_and_a_broken_one_leaves_who_was_known",
    "the service logs an error and keeps its present tokens": "access/test_tokens.py::test_a_file_that_cannot_be_read_leaves_who_was_known_and_is_not_logged",
    "| role | permissions |": "access/test_calls.py::test_over_grpc_a_call_is_made_by_its_roles_alone",
    "`peer` | a replica": "access/test_passed_on.py::test_over_http_a_peer_may_no_more_than_its_caller",
    "and the files of the page (`/`, `/docs`, `/page/*`) need no token": "access/test_calls.py::test_over_http_a_call_is_made_by_its_roles_alone",
    "A scraper's token is accepted at `--probe-address`": "api/test_probe_address.py::test_metrics_are_for_the_same_callers_as_at_the_other_address",
    "neither lists nor serves runs that match no pattern": "access/test_calls.py::test_runs_of_others_are_neither_shown_nor_served",
    "no answer, error or metric names them": "access/test_tenants.py::test_no_answer_to_a_tenant_names_anything_of_the_other",
    "names no other callers": "access/test_tenants.py::test_a_scraper_reads_no_name_of_the_other_tenant_in_any_label",
    "What needs no token names no run": "access/test_tenants.py::test_callers_without_a_token_read_no_name",
    "a trainer's token that is limited to rank 3": "access/test_calls.py::test_a_ranks_token_is_for_that_rank",
    "A position is committed when every rank has committed it": "access/test_calls.py::test_ranks_with_tokens_of_their_own_commit_each_for_itself",
    "affect all ranks and are refused": "access/test_calls.py::test_a_ranks_token_neither_commits_nor_resumes_for_others",
    "which the client reads again every few seconds": "access/test_tokens.py::test_a_client_reads_its_token_file_again",
    "`GRISTMILL_CERT_FILE`, `GRISTMILL_KEY_FILE`": "access/test_tls.py::test_clients_show_a_certificate_where_the_service_asks_for_one",
    "a client sends its token only to its own machine": "access/test_plain_text.py::test_a_token_is_not_sent_to_another_machine_in_plain_text",
    "read these variables, too": "access/test_plain_text.py::test_nor_does_a_command",
    "uses a cookie that scripts cannot read": "page/test_sign_in.py::test_a_person_signs_in_with_a_token_and_sees_the_runs",
    # JSON web tokens
    "The service checks its signature, issuer, audience and expiry": "access/test_tokens.py::test_a_token_that_is_not_for_us_is_refused",
    "This requires PyJWT": "access/test_tokens.py::test_web_tokens_without_their_package_are_refused_at_the_start",
    "pass that authority with `--jwks-ca-file`": "access/test_tokens.py::test_keys_at_a_url_are_had_by_the_authority_that_is_configured",
    "The service reads a file again when it changes": "access/test_tokens.py::test_keys_that_cannot_be_read_leave_those_before",
    "While the keys cannot be read, those that it has stay valid": "access/test_tokens.py::test_keys_outlive_their_issuers_garbage_and_one_call_alone_waits_for_it",
    "An expired token is accepted for 10 s more": "access/test_tokens.py::test_a_service_accounts_token_has_its_subjects_roles",
    # Sign-in at a proxy
    "entries under `proxy_users` define the permissions": "access/test_proxy.py::test_whom_the_proxy_names_may_what_the_file_says",
    "The service trusts the header only from `--proxy-addresses`": "access/test_proxy.py::test_the_header_counts_for_nothing_from_other_addresses_or_where_it_is_not_configured",
    "so that no user of the proxy gets the permissions of a token's subject": "access/test_proxy.py::test_a_user_and_a_subject_of_the_same_name_are_apart",
    "a request that contains the header twice": "access/test_proxy.py::test_a_request_that_names_two_users_is_refused",
    # A proxy for untrusted clients
    "It listens on one port for gRPC, the API and the page": "deploy/test_proxy.py::test_a_run_is_filled_and_trained_through_the_proxy",
    "| connections; new ones in 10 s |": "deploy/test_proxy.py::test_an_address_has_a_limit_of_new_connections",
    "| requests in 10 s, then 429": "deploy/test_proxy.py::test_an_address_has_a_limit_of_requests",
    "| requests in progress": "deploy/test_proxy.py::test_an_address_has_a_limit_of_concurrent_requests",
    "| answers of 4xx": "deploy/test_proxy.py::test_wrong_tokens_of_one_address_are_refused_by_the_proxy_and_another_address_goes_on",
    "| time for all headers": "deploy/test_proxy.py::test_slow_headers_and_bodies_never_reach_the_service",
    "| headers | 15 KiB, 64 lines |": "deploy/test_proxy.py::test_headers_have_a_limit",
    "| streams of an HTTP/2 connection": "deploy/test_proxy.py::test_a_connection_has_a_limit_of_streams",
    "It does not forward `/metrics`": "deploy/test_proxy.py::test_no_spelling_reaches_the_metrics_or_other_calls_of_the_inside",
    "Of gRPC it forwards only": "deploy/test_proxy.py::test_grpc_checks_health_and_is_refused_all_else",
    "removes the headers that only replicas": "deploy/test_proxy.py::test_callers_cannot_say_what_only_a_proxy_or_a_replica_may",
    "the proxy opens one for each": "deploy/test_proxy.py::test_each_connection_has_one_of_its_own_to_the_service",
    "401 and 429 are sent as such": "access/test_unknown_callers.py::test_a_refused_token_has_its_status_also_where_errors_are_preferred_in_the_body",
    "never from `X-Forwarded-For`": "access/test_passed_on.py::test_where_a_call_came_from_is_believed_of_peers_alone",
    # Replicas
    "Services that share a Redis forward a call": "access/test_tls.py::test_services_on_redis_pass_calls_on_over_tls_with_the_callers_own_token",
    "The caller's token is sent with the call, and both services check it": "access/test_passed_on.py::test_over_grpc_a_peer_may_no_more_than_its_caller",
    "the owner applies limits to the caller and not to the replica": "access/test_passed_on.py::test_callers_whose_calls_a_peer_passes_on_make_up_for_their_own_refusals_alone",
    "see the runs of all replicas": "access/test_passed_on.py::test_who_signed_in_at_a_proxy_sees_the_runs_of_every_replica",
    "marked as forwarded without such a secret": "access/test_passed_on.py::test_a_mark_that_no_peer_made_is_refused_from_any_caller",
    # Encryption
    "version 1.2 or newer": "access/test_tls.py::test_versions_of_tls_before_1_2_are_refused_by_both_apis",
    "every client must present a certificate": "access/test_tls.py::test_clients_show_a_certificate_where_the_service_asks_for_one",
    "is used from the next connection on": "access/test_tls.py::test_a_renewed_certificate_is_shown_from_the_next_handshake_on",
    "not even with a session that it would resume": "access/test_tls.py::test_a_replaced_authority_of_clients_ends_the_sessions_of_its_clients",
    "Connections between services work the same way": "access/test_tls.py::test_what_services_show_each_other_is_renewed_when_it_is_whole",
    "Clients check their files every few seconds": "access/test_tls.py::test_a_client_that_lives_on_shows_its_renewed_certificate_from_the_next_connection_on",
    "In Kubernetes the chart mounts both secrets": "deploy/test_chart.py::test_with_certificates_and_tokens_nothing_is_left_open",
    # Limits
    "while the rows of all runs together are below": "run/test_admission.py::test_the_rows_of_all_runs_share_the_services_bound",
    "may exceed these limits by a quarter": "run/test_admission.py::test_rows_of_an_admitted_group_wait_where_they_pass_the_runs_limit_by_a_quarter",
    "at most four fifths": "run/test_admission.py::test_a_run_that_takes_all_it_gets_leaves_a_fifth_to_the_next",
    "is not given to another run": "run/test_admission.py::test_one_runs_rows_never_take_the_room_that_anothers_groups_were_promised",
    "a caller gets at most three quarters of each": "api/test_admission.py::test_one_caller_leaves_a_quarter_to_others",
    "counts as one large request per `max_message_bytes`": "api/test_admission.py::test_a_request_in_parts_takes_all_its_places_at_once_and_none_while_it_waits",
    "40 of them are refused per second": "api/test_admission.py::test_calls_that_find_no_slot_are_refused_one_after_another",
    "A request must arrive within 20 s": "api/test_floods.py::test_a_request_that_does_not_come_is_refused_in_time",
    "an answer must make progress within 60 s": "api/test_admission.py::test_slots_are_ended_where_nothing_goes_on",
    "an acknowledgement never waits for the slow uploads": "api/test_admission.py::test_a_request_of_a_call_that_is_never_large_does_not_wait_for_large_ones",
    "A request lists at most 1,024 rows, groups": "api/test_bounds.py::test_each_list_of_a_message_may_have_as_many_entries_as_a_request_decides_on",
    "50 ms on two cores, and 150 ms for eight at once": "api/test_bounds.py::test_the_largest_requests_that_are_accepted_hold_up_nobody",
    "they are counted before the body is parsed": "api/test_bounds.py::test_values_lists_and_levels_of_documents_are_counted_outside_of_their_texts",
    "Larger ones are refused before they are parsed": "api/test_floods.py::test_the_request_of_a_call_that_is_never_large_is_refused_unparsed_if_it_is",
    "have separate slots": "api/test_floods.py::test_health_and_reflection_are_bounded_and_nobody_is_kept_from_calling",
    "A connection may make 10 such calls at once": "api/test_admission.py::test_probes_of_a_connection_are_paced",
    "counted before any TLS handshake": "api/test_http_connections.py::test_connections_that_never_begin_a_handshake_are_counted",
    "the one that has been idle for longest": "api/test_floods.py::test_where_there_are_too_many_connections_the_longest_idle_one_goes",
    "a connection that sends no request within 20 s": "api/test_floods.py::test_a_connection_over_which_no_request_comes_is_closed",
    "decompresses such requests one at a time": "api/test_rpc.py::test_requests_that_grow_when_they_are_expanded_are_expanded_one_at_a_time",
    "refuses gRPC's own compression": "api/test_rpc.py::test_compression_by_grpc_itself_is_refused_before_anything_is_expanded",
    "A body can have at most 1 MiB, a body of rows 8 MiB": "api/test_wrong_bodies.py::test_a_body_of_json_has_a_limit",
    "first the refusals are delayed": "api/test_admission.py::test_wrong_calls_are_delayed_and_then_refused_unread",
    "where only some of its rows were refused": "api/test_floods.py::test_rows_that_are_refused_alone_cost_their_caller_like_a_refused_request",
    "All connections of a token together": "api/test_admission.py::test_a_caller_with_many_connections_has_a_limit_too",
    "so a token is looked up before anything else": "access/test_unknown_callers.py::test_who_has_a_token_goes_on_while_unknown_callers_of_the_machine_take_all_that_they_may",
    "A call without a known token is refused unread": "access/test_calls.py::test_a_body_is_not_waited_for_where_its_caller_is_not_known",
    "delayed by at most 5 s": "api/test_admission.py::test_unknown_callers_of_a_machine_wait_seconds_however_many_there_are",
    "counts apart from those in calls": "access/test_unknown_callers.py::test_wrong_tokens_at_the_sign_in_are_paid_for_apart",
    "a right one is never refused": "access/test_unknown_callers.py::test_a_person_signs_in_next_to_wrong_tokens_in_calls_and_at_the_sign_in",
    "until it expires or the issuer's keys change": "access/test_tokens.py::test_a_verified_token_is_known_until_it_expires_or_the_keys_change",
    "the first call waits for up to 5 s before its signature is checked": "access/test_unknown_callers.py::test_no_signature_is_checked_for_callers_that_leave",
    "a run with many batches waits": "run/test_fair_builds.py::test_where_threads_are_few_a_run_s_next_batch_is_built_behind_another_run_s",
    "more than 131,072 rows": "test_config.py::test_a_wrong_configuration_is_refused_naming_the_setting_and_the_remedy",
    "There are at most `--max-runs` runs": "access/test_quotas.py::test_a_service_has_no_more_runs_than_it_is_configured_for",
    "Each stores at most": "access/test_quotas.py::test_a_run_holds_no_more_than_the_service_lets_any",
    "limits for all runs together that match": "access/test_quotas.py::test_a_caller_brings_no_more_rows_than_its_token_says",
    "limits the concurrent calls of the caller": "access/test_quotas.py::test_calls_of_one_caller_in_flight_are_counted_over_both_apis",
    "Runs that are being created count, too": "access/test_at_once.py::test_40_creations_at_once_over_two_replicas_pass_no_limit",
    "refuses the whole call, stores nothing of it": "access/test_quotas.py::test_a_caller_brings_no_more_rows_than_its_token_says",
    "refuses HTTP requests for a host name that somebody else may own": "api/test_host_names.py::test_a_name_of_somebody_elses_is_refused_for_reads_and_for_changes",
    "It accepts IP addresses": "api/test_host_names.py::test_addresses_and_names_that_nobody_can_buy_are_answered",
    "refuses run names that cannot be part of a URL's path": "run/test_runs.py::test_a_name_that_no_path_can_have_is_refused",
    # Audit log
    "writes a line for each call that begins or ends something": "access/test_session.py::test_who_ended_or_took_something_is_logged_and_who_was_refused",
    "even if the token is unknown": "access/test_refusal_log.py::test_tokens_that_are_not_known_are_logged_without_them",
    "it writes one line per second": "access/test_refusal_log.py::test_of_a_flood_there_is_a_line_a_second_that_counts_the_others",
    "No log line contains a token": "access/test_refusal_log.py::test_tokens_that_are_not_known_are_logged_without_them",
    "gRPC reflection is disabled": "access/test_calls.py::test_nobody_learns_the_contract_by_reflection",
    "passes mutated inputs to all code that reads bytes": "tools/fuzz/test_fuzz.py::test_changed_inputs_are_taken_or_refused_cleanly",
}
"""Words of the page, and the test that would fail if they were no longer true."""


def text() -> str:
    return " ".join((ROOT / PAGE).read_text(encoding="utf-8").split())


@cache
def names_in(path: Path) -> frozenset[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return frozenset(node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))


@pytest.mark.parametrize("words", PROMISES)
def test_what_is_promised_is_tested(words: str) -> None:
    path, _, name = PROMISES[words].partition("::")
    assert words in text(), f"{PAGE} no longer says so: remove the line, and the test if nothing else needs it"
    assert name in names_in(ROOT / "tests" / path), "the test is gone, and the promise with it"


def test_each_paragraph_of_the_limits_has_a_promise_that_is_tested() -> None:
    limits = (ROOT / PAGE).read_text(encoding="utf-8").partition("## Limits")[2].partition("\n## ")[0]
    paragraphs = [" ".join(paragraph.split()) for paragraph in re.split(r"^- ", limits, flags=re.MULTILINE)[1:]]
    assert [paragraph[:40] for paragraph in paragraphs if not any(words in paragraph for words in PROMISES)] == []
