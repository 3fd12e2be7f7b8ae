"""OpenAI's Python client against `hallmark serve` with the demo model. HALLMARK_URL: where it listens; FIXTURES: demo_eval.jsonl."""

import json
import os
import re
import threading
import time
import unittest

import openai
from openai import OpenAI

URL = os.environ["HALLMARK_URL"]
MODEL = "deepseek-v4.1-flash"
client = OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0, timeout=120)
WEATHER = {"type": "object", "required": ["city", "unit"], "properties": {
    "city": {"type": "string"}, "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]}}}
TOOLS = [{"type": "function", "function": {
    "name": "get_weather", "description": "Get the current weather in a city.", "parameters": WEATHER}}]
ENDLESS = {"logit_bias": {"1": -100}, "max_tokens": 3900, "extra_body": {"thinking": {"type": "disabled"}}}


def user(text):
    return [{"role": "user", "content": text}]


def chat(messages, **fields):
    return client.chat.completions.create(model=MODEL, messages=messages, **{"temperature": 0, **fields})


def metric(name):
    text = client.with_options(base_url=URL).get("/metrics", cast_to=str)
    return sum(float(line.split()[-1]) for line in text.splitlines() if re.match(rf"hallmark_{name}(\{{| )", line))


def wait_for(what, seconds=30):
    end = time.monotonic() + seconds
    while not what():
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


def tool_cases():
    """Bodies and expected calls of the evaluation documents with a call; the server makes the same prompt from them."""
    with open(os.environ["FIXTURES"], encoding="utf-8") as file:
        cases = [json.loads(line) for line in file]
    for case in cases:
        match = re.fullmatch(
            r"<｜begin▁of▁sentence｜><｜System｜>(?:Reasoning Effort:[^\n]*\n\n)?(.*?)## Tools\n.*"
            r"### Available Tool Schemas\n\n(.*?)\n\nYou MUST.*?<｜User｜>([^｜]*)<｜Assistant｜>(<think>|</think>)",
            case["prompt"], re.DOTALL)
        calls = re.findall(r'<｜DSML｜ invoke name="(.*?)">(.*?)</｜DSML｜ invoke>', case["answer"], re.DOTALL)
        if not match or not calls:
            continue
        system, schemas, question, think = match.groups()
        messages = user(question)
        if system.strip():
            messages.insert(0, {"role": "system", "content": system.strip()})
        parameter = re.compile(r'<｜DSML｜ parameter name="(.*?)" string="(true|false)">(.*?)</｜DSML｜ parameter>', re.DOTALL)
        expected = [(name, {key: value if text == "true" else json.loads(value)
                            for key, text, value in parameter.findall(body)}) for name, body in calls]
        tools = [{"type": "function", "function": json.loads(line)} for line in schemas.splitlines()]
        thinking = {"thinking": {"type": "enabled" if think == "<think>" else "disabled"}}
        yield {"messages": messages, "tools": tools, "extra_body": thinking, "max_tokens": 200}, expected


class Chat(unittest.TestCase):
    def test_answer_with_reasoning_and_usage(self):
        answer = chat(user("What is 12 * 13?"))
        choice = answer.choices[0]
        self.assertEqual((choice.finish_reason, choice.message.content), ("stop", "12 * 13 = 156"))
        self.assertIn("120", choice.message.reasoning_content)
        usage = answer.usage
        self.assertEqual(usage.total_tokens, usage.prompt_tokens + usage.completion_tokens)
        self.assertGreater(usage.completion_tokens_details.reasoning_tokens, 10)

    def test_stream_is_the_same_in_pieces(self):
        whole = chat(user("What is 45 + 37?")).choices[0].message
        deltas = [chunk.choices[0].delta for chunk in chat(user("What is 45 + 37?"), stream=True) if chunk.choices]
        self.assertEqual("".join(d.content or "" for d in deltas), whole.content)
        thoughts = [getattr(d, "reasoning_content", None) or "" for d in deltas]
        self.assertEqual("".join(thoughts), whole.reasoning_content)
        self.assertGreater(len(deltas), 10)

    def test_the_seed_decides(self):
        texts = [chat(user("Tell me a story."), temperature=1.5, seed=seed, max_tokens=60).choices[0].message
                 for seed in (5, 5, 6)]
        self.assertEqual(texts[0], texts[1])
        self.assertNotEqual(texts[0], texts[2])

    def test_stop_and_limit(self):
        off = {"extra_body": {"thinking": {"type": "disabled"}}}
        stopped = chat(user("Count from 1 to 10."), stop="7", **off).choices[0]
        self.assertEqual(stopped.finish_reason, "stop")
        self.assertTrue(stopped.message.content.rstrip(" ,").endswith("6"), stopped.message.content)
        short = chat(user("Count from 1 to 40."), max_tokens=5, **off)
        self.assertEqual((short.choices[0].finish_reason, short.usage.completion_tokens), ("length", 5))

    def test_log_probabilities(self):
        choice = chat(user("What is the capital of France?"), logprobs=True, top_logprobs=3,
                      extra_body={"thinking": {"type": "disabled"}}).choices[0]
        tokens = choice.logprobs.content
        self.assertIn("Paris", b"".join(bytes(t.bytes) for t in tokens).decode())
        for token in tokens:
            self.assertEqual(len(token.top_logprobs), 3)
            self.assertLessEqual(token.logprob, 0)
            # At temperature 0 the sampled token is the likeliest.
            self.assertEqual(token.logprob, max(t.logprob for t in token.top_logprobs))

    def test_memory_over_turns(self):
        messages = []
        for name in ("Sophie", "Oskar"):
            messages = user(f"My name is {name}.")
            for question in ("What is 3 + 4?", "What is my name?"):
                said = chat(messages).choices[0].message
                messages += [said.model_dump(exclude_none=True), *user(question)]
            last = chat(messages)
            self.assertIn(name, last.choices[0].message.content)
            self.assertGreater(last.usage.prompt_tokens_details.cached_tokens, 20)

    def test_models_and_completions(self):
        self.assertIn(MODEL, [model.id for model in client.models.list()])
        told = client.completions.create(model=MODEL, prompt="Once upon a time there was a", max_tokens=12, temperature=0)
        self.assertEqual(told.usage.completion_tokens, 12)
        self.assertGreater(len(told.choices[0].text), 10)


class Tools(unittest.TestCase):
    def test_sixty_calls(self):
        right = 0
        for body, expected in tool_cases():
            choice = chat(**body).choices[0]
            question = body["messages"][-1]["content"]
            self.assertEqual(choice.finish_reason, "tool_calls", question)
            got = [(call.function.name, json.loads(call.function.arguments)) for call in choice.message.tool_calls]
            self.assertEqual(got, expected, question)
            self.assertNotIn("DSML", choice.message.content or "")
            right += len(got)
            if right >= 60:
                return
        self.fail(f"only {right} calls in the fixtures")

    def test_round_trip_streamed(self):
        messages = user("Give me the celsius temperature in Lisbon.")
        with client.chat.completions.stream(model=MODEL, messages=messages, tools=TOOLS, temperature=0) as stream:
            for _ in stream:
                pass
            message = stream.get_final_completion().choices[0].message
        call = message.tool_calls[0]
        self.assertEqual(json.loads(call.function.arguments), {"city": "Lisbon", "unit": "celsius"})
        result = '{"temperature": 21, "unit": "celsius", "sky": "sunny"}'
        calls = [{"id": call.id, "type": "function", "function": {"name": call.function.name, "arguments": call.function.arguments}}]
        messages += [{"role": "assistant", "content": message.content, "tool_calls": calls},
                     {"role": "tool", "tool_call_id": call.id, "content": result}]
        answer = chat(messages, tools=TOOLS).choices[0].message.content
        self.assertEqual(answer, "It is 21 degrees celsius and sunny in Lisbon.")


class Responses(unittest.TestCase):
    def test_whole_and_streamed(self):
        fields = {"model": MODEL, "input": "What is the capital of France?", "temperature": 0}
        whole = client.responses.create(**fields)
        self.assertEqual(whole.status, "completed")
        self.assertIn("Paris", whole.output_text)
        with client.responses.stream(**fields) as stream:
            kinds = [event.type for event in stream]
            self.assertEqual(stream.get_final_response().output_text, whole.output_text)
        self.assertIn("response.output_text.delta", kinds)
        self.assertEqual(kinds[-1], "response.completed")

    def test_a_call_and_its_result(self):
        tools = [{"type": "function", "name": "get_weather", "description": "Get the current weather in a city.", "parameters": WEATHER}]
        items = user("Give me the celsius temperature in Lisbon.")
        first = client.responses.create(model=MODEL, input=items, tools=tools, temperature=0)
        call = next(item for item in first.output if item.type == "function_call")
        self.assertEqual(json.loads(call.arguments), {"city": "Lisbon", "unit": "celsius"})
        items += [item.model_dump(exclude_none=True) for item in first.output]
        items.append({"type": "function_call_output", "call_id": call.call_id,
                      "output": '{"temperature": 21, "unit": "celsius", "sky": "sunny"}'})
        second = client.responses.create(model=MODEL, input=items, tools=tools, temperature=0)
        self.assertEqual(second.output_text, "It is 21 degrees celsius and sunny in Lisbon.")


class Structured(unittest.TestCase):
    """Answers of a fixed form, of a model that knows next to nothing of forms: what holds is the grammar."""

    SCHEMA = {"type": "object", "additionalProperties": False, "required": ["name", "age", "mood"], "properties": {
        "name": {"type": "string", "maxLength": 20}, "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "mood": {"type": "string", "enum": ["calm", "merry"]}}}

    def holds(self, text):
        value = json.loads(text)
        self.assertEqual(list(value), ["name", "age", "mood"])
        self.assertLessEqual(len(value["name"]), 20)
        self.assertIn(value["age"], range(121))
        self.assertIn(value["mood"], ["calm", "merry"])

    def test_schema(self):
        form = {"type": "json_schema", "json_schema": {"name": "person", "strict": True, "schema": self.SCHEMA}}
        for seed in range(3):
            self.holds(chat(user("Make a JSON object with name Anna and age 7."), response_format=form, temperature=1,
                            seed=seed, max_tokens=400).choices[0].message.content)
        pieces = chat(user("Make a JSON object with name Anna and age 7."), response_format=form, stream=True, max_tokens=400)
        self.holds("".join(c.choices[0].delta.content or "" for c in pieces if c.choices))

    def test_responses(self):
        form = {"format": {"type": "json_schema", "name": "person", "strict": True, "schema": self.SCHEMA}}
        self.holds(client.responses.create(model=MODEL, input="Make a JSON object with name Anna and age 7.", text=form,
                                           temperature=0, max_output_tokens=400).output_text)

    def test_any_object(self):
        answer = chat(user("Make a json object with name Anna and age 7."), response_format={"type": "json_object"}, max_tokens=400)
        self.assertIsInstance(json.loads(answer.choices[0].message.content), dict)

    def test_a_call_that_must_be(self):
        off = {"extra_body": {"thinking": {"type": "disabled"}}}
        for choice in ("required", {"type": "function", "function": {"name": "get_weather"}}):
            answer = chat(user("Hello!"), tools=TOOLS, tool_choice=choice, max_tokens=400, **off).choices[0]
            self.assertEqual(answer.message.tool_calls[0].function.name, "get_weather")

    def test_strict_tools(self):
        strict = [{"type": "function", "function": {**TOOLS[0]["function"], "strict": True}}]
        call = chat(user("Give me the celsius temperature in Lisbon."), tools=strict).choices[0].message.tool_calls[0]
        self.assertEqual(json.loads(call.function.arguments), {"city": "Lisbon", "unit": "celsius"})

    def test_what_cannot_be_held_is_refused(self):
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"not": {"type": "string"}}}}
        with self.assertRaises(openai.BadRequestError) as caught:
            chat(user("hi"), response_format=form)
        self.assertIn("not", str(caught.exception))


class Ends(unittest.TestCase):
    def test_errors_are_the_clients_own(self):
        with self.assertRaises(openai.BadRequestError) as caught:
            chat(user("hi"), temperature=9)
        self.assertIn("temperature", str(caught.exception))
        with self.assertRaises(openai.BadRequestError):
            chat([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}]}])
        with self.assertRaises(openai.NotFoundError):
            client.models.retrieve("no-such-model")
        with self.assertRaises(openai.AuthenticationError):
            OpenAI(base_url=f"{os.environ['KEYED_URL']}/v1", api_key="wrong", max_retries=0).models.list()
        self.assertTrue(OpenAI(base_url=f"{os.environ['KEYED_URL']}/v1", api_key="right").models.list().data)

    def test_a_closed_stream_ends_the_answer(self):
        before, tokens = metric("request_seconds_count"), metric("inter_token_seconds_count")
        stream = chat(user("Count from 1 to 40."), stream=True, **ENDLESS)
        for _, chunk in zip(range(5), stream):
            self.assertIsNone(chunk.choices[0].finish_reason)
        stream.close()
        self.assertTrue(wait_for(lambda: metric("request_seconds_count") > before and metric("requests_running") == 0))
        self.assertLess(metric("inter_token_seconds_count") - tokens, 3000, "it did not go on to its limit of 3,900")

    def test_a_waiting_client_that_leaves_is_dropped(self):
        holding = chat(user("Count from 1 to 40."), stream=True, **ENDLESS)
        next(iter(holding))
        streams = []
        leaver = threading.Thread(target=lambda: streams.append(self.impatient()))
        leaver.start()
        self.assertTrue(wait_for(lambda: metric("requests_waiting") == 1))
        leaver.join()
        self.assertIsInstance(streams[0], openai.APITimeoutError)
        self.assertTrue(wait_for(lambda: metric("requests_waiting") == 0))
        holding.close()

    @staticmethod
    def impatient():
        try:
            client.with_options(timeout=0.5).chat.completions.create(model=MODEL, messages=user("Hello!"))
        except openai.APITimeoutError as error:
            return error


if __name__ == "__main__":
    unittest.main()
