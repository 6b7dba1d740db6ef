"""The tool-call workload: the system turn declares tools, the user asks in words, the answer is one JSON call.

The verb phrase of the request tells which tool is meant. The arguments stand in the request as `city=Olten`, in any order;
the call has them in the order of the tool's declaration.
"""

import random
from collections.abc import Callable

from pipeline.core.records import Sample
from stages.workloads.conversation import Slot, compact_json
from stages.workloads.vocabulary import CITIES, ITEMS, STATUSES, amount, full_name, record_id, short_date

TOOLS: dict[str, tuple[tuple[str, ...], str]] = {
    "get_weather": (("city", "date"), "Check the weather"),
    "book_room": (("city", "guest", "date"), "Book a room"),
    "send_item": (("item", "city"), "Send a parcel"),
    "find_person": (("guest", "city"), "Find somebody"),
    "pay_bill": (("bill", "total"), "Pay a bill"),
    "set_status": (("bill", "status"), "Change the status"),
    "list_items": (("city", "item"), "List the stock"),
    "move_date": (("bill", "date"), "Move a date"),
    "refund": (("bill", "guest", "total"), "Return the money"),
    "call_guest": (("guest", "date"), "Call a guest"),
}
"""Tool -> (names of its arguments, the phrase that asks for it)."""
ARGUMENTS: dict[str, Callable[[random.Random], str]] = {
    "city": lambda rng: rng.choice(CITIES),
    "date": short_date,
    "guest": full_name,
    "item": lambda rng: rng.choice(ITEMS),
    "bill": record_id,
    "total": amount,
    "status": lambda rng: rng.choice(STATUSES),
}


def tool_call(slot: Slot) -> Sample:
    """Generate a declaration of three to six tools, a request for one of them, and its call."""
    rng = slot.rng()
    names = rng.sample(list(TOOLS), rng.randint(3, 6))
    declaration = "\n".join(compact_json({"name": name, "arguments": TOOLS[name][0]}) for name in names)
    name = rng.choice(names)
    argument_names, phrase = TOOLS[name]
    arguments = {argument: ARGUMENTS[argument](rng) for argument in argument_names}
    stated = rng.sample(argument_names, len(argument_names))
    request = f"{phrase}: " + ", ".join(f"{argument}={arguments[argument]}" for argument in stated) + "."
    reference = compact_json({"name": name, "arguments": arguments})
    messages, tools = (("system", declaration), ("user", request)), tuple((tool, TOOLS[tool][0]) for tool in names)
    return Sample(slot.id, slot.workload, reference, messages=messages, check="tool_call", tools=tools)
