"""Anthropic's Python client against `hallmark serve` with the demo model. HALLMARK_URL: where it listens."""

import json
import os
import unittest

import anthropic
from anthropic import Anthropic

MODEL = "deepseek-v4.1-flash"
client = Anthropic(base_url=os.environ["HALLMARK_URL"], api_key="none", max_retries=0, timeout=120)
TOOLS = [{"name": "get_weather", "description": "Get the current weather in a city.", "input_schema": {
    "type": "object", "required": ["city", "unit"], "properties": {
        "city": {"type": "string"}, "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]}}}}]
RESULT = '{"temperature": 21, "unit": "celsius", "sky": "sunny"}'


def user(text):
    return [{"role": "user", "content": text}]


def text_of(message):
    return "".join(block.text for block in message.content if block.type == "text")


class Messages(unittest.TestCase):
    # Newer clients have no field for the temperature; the likeliest token is asked for by top_k.
    fields = {"model": MODEL, "max_tokens": 400, "extra_body": {"top_k": 1}}

    def test_answer_thinks_first(self):
        message = client.messages.create(messages=user("What is 12 * 13?"), thinking={"type": "adaptive"}, **self.fields)
        self.assertEqual([block.type for block in message.content], ["thinking", "text"])
        self.assertEqual((text_of(message), message.stop_reason), ("12 * 13 = 156", "end_turn"))
        self.assertGreater(message.usage.output_tokens, 20)

    def test_stream_is_the_same_in_pieces(self):
        with client.messages.stream(messages=user("What is 45 + 37?"), **self.fields) as stream:
            pieces = list(stream.text_stream)
            final = stream.get_final_message()
        self.assertGreater(len(pieces), 3)
        self.assertEqual("".join(pieces), text_of(final))
        self.assertEqual(text_of(final), text_of(client.messages.create(messages=user("What is 45 + 37?"), **self.fields)))

    def test_tools_round_trip(self):
        messages = user("Give me the celsius temperature in Lisbon.")
        with client.messages.stream(messages=messages, tools=TOOLS, **self.fields) as stream:
            first = stream.get_final_message()
        self.assertEqual(first.stop_reason, "tool_use")
        call = next(block for block in first.content if block.type == "tool_use")
        self.assertEqual((call.name, call.input), ("get_weather", {"city": "Lisbon", "unit": "celsius"}))
        messages += [{"role": "assistant", "content": first.content}, {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": call.id, "content": RESULT}]}]
        second = client.messages.create(messages=messages, tools=TOOLS, **self.fields)
        self.assertEqual(text_of(second), "It is 21 degrees celsius and sunny in Lisbon.")

    def test_memory_and_system(self):
        messages = user("My name is Sophie.")
        first = client.messages.create(messages=messages, **self.fields)
        messages += [{"role": "assistant", "content": first.content}, *user("What is my name?")]
        self.assertIn("Sophie", text_of(client.messages.create(messages=messages, **self.fields)))
        day = client.messages.create(system="Today is Thursday.", messages=user("What day is it today?"), **self.fields)
        self.assertIn("Thursday", text_of(day))

    def test_an_answer_of_a_schema(self):
        schema = {"type": "object", "additionalProperties": False, "required": ["name", "age"], "properties": {
            "name": {"type": "string", "maxLength": 20}, "age": {"type": "integer", "minimum": 0, "maximum": 120}}}
        body = {"top_k": 1, "output_config": {"format": {"type": "json_schema", "schema": schema}}}
        message = client.messages.create(messages=user("Make a JSON object with name Anna and age 7."),
                                         **{**self.fields, "extra_body": body})
        value = json.loads(text_of(message))
        self.assertEqual(list(value), ["name", "age"])
        self.assertIn(value["age"], range(121))

    def test_counted_tokens_are_those_of_the_answer(self):
        counted = client.messages.count_tokens(model=MODEL, messages=user("Hello!"))
        usage = client.messages.create(messages=user("Hello!"), **self.fields).usage
        sent = usage.input_tokens + (usage.cache_read_input_tokens or 0) + (usage.cache_creation_input_tokens or 0)
        self.assertEqual(counted.input_tokens, sent)

    def test_errors_are_the_clients_own(self):
        with self.assertRaises(anthropic.BadRequestError) as caught:
            client.messages.create(messages=user("hi"), model=MODEL, max_tokens=10, extra_body={"top_p": 7})
        self.assertIn("top_p", str(caught.exception))
        with self.assertRaises(anthropic.AuthenticationError):
            keyed = Anthropic(base_url=os.environ["KEYED_URL"], api_key="wrong", max_retries=0)
            keyed.messages.create(messages=user("hi"), **self.fields)

    def test_a_closed_stream_leaves_a_server_that_answers(self):
        with client.messages.stream(messages=user("Count from 1 to 40."), model=MODEL, max_tokens=3900) as stream:
            next(iter(stream))
        self.assertEqual(text_of(client.messages.create(messages=user("What is 3 + 4?"), **self.fields)), "3 + 4 = 7")


if __name__ == "__main__":
    unittest.main()
