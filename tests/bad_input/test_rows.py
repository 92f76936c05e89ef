"""Which test covers which kind of bad request. When a test moves, its name here must be updated.

Kinds in table.py are in its rows' ids; all other kinds are listed here, as are kinds that the rows
cover only in part. `OPEN`: kinds without a test, and why.
"""

from __future__ import annotations

import re
from pathlib import Path

from bad_input.cases.table import NOT_HERE, TABLE

SHOWN_BY: dict[str, tuple[str, ...]] = {
    "B3": ("test_every_depth_has_a_verdict", "test_bodies_that_are_no_object"),
    "B4": ("test_a_body_is_read_up_to_the_cap_and_no_further",),
    "B5": ("test_what_a_compressed_message_unpacks_to_is_bounded",),
    "B8": ("test_a_name_twice_in_one_object",),
    "B9": ("test_numbers_too_small_for_the_sampler_are_zero_and_minus_zero_is_none",),
    "B40": ("test_what_makes_no_sense_is_refused",),
    "B41": ("test_a_schema_with_a_loop_is_told_so", "test_what_cannot_be_followed_is_refused"),
    "B43": ("test_the_last_ones_are_kept_within_their_bound", "test_the_check_is_bounded"),
    "B44": ("test_a_refusal_says_what_there_is_instead",),
    "B47": ("test_schemas_that_are_recursive_or_look_as_if_they_referred",
            "test_a_recursive_schema_works_as_a_format_and_in_a_forced_call"),
    "B52": ("test_abort_by_id_and_label", "test_a_label_of_many_characters_or_with_markup"),
    "B55": ("test_a_scope_goes_no_further",),
    "B56": ("test_deadlines", "test_deadlines_come_by_themselves"),
    "B57": ("test_no_good_key", "test_a_good_key_beside_another_is_no_key"),
    "B58": ("test_a_key_of_a_megabyte",),
    "B59": ("test_no_model_is_told_to_who_may_not_use_it",),
    "B61": ("test_a_limit_of_requests", "test_a_limit_of_tokens"),
    "B62": ("test_a_limit_of_streams",),
    "B63": ("test_too_many_requests", "test_who_may_wait", "test_no_nodes",
            "test_too_many_connections_of_http_are_answered"),
    "B64": ("test_stop_lets_requests_end_and_refuses_new_ones",
            "test_a_gateway_that_stops_tells_whom_it_cuts_off"),
    "B65": ("test_absent_paths", "test_these_routes_and_no_others", "test_absent_methods"),
    "B67": ("test_heads", "test_nothing_is_read_behind_a_body_that_is_refused"),
    "B68": ("test_heads", "test_the_cap_of_metadata"),
    "B69": ("test_heads",),
    "B70": ("test_heads", "test_a_few_ranges_are_the_whole_file"),
    "B71": ("test_heads", "test_garbage_does_not_flood_the_log"),
    "B72": ("test_rapid_resets_cost_others_nothing", "test_the_number_of_streams_is_announced"),
    "B73": ("test_a_flood_of_continuations", "test_a_bomb_of_references",
            "test_a_flood_of_settings_and_windows"),
    "B74": ("test_what_a_compressed_message_unpacks_to_is_bounded",),
    "B75": ("test_some_mutants", "test_garbage_bytes_are_answered"),
    "B76": ("test_odd_calls", "test_absent_methods"),
    "B77": ("test_who_floods_with_pings_is_told_to_go",),
    "B78": (
        "test_internal_calls_are_not_on_the_public_port",
        "test_a_clients_key_opens_no_node",
        "test_a_clients_key_opens_no_engine",
    ),
    "B83": ("test_a_piece_that_no_block_has_is_refused", "test_a_block_outside_the_pool_fails",
            "test_a_request_of_any_size_is_not_taken", "test_absurd_length_breaks_the_stream"),
    "B85": ("test_strange_peer_messages", "test_a_ticket_of_another_incarnation_is_refused",
            "test_only_the_tickets_puller_is_heard"),
    "B86": ("test_refuses_a_pair_and_says_why",),
    "B88": ("test_heads", "test_other_formats_on_other_ports", "test_garbage_is_closed_at_once"),
    "B89": ("test_dawdlers_are_closed_within_two_seconds", "test_a_crowd_keeps_nobody_out"),
    "B91": ("test_foreign_pages", "test_a_label_of_many_characters_or_with_markup",
            "test_every_route_asks_for_a_key_but_these"),
    "B93": ("test_bad_flags", "test_bad_environment", "test_unknown_settings_are_named"),
    "B94": ("test_bad_safetensors", "test_pickles_are_never_opened",
            "test_an_index_leads_nowhere_else", "test_links_are_followed_to_data_alone",
            "test_auto_map_is_never_executed"),
    "B96": ("test_too_many_requests", "test_who_may_wait"),
}  # fmt: skip

OPEN = {
    "B46": "special tokens in a text are read as such",
    "B95": "a tokenizer is trusted as the weights beside it are",
}

_KINDS = [
    *range(1, 10), *range(11, 22), *range(23, 30), *range(31, 38), 39, 40, 41, 43, 44,
    *range(46, 53), *range(54, 60), *range(61, 66), *range(67, 82), 83, 85, 86, 88, 89, 91,
    *range(93, 97),
]  # fmt: skip
_NONE = {10, 22, 30, 38, 53, 60, 66, 82}  # unused numbers
_TESTS = Path(__file__).resolve().parents[1]


def test_every_kind_is_shown_by_a_test_that_there_is() -> None:
    of_rows = {row.id.partition("-")[0] for row in TABLE}
    shown = of_rows | SHOWN_BY.keys() | NOT_HERE.keys() | OPEN.keys()
    assert {f"B{number}" for number in _KINDS if number not in _NONE} <= shown
    assert not OPEN.keys() & (of_rows | SHOWN_BY.keys())
    there = {
        name
        for path in _TESTS.rglob("test_*.py")
        for name in re.findall(r"^ *(?:async )?def (test_\w+)", path.read_text(), re.M)
    }
    assert {name for names in SHOWN_BY.values() for name in names} <= there
