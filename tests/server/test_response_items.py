"""Items of a response, one after the other, and their events."""

from __future__ import annotations

from mlserve.server.response_items import OutputItems, Status
from mlserve.server.tools.deltas import CallArguments, CallStart, Content, Delta

DELTAS: list[Delta] = [
    Content("a"),
    Content("b"),
    CallStart(0, "c0", "f"),
    CallArguments(0, "{"),
    CallArguments(0, "}"),
    CallStart(1, "c1", "g"),
    Content("d"),
]


def test_items_begin_and_end_in_turn() -> None:
    items = OutputItems("r")
    events = [event for delta in DELTAS for event in items.add(delta)] + items.finish(Status.INCOMPLETE)
    assert [(event["output_index"], event["type"].removeprefix("response.")) for event in events] == [
        (0, "output_item.added"),
        (0, "content_part.added"),
        (0, "output_text.delta"),
        (0, "output_text.delta"),
        (0, "output_text.done"),
        (0, "content_part.done"),
        (0, "output_item.done"),
        (1, "output_item.added"),
        (1, "function_call_arguments.delta"),
        (1, "function_call_arguments.delta"),
        (1, "function_call_arguments.done"),
        (1, "output_item.done"),
        (2, "output_item.added"),
        (2, "function_call_arguments.done"),
        (2, "output_item.done"),
        (3, "output_item.added"),
        (3, "content_part.added"),
        (3, "output_text.delta"),
        (3, "output_text.done"),
        (3, "content_part.done"),
        (3, "output_item.done"),
    ]
    ids = ["msg_r_0", "fc_r_1", "fc_r_2", "msg_r_3"]
    assert all(event.get("item_id", ids[event["output_index"]]) == ids[event["output_index"]] for event in events)
    assert [item["id"] for item in items.shown()] == ids
    assert [item["status"] for item in items.shown()] == ["completed"] * 3 + ["incomplete"]
    assert [event["item"] for event in events if event["type"] == "response.output_item.done"] == items.shown()
    first, call, bare, last = items.shown()
    assert (first["content"][0]["text"], last["content"][0]["text"]) == ("ab", "d")
    assert (call["call_id"], call["name"], call["arguments"]) == ("c0", "f", "{}")
    assert (bare["call_id"], bare["name"], bare["arguments"]) == ("c1", "g", "")


def test_events_are_not_changed_by_what_comes_later() -> None:
    items = OutputItems("r")
    added, part, _ = items.add(Content("a"), [{"token": "a"}])
    items.add(Content("b"), [{"token": "b"}])
    assert added["item"]["content"] == []
    assert (part["part"]["text"], part["part"]["logprobs"]) == ("", [])
    assert items.shown()[0]["status"] == "incomplete"
    assert items.shown()[0]["content"][0] == {
        "type": "output_text", "text": "ab", "annotations": [], "logprobs": [{"token": "a"}, {"token": "b"}],
    }  # fmt: skip


def test_nothing_at_all_is_an_empty_message() -> None:
    items = OutputItems("r")
    assert items.shown() == []
    items.finish(Status.COMPLETED)
    (message,) = items.shown()
    assert (message["status"], message["content"][0]["text"]) == ("completed", "")
